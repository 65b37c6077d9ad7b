"""Planners that only tests want: placements no sensible planner makes, but that must be right all the same."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences, Shards
from tests.plan.strategies import random_placement


@dataclass(frozen=True)
class RandomPlanner:
    """Cuts tokens and rows anywhere and gives the pieces to any ranks."""

    seed: int
    name: str = "random"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        rng = np.random.default_rng(self.seed)
        return random_placement(sequences, cluster.world_size, cost.num_heads, rng)


@dataclass(frozen=True)
class OneSidedPlanner:
    """All tokens on rank 0, all attention rows on the last rank: a rank with rows but no tokens, and the reverse."""

    name: str = "one-sided"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        ids = np.arange(len(sequences))
        zero, rows = np.zeros_like(ids), sequences.length * cost.num_heads
        last = np.full_like(ids, cluster.world_size - 1)
        return Placement(
            sequences,
            cluster.world_size,
            cost.num_heads,
            Shards.sorted(ids, zero, zero, sequences.length),
            Shards.sorted(ids, last, zero, rows),
            self.name,
        )


@dataclass(frozen=True)
class UnevenHeadsPlanner:
    """Tokens cut evenly, rows cut at 1/7, 1/2 and 5/6 of the heads: whole heads here, parts of a head there."""

    name: str = "uneven-heads"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        world, tokens, rows = cluster.world_size, [], []
        for seq, length in enumerate(sequences.length.tolist()):
            total = length * cost.num_heads
            cuts = [length * r // world for r in range(world + 1)]
            tokens += [(seq, (r + seq) % world, a, b) for r, (a, b) in enumerate(pairwise(cuts))]
            cuts = sorted({0, total // 7, total // 2, total * 5 // 6, total})
            rows += [(seq, (r + 1) % world, a, b) for r, (a, b) in enumerate(pairwise(cuts))]
        table = [Shards.sorted(*np.array(t, dtype=np.int64).reshape(-1, 4).T) for t in (tokens, rows)]
        return Placement(sequences, world, cost.num_heads, *table, planner=self.name)
