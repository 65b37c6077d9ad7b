"""Nested power-of-two groups per sequence, as Megatron-Core's dynamic (hybrid) context parallelism.

Each sequence gets the smallest power of two g of ranks that brings its share under a threshold, and one of the aligned
groups of g ranks; groups of different sizes nest, so a rank serves one group after another. Largest shares are placed
first, each on the group that is then ready earliest.

Published: the threshold is a number of tokens per rank, set by hand; work is balanced between barriers, one round of
groups after another; context parallelism exchanges keys and values. Here, in its favour: thresholds on tokens and on
time are tried for every step and the best step on the timeline kept; there are no barriers; attention moves Ulysses'
traffic, and rows are equal where heads do not divide by g.
"""

from dataclasses import dataclass

import numpy as np

from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences
from knapformer.plan.timeline import timeline

from .rank_sets import Prices, RankSet, check_cap, place

THRESHOLDS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Thresholds tried, as multiples of the mean tokens and of the mean time per rank."""


@dataclass(frozen=True, slots=True)
class NestedGroupsPlanner:
    """Every sequence on an aligned group of a power of two of ranks."""

    name: str = "nested-groups"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        sets = nested_sets(sequences, cluster, cost)
        return check_cap(place(sequences, cluster, cost, sets, self.name, equal_rows=True), limits)


def nested_sets(sequences: Sequences, cluster: Cluster, cost: CostModel) -> list[RankSet]:
    """The group of each sequence, for the threshold with the least step on the timeline."""
    world_size = cluster.world_size
    powers = [2**k for k in range(world_size.bit_length()) if 2**k <= world_size]
    time = np.stack([Prices(cluster, cost, equal_rows=True).share(sequences.length, g) for g in powers])
    tokens = np.stack([sequences.length / g for g in powers])
    tried: dict[bytes, list[RankSet]] = {}
    for share, mean in ((time, time[0].sum() / world_size), (tokens, tokens[0].sum() / world_size)):
        for threshold in THRESHOLDS:
            fits = share <= threshold * mean
            power = np.where(fits.any(axis=0), fits.argmax(axis=0), len(powers) - 1)
            if power.tobytes() not in tried:
                tried[power.tobytes()] = _groups(world_size, powers, power, time[power, np.arange(len(sequences))])
    steps = [
        timeline(place(sequences, cluster, cost, sets, "", equal_rows=True), cluster, cost).step
        for sets in tried.values()
    ]
    return list(tried.values())[int(np.argmin(steps))]


def _groups(world_size: int, powers: list[int], power: np.ndarray, time: np.ndarray) -> list[RankSet]:
    """The group of each sequence: largest share first, on the aligned group of its size that is ready earliest."""
    load = np.zeros(world_size)
    sets: list[RankSet] = [()] * len(power)
    for seq in np.lexsort((np.arange(len(time)), -time)).tolist():
        size = powers[power[seq]]
        count = world_size // size
        groups = load[: count * size].reshape(count, size)
        ready = groups.max(axis=1)
        chosen = int(np.lexsort((groups.sum(axis=1), ready))[0])
        groups[chosen] += time[seq]
        sets[seq] = tuple(range(chosen * size, (chosen + 1) * size))
    return sets
