"""Sequences to nodes: each node gets its share of the predicted time, by moving whole sequences.

Longest processing time first, so that nodes get about equally many of every size; small ones go home where that is
nearly as good. Then rounds of exchanges between nodes paired by load, most loaded with least, until all are level.
Only a sequence that no node can take is cut over several nodes, at a head where that is near.
"""

import heapq
from typing import NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array, exact_sum, exclusive_cumsum
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.planners.balanced.fill import raised_level
from knapformer.plan.predict import row_prices
from knapformer.plan.sequences import Sequences

ROUNDS = 6
"""Most rounds of exchanges between nodes."""

TRAFFIC_TOLERANCE = 1400
"""Nodes with less traffic than others may get more work than their share by 1 part in this many."""

CANDIDATES = 12
"""Smallest sequences of a node that take part in exchanges."""

CUT_TOLERANCE = 512
"""A sequence is cut over nodes if the emptiest would exceed its share by more than 1 part in this many."""

TOLERANCE = 4096
"""Exchanges end when no node is above its share by more than 1 part in this many."""


class Pieces(NamedTuple):
    """Contiguous parts of sequences on nodes, sorted by node; most are whole sequences.

    Attributes:
        seq, node: (P,) columns.
        token, num_tokens: first token and tokens of the part.
        row, num_rows: first attention row and rows of the part.
        senders: 0 for whole sequences; for the largest part of a cut one -1; for the others about how many ranks the
            largest part is on.
    """

    seq: Int64Array
    node: Int64Array
    token: Int64Array
    num_tokens: Int64Array
    row: Int64Array
    num_rows: Int64Array
    senders: Int64Array


def assign_nodes(sequences: Sequences, cluster: Cluster, cost: CostModel, work: Int64Array, total: int) -> Pieces:
    """Give each node pieces whose work is its share of `total`, the sum of `work` (S,), as nearly as can be."""
    length, num_nodes = sequences.length, cluster.num_nodes
    if num_nodes == 1:
        zero = np.zeros_like(length)
        return Pieces(np.arange(len(length)), zero, zero, length, zero, length * cost.num_heads, zero)
    first = exclusive_cumsum(np.array(cluster.node_sizes, dtype=np.int64))
    speed = np.add.reduceat(cluster.speed, first)
    share = _shares(total, speed)
    node, cuts = _longest_first(work, share, cluster, cost, sequences)
    free = share.copy()
    for parts in cuts:
        np.subtract.at(free, parts.node, _work_of(parts, length, cost))
    free += _for_traffic(node, work, length, share, cluster, cost)
    _level(node, work, free, share)
    whole = np.flatnonzero(node >= 0)
    zero = np.zeros_like(whole)
    rest = Pieces(whole, node[whole], zero, length[whole], zero, length[whole] * cost.num_heads, zero)
    table = np.concatenate([np.stack(parts) for parts in (rest, *cuts)], axis=1)
    return Pieces(*table[:, np.lexsort((table[0], table[1]))])


def _work_of(parts: Pieces, length: Int64Array, cost: CostModel) -> Int64Array:
    return cost.token * parts.num_tokens + cost.row_key * parts.num_rows * length[parts.seq]


def _for_traffic(
    node: Int64Array, work: Int64Array, length: Int64Array, share: Int64Array, cluster: Cluster, cost: CostModel
) -> Int64Array:
    """What to change nodes' shares by so that those that will have more traffic get less work; adds up to about 0.

    A node whose R ranks share K split sequences of S tokens in all has traffic of about 4 S (1 - K / R) / R tokens a
    rank. No node gets more than 1 part in `TRAFFIC_TOLERANCE` for it.
    """
    size = np.array(cluster.node_sizes, dtype=np.int64)
    big = np.flatnonzero(node >= 0)
    big = big[work[big] * size[node[big]] > share[node[big]]]
    tokens, number = np.zeros_like(size), np.bincount(node[big], minlength=len(size))
    np.add.at(tokens, node[big], length[big])
    price = 4 * cost.num_heads * row_prices(cluster, cost)[0]
    traffic = price * (tokens * np.maximum(size - number, 0) // (size * size))
    limit = share // size // TRAFFIC_TOLERANCE
    level = raised_level(traffic, limit, np.array([0, len(size)]))
    change = np.minimum(level - traffic, limit) * size
    return change - change.sum() // len(size)


def _shares(total: int, speed: Int64Array) -> Int64Array:
    all_speed = int(speed.sum())
    return np.array([-(-total * s // all_speed) for s in speed.tolist()], dtype=np.int64)


def _longest_first(
    work: Int64Array, share: Int64Array, cluster: Cluster, cost: CostModel, sequences: Sequences
) -> tuple[Int64Array, list[Pieces]]:
    """Node of each sequence, -1 for those cut over several nodes, and the pieces of those."""
    node, length, home = np.empty(len(work), dtype=np.int64), sequences.length, cluster.node_of[sequences.home]
    cuts: list[Pieces] = []
    order = np.argsort(-work, kind="stable")
    least = int(share.min())
    num_big = int((work > least // 16).sum())
    slack = exact_sum(work[order[num_big:]]) // 2  # what small sequences can make up for
    heap = [(-r, n) for n, r in enumerate(share.tolist())]  # minus the room left on each node
    heapq.heapify(heap)
    for seq, amount in zip(order[:num_big].tolist(), work[order[:num_big]].tolist(), strict=True):
        room, n = heap[0]
        if amount + room <= least // CUT_TOLERANCE:
            heapq.heapreplace(heap, (room + amount, n))
            node[seq] = n
            continue
        rooms = [-r for r, _ in sorted(heap, key=lambda entry: entry[1])]
        parts, moved = _cut_work(amount, rooms, share, cluster, cost.num_heads, slack)
        slack -= moved
        cuts.append(_cut(seq, int(length[seq]), parts, cluster, cost, share.tolist()))
        node[seq] = -1
        taken = np.zeros(len(rooms), dtype=np.int64)
        taken[cuts[-1].node] = _work_of(cuts[-1], length, cost)
        heap = [(part - r, n) for n, (r, part) in enumerate(zip(rooms, taken.tolist(), strict=True))]
        heapq.heapify(heap)
    small = order[num_big:]
    node[small] = _small_first_home(work[small].tolist(), home[small].tolist(), heap)
    return node, cuts


def _small_first_home(amounts: list[int], homes: list[int], heap: list[tuple[int, int]]) -> list[int]:
    """Node of each small sequence: home, unless that is ahead of the emptiest node by more than the sequence."""
    load = [room for room, _ in sorted(heap, key=lambda entry: entry[1])]
    chosen = []
    for amount, at in zip(amounts, homes, strict=True):
        least, n = heap[0]
        while least != load[n]:  # stale: the node took something since
            heapq.heappop(heap)
            least, n = heap[0]
        if at != n and load[at] - least <= amount:
            load[at] += amount
            heapq.heappush(heap, (load[at], at))
            chosen.append(at)
        else:
            load[n] += amount
            heapq.heapreplace(heap, (load[n], n))
            chosen.append(n)
    return chosen


def _cut_work(
    amount: int, room: list[int], share: Int64Array, cluster: Cluster, num_heads: int, slack: int
) -> tuple[list[int], int]:
    """Work of a sequence on each node, and how much less than their room the full ones got.

    Nodes with most room come first, of the domain with most room. Parts are whole heads where `slack` allows.
    """
    per_domain = cluster.nodes_per_domain or len(room)
    domain_room: dict[int, int] = {}
    for n, r in enumerate(room):
        domain_room[n // per_domain] = domain_room.get(n // per_domain, 0) + max(r, 0)
    parts, left, moved = [0] * len(room), amount, 0
    for n in sorted(range(len(room)), key=lambda n: (-domain_room[n // per_domain], n // per_domain, -room[n], n)):
        part = min(left, max(room[n], 0))
        heads = part * num_heads // amount
        shift = part - heads * amount // num_heads
        if part < left and heads and shift <= slack - moved:
            part -= shift
            moved += shift
        parts[n] = part
        left -= part
    if left:  # rounding, or no node has room: over all nodes alike
        total = int(share.sum())
        more = [left * int(s) // total for s in share]
        more[0] += left - sum(more)
        parts = [part + extra for part, extra in zip(parts, more, strict=True)]
    return parts, moved


def _cut(seq: int, length: int, parts: list[int], cluster: Cluster, cost: CostModel, share: list[int]) -> Pieces:
    """Pieces of one sequence whose work is cut as `parts`, nearly.

    A rank that has 1/p of a head receives (2 + 1/p) / H of the tokens on other nodes; a rank of the main part with a
    heads, about (2 + 3 a) / H. Tokens are shared so that both have about the same traffic over slow links.
    """
    used = [n for n, part in enumerate(parts) if part]
    main = max(used, key=lambda n: parts[n])
    others = [n for n in used if n != main]
    total, num_heads = sum(parts), cost.num_heads
    ranks = max(1, min(cluster.node_sizes[main], round_div(parts[main] * cluster.node_sizes[main], share[main])))
    main_heads = num_heads * parts[main] // total
    fair = length * 9 * ranks // (17 * ranks + 12 * main_heads) // max(1, len(others))
    tokens, rows = {}, {}
    for n in others:
        tokens[n] = min(fair, parts[n] // max(cost.token, 1))
        rows[n] = (parts[n] - cost.token * tokens[n]) // (max(cost.row_key, 1) * length)
        near = round_div(rows[n], length) * length
        if abs(near - rows[n]) * 16 <= length:
            rows[n] = near
    if sum(tokens.values()) > length or sum(rows.values()) > length * num_heads:  # one of the prices is next to nothing
        tokens = {n: length * parts[n] // total for n in others}
        rows = {n: length * num_heads * parts[n] // total for n in others}
    tokens[main] = length - sum(tokens.values())
    rows[main] = length * num_heads - sum(rows.values())
    counts = np.array([(tokens[n], rows[n]) for n in used], dtype=np.int64)
    starts = np.cumsum(counts, axis=0) - counts
    senders = np.array([-1 if n == main else ranks for n in used])
    node = np.array(used)
    return Pieces(np.full_like(node, seq), node, starts[:, 0], counts[:, 0], starts[:, 1], counts[:, 1], senders)


def round_div(a: int, b: int) -> int:
    """a / b to the nearest whole number."""
    return (2 * a + b) // (2 * b)


def _level(node: Int64Array, work: Int64Array, free: Int64Array, share: Int64Array) -> None:
    """Exchange small sequences between nodes paired by load, in place; `free` is what a node has for them."""
    num_nodes = len(share)
    excess, placed = -free, np.flatnonzero(node >= 0)
    np.add.at(excess, node[placed], work[placed])
    for _ in range(ROUNDS):
        if not len(placed) or not np.any(excess > share // TOLERANCE):
            return
        order = placed[np.lexsort((work[placed], node[placed]))]
        starts = np.searchsorted(node[order], np.arange(num_nodes + 1))
        ranked = np.argsort(-excess, kind="stable")
        half = num_nodes // 2
        high, low = ranked[:half], ranked[::-1][:half]
        give, give_work = _smallest(order, starts, high, work)
        take, take_work = _smallest(order, starts, low, work)
        wanted = (excess[high] - excess[low]) // 2
        miss = np.abs(give_work[:, :, None] - take_work[:, None, :] - wanted[:, None, None])
        best = miss.reshape(half, -1).argmin(axis=1)
        i, j = np.divmod(best, CANDIDATES + 1)
        pair = np.arange(half)
        gain = miss[pair, i, j] < np.abs(wanted)
        for items, target in ((give[pair, i], low), (take[pair, j], high)):
            moves = gain & (items >= 0)
            node[items[moves]] = target[moves]
        delta = np.where(gain, give_work[pair, i] - take_work[pair, j], 0)
        if not delta.any():
            return
        excess[high] -= delta
        excess[low] += delta


def _smallest(
    order: Int64Array, starts: Int64Array, nodes: Int64Array, work: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """(N, CANDIDATES + 1) ids of the smallest sequences of `nodes` and their work; -1 and 0 for nothing."""
    place = starts[nodes][:, None] + np.arange(-1, CANDIDATES)
    real = place < starts[nodes + 1][:, None]
    real[:, 0] = False
    ids = np.where(real, order[np.minimum(place, len(order) - 1)], -1)
    return ids, np.where(real, work[ids], 0)
