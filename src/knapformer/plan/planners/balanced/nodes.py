"""Sequences to nodes: each node gets its share of the predicted time, by moving whole sequences.

Longest processing time first, so that nodes get about equally many of every size; small ones go home where that is
nearly as good. Then rounds of exchanges between nodes paired by load, most loaded with least, until all are level.
Only a sequence that no node can take is cut over several nodes, at a head where that is near.
"""

import heapq
from bisect import insort
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array, exact_sum
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
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


Members = list[tuple[int, int]]
"""Work and id of sequences on a node."""


class Pieces(NamedTuple):
    """Contiguous parts of sequences on nodes, sorted by node, longest first; most are whole sequences.

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
        seq = np.argsort(-length, kind="stable")
        length, zero = length[seq], np.zeros_like(length)
        return Pieces(seq, zero, zero, length, zero, length * cost.num_heads, zero)
    share = _shares(total, cluster)
    order = np.argsort(-work, kind="stable")
    node, excess, cuts = _longest_first(order, work, share, cluster, cost, sequences)
    placed = order[::-1]
    placed = placed[node[placed] >= 0] if cuts else placed
    placed = placed[node[placed].argsort(kind="stable")]  # by node, least work first
    for n, change in enumerate(_for_traffic(work[placed], length[placed], node[placed], share, cluster, cost)):
        excess[n] -= change
    small = _smallest(
        work[placed].tolist(), placed.tolist(), node[placed].searchsorted(np.arange(num_nodes + 1)).tolist()
    )
    level_nodes(small, excess, [s // TOLERANCE for s in share])
    seqs = [seq for members in small for _, seq in members]
    node[seqs] = np.arange(num_nodes).repeat([len(members) for members in small])
    seq = (node >= 0).nonzero()[0]
    zero = np.zeros_like(seq)
    rest = Pieces(seq, node[seq], zero, length[seq], zero, length[seq] * cost.num_heads, zero)
    table = np.concatenate([np.array(parts) for parts in (rest, *cuts)], axis=1)
    return Pieces(*table[:, np.argsort((table[1] << 32) - table[3], kind="stable")])


def _smallest(work: list[int], seq: list[int], starts: list[int]) -> list[Members]:
    """The smallest sequences of each node, as many as exchanges may take; node n has those from `starts[n]` on."""
    cuts = [(start, min(stop, start + CANDIDATES + ROUNDS)) for start, stop in pairwise(starts)]
    return [list(zip(work[a:b], seq[a:b], strict=True)) for a, b in cuts]


def _work_of(parts: Pieces, length: Int64Array, cost: CostModel) -> Int64Array:
    return cost.token * parts.num_tokens + cost.per_qk_pair * parts.num_rows * length[parts.seq]


def _for_traffic(
    work: Int64Array, length: Int64Array, node: Int64Array, share: list[int], cluster: Cluster, cost: CostModel
) -> list[int]:
    """What to change nodes' shares by so that those that will have more traffic get less work; adds up to about 0.

    A node whose R ranks share K split sequences of S tokens in all has traffic of about 4 S (1 - K / R) / R tokens a
    rank. No node gets more than 1 part in `TRAFFIC_TOLERANCE` for it. `work`, `length` and `node` are of all whole
    sequences.
    """
    sizes, price = cluster.node_sizes, 4 * cost.num_heads * row_prices(cluster, cost)[0]
    split = (work > np.array([most // size for most, size in zip(share, sizes, strict=True)])[node]).nonzero()[0]
    number, tokens = np.zeros((2, len(sizes)), dtype=np.int64)
    np.add.at(number, node[split], 1)
    np.add.at(tokens, node[split], length[split])
    traffic = [
        price * (s * max(size - k, 0) // (size * size))
        for s, k, size in zip(tokens.tolist(), number.tolist(), sizes, strict=True)
    ]
    limit = [most // size // TRAFFIC_TOLERANCE for most, size in zip(share, sizes, strict=True)]
    level = sum(traffic) // len(sizes)
    for _ in range(3):
        free = [t for t, most in zip(traffic, limit, strict=True) if level - t <= most]
        fixed = sum(most for t, most in zip(traffic, limit, strict=True) if level - t > most)
        level = (sum(free) - fixed) // max(len(free), 1)
    change = [min(level - t, most) * size for t, most, size in zip(traffic, limit, sizes, strict=True)]
    mean = sum(change) // len(sizes)
    return [c - mean for c in change]


def _shares(total: int, cluster: Cluster) -> list[int]:
    speeds = list(cluster.node_sizes)
    if cluster.speeds:
        speeds = [sum(cluster.speeds[r.start : r.stop]) for r in cluster.node_ranks()]
    all_speed = sum(speeds)
    return [-(-total * speed // all_speed) for speed in speeds]


def _longest_first(
    order: Int64Array, work: Int64Array, share: list[int], cluster: Cluster, cost: CostModel, sequences: Sequences
) -> tuple[Int64Array, list[int], list[Pieces]]:
    """Node of each sequence, -1 for those that are cut; what each node has above its share; pieces of those cut.

    `order` is that of falling work.
    """
    length, home, node = sequences.length, cluster.node_of[sequences.home], np.empty(len(work), dtype=np.int64)
    cuts: list[Pieces] = []
    least = min(share)
    ordered = work[order]
    num_big = int((ordered > least // 16).sum())
    slack = exact_sum(ordered[num_big:]) // 2  # what small sequences can make up for
    heap = [(-r, n) for n, r in enumerate(share)]  # minus the room left on each node
    heapq.heapify(heap)
    for seq, amount in zip(order[:num_big].tolist(), ordered[:num_big].tolist(), strict=True):
        room, n = heap[0]
        if amount + room <= least // CUT_TOLERANCE:
            heapq.heapreplace(heap, (room + amount, n))
            node[seq] = n
            continue
        rooms = [-r for r, _ in sorted(heap, key=lambda entry: entry[1])]
        parts, moved = _cut_work(amount, rooms, share, cost.num_heads, slack)
        slack -= moved
        cuts.append(_cut(seq, int(length[seq]), parts, cluster, cost, share))
        node[seq] = -1
        taken = np.zeros(len(rooms), dtype=np.int64)
        taken[cuts[-1].node] = _work_of(cuts[-1], length, cost)
        heap = [(part - r, n) for n, (r, part) in enumerate(zip(rooms, taken.tolist(), strict=True))]
        heapq.heapify(heap)
    small = order[num_big:]
    node[small], load = _small_first_home(ordered[num_big:].tolist(), home[small].tolist(), heap)
    return node, load, cuts


def _small_first_home(amounts: list[int], homes: list[int], heap: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Node of each small sequence: home, unless that is ahead of the emptiest node by more than the sequence.

    `heap` is what each node has above its share; also returned as it is in the end.
    """
    load = [room for room, _ in sorted(heap, key=lambda entry: entry[1])]
    push, pop, replace = heapq.heappush, heapq.heappop, heapq.heapreplace
    chosen, (least, n) = list(homes), heap[0]
    for i, (amount, at) in enumerate(zip(amounts, homes, strict=True)):
        while least != load[n]:  # stale: the node took something since
            pop(heap)
            least, n = heap[0]
        if at != n and load[at] - least <= amount:
            load[at] += amount
            push(heap, (load[at], at))
        else:
            chosen[i] = n
            load[n] += amount
            replace(heap, (load[n], n))
            least, n = heap[0]
    return chosen, load


def _cut_work(amount: int, room: list[int], share: list[int], num_heads: int, slack: int) -> tuple[list[int], int]:
    """Work of a sequence on each node, and how much less than their room the full ones got.

    Nodes with most room come first. Parts are whole heads where `slack` allows.
    """
    parts, left, moved = [0] * len(room), amount, 0
    for n in sorted(range(len(room)), key=lambda n: (-room[n], n)):
        part = min(left, max(room[n], 0))
        heads = part * num_heads // amount
        shift = part - heads * amount // num_heads
        if part < left and heads and shift <= slack - moved:
            part -= shift
            moved += shift
        parts[n] = part
        left -= part
    if left:  # rounding, or no node has room: over all nodes alike
        total = sum(share)
        more = [left * s // total for s in share]
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
        rows[n] = (parts[n] - cost.token * tokens[n]) // (max(cost.per_qk_pair, 1) * length)
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


def level_nodes(small: list[Members], excess: list[int], tolerance: list[int]) -> None:
    """Exchange sequences of `small` between nodes paired by load, in place; `excess` is what a node has too much."""
    half = len(small) // 2
    for _ in range(ROUNDS):
        if all(e <= t for e, t in zip(excess, tolerance, strict=True)):
            return
        ranked = sorted(range(len(excess)), key=lambda n: -excess[n])
        moved = False
        for high, low in zip(ranked[:half], reversed(ranked), strict=False):
            wanted = (excess[high] - excess[low]) // 2
            give, take = _exchange(small[high], small[low], wanted)
            given = small[high].pop(give) if give >= 0 else None
            taken = small[low].pop(take) if take >= 0 else None
            delta = (given[0] if given else 0) - (taken[0] if taken else 0)
            moved |= delta != 0
            excess[high] -= delta
            excess[low] += delta
            if given:
                insort(small[low], given)
            if taken:
                insort(small[high], taken)
        if not moved:
            return


def _exchange(give: Members, take: Members, wanted: int) -> tuple[int, int]:
    """Indices of what to give and what to take, -1 for nothing, such that the difference is nearest to `wanted`."""
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
