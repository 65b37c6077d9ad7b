"""Wrap-around filling (McNaughton, 1959): lay what there is and what is wanted on one line and cut at every end.

    amounts   |--- seq 0 ---|------- seq 1 -------|- seq 2 -|
    budgets   |- rank 0 -|- rank 1 -|- rank 2 -|- rank 3 ---|
    cuts      |          |  |       |          |  |         |

n budgets are met exactly with at most n - 1 cuts more than there are amounts, all at once for all nodes of a cluster.
"""

from typing import NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array

UNIT = 1 << 20
"""Fixed point: the budget of a mean rank of the node."""


class Segments(NamedTuple):
    """Parts of the line: `[start, start + num)` of amount `item`, which lies in budget `bin`."""

    item: Int64Array
    bin: Int64Array
    start: Int64Array
    num: Int64Array


def fill(amounts: Int64Array, budgets: Int64Array) -> Segments:
    """Cut `amounts`, in order, over `budgets`, in order. Both are non-negative and have the same sum."""
    item_stop, bin_stop = amounts.cumsum(), budgets.cumsum()
    stop = np.concatenate((item_stop, bin_stop))
    stop.sort(kind="stable")
    count = stop.copy()
    count[1:] -= stop[:-1]
    keep = count.nonzero()[0]
    stop, count = stop[keep], count[keep]
    item = item_stop.searchsorted(stop)
    start = stop - count - (item_stop - amounts)[item]
    return Segments(item, bin_stop.searchsorted(stop), start, count)


def opens(group: Int64Array) -> np.ndarray:
    """(M,) whether each member is the first of its group; groups are adjacent."""
    first = np.ones(len(group), dtype=bool)
    np.not_equal(group[1:], group[:-1], out=first[1:])
    return first


def apportion(total: Int64Array, weight: Int64Array, group: Int64Array, first: Int64Array) -> Int64Array:
    """Share each group's whole `total` among its members by `weight`, in whole numbers that add up.

    `group` (M,) is the sorted group of each member, `first` (N,) the first member of each. Exact while `weight` sums to
    less than 2**31 per group.
    """
    after = weight.cumsum()
    base = (after - weight)[first][group]
    sums = np.add.reduceat(weight, first)[group]
    quotient, rest = np.divmod(total[group], sums)
    after -= base
    return quotient * weight + rest * after // sums - rest * (after - weight) // sums


def concatenate(*parts: Segments) -> Segments:
    """All segments in one."""
    return Segments(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def raised_level(time: Int64Array, limit: Int64Array, first: Int64Array) -> Int64Array:
    """(N,) time at which the slowest member of each group ends when load moves and none gets more than `limit` (M,).

    `first` (N + 1,) is the first member of each group.
    """
    size, first = first[1:] - first[:-1], first[:-1]
    level = np.add.reduceat(time, first) // size
    for _ in range(2):
        low = level.repeat(size) - time > limit
        others = np.maximum(size - np.add.reduceat(low, first, dtype=np.int64), 1)
        level = np.add.reduceat(np.where(low, -limit, time), first) // others
    return level


def changed(
    budget: Int64Array, free: Int64Array, change: Int64Array, first: Int64Array, node: Int64Array
) -> Int64Array:
    """`free` (2, W) after `budget` (2, W) changes by `change` / `UNIT`, as far as that goes.

    Sums over every node stay the same; `first` (N + 1,) is the first rank of each node and `node` (W,) that of ranks.
    """
    if int(budget[1].max()) >> 46:
        return free  # products would leave 64 bits; nobody has ranks of that size
    world_size, num_nodes = len(node), len(first) - 1
    first = np.concatenate((first[:-1], first[:-1] + world_size))  # tokens and area as nodes side by side
    node = np.concatenate((node, node + num_nodes))
    free = free.ravel()
    wanted = np.maximum((budget * np.maximum(change, -UNIT // 32) // UNIT).ravel(), -free)
    surplus = np.add.reduceat(wanted, first)
    lowered = (wanted < 0) & (surplus < 0)[node]
    weight = (lowered | ~np.logical_or.reduceat(lowered, first)[node]).astype(np.int64)
    result = free + wanted - apportion(surplus, weight, node, first)
    short = np.minimum.reduceat(result, first) < 0
    if short.any():
        result = np.where(short[node], free, result)
    return result.reshape(2, world_size)
