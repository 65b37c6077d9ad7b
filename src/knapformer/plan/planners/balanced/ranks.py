"""Pieces to ranks inside every node: whole sequences first, the rest shared so that tokens and area both are level.

A node's ranks are a line. Sequences too big for one rank get stretches of it (`stretch`), so that each rank works on
few split sequences and all have about the same traffic; what a stretch needs is set aside on its ranks. The other
sequences are then placed whole, largest first, on the rank whose remaining budgets of tokens and attention area fit
them best (largest inner product of need and remainder: vector bin packing). What fits nowhere is split as well. At
last tokens and rows of the split sequences fill, separately and in one order, what every rank has free of each.

All nodes are done at once: step j places the j-th sequence of every node. A node may appear several times with
different variants, of which the caller takes the best.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array, exclusive_cumsum
from knapformer.plan.planners.balanced.fill import Segments, apportion, concatenate, fill, opens
from knapformer.plan.planners.balanced.nodes import Pieces
from knapformer.plan.planners.balanced.order import choose_order
from knapformer.plan.planners.balanced.stretch import snapped, stretches

UNIT = 1 << 20
"""Fixed point: the budget of a mean rank of the node."""

CUT_WEIGHT = 8
"""How much longer a stretch a part of a sequence cut over nodes gets: its traffic crosses slow links."""

JITTER = UNIT // 16
"""Most that variants change the room of ranks, to try other packings."""

_THIN, _NOWHERE = -2, -1


class Line(NamedTuple):
    """Ranks of all nodes in a row, with what each shall hold.

    Attributes:
        node: (W,) node of each rank, rising.
        first: (N + 1,) first rank of each node.
        tokens, area: (W,) exact budgets; their sums are those of all pieces.
    """

    node: Int64Array
    first: Int64Array
    tokens: Int64Array
    area: Int64Array

    @property
    def sizes(self) -> Int64Array:
        """(N,) ranks of each node."""
        return self.first[1:] - self.first[:-1]


class Variants(NamedTuple):
    """Per node: how to share.

    Attributes:
        blend: of stretches, see `stretch.BLEND`.
        snap: whether stretches end between ranks.
        seed: of the changes to the ranks' room; 0 for none.
        avoid: for parts of sequences cut over nodes: 0 anywhere, 1 keep stretches off their ranks, 2 and use half as
            many ranks.
    """

    blend: Int64Array
    snap: np.ndarray
    seed: Int64Array
    avoid: Int64Array


class Shares(NamedTuple):
    """Pieces on ranks: `whole` (P,) the rank of each whole piece, -1 for the others, and the cuts of those.

    `tokens` and `rows` count from the piece's first token and row.
    """

    whole: Int64Array
    tokens: Segments
    rows: Segments


@dataclass(slots=True)
class RankSharing:
    """One run over all nodes: `pack`, then `shares`, possibly again with changed budgets."""

    pieces: Pieces
    length: Int64Array
    line: Line
    variants: Variants
    area: Int64Array = field(init=False)
    free_tokens: Int64Array = field(init=False)
    free_area: Int64Array = field(init=False)
    split: Int64Array = field(init=False)
    order: Int64Array = field(init=False)
    _need: Int64Array = field(init=False)
    _room: Int64Array = field(init=False)
    _whole: Int64Array = field(init=False)
    _position: Int64Array = field(init=False)
    _thin: tuple[Segments, Segments] | None = field(init=False, default=None)

    def pack(self) -> None:
        """Decide what stays whole where, and in which order the rest is laid over the ranks."""
        pieces, line = self.pieces, self.line
        self.area = pieces.num_rows * self.length
        self.free_tokens, self.free_area = line.tokens.copy(), line.area.copy()
        units = [self._in_units(pieces.num_tokens, line.tokens), self._in_units(self.area, line.area)]
        self._need, self._room = np.stack([need for need, _ in units]), np.stack([room for _, room in units])
        self._whole = np.full(len(self.area), _NOWHERE, dtype=np.int64)
        self._position = np.zeros(len(self.area), dtype=np.int64)
        self.order = np.arange(len(line.node))
        place_key = None
        need = self._need.max(axis=0)
        largest = np.maximum.reduceat(self._room.min(axis=0), line.first[:-1])
        must_split = (need > largest[pieces.node]) | (pieces.senders != 0)
        thin = np.where(pieces.senders < 0, line.sizes[pieces.node] // 4, line.sizes[pieces.node] // 2)
        cut = np.flatnonzero((pieces.senders != 0) & (need < UNIT * thin))
        if len(cut):
            self._spread(cut)
        self._place_large(np.flatnonzero((self._need[1] >= UNIT // 2) & ~must_split))
        split = np.flatnonzero(must_split & (self._whole == _NOWHERE))
        if len(split):
            place_key = self._set_aside(split[np.lexsort((-need[split], pieces.node[split]))], need)
        self._pack_whole(np.flatnonzero(~must_split & (self._whole == _NOWHERE)))
        self._evict()
        self._order_split(place_key)

    def shares(self, change: Int64Array | None = None) -> Shares:
        """Lay tokens and rows of the split pieces into what the ranks have free.

        `change` (W,) raises or lowers the budgets of ranks, in parts of `UNIT`; nothing else moves.
        """
        free_tokens, free_area = self.free_tokens, self.free_area
        if change is not None:
            free_tokens = _changed(self.line.tokens, free_tokens, change, self.line)
            free_area = _changed(self.line.area, free_area, change, self.line)
        split, order = self.split, self.order
        tokens = fill(self.pieces.num_tokens[split], free_tokens[order])
        area = fill(self.area[split], free_area[order])
        length = self.length[split][area.item]
        start = area.start // length
        tokens = Segments(split[tokens.item], order[tokens.bin], tokens.start, tokens.num)
        rows = Segments(split[area.item], order[area.bin], start, (area.start + area.num) // length - start)
        if self._thin is not None:
            tokens, rows = concatenate(tokens, self._thin[0]), concatenate(rows, self._thin[1])
        return Shares(np.maximum(self._whole, _NOWHERE), tokens, rows)

    def _in_units(self, amount: Int64Array, budget: Int64Array) -> tuple[Int64Array, Int64Array]:
        """What each piece needs and each rank has, in units of the mean rank of the node."""
        most = max(int(amount.max(initial=1)), int(budget.max(initial=1)))
        shift = max(0, most.bit_length() - 42)  # so that the products below fit 64 bits
        mean = np.add.reduceat(budget, self.line.first[:-1]) // self.line.sizes
        mean = np.maximum(mean >> shift, 1)
        need = ((amount >> shift) * UNIT) // mean[self.pieces.node]
        return need, ((budget >> shift) * UNIT) // mean[self.line.node]

    def _spread(self, parts: Int64Array) -> None:
        """Small parts of sequences cut over nodes: thinly over the node, equally many ranks on every head.

        A rank's traffic over slow links is then least: keys and values of one head, and a fraction of its queries. On
        p ranks a head, each of h heads is sent p times by the ranks of the main part; p balances both sides.
        """
        line, length = self.line, self.length
        heads = np.maximum(-(-self.pieces.num_rows[parts] // length[parts]), 1)
        size = line.sizes[self.pieces.node[parts]]
        fits = heads <= size
        parts, heads, size = parts[fits], heads[fits], size[fits]
        fewer = np.where(self.variants.avoid[self.pieces.node[parts]] == 2, 2, 1)
        num = np.clip(self.pieces.senders[parts] // heads // fewer, 1, size // heads) * heads
        offset = exclusive_cumsum(num)
        piece, size, offset = np.repeat(parts, num), np.repeat(size, num), np.repeat(offset, num)
        turn = np.arange(len(piece)) - offset
        num = np.repeat(num, num)
        rank = line.first[self.pieces.node[piece]] + (turn + offset) % size
        num_tokens, num_rows, length = self.pieces.num_tokens[piece], self.pieces.num_rows[piece], length[piece]
        start = num_tokens * turn // num
        tokens = Segments(piece, rank, start, num_tokens * (turn + 1) // num - start)
        begin = self.pieces.row[piece]
        start = begin + num_rows * turn // num
        head = (2 * start + length) // (2 * length) * length
        start = np.where((turn > 0) & (np.abs(head - start) * 4 * num <= num_rows), head, start)
        stop = np.where(turn == num - 1, begin + num_rows, np.append(start[1:], 0))
        rows = Segments(piece, rank, start - begin, stop - start)
        tokens_left, area_left = self.free_tokens.copy(), self.free_area.copy()
        np.subtract.at(tokens_left, rank, tokens.num)
        np.subtract.at(area_left, rank, rows.num * length)
        if min(int(tokens_left.min()), int(area_left.min())) < 0:  # slow ranks: let them be laid like the others
            return
        self.free_tokens, self.free_area = tokens_left, area_left
        self._take(rank, self._need[:, piece] // num)
        self._thin = tokens, rows
        self._whole[parts] = _THIN

    def _take(self, rank: Int64Array, amount: Int64Array) -> None:
        """Reduce the room of `rank` (M,) by `amount` (2, M); ranks may repeat."""
        for room, taken in zip(self._room, amount, strict=True):
            np.subtract.at(room, rank, taken)

    def _place_large(self, large: Int64Array) -> None:
        """Sequences that take most of a rank's area: one each on the last ranks, the largest on the last."""
        if not len(large):
            return
        node = self.pieces.node[large]
        order = np.lexsort((-self._need[1, large], node))
        large, node = large[order], node[order]
        rank = self.line.first[node + 1] - 1 - (np.arange(len(large)) - np.searchsorted(node, node))
        fits = rank >= self.line.first[node]
        large, rank = large[fits], rank[fits]
        fits = np.all(self._need[:, large] <= self._room[:, rank], axis=0)
        large, rank = large[fits], rank[fits]
        self._whole[large] = rank
        self._room[:, rank] -= self._need[:, large]

    def _set_aside(self, split: Int64Array, need: Int64Array) -> Int64Array:
        """Give each of `split` a stretch of its node's ranks and set aside there what it needs; return place keys."""
        line, variants = self.line, self.variants
        node, first = self.pieces.node[split], line.first[:-1]
        room = np.maximum(self._room.min(axis=0), 1)
        if self._thin is not None:
            room = self._off(self._thin[0].bin, room, need[split], node)
        weight = self.length[split] * np.where(self.pieces.senders[split] != 0, CUT_WEIGHT, 1)
        needed = np.maximum(need[split], 1)
        stretch = stretches(needed, weight, node, np.add.reduceat(room, first), variants.blend[node])
        has_split = np.zeros(len(first), dtype=bool)
        has_split[node] = True
        room *= has_split[line.node]
        if variants.snap.any():
            stretch = snapped(stretch, needed, node, room, variants.snap)
        parts = fill(stretch, room)
        taken = parts.num * self._need[:, split][:, parts.item] // np.maximum(stretch, 1)[parts.item]
        self._take(parts.bin, taken)
        lowest = np.full(len(room), len(split), dtype=np.int64)
        highest = np.zeros(len(room), dtype=np.int64)
        np.minimum.at(lowest, parts.bin, parts.item)
        np.maximum.at(highest, parts.bin, parts.item)
        key = line.node * (4 * len(split) + 2) + np.where(highest < lowest, 4 * len(split), lowest + highest)
        self.order = np.argsort(key, kind="stable")
        start = np.full(len(split), len(room), dtype=np.int64)
        np.minimum.at(start, parts.item, self._places()[parts.bin])
        self._position[split] = start * UNIT + np.arange(len(split))
        return key

    def _off(self, busy: Int64Array, room: Int64Array, need: Int64Array, node: Int64Array) -> Int64Array:
        """Less room on ranks that have traffic already, in the nodes whose variant says so and that have enough."""
        first = self.line.first[:-1]
        less = room.copy()
        less[np.unique(busy)] //= 16
        needed = np.zeros(len(first), dtype=np.int64)
        np.add.at(needed, node, need)
        enough = (np.add.reduceat(less, first) >= needed) & (self.variants.avoid > 0)
        return np.where(enough[self.line.node], less, room)

    def _places(self) -> Int64Array:
        """(W,) position of each rank on the line."""
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        return place

    def _pack_whole(self, rest: Int64Array) -> None:
        """Place `rest` whole, in every node the one with the largest need first."""
        node, line = self.pieces.node[rest], self.line
        order = np.lexsort((-self._need[:, rest].sum(axis=0), node))
        rest, node = rest[order], node[order]
        num_nodes, width = len(line.first) - 1, int(line.sizes.max())
        turn = np.arange(len(rest)) - np.searchsorted(node, node)
        table = np.full((int(turn.max(initial=-1)) + 1, num_nodes), len(self.area))
        table[turn, node] = rest
        needs = np.append(self._need, [[0], [0]], axis=1)[:, table]
        column = np.arange(len(line.node)) - line.first[line.node]
        rooms = np.full((2, num_nodes, width), -(1 << 40))
        rooms[:, line.node, column] = self._room
        seed, axis = self.variants.seed, np.arange(2)[:, None, None]
        mix = (np.arange(width) + 64 * axis + 1009 * seed[:, None] + 1) * 2654435761 % 4294967291 % 65536
        rooms += np.where(seed[:, None] > 0, mix * JITTER >> 16, 0)
        flat = rooms.reshape(2, -1)
        base, chosen = np.arange(num_nodes) * width, np.empty_like(table)
        score, other = np.empty_like(rooms[0]), np.empty_like(rooms[0])
        for step in range(len(table)):
            need = needs[:, step]
            np.multiply(rooms[0], need[0, :, None], out=score)
            np.multiply(rooms[1], need[1, :, None], out=other)
            score += other
            at = score.argmax(axis=1)
            at += base
            flat[:, at] -= need
            chosen[step] = at
        self._whole[rest] = line.first[node] + chosen[turn, node] - base[node]

    def _evict(self) -> None:
        """Split what does not fit after all, so that no budget is exceeded by whole sequences.

        Of each rank that has too much, the smallest sequence that makes it fit, or else its largest.
        """
        place = self._places()
        kept = np.flatnonzero(self._whole >= 0)
        np.subtract.at(self.free_tokens, self._whole[kept], self.pieces.num_tokens[kept])
        np.subtract.at(self.free_area, self._whole[kept], self.area[kept])
        while True:
            over = (self.free_tokens < 0) | (self.free_area < 0)
            if not over.any():
                return
            items = kept[over[self._whole[kept]]]
            rank, tokens, area = self._whole[items], self.pieces.num_tokens[items], self.area[items]
            enough = (self.free_tokens[rank] + tokens >= 0) & (self.free_area[rank] + area >= 0)
            order = np.lexsort((np.where(enough, area, -area), ~enough, rank))
            first = order[opens(rank[order])]
            out, rank = items[first], rank[first]
            self._position[out] = place[rank] * UNIT + UNIT - 1
            self._whole[out] = _NOWHERE
            self.free_tokens[rank] += tokens[first]
            self.free_area[rank] += area[first]
            kept = kept[self._whole[kept] >= 0]

    def _order_split(self, place_key: Int64Array | None) -> None:
        split = np.flatnonzero(self._whole == _NOWHERE)
        node = self.pieces.node[split]
        self.split = split = split[np.lexsort((-self._need[1, split], self._position[split], node))]
        if place_key is not None:
            self.order = choose_order(
                self.order,
                place_key,
                self.line.first[:-1],
                self.line.node,
                (self.free_tokens, self.free_area),
                (self.length[split], self.area[split]),
            )


def _changed(budget: Int64Array, free: Int64Array, change: Int64Array, line: Line) -> Int64Array:
    """`free` after `budget` changes by `change` / UNIT, as far as that goes, with the same sum in every node."""
    if int(budget.max(initial=0)) >> 46:
        return free  # products would leave 64 bits; nobody has ranks of that size
    first, node = line.first[:-1], line.node
    wanted = np.maximum(budget * np.maximum(change, -UNIT // 32) // UNIT, -free)
    surplus = np.add.reduceat(wanted, first)
    lowered = (wanted < 0) & (surplus < 0)[node]
    weight = np.where(np.logical_or.reduceat(lowered, first)[node], lowered, True).astype(np.int64)
    result = free + wanted - apportion(surplus, weight, node, len(first))
    short = np.minimum.reduceat(result, first) < 0
    return np.where(short[node], free, result)
