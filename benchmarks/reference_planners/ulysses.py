"""Uniform sequence parallelism of degree g (DeepSpeed-Ulysses, arXiv 2309.14509), the groups balanced.

Ranks form aligned groups of g; every sequence is shared by one group, in equal parts; groups are filled longest
sequence first. The published scheme leaves balance to the data loader and needs heads and lengths that divide by g;
here groups are balanced, heads and tokens that are left over go to some ranks, and g is chosen anew for every step by
predicted step time.
"""

import heapq
from dataclasses import dataclass

from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences

from .rank_sets import Prices, RankSet, best, by_falling_work, check_cap, place

MAX_PAIRS = 4_000_000
"""Largest sum of g * g over sequences that is tried, to bound the time a plan takes; g up to a node is always tried."""


@dataclass(frozen=True, slots=True)
class UlyssesPlanner:
    """Every sequence on a group of g ranks.

    Attributes:
        degree: g; None to try every divisor of the world size.
        name: "ulysses".
    """

    degree: int | None = None
    name: str = "ulysses"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        tried = [
            place(
                sequences,
                cluster,
                cost,
                uniform_sets(sequences, cluster, cost, degree),
                self.name,
                equal_rows=False,
            )
            for degree in ([self.degree] if self.degree else degrees(sequences, cluster))
        ]
        return check_cap(best(tried, cluster, cost), limits)


def degrees(sequences: Sequences, cluster: Cluster) -> list[int]:
    """Divisors of the world size that are worth trying."""
    world_size, node = cluster.world_size, max(cluster.node_sizes)
    divisors = [g for g in range(1, world_size + 1) if world_size % g == 0]
    return [g for g in divisors if g <= node or (g % node == 0 and len(sequences) * g * g <= MAX_PAIRS)]


def uniform_sets(sequences: Sequences, cluster: Cluster, cost: CostModel, degree: int) -> list[RankSet]:
    """The group of each sequence, by longest processing time first."""
    time = Prices(cluster, cost, equal_rows=False).share(sequences.length, degree).tolist()
    heap = [(0.0, first) for first in range(0, cluster.world_size - degree + 1, degree)]
    sets: list[RankSet] = [()] * len(sequences)
    for seq in by_falling_work(sequences):
        load, first = heap[0]
        heapq.heapreplace(heap, (load + time[seq], first))
        sets[seq] = tuple(range(first, first + degree))
    return sets
