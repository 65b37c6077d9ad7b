"""Largest differencing (Karmarkar and Karp, 1982), for as many subsets as there are ranks; sequences stay whole.

Every sequence begins as a partition of its own: one subset with its work, the others empty. The two partitions whose
subsets differ most are joined, the largest subset of one with the smallest of the other, until one is left.
Empty subsets are not stored, so early joins are cheap.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences

from .rank_sets import check_cap

Subset = tuple[int, list[int]]
"""Work and sequence ids of one rank; subsets of a partition are kept by falling work."""


@dataclass(frozen=True, slots=True)
class KarmarkarKarpPlanner:
    """Whole sequences on single ranks, by differencing."""

    name: str = "karmarkar-karp"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        world_size = cluster.world_size
        heap: list[tuple[int, int, list[Subset]]] = []
        for seq, work in enumerate(cost.work(sequences.length).tolist()):
            heap.append((-work if world_size > 1 else 0, seq, [(work, [seq])]))
        heapq.heapify(heap)
        count = len(heap)
        while len(heap) > 1:
            joined = _join(heapq.heappop(heap)[2], heapq.heappop(heap)[2], world_size)
            smallest = joined[-1][0] if len(joined) == world_size else 0
            heapq.heappush(heap, (smallest - joined[0][0], count, joined))
            count += 1
        rank_of = np.zeros(len(sequences), dtype=np.int64)
        for rank, (_, seqs) in enumerate(heap[0][2] if heap else []):
            rank_of[seqs] = rank
        placement = Placement.whole(
            sequences, rank_of, world_size=world_size, num_heads=cost.num_heads, planner=self.name
        )
        return check_cap(placement, limits)


def _join(first: list[Subset], second: list[Subset], num_subsets: int) -> list[Subset]:
    """The largest subset of one partition with the smallest of the other, and so on."""
    overlap = max(0, len(first) + len(second) - num_subsets)
    alone = first[: len(first) - overlap]  # meet empty subsets of the second
    pairs = zip(first[len(first) - overlap :], reversed(second[len(second) - overlap :]), strict=True)
    joined = [(a + b, seqs + more) for (a, seqs), (b, more) in pairs]
    return sorted([*alone, *second[: len(second) - overlap], *joined], key=lambda subset: -subset[0])
