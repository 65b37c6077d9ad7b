"""Whole sequences to ranks: vector bin packing, step j places the j-th sequence of every node.

Each goes to the rank whose remaining room of tokens and of area fits it best: largest inner product of need and room.
Small ones stay at home where that is at least half as good.
"""

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.planners.balanced.fill import UNIT

JITTER = UNIT // 16
"""Most that variants change the room of ranks, to try other packings."""


SMALL = UNIT // 4
"""Sequences that need less than this of a rank prefer their home."""


def pack(
    need: Int64Array, node: Int64Array, home: Int64Array, room: Int64Array, first: Int64Array, seed: Int64Array
) -> Int64Array:
    """Rank of each sequence.

    Args:
        need: (2, M) tokens and area of each sequence, sorted by node and falling.
        node: (M,) its node.
        home: (M,) its home rank, counted from the node's first; -1 where that is in another node.
        room: (2, W) tokens and area each rank has room for.
        first: (N + 1,) first rank of each node.
        seed: (N,) of the changes to the ranks' room; 0 for none.
    """
    num_nodes = len(first) - 1
    sizes = first[1:] - first[:-1]
    width = int(sizes.max())
    count = np.bincount(node, minlength=num_nodes)
    turn = np.arange(len(node)) - (count.cumsum() - count)[node]
    steps = int(count.max(initial=0))
    needs = np.zeros((steps, 2, num_nodes, 1), dtype=np.int64)
    needs[turn, 0, node, 0], needs[turn, 1, node, 0] = need
    rooms = _rooms(room, first, sizes, width)
    index = np.arange(width) + np.array([[[1]], [[65]]]) + 1009 * seed[:, None]
    rooms += np.where(seed[:, None] > 0, (index * 2654435761 % 4294967291 % 65536) * JITTER >> 16, 0)
    offset = (np.arange(2 * num_nodes) * width).reshape(2, num_nodes)
    product, chosen = np.zeros(rooms.size + 1, dtype=np.int64), np.empty((steps, num_nodes), dtype=np.int64)
    at_home = np.full((steps, num_nodes), rooms.size)  # the last entry of `product` is nobody's
    small = ((home >= 0) & (np.maximum(*need) < SMALL)).nonzero()[0]
    at_home[turn[small], node[small]] = node[small] * width + home[small]
    both, entry, flat = product[:-1].reshape(rooms.shape), np.empty_like(offset), rooms.reshape(-1)
    (score, other), entries = both, entry.reshape(-1)
    for best, wanted, taken, at in zip(chosen, needs, needs.reshape(steps, 2 * num_nodes), at_home, strict=True):
        np.multiply(rooms, wanted, out=both)
        score += other
        np.multiply.at(product, at, 2)
        score.argmax(axis=1, out=best)
        np.add(best, offset, out=entry)
        np.subtract.at(flat, entries, taken)
    return first[node] + chosen[turn, node]


def _rooms(room: Int64Array, first: Int64Array, sizes: Int64Array, width: int) -> Int64Array:
    """(2, N, R) room of each node's ranks; less than nothing beyond a node's last rank."""
    if int(sizes.min()) == width:
        return room.reshape(2, len(sizes), width).copy()
    rooms = np.full((2, len(sizes), width), -(1 << 40))
    rooms[:, np.arange(width) < sizes[:, None]] = room
    return rooms
