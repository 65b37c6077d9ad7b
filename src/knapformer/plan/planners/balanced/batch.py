"""Nodes to be shared, some of them several times side by side, and the layouts that come out.

A layout says which pieces are whole and in which order the others are laid over the ranks; laying them, with budgets
as they are or a little changed, gives the shares.
"""

from typing import NamedTuple, Self

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.planners.balanced.fill import UNIT, Segments, changed, concatenate, fill
from knapformer.plan.planners.balanced.nodes import Pieces

NOWHERE = -1
"""Rank of a piece that is not whole."""


class Line(NamedTuple):
    """Ranks of all nodes in a row, with what each shall hold.

    Attributes:
        node: (W,) node of each rank, rising.
        first: (N + 1,) first rank of each node.
        budget: (2, W) exact tokens and area; their sums are those of all pieces.
    """

    node: Int64Array
    first: Int64Array
    budget: Int64Array

    @property
    def sizes(self) -> Int64Array:
        """(N,) ranks of each node."""
        return self.first[1:] - self.first[:-1]


class Shares(NamedTuple):
    """Pieces on ranks: `whole` (P,) the rank of each whole piece, -1 for the others, and the cuts of those.

    `tokens` and `rows` count from the piece's first token and row.
    """

    whole: Int64Array
    tokens: Segments
    rows: Segments


class Layout(NamedTuple):
    """What is decided before tokens and rows of split pieces are laid over the ranks.

    Attributes:
        whole: (P,) rank of each whole piece, -1 for the others.
        split: (K,) split pieces by node, in the order in which they are laid.
        order: (W,) ranks of each node, in that order.
        free: (2, W) tokens and area that each rank has free for them.
        thin: cuts of pieces that are laid already.
    """

    whole: Int64Array
    split: Int64Array
    order: Int64Array
    free: Int64Array
    thin: tuple[Segments, Segments] | None

    def shares(self, batch: "Batch") -> Shares:
        """Lay tokens and rows of the split pieces, separately, into what the ranks have free."""
        split, order = self.split, self.order
        both = fill(batch.amount[:, split].ravel(), self.free[:, order].ravel())
        unit = batch.unit[:, split].ravel()[both.item]
        most = np.concatenate((batch.pieces.num_tokens[split], batch.pieces.num_rows[split]))[both.item]
        start = np.minimum(both.start // unit, most)
        num = np.minimum((both.start + both.num) // unit, most) - start
        at = int(both.item.searchsorted(len(split)))
        tokens = Segments(split[both.item[:at]], order[both.bin[:at]], start[:at], num[:at])
        rows = Segments(split[both.item[at:] - len(split)], order[both.bin[at:] - len(order)], start[at:], num[at:])
        if self.thin is not None:
            tokens, rows = concatenate(tokens, self.thin[0]), concatenate(rows, self.thin[1])
        return Shares(self.whole, tokens, rows)

    def changed(self, line: Line, change: Int64Array) -> "Layout":
        """With budgets of ranks raised or lowered by `change` (W,), in parts of `UNIT`; nothing else moves."""
        return self._replace(free=changed(line.budget, self.free, change, line.first, line.node))

    def updated(self, batch: "Batch", tried: "Layout", taken: Int64Array) -> "Layout":
        """With nodes `taken` (indices into those of `batch`) as in `tried`, a layout of the batch."""
        mask = np.zeros(len(batch.line.first) - 1, dtype=bool)
        mask[taken] = True
        here, kept = mask[batch.line.node].nonzero()[0], mask[batch.pieces.node].nonzero()[0]
        rank, piece = batch.rank[here], batch.piece[kept]
        order, free, whole = self.order.copy(), self.free.copy(), self.whole.copy()
        order[rank] = batch.rank[tried.order[here]]
        free[:, rank] = tried.free[:, here]
        mine = tried.whole[kept]
        whole[piece] = np.where(mine < 0, mine, batch.rank[mine])
        touched = np.zeros(len(whole), dtype=bool)
        touched[piece] = True
        split = tried.split[mask[batch.pieces.node[tried.split]]]
        split = np.concatenate((self.split[~touched[self.split]], batch.piece[split]))
        thin = self.thin
        if tried.thin is not None:

            def of_nodes(cuts: Segments) -> Segments:
                keep = mask[batch.pieces.node[cuts.item]].nonzero()[0]
                item, rank = batch.piece[cuts.item[keep]], batch.rank[cuts.bin[keep]]
                return Segments(item, rank, cuts.start[keep], cuts.num[keep])

            thin = of_nodes(tried.thin[0]), of_nodes(tried.thin[1])
        return Layout(whole, split[batch.node[split].argsort(kind="stable")], order, free, thin)


class Batch(NamedTuple):
    """Nodes with their pieces, to be shared at once; a node may be there several times.

    Attributes:
        pieces: its `node` counts the nodes of the batch.
        length: (P,) tokens of each piece's sequence.
        amount: (2, P) tokens and area of each piece; or its work twice, where only time counts and tokens and rows are
            cut alike.
        line: ranks of the batch.
        need: (2, P) tokens and area of each piece in units of the node's mean rank.
        room: (2, W) budgets in these units.
        unit: (2, P) what a token and what a row of each piece count in `amount`.
        home: (P,) home rank of each piece, counted from the first of its node; -1 where that is in another node.
        piece, rank: (P,), (W,) which piece and rank of the cluster each is.
        node: node of each piece of the cluster.
        is_work: whether amounts are work [tick].
    """

    pieces: Pieces
    length: Int64Array
    amount: Int64Array
    line: Line
    need: Int64Array
    room: Int64Array
    unit: Int64Array
    home: Int64Array
    piece: Int64Array
    rank: Int64Array
    node: Int64Array
    is_work: bool

    @classmethod
    def of(
        cls, pieces: Pieces, length: Int64Array, amount: Int64Array, home: Int64Array, line: Line, *, is_work: bool
    ) -> Self:
        """Every node of the cluster once; `home` (P,) is the home rank of each piece's sequence."""
        budget = line.budget
        unit = np.maximum(amount // np.maximum((pieces.num_tokens, pieces.num_rows), 1), 1)
        mean = np.add.reduceat(budget, line.first[:-1], axis=1) // line.sizes
        largest = np.maximum(amount.max(axis=1, initial=1), budget.max(axis=1)).tolist()
        shift = np.array([[max(0, x.bit_length() - 42)] for x in largest])  # so that the products below fit 64 bits
        mean = np.maximum(mean >> shift, 1)
        need = (amount >> shift) * UNIT // mean[:, pieces.node]
        room = (budget >> shift) * UNIT // mean[:, line.node]
        home = np.where(line.node[home] == pieces.node, home - line.first[pieces.node], -1)
        all_pieces, all_ranks = np.arange(len(length)), np.arange(len(line.node))
        return cls(pieces, length, amount, line, need, room, unit, home, all_pieces, all_ranks, pieces.node, is_work)

    def repeated(self, nodes: Int64Array) -> "Batch":
        """`nodes` of this batch of the whole cluster, in any order, any number of times."""
        line = self.line
        piece, entry = _ranges(self.pieces.node.searchsorted(np.arange(len(line.first))), nodes)
        rank, rank_entry = _ranges(line.first, nodes)
        table = np.concatenate((self.pieces, [self.length, self.home], self.amount, self.need, self.unit))[:, piece]
        table[1] = entry
        ranks = np.concatenate((line.budget, self.room))[:, rank]
        first = np.concatenate(([0], line.sizes[nodes].cumsum()))
        line = Line(rank_entry, first, ranks[:2])
        pieces, (length, home), (amount, need, unit) = Pieces(*table[:7]), table[7:9], np.split(table[9:], 3)
        return Batch(pieces, length, amount, line, need, ranks[2:], unit, home, piece, rank, self.node, self.is_work)

    def nothing(self) -> Layout:
        """Nothing laid out."""
        empty = np.zeros(0, dtype=np.int64)
        return Layout(np.full(len(self.length), NOWHERE), empty, np.arange(len(self.rank)), self.line.budget, None)


def _ranges(first: Int64Array, chosen: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Members of each chosen group, one group after another, and the number of the group in `chosen`."""
    count = (first[1:] - first[:-1])[chosen]
    stop = count.cumsum()
    group = np.arange(len(chosen)).repeat(count)
    return np.arange(len(group)) + (first[chosen] - stop + count)[group], group
