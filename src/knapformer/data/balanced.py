"""`BalancedSampler`: plan each step from the manifest before loading, and read samples where they will be used.

A sampler that deals samples blindly makes the planner move most of their tokens. Where lengths are known beforehand,
the plan can be made first:

    lengths of the global batch --planner--> placement --> whole: read by the rank that will hold it; nothing moves
                                                           split: read by the rank with the largest share of it

The balancer then has to come to the same plan from the lengths and home ranks it gathers, so both ask `AheadPlanner`,
whose plan does not depend on homes. If samples turn out to have other lengths than the manifest said, the plan is made
anew from where they are: results stay the same, only more tokens move.

    sampler = BalancedSampler(lengths, batch=64, cost=cost, cluster=Cluster(world_size, 8), rank=rank)
    balancer = SequenceBalancer(planner=sampler.planner, cost=sampler.cost, cluster=sampler.cluster)
"""

import heapq
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from knapformer.data.epoch import EpochSampler
from knapformer.errors import SpecError
from knapformer.plan import Cluster, CostModel, Limits, Placement, Planner, Sequences, Shards, make_planner

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AheadPlanner:
    """Another planner's placement for these lengths, wherever they are, each sequence in the place nearest its home.

    The sequences are dealt by their work first, the longest to the rank with least, and planned from there. Sequences
    of equal lengths change places so that as many as possible are at home. If a whole one is not, these are not the
    homes that `homes` named, and the planner is asked again, with the real ones.

    Attributes:
        base: the planner.
        name: the same.
    """

    base: Planner = field(default_factory=lambda: make_planner("balanced"))

    @property
    def name(self) -> str:
        return f"{self.base.name}, ahead"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        limits = limits or Limits()
        placement, order = self._ahead(sequences, cluster, cost, limits)
        lens = sequences.length, sequences.text_length, sequences.context_length
        here = np.lexsort((sequences.home, *lens))
        there = np.lexsort((reading_ranks(placement), *(x[order] for x in lens)))
        real = np.empty_like(here)
        real[there] = here

        def renamed(shards: Shards) -> Shards:
            return Shards.sorted(real[shards.seq], shards.rank, shards.start, shards.stop)

        moved = replace(
            placement,
            sequences=sequences,
            token_shards=renamed(placement.token_shards),
            attention_shards=renamed(placement.attention_shards),
            planner=self.name,
        )
        whole = ~moved.split
        if (reading_ranks(moved)[whole] == sequences.home[whole]).all():
            return moved
        return self.base(sequences, cluster, cost, limits)

    def homes(self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None) -> Int64:
        """(S,) the rank that should read each sequence."""
        placement, order = self._ahead(sequences, cluster, cost, limits or Limits())
        homes = np.empty(len(order), dtype=np.int64)
        homes[order] = reading_ranks(placement)
        return homes

    def _ahead(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits
    ) -> tuple[Placement, Int64]:
        """The plan of the sequences in another order, and that order. Neither depends on homes."""
        lens = sequences.length, sequences.text_length, sequences.context_length
        falling = np.lexsort([-x for x in lens])
        rank = _deal(cost.work(sequences.length)[falling], cluster.world_size)
        by_rank = np.argsort(rank, kind="stable")
        order = falling[by_rank]
        dealt = Sequences(lens[0][order], rank[by_rank], lens[1][order], lens[2][order])
        return self.base(dealt, cluster, cost, limits), order


class BalancedSampler(EpochSampler):
    """An `EpochSampler` whose ranks read the samples that they will hold.

    Args:
        lengths: (N,) tokens of each sample, text included where it is part of the sequence.
        batch, max_tokens: as for `EpochSampler`.
        text_lengths, context_lengths: (N,) as `plan_routing` will be told; default none.
        cost: prices; those of the balancer.
        cluster: the ranks; those of the balancer.
        limits: those of the balancer.
        planner: the planner, or its name.
        rank: of this process.
        seed: of the order.

    Raises:
        SpecError: for arguments that make no sense.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        batch: int | None = None,
        *,
        max_tokens: int | None = None,
        text_lengths: ArrayLike | None = None,
        context_lengths: ArrayLike | None = None,
        cost: CostModel,
        cluster: Cluster,
        limits: Limits | None = None,
        planner: Planner | str = "balanced",
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        of_samples = np.asarray(lengths, dtype=np.int64).reshape(-1)
        super().__init__(
            len(of_samples),
            batch,
            max_tokens=max_tokens,
            lengths=of_samples,
            rank=rank,
            world_size=cluster.world_size,
            seed=seed,
        )
        self.cost, self.cluster, self.limits = cost, cluster, limits or Limits()
        self.planner = AheadPlanner(make_planner(planner) if isinstance(planner, str) else planner)
        beside = []
        for name, given in (("text_lengths", text_lengths), ("context_lengths", context_lengths)):
            column = np.zeros_like(of_samples) if given is None else np.asarray(given, dtype=np.int64)
            if column.shape != of_samples.shape:
                raise SpecError(f"{name} has shape {column.shape}; it must be {of_samples.shape}, like lengths")
            beside.append(column)
        zeros = np.zeros_like(of_samples)
        self._sequences = Sequences(of_samples, zeros, *beside)  # checks all lengths once

    def deal(self, samples: Int64) -> list[list[int]]:
        """The samples of a step by the rank that will hold them, or most of them."""
        s = self._sequences
        chosen = Sequences(s.length[samples], s.home[samples], s.text_length[samples], s.context_length[samples])
        homes = self.planner.homes(chosen, self.cluster, self.cost, self.limits)
        return [samples[homes == rank].tolist() for rank in range(self.world_size)]


def reading_ranks(placement: Placement) -> Int64:
    """(S,) the rank that holds most tokens of each sequence."""
    shards = placement.token_shards
    tokens = np.zeros((len(placement.sequences), placement.world_size), dtype=np.int64)
    np.add.at(tokens, (shards.seq, shards.rank), shards.count)
    return tokens.argmax(axis=1)


def _deal(work: Int64, world_size: int) -> Int64:
    """(S,) rank of each of these sequences: the one with least work so far."""
    heap = [(0, rank) for rank in range(world_size)]
    ranks = np.zeros(len(work), dtype=np.int64)
    for index, amount in enumerate(work.tolist()):
        load, rank = heap[0]
        ranks[index] = rank
        heapq.heapreplace(heap, (load + amount, rank))
    return ranks
