"""Sequences to groups of nodes: every group gets its share of the work, by whole sequences.

Links between nodes are slow, so a sequence stays inside a node if any node can hold it. A group is one node at first.

1. Large sequences, by falling work: each to the group with most room. If that is too little, groups with most room
   become one until the sequence takes only a part of their room. Its ranks then have work of their own behind which
   the traffic between nodes hides.
2. Small ones: to the group of their home, unless another has less work by more than the sequence.
3. Rounds of exchanges of small sequences between groups, most loaded with least, until all are level.
"""

from bisect import insort
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.cluster import Cluster
from knapformer.plan.sequences import Sequences

LARGE = 16
"""Sequences of more than 1/LARGE of a node's share of the work are large."""

OVERFULL = 512
"""A sequence fits if it exceeds the room of a group by less than 1/OVERFULL of a node's share."""

LEVEL = 4096
"""Groups are level when none exceeds its share by more than 1/LEVEL."""

ROUNDS = 6
"""Most rounds of exchanges."""

CANDIDATES = 12
"""Smallest sequences of a group that may take part in an exchange."""

Members = list[tuple[int, int]]
"""Work and id of sequences of one group, least work first."""


class Groups(NamedTuple):
    """Nodes in groups.

    Attributes:
        of_node: (N,) group of each node.
        of_sequence: (S,) group of each sequence.
        beyond: ids of the sequences that no node could hold.
    """

    of_node: Int64Array
    of_sequence: Int64Array
    beyond: list[int]


def assign_groups(
    sequences: Sequences, cluster: Cluster, work: Int64Array, total: int, room: tuple[int, int]
) -> Groups:
    """Group nodes and give each group sequences whose work is its share of `total`, the sum of `work` (S,).

    `room` is the part of their room that nodes are grouped for, as a fraction.
    """
    if cluster.num_nodes == 1:
        return Groups(np.zeros(1, dtype=np.int64), np.zeros(len(sequences), dtype=np.int64), [])
    speeds = np.add.reduceat(cluster.speed, [ranks.start for ranks in cluster.node_ranks()]).tolist()
    share = [-(-total * speed // sum(speeds)) for speed in speeds]
    falling = np.argsort(-work, kind="stable")
    num_large = int((work > min(share) // LARGE).sum())
    large, small = falling[:num_large], falling[num_large:]
    of_node, of_large, excess, beyond = _place_large(work[large].tolist(), share, room)
    of_sequence = np.empty(len(sequences), dtype=np.int64)
    of_sequence[large] = of_large
    home = of_node[cluster.node_of[sequences.home[small]]]
    of_sequence[small] = _place_small(work[small].tolist(), home.tolist(), excess)
    members = _smallest(falling, work, of_sequence, len(excess))
    tolerance = [0] * len(excess)
    for group, most in zip(of_node.tolist(), share, strict=True):
        tolerance[group] += most // LEVEL
    level_groups(members, excess, tolerance)
    for group, each in enumerate(members):
        of_sequence[[seq for _, seq in each]] = group
    return Groups(of_node, of_sequence, large[beyond].tolist())


def _place_large(
    amounts: list[int], share: list[int], room: tuple[int, int]
) -> tuple[Int64Array, list[int], list[int], list[int]]:
    """Group of each node; group of each amount, which fall; what each group has above its share; which needed several.

    While nodes are grouped, a group goes by the number of one of its nodes, and the others point there.
    """
    slack = min(share) // OVERFULL
    heap = [(-most, node) for node, most in enumerate(share)]  # minus the room of each group
    heapify(heap)
    points_to = list(range(len(share)))
    chosen, beyond = [], []
    for index, amount in enumerate(amounts):
        excess, group = heap[0]
        if amount + excess > slack:
            beyond.append(index)
            heap.sort()  # a sorted list is a heap
            while amount * room[1] > -excess * room[0] and len(heap) > 1:
                more, other = heap[1]
                points_to[other] = group
                excess += more
                heap[:2] = [(excess, group)]
        heapreplace(heap, (excess + amount, group))
        chosen.append(group)

    def group_of(node: int) -> int:
        while points_to[node] != node:
            node = points_to[node]
        return node

    groups = [group_of(node) for node in range(len(share))]
    number = {group: index for index, group in enumerate(sorted(set(groups)))}
    excess_of = [excess for _, excess in sorted((group, excess) for excess, group in heap)]
    return np.array([number[g] for g in groups]), [number[group_of(g)] for g in chosen], excess_of, beyond


def _place_small(amounts: list[int], homes: list[int], excess: list[int]) -> list[int]:
    """Group of each amount: home, unless that is ahead of the emptiest by more than the amount. Updates `excess`."""
    heap = [(load, group) for group, load in enumerate(excess)]
    heapify(heap)
    chosen = []
    for amount, home in zip(amounts, homes, strict=True):
        least, group = heap[0]
        while least != excess[group]:  # the group took something since
            heapreplace(heap, (excess[group], group))
            least, group = heap[0]
        if excess[home] - least <= amount:
            group = home
        excess[group] += amount
        chosen.append(group)
    return chosen


def _smallest(falling: Int64Array, work: Int64Array, group: Int64Array, num_groups: int) -> list[Members]:
    """The smallest sequences of each group, as many as exchanges may take."""
    rising = falling[::-1]
    rising = rising[group[rising].argsort(kind="stable")]
    first = group[rising].searchsorted(np.arange(num_groups + 1)).tolist()
    members = []
    for start, stop in pairwise(first):
        some = rising[start : min(stop, start + CANDIDATES + ROUNDS)]
        members.append(list(zip(work[some].tolist(), some.tolist(), strict=True)))
    return members


def level_groups(members: list[Members], excess: list[int], tolerance: list[int]) -> None:
    """Exchange `members` between groups paired by load, in place; `excess` is what a group has too much."""
    half = len(members) // 2
    for _ in range(ROUNDS):
        if all(e <= t for e, t in zip(excess, tolerance, strict=True)):
            return
        ranked = sorted(range(len(excess)), key=lambda group: -excess[group])
        moved = False
        for high, low in zip(ranked[:half], reversed(ranked), strict=False):
            wanted = (excess[high] - excess[low]) // 2
            give, take = best_exchange(members[high], members[low], wanted)
            given = members[high].pop(give) if give >= 0 else (0, -1)
            taken = members[low].pop(take) if take >= 0 else (0, -1)
            excess[high] += taken[0] - given[0]
            excess[low] += given[0] - taken[0]
            moved |= given[0] != taken[0]
            if give >= 0:
                insort(members[low], given)
            if take >= 0:
                insort(members[high], taken)
        if not moved:
            return


def best_exchange(give: Members, take: Members, wanted: int) -> tuple[int, int]:
    """Indices of what to give and what to take, -1 for nothing, such that the difference is nearest to `wanted`.

    Both lists rise, so one walk through them meets the best pair.
    """
    most, least = min(len(give), CANDIDATES), min(len(take), CANDIDATES)
    best, chosen, i, j, given, taken = wanted, (-1, -1), -1, -1, 0, 0
    while True:
        miss = given - taken - wanted
        if abs(miss) < best:
            best, chosen = abs(miss), (i, j)
        if miss < 0:
            i += 1
            if i == most:
                return chosen
            given = give[i][0]
        else:
            j += 1
            if j == least:
                return chosen
            taken = take[j][0]
