"""Whole sequences to ranks: vector bin packing, step j places the j-th sequence of every node.

Each goes to the rank whose remaining room of tokens and of area fits it best: largest inner product of need and room.
"""

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.planners.balanced.fill import UNIT

JITTER = UNIT // 16
"""Most that variants change the room of ranks, to try other packings."""


def pack(need: Int64Array, node: Int64Array, room: Int64Array, first: Int64Array, seed: Int64Array) -> Int64Array:
    """Rank of each sequence.

    Args:
        need: (2, M) tokens and area of each sequence, sorted by node and falling.
        node: (M,) its node.
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
    flat, offset = rooms.reshape(-1), (np.arange(2 * num_nodes) * width).reshape(2, num_nodes)
    product, chosen = np.empty_like(rooms), np.empty((steps, num_nodes), dtype=np.int64)
    score, other = product
    for best, wanted, taken in zip(chosen, needs, needs[:, :, :, 0], strict=True):
        np.multiply(rooms, wanted, out=product)
        score += other
        score.argmax(axis=1, out=best)
        flat[best + offset] -= taken
    return first[node] + chosen[turn, node]


def _rooms(room: Int64Array, first: Int64Array, sizes: Int64Array, width: int) -> Int64Array:
    """(2, N, R) room of each node's ranks; less than nothing beyond a node's last rank."""
    if int(sizes.min()) == width:
        return room.reshape(2, len(sizes), width).copy()
    rooms = np.full((2, len(sizes), width), -(1 << 40))
    rooms[:, np.arange(width) < sizes[:, None]] = room
    return rooms
