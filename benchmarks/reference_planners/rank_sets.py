"""What the reference planners share: sequences on sets of ranks in equal shares, and what that costs.

A sequence of L tokens and H heads on a set of g ranks, g_n of them in a rank's node, takes on each rank

    work(L) / g  +  4 H L / g * ((g_n - 1) / g * price in the node + (g - g_n) / g * price between nodes)

which is DeepSpeed-Ulysses attention in equal shares: q, k, v and o of (1 - 1/g) of a rank's rows cross ranks. Where H
does not divide by g, some ranks have a head more than others; or, for schemes that are not tied to Ulysses, heads are
cut so that rows are equal and keys of cut heads travel twice, where that is cheaper.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knapformer.errors import PlanError
from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences, Shards
from knapformer.plan.predict import row_prices
from knapformer.plan.timeline import timeline

RankSet = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """Time per rank of sequences in equal shares on sets of ranks [tick].

    Attributes:
        equal_rows: whether heads may be cut, where that is cheaper.
    """

    cluster: Cluster
    cost: CostModel
    equal_rows: bool

    def share(self, length: NDArray[np.int64], degree: int, in_node: int | None = None) -> NDArray[np.float64]:
        """(S,) time on each of `degree` ranks, of which `in_node` are in one node (default: as many as fit)."""
        in_node = min(degree, max(self.cluster.node_sizes)) if in_node is None else in_node
        fast, slow = row_prices(self.cluster, self.cost)
        heads, work = self.cost.num_heads, self.cost.work(length) / degree
        crossing = length * ((in_node - 1) * fast + (degree - in_node) * slow) / degree  # per row of each token
        uneven_work = (-(-heads // degree) / (heads / degree) - 1) * self.cost.per_qk_pair * heads * length**2 / degree
        touched = (heads + degree - math.gcd(heads, degree)) / degree
        whole_heads = uneven_work + 4 * -(-heads // degree) * crossing
        equal_rows = (2 * touched + 2 * heads / degree) * crossing
        return work + (np.minimum(whole_heads, equal_rows) if self.equal_rows else whole_heads)


def by_falling_work(sequences: Sequences) -> list[int]:
    """Ids of sequences, longest first; ties by id."""
    return np.lexsort((np.arange(len(sequences)), -sequences.length)).tolist()


def place(
    sequences: Sequences, cluster: Cluster, cost: CostModel, sets: Sequence[RankSet], name: str, *, equal_rows: bool
) -> Placement:
    """Equal shares of each sequence on its set of ranks, in whole heads, or in equal rows if predicted better."""
    divides = all(cost.num_heads % len(ranks) == 0 for ranks in sets)
    units = (1,) if divides or not equal_rows else (1, 0)
    return best([_cut(sequences, cluster, cost, sets, name, unit=unit) for unit in units], cluster, cost)


def best(placements: Iterable[Placement], cluster: Cluster, cost: CostModel) -> Placement:
    """The placement of the least step on the timeline; the first of equals."""
    return min(placements, key=lambda placement: timeline(placement, cluster, cost).step)


def check_cap(placement: Placement, limits: Limits | None) -> Placement:
    """Raise `PlanError` if the placement breaks the token limit, which the published schemes do not search under."""
    most = int(placement.tokens().max())
    if limits is not None and limits.max_tokens_per_rank is not None and most > limits.max_tokens_per_rank:
        raise PlanError(
            f"planner '{placement.planner}' puts {most} tokens on a rank, above max_tokens_per_rank "
            f"{limits.max_tokens_per_rank}; use another planner"
        )
    return placement


def _cut(
    sequences: Sequences, cluster: Cluster, cost: CostModel, sets: Sequence[RankSet], name: str, *, unit: int
) -> Placement:
    """Cut tokens, and heads (`unit` 1) or rows (`unit` 0), as equally as whole numbers allow.

    What is left over goes to the ranks that have the least of it so far.
    """
    tokens, rows = [], []
    held, area = np.zeros(cluster.world_size), np.zeros(cluster.world_size)
    for seq in by_falling_work(sequences):
        ranks, length = list(sets[seq]), int(sequences.length[seq])
        step = length if unit else 1
        tokens += _shares(seq, ranks, length, 1, held, 1)
        rows += _shares(seq, ranks, cost.num_heads * length // step, step, area, length)
    token_shards, attention_shards = (
        Shards.sorted(*np.array(table, dtype=np.int64).reshape(-1, 4).T) for table in (tokens, rows)
    )
    return Placement(sequences, cluster.world_size, cost.num_heads, token_shards, attention_shards, name)


def _shares(
    seq: int, ranks: list[int], amount: int, step: int, held: NDArray[np.float64], weight: int
) -> list[tuple[int, int, int, int]]:
    """(seq, rank, start, stop) of equal shares of `amount * step`, cut at multiples of `step`; adds to `held`."""
    share, extra = divmod(amount, len(ranks))
    counts = dict.fromkeys(ranks, share)
    for rank in sorted(ranks, key=lambda r: held[r])[:extra]:
        counts[rank] += 1
    table, start = [], 0
    for rank in ranks:
        stop = start + counts[rank] * step
        table.append((seq, rank, start, stop))
        held[rank] += (stop - start) * weight
        start = stop
    return table
