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
from knapformer.plan.planners.balanced.batch import NOWHERE, Batch, Layout, Line
from knapformer.plan.planners.balanced.fill import UNIT, Segments, fill, opens
from knapformer.plan.planners.balanced.nodes import Pieces
from knapformer.plan.planners.balanced.pack import pack
from knapformer.plan.planners.balanced.stretch import snapped, stretches

CUT_WEIGHT = 8
"""How much longer a stretch a part of a sequence cut over nodes gets: its traffic crosses slow links."""

TIGHT = UNIT * 1015 // 1000
"""Most work of a rank with a split sequence, where only the step counts: others may have more by the traffic saved."""

_THIN = NOWHERE - 1


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


@dataclass(slots=True)
class RankSharing:
    """One run over all nodes of a batch; `pack` is all there is to call."""

    batch: Batch
    variants: Variants
    pieces: Pieces = field(init=False)
    length: Int64Array = field(init=False)
    amount: Int64Array = field(init=False)
    line: Line = field(init=False)
    free: Int64Array = field(init=False)
    split: Int64Array = field(init=False)
    order: Int64Array = field(init=False)
    _need: Int64Array = field(init=False)
    _room: Int64Array = field(init=False)
    _whole: Int64Array = field(init=False)
    _position: Int64Array = field(init=False)
    _thin: tuple[Segments, Segments] | None = field(init=False, default=None)

    def pack(self) -> Layout:
        """Decide what stays whole where, and in which order the rest is laid over the ranks."""
        self.pieces, self.length, self.amount, self.line = self.batch[:4]
        pieces, line = self.pieces, self.line
        node = pieces.node
        self.free = line.budget.copy()
        self._need, self._room = self.batch.need, self.batch.room.copy()
        self._whole = np.full(len(node), NOWHERE, dtype=np.int64)
        self._position = np.zeros(len(node), dtype=np.int64)
        self.order = np.arange(len(line.node))
        need = np.maximum(*self._need)
        largest = np.maximum.reduceat(np.minimum(*self._room), line.first[:-1])
        must_split = need > largest[node]
        if pieces.senders.any():
            must_split |= pieces.senders != 0
            thin = np.where(pieces.senders < 0, line.sizes[node] // 4, line.sizes[node] // 2)
            cut = ((pieces.senders != 0) & (need < UNIT * thin)).nonzero()[0]
            if len(cut):
                self._spread(cut)
        self._place_large(((self._need[1] >= UNIT // 2) & ~must_split).nonzero()[0])
        nowhere = self._whole == NOWHERE
        split = (must_split & nowhere).nonzero()[0]
        if len(split):
            self._set_aside(split[np.lexsort((-need[split], node[split]))], need)
        rest = (nowhere & ~must_split).nonzero()[0]
        home = self.batch.home[rest]
        self._whole[rest] = pack(self._need[:, rest], node[rest], home, self._room, line.first, self.variants.seed)
        self._evict()
        self._order_split()
        return Layout(np.maximum(self._whole, NOWHERE), self.split, self.order, self.free, self._thin)

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
        left = self.free.copy()
        np.subtract.at(left[0], rank, tokens.num)
        np.subtract.at(left[1], rank, rows.num * length)
        if int(left.min()) < 0:  # slow ranks: let them be laid like the others
            return
        self.free = left
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

    def _set_aside(self, split: Int64Array, need: Int64Array) -> None:
        """Give each of `split` a stretch of its node's ranks and set aside there what it needs."""
        line, variants = self.line, self.variants
        node, first, number = self.pieces.node[split], line.first[:-1], len(split)
        room, needed = np.minimum(*self._room), need[split]
        np.maximum(room, 1, out=room)
        if self._thin is not None:
            room = self._off(self._thin[0].bin, room, needed, node)
        weight = self.length[split]
        if self.pieces.senders.any():
            weight = weight * np.where(self.pieces.senders[split] != 0, CUT_WEIGHT, 1)
        needed = np.maximum(needed, 1)
        if self.batch.is_work:
            needed, room = self._fewest_ranks(needed, room, node)
        stretch = stretches(needed, weight, node, np.add.reduceat(room, first), variants.blend[node])
        has_split = np.zeros(len(first), dtype=bool)
        has_split[node] = True
        if not has_split.all():
            room *= has_split[line.node]
        if variants.snap.any():
            stretch = snapped(stretch, needed, node, room, variants.snap)
        parts = fill(stretch, room)
        self._take(parts.bin, parts.num * self._need[:, split[parts.item]] // np.maximum(stretch, 1)[parts.item])
        lowest, highest = np.full(len(room), number), np.zeros(len(room), dtype=np.int64)
        np.minimum.at(lowest, parts.bin, parts.item)
        np.maximum.at(highest, parts.bin, parts.item)
        key = line.node * (4 * number + 2) + np.where(highest < lowest, 4 * number, lowest + highest)
        self.order = key.argsort(kind="stable")
        start = np.full(number, len(room))
        np.minimum.at(start, parts.item, self._places()[parts.bin])
        self._position[split] = start * UNIT + np.arange(number)

    def _off(self, busy: Int64Array, room: Int64Array, need: Int64Array, node: Int64Array) -> Int64Array:
        """Less room on ranks that have traffic already, in the nodes whose variant says so and that have enough."""
        first = self.line.first[:-1]
        less = room.copy()
        less[np.unique(busy)] //= 16
        needed = np.zeros(len(first), dtype=np.int64)
        np.add.at(needed, node, need)
        enough = (np.add.reduceat(less, first) >= needed) & (self.variants.avoid > 0)
        return np.where(enough[self.line.node], less, room)

    def _fewest_ranks(self, need: Int64Array, room: Int64Array, node: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Whole ranks for each split sequence, as few as hold it, and room on no others, where a node has enough."""
        first, mine = self.line.first[:-1], self.line.node
        ranks, left = -(-need // TIGHT) * UNIT, np.zeros(len(first), dtype=np.int64)
        np.add.at(left, node, ranks)
        enough = left <= np.add.reduceat(room, first)
        before = room.cumsum() - room
        fewer = np.clip((left + before[first])[mine] - before, 0, room)
        return np.where(enough[node], ranks, need), np.where(enough[mine], fewer, room)

    def _places(self) -> Int64Array:
        """(W,) position of each rank on the line."""
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        return place

    def _evict(self) -> None:
        """Split what does not fit after all, so that no budget is exceeded by whole sequences.

        Of each rank that has too much, the smallest sequence that makes it fit, or else its largest.
        """
        free, amount = self.free, self.amount
        kept = (self._whole >= 0).nonzero()[0]
        np.subtract.at(free[0], self._whole[kept], amount[0, kept])
        np.subtract.at(free[1], self._whole[kept], amount[1, kept])
        if int(free.min()) >= 0:
            return
        place = self._places()
        while True:
            over = (free[0] < 0) | (free[1] < 0)
            if not over.any():
                return
            items = kept[over[self._whole[kept]]]
            rank, area = self._whole[items], amount[1, items]
            enough = (free[:, rank] + amount[:, items] >= 0).all(axis=0)
            order = np.lexsort((np.where(enough, area, -area), ~enough, rank))
            first = order[opens(rank[order])]
            out, rank = items[first], rank[first]
            self._position[out] = place[rank] * UNIT + UNIT - 1
            self._whole[out] = NOWHERE
            free[:, rank] += amount[:, out]
            kept = kept[self._whole[kept] >= 0]

    def _order_split(self) -> None:
        split = (self._whole == NOWHERE).nonzero()[0]
        node = self.pieces.node[split]
        self.split = split[np.lexsort((-self._need[1, split], self._position[split], node))]
