"""Longest processing time first (Graham, 1969): by falling work, each sequence whole on the least loaded rank."""

import heapq
from dataclasses import dataclass

import numpy as np

from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences

from .rank_sets import by_falling_work, check_cap


@dataclass(frozen=True, slots=True)
class LPTPlanner:
    """Whole sequences on single ranks, greedily."""

    name: str = "lpt"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        work = cost.work(sequences.length).tolist()
        rank_of = np.zeros(len(sequences), dtype=np.int64)
        heap = [(0, rank) for rank in range(cluster.world_size)]
        for seq in by_falling_work(sequences):
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + work[seq], rank))
            rank_of[seq] = rank
        placement = Placement.whole(
            sequences, rank_of, world_size=cluster.world_size, num_heads=cost.num_heads, planner=self.name
        )
        return check_cap(placement, limits)
