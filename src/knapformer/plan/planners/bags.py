"""The paper's planner: a global knapsack of sequences over compute bags (KnapFormer, arXiv 2508.06001, section 3).

Sequences are taken by falling work. A bag is a candidate if its capacity (its ranks' share of all work) is at least
the sequence's work and the sequence has a token for each of its ranks; where no bag is, the largest bags are. Of the
candidates the least occupied bag (work over capacity) takes the sequence; ties go to the first bag. Inside a bag of
g ranks, tokens are cut into g equal ranges and attention into g ranges of whole heads, as in DeepSpeed-Ulysses.
"""

import heapq
from dataclasses import dataclass
from math import lcm

import numpy as np

from knapformer.errors import PlanError
from knapformer.plan.arrays import Int64Array, exact_sum, exclusive_cumsum
from knapformer.plan.bagspec import BagSpec
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.placement import Placement, Shards
from knapformer.plan.planners.base import Limits
from knapformer.plan.sequences import Sequences


@dataclass(frozen=True, slots=True)
class BagsPlanner:
    """Places every sequence in one compute bag.

    Attributes:
        spec: the bags of one balancing group; groups repeat where the world is a multiple of it.
        name: "bags".
        num_heads: heads to cut attention into; default those of the cost model. Does not change which bag takes what.
    """

    spec: BagSpec
    name: str = "bags"
    num_heads: int | None = None

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        """Raises `SpecError` if the spec does not divide the world, `PlanError` if the rule breaks a token limit."""
        group_size = self.spec.num_ranks
        bags = self.spec.bags()
        bag_of = np.zeros(len(sequences), dtype=np.int64)
        for group in range(self.spec.num_groups(cluster.world_size)):
            first, last = np.searchsorted(sequences.home, [group * group_size, (group + 1) * group_size])
            chosen = self._choose(sequences.length[first:last], cost.work(sequences.length[first:last]), bags)
            bag_of[first:last] = group * len(bags) + chosen
        placement = self._cut(sequences, bag_of, cluster.world_size, self.num_heads or cost.num_heads)
        most = int(placement.tokens().max())
        if limits is not None and limits.max_tokens_per_rank is not None and most > limits.max_tokens_per_rank:
            raise PlanError(
                f"bags '{self.spec}' put {most} tokens on rank {int(placement.tokens().argmax())}, above "
                f"max_tokens_per_rank {limits.max_tokens_per_rank}; use larger bags or another planner"
            )
        return placement

    def _choose(self, length: Int64Array, work: Int64Array, bags: list[range]) -> Int64Array:
        """Index of the bag for each sequence.

        One heap per bag size, as bags of one size are candidates together. Occupancies are compared as work times
        `lcm(sizes) / size`, which keeps them whole numbers.
        """
        total = exact_sum(work)
        sizes = [size for size, _ in self.spec.terms]
        common = lcm(*sizes)
        heaps: dict[int, list[tuple[int, int]]] = {size: [] for size in sizes}
        for index, ranks in enumerate(bags):
            heaps[len(ranks)].append((0, index))  # by index, so already a heap
        chosen = np.empty(len(length), dtype=np.int64)
        for seq in np.lexsort((np.arange(len(work)), -work)).tolist():
            one_work, tokens = int(work[seq]), int(length[seq])
            fits = [s for s in sizes if s * total >= one_work * self.spec.num_ranks and tokens >= s] or sizes[-1:]
            size = min(fits, key=lambda s: heaps[s][0])
            occupancy, index = heaps[size][0]
            heapq.heapreplace(heaps[size], (occupancy + one_work * (common // size), index))
            chosen[seq] = index
        return chosen

    def _cut(self, sequences: Sequences, bag_of: Int64Array, world_size: int, num_heads: int) -> Placement:
        bags = self.spec.bags()
        groups = self.spec.num_groups(world_size)
        first_rank = np.array([g * self.spec.num_ranks + b.start for g in range(groups) for b in bags], dtype=np.int64)
        bag_size = np.array([len(b) for b in bags] * groups, dtype=np.int64)
        size, length = bag_size[bag_of], sequences.length
        seq = np.repeat(np.arange(len(sequences)), size)
        part = np.arange(len(seq)) - np.repeat(exclusive_cumsum(size), size)
        rank = first_rank[bag_of][seq] + part
        tokens = _level_shares(length, size, bag_of)
        heads = _level_shares(np.full_like(length, num_heads), size, bag_of)
        return Placement(
            sequences,
            world_size,
            num_heads,
            Shards.sorted(seq, rank, *tokens),
            Shards.sorted(seq, rank, heads[0] * length[seq], heads[1] * length[seq]),
            self.name,
        )


def _level_shares(amount: Int64Array, parts: Int64Array, bag: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Cut each `amount` into `parts` contiguous ranges that differ by at most 1; return their starts and stops.

    Who gets the remainder goes round within each bag, so that a bag's ranks differ by at most 1 over all sequences.
    """
    share, extra = np.divmod(amount, parts)
    order = np.argsort(bag, kind="stable")
    before = exclusive_cumsum(extra[order])
    sorted_bag = bag[order]
    before -= before[np.searchsorted(sorted_bag, sorted_bag)] if len(bag) else 0
    turn = np.empty_like(before)
    turn[order] = before
    part = np.arange(int(parts.sum())) - np.repeat(exclusive_cumsum(parts), parts)
    size = np.repeat(parts, parts)
    has_extra = (part - np.repeat(turn, parts)) % size < np.repeat(extra, parts)
    count = np.repeat(share, parts) + has_extra
    start = exclusive_cumsum(count) - np.repeat(exclusive_cumsum(amount), parts)
    return start, start + count
