"""Many small sequences: leave nearly all at home and level the ranks by moving a few.

Ranks whose loaders drew from one distribution differ by little, a few sequences' worth. A sequence moved from a rank
with too much to one with too little is best if it makes one of them exact, or both; so the moves that do are made
first, and exchanges of two sequences are the last resort, as they move most for what they level. Then what has moved
changes places with sequences of nearly its length, which levels nodes and ranks further without moving more. The rest,
at most about 1 part in `TOLERANCE` of a rank's load, is levelled inside each node with slices of tokens (tens of them)
whose attention rows stay where the sequence is; how far is a matter of what they save and of their traffic.
"""

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.placement import Placement, Shards
from knapformer.plan.planners.balanced.fill import fill
from knapformer.plan.predict import row_prices
from knapformer.plan.sequences import Sequences

MOST_RANKS = 64
"""Ranks up to which few moves are looked for; the search grows with the square."""

SMALL = 8
"""Every sequence must be smaller than the mean load by this factor."""

TOLERANCE = 600
"""Ranks are level by whole sequences when within 1 part in this many."""

PARTNERS = 6
"""Ranks with least load that are considered for an exchange."""

SWAPS = 8
"""Most sequences that have moved and change places."""

_NEVER = 1 << 62


def few_moves(sequences: Sequences, cluster: Cluster, cost: CostModel, work: Int64Array, name: str) -> Placement | None:
    """A placement that leaves most sequences at home; None where moves alone do not get all ranks level."""
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


def _finishing_move(
    work: Int64Array, rank: Int64Array, excess: Int64Array, tolerance: int
) -> list[tuple[int, int]] | None:
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
    if len(i):
        other = np.where(left_done[i, 0], missing[i, j], left[i, 0])
        score = np.abs(other) // 20 + _distance(-excess[np.abs(excess) > tolerance], other)
        score += np.where(np.abs(other) < work.min(), 100 * tolerance, 0)
        best = int(score.argmin())
        return [(int(items[i[best]]), int(low[j[best]]))]
    most = int(excess.argmax())
    mine = np.flatnonzero(rank == most)
    amount = work[mine][:, None]
    gain = np.abs(excess[most] - amount) + np.abs(amount + excess[low]) + excess[low] - excess[most] + amount
    best = int(gain.argmin())
    i, j = divmod(best, len(low))
    return [(int(mine[i]), int(low[j]))] if gain.ravel()[best] < 0 else None


def _distance(wanted: Int64Array, values: Int64Array) -> Int64Array:
    """How far each value is from the nearest wanted one."""
    wanted = np.sort(wanted)
    at = np.searchsorted(wanted, values)
    above, below = wanted[np.minimum(at, len(wanted) - 1)], wanted[np.maximum(at - 1, 0)]
    return np.minimum(np.abs(above - values), np.abs(below - values))


def _best_exchange(
    work: Int64Array, rank: Int64Array, excess: Int64Array, tolerance: int
) -> list[tuple[int, int]] | None:
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
    node, sizes = cluster.node_of, np.array(cluster.node_sizes)
    first, shift = np.cumsum(sizes) - sizes, max(0, tolerance.bit_length() - 18)  # squares fit 64 bits
    moved, scaled = (rank != home).nonzero()[0], work >> shift
    for _ in range(SWAPS if len(moved) else 0):
        away = rank != home
        moved = away.nonzero()[0]
        j, i = (away | (rank == home[moved][:, None])).nonzero()
        out, back = i, moved[j]
        source, target = rank[out], rank[back]
        more = scaled[out] - scaled[back]
        load = excess >> shift
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
    seq, start = np.arange(len(rank)), np.zeros_like(rank)
    length, num_heads = sequences.length, cost.num_heads
    rows = Shards(seq, rank, start, length * num_heads)
    sizes = np.array(cluster.node_sizes)
    first = np.cumsum(sizes) - sizes
    give, take = _slices(excess, first, cluster, cost)
    longest = np.full(cluster.world_size, -1, dtype=np.int64)
    by_length = np.argsort(length, kind="stable")
    longest[rank[by_length]] = by_length
    give = np.where(longest >= 0, np.minimum(give, length[longest] - 1), 0)
    given, taken = np.add.reduceat(give, first), np.add.reduceat(take, first)
    both = np.minimum(given, taken)
    give, take = (_first_of(amount, both, first, cluster.node_of) for amount in (give, take))
    parts = fill(give, take)
    cut = longest[parts.item]
    base = length[cut] - give[parts.item] + parts.start
    stop = length.copy()
    givers = np.flatnonzero(give)
    stop[longest[givers]] -= give[givers]
    table = Shards.sorted(
        np.concatenate((seq, cut)),
        np.concatenate((rank, parts.bin)),
        np.concatenate((start, base)),
        np.concatenate((stop, base + parts.num)),
    )
    return Placement(sequences, cluster.world_size, num_heads, table, rows, name)


def _slices(excess: Int64Array, first: Int64Array, cluster: Cluster, cost: CostModel) -> tuple[Int64Array, Int64Array]:
    """Tokens that each rank gives and takes so that load and traffic of all givers and takers in a node are equal.

    A token that moves is 3 H rows of traffic for both ranks: q, k, v go back to where its sequence is.
    """
    token = max(cost.token, 1)
    traffic = min(3 * cost.num_heads * row_prices(cluster, cost)[0], token // 2)
    low, high = (bound.reduceat(excess, first) for bound in (np.minimum, np.maximum))
    for _ in range(24):
        middle = (low + high) // 2
        over = excess - middle[cluster.node_of]
        give, take = np.maximum(over, 0) // (token - traffic), np.maximum(-over, 0) // (token + traffic)
        fits = np.add.reduceat(give, first) <= np.add.reduceat(take, first)
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    over = excess - high[cluster.node_of]
    return np.maximum(over, 0) // (token - traffic), np.maximum(-over, 0) // (token + traffic)


def _first_of(amount: Int64Array, most: Int64Array, first: Int64Array, node: Int64Array) -> Int64Array:
    """`amount` (W,), reduced from the last rank on so that each node's sum is at most `most` (N,)."""
    after = np.cumsum(amount)
    after -= (after - amount)[first][node]
    return np.maximum(np.minimum(amount, most[node] - (after - amount)), 0)
