"""The order of a node's ranks on its line: where cuts of rows fall within heads.

A rank that has part of a head receives the keys and values of all of it. With 4.8 heads each, a rank whose rows begin
at 4.8 works on heads 4 to 9, six of them; one that begins at 5.0 only on five. Ranks inside one stretch may change
places, and a few fixed orders are tried to find one where the busiest rank receives least.
"""

import numpy as np

from knapformer.plan.arrays import Int64Array

ORDERS = 4
"""Orders tried, the given one included."""


def choose_order(
    order: Int64Array,
    place_key: Int64Array,
    first: Int64Array,
    node: Int64Array,
    free: tuple[Int64Array, Int64Array],
    split: tuple[Int64Array, Int64Array],
) -> Int64Array:
    """Best order of ranks for each node.

    Args:
        order: (W,) the order given.
        place_key: (W,) ranks with equal keys may change places; keys rise along the line.
        first: (N,) first rank of each node.
        node: (W,) node of each rank.
        free: (W,) tokens and area that each rank has free for split sequences.
        split: (K,) length and area of the split sequences, in the order in which they are laid.
    """
    free_tokens, free_area = free
    length, area = split
    index = np.arange(len(order))
    tries = np.arange(ORDERS)[:, None]
    mix = (index * 40503 + tries * 104729 + 12345) * 2654435761 % 1048573
    orders = np.argsort(place_key * (1 << 20) + mix, axis=1, kind="stable")
    orders[0] = order
    stop = np.cumsum(area)
    begin = stop - area
    rows_area = free_area[orders]
    ends = np.cumsum(rows_area, axis=1)
    starts = ends - rows_area
    last = len(area) - 1
    i = np.minimum(np.searchsorted(stop, starts.ravel(), side="right"), last).reshape(ends.shape)
    j = np.minimum(np.searchsorted(stop, ends.ravel(), side="left"), last).reshape(ends.shape)
    length_i, length_j = length[i], length[j]
    head_i, head_j = length_i * length_i, length_j * length_j
    same = i == j
    touched_i = -(-(np.where(same, ends, stop[i]) - begin[i]) // head_i) - (starts - begin[i]) // head_i
    touched_j = np.where(same, 0, -(-(ends - begin[j]) // head_j))
    tokens = np.minimum(free_tokens[orders], length_i)
    rows = rows_area // np.maximum(head_i, head_j)
    keys_values = touched_i * (length_i - np.where(same, tokens, tokens // 2)) + touched_j * (length_j - tokens // 2)
    received = 2 * keys_values + rows * (length_i - tokens) + tokens * (area // (length * length))[i]
    received -= tokens * (rows_area // head_i)
    received[rows_area == 0] = 0
    best = np.maximum.reduceat(received, first, axis=1).argmin(axis=0)
    return orders[best[node], index]
