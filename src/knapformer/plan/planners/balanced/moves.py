"""Many small sequences: leave nearly all where they are and level the ranks by moving a few.

Ranks whose loaders drew from one distribution differ by little, a few sequences' worth.

1. Moves of one sequence, from a rank with too much to one with too little, that make one of them exact, or both.
2. Where there is none, an exchange of two sequences, which moves most for what it levels.
3. What has moved changes places with sequences of nearly its length, which levels without moving more.
4. The rest, at most about 1/TOLERANCE of a rank's load, is levelled inside each node with slices of tokens, tens of
   them, whose attention rows stay where the sequence is.
"""

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.placement import Placement, Shards
from knapformer.plan.planners.balanced.ranks import apportion, fill
from knapformer.plan.sequences import Sequences

MOST_RANKS = 64
"""Ranks up to which few moves are looked for; the search grows with the square."""

SMALL = 8
"""Every sequence must be smaller than the mean load by this factor."""

TOLERANCE = 600
"""Ranks are level by whole sequences when within 1/TOLERANCE of the mean load."""

PARTNERS = 6
"""Ranks with least load that are considered for an exchange."""

SWAPS = 8
"""Most sequences that have moved and change places."""

_NEVER = 1 << 62

Moves = list[tuple[int, int]]
"""Sequences and the ranks they go to."""


def few_moves(sequences: Sequences, cluster: Cluster, cost: CostModel, work: Int64Array, name: str) -> Placement | None:
    """A placement that leaves most sequences on their home rank; None where moves alone do not get all ranks level."""
    world_size, home = cluster.world_size, sequences.home
    mean = int(work.sum()) // world_size
    if world_size > MOST_RANKS or cluster.speeds or int(work.max()) * SMALL > mean:
        return None
    excess = np.full(world_size, -mean, dtype=np.int64)
    np.add.at(excess, home, work)
    rank = home.copy()
    tolerance = mean // TOLERANCE
    for _ in range(4 * world_size):
        if int(excess.max()) <= tolerance:
            _swap_moved(work, home, rank, excess, cluster, tolerance)
            return _with_slices(sequences, cluster, cost, rank, excess, name)
        move = _finishing_move(work, rank, excess, tolerance) or _best_exchange(work, rank, excess, tolerance)
        if move is None:
            return None
        for seq, target in move:
            excess[rank[seq]] -= work[seq]
            excess[target] += work[seq]
            rank[seq] = target
    return None


def _finishing_move(work: Int64Array, rank: Int64Array, excess: Int64Array, tolerance: int) -> Moves | None:
    """One sequence from a rank with too much to one with too little, such that one of them, or both, are done."""
    low = np.flatnonzero(excess < -tolerance)
    items = np.flatnonzero(excess[rank] > tolerance)
    if not len(low):
        return None
    amount, surplus = work[items], excess[rank[items]]
    left, missing = (surplus - amount)[:, None], amount[:, None] + excess[low]
    left_done, low_done = np.abs(left) <= tolerance, np.abs(missing) <= tolerance
    both = np.flatnonzero((left_done & low_done).ravel())
    if len(both):
        i, j = divmod(int(both[0]), len(low))
        return [(int(items[i]), int(low[j]))]
    useful = (left_done & (np.abs(missing) <= -excess[low])) | (low_done & (np.abs(left) <= surplus[:, None]))
    i, j = np.nonzero(useful)
    if len(i):  # the other rank should be left with little, but not with less than any sequence could mend
        other = np.abs(np.where(left_done[i, 0], missing[i, j], left[i, 0]))
        best = int((other + np.where(other < work.min(), _NEVER, 0)).argmin())
        return [(int(items[i[best]]), int(low[j[best]]))]
    most = int(excess.argmax())
    mine = np.flatnonzero(rank == most)
    amount = work[mine][:, None]
    gain = np.abs(excess[most] - amount) + np.abs(amount + excess[low]) + excess[low] - excess[most] + amount
    best = int(gain.argmin())
    i, j = divmod(best, len(low))
    return [(int(mine[i]), int(low[j]))] if gain.ravel()[best] < 0 else None


def _best_exchange(work: Int64Array, rank: Int64Array, excess: Int64Array, tolerance: int) -> Moves | None:
    """Two sequences change places between the rank with most and another, which must get less than that rank had."""
    most = int(excess.argmax())
    partner = excess <= np.sort(excess)[min(PARTNERS, len(excess) - 1)]
    partner[most] = False
    mine, others = np.flatnonzero(rank == most), np.flatnonzero(partner[rank])
    if not len(mine) or not len(others):
        return None
    change = work[mine][:, None] - work[others]
    left, there = excess[most] - change, excess[rank[others]] + change
    done = (np.abs(left) <= tolerance) * 1 + (np.abs(there) <= tolerance)
    score = np.maximum(np.abs(left), np.abs(there)) + (2 - done) * (1 << 58)
    score[(change <= 0) | (np.maximum(left, there) >= excess[most])] = _NEVER
    best = int(score.argmin())
    if score.ravel()[best] == _NEVER:
        return None
    i, j = divmod(best, len(others))
    return [(int(mine[i]), int(rank[others[j]])), (int(others[j]), most)]


def _swap_moved(
    work: Int64Array, home: Int64Array, rank: Int64Array, excess: Int64Array, cluster: Cluster, tolerance: int
) -> None:
    """Level nodes and ranks further, in place, by swaps after which no more sequences are away from home than before.

    A sequence that has moved changes places with one that stays at its home, or with another that has moved.
    """
    node = cluster.node_of
    first, shift = node.searchsorted(np.arange(cluster.num_nodes)), max(0, tolerance.bit_length() - 18)
    scaled = work >> shift  # so that squares fit 64 bits
    for _ in range(SWAPS):
        away = rank != home
        moved = away.nonzero()[0]
        if not len(moved):
            return
        j, out = (away | (rank == home[moved][:, None])).nonzero()
        back = moved[j]
        source, target = rank[out], rank[back]
        more, load = scaled[out] - scaled[back], excess >> shift
        level = np.add.reduceat(load, first)
        change = more * (more + load[target] - load[source])
        across = node[source] != node[target]
        change += across * more * (more + level[node[target]] - level[node[source]])
        best = int(change.argmin())
        if change[best] >= 0:
            return
        out, back, source, target = (int(x[best]) for x in (out, back, source, target))
        rank[out], rank[back] = target, source
        excess[source] += work[back] - work[out]
        excess[target] += work[out] - work[back]


def _with_slices(
    sequences: Sequences, cluster: Cluster, cost: CostModel, rank: Int64Array, excess: Int64Array, name: str
) -> Placement:
    """Level each node with slices off the end of one sequence of every rank that has too much."""
    node, length = cluster.node_of, sequences.length
    first = node.searchsorted(np.arange(cluster.num_nodes))
    over = (excess - (np.add.reduceat(excess, first) // cluster.node_sizes)[node]) // max(cost.token, 1)
    longest = np.full(cluster.world_size, -1)
    by_length = np.argsort(length, kind="stable")
    longest[rank[by_length]] = by_length
    give = np.where(longest >= 0, np.minimum(np.maximum(over, 0), length[longest] - 1), 0)
    take = apportion(np.add.reduceat(give, first), np.maximum(-over, 1), node)
    cuts = fill(give, take)
    seq, start, cut = np.arange(len(rank)), np.zeros_like(rank), longest[cuts.item]
    stop = length.copy()
    np.subtract.at(stop, longest[longest >= 0], give[longest >= 0])
    begin = stop[cut] + cuts.start
    tokens = Shards.sorted(
        np.concatenate((seq, cut)),
        np.concatenate((rank, cuts.place)),
        np.concatenate((start, begin)),
        np.concatenate((stop, begin + cuts.num)),
    )
    rows = Shards(seq, rank, start, length * cost.num_heads)
    return Placement(sequences, cluster.world_size, cost.num_heads, tokens, rows, name)
