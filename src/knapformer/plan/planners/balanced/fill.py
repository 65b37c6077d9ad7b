"""Wrap-around filling (McNaughton, 1959): lay what there is and what is wanted on one line and cut at every end.

    amounts   |--- seq 0 ---|------- seq 1 -------|- seq 2 -|
    budgets   |- rank 0 -|- rank 1 -|- rank 2 -|- rank 3 ---|
    cuts      |          |  |       |          |  |         |

n budgets are met exactly with at most n - 1 cuts more than there are amounts, all at once for all nodes of a cluster.
"""

from typing import NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array


class Segments(NamedTuple):
    """Parts of the line: `[start, start + num)` of amount `item`, which lies in budget `bin`."""

    item: Int64Array
    bin: Int64Array
    start: Int64Array
    num: Int64Array


def fill(amounts: Int64Array, budgets: Int64Array) -> Segments:
    """Cut `amounts`, in order, over `budgets`, in order. Both are non-negative and have the same sum."""
    item_stop, bin_stop = np.cumsum(amounts), np.cumsum(budgets)
    stop = np.concatenate((item_stop, bin_stop))
    stop.sort()
    count = stop.copy()
    count[1:] -= stop[:-1]
    keep = np.flatnonzero(count)
    stop, count = stop[keep], count[keep]
    item = np.searchsorted(item_stop, stop)
    start = stop - count - (item_stop - amounts)[item]
    return Segments(item, np.searchsorted(bin_stop, stop), start, count)


def opens(group: Int64Array) -> np.ndarray:
    """(M,) whether each member is the first of its group; groups are adjacent."""
    first = np.ones(len(group), dtype=bool)
    np.not_equal(group[1:], group[:-1], out=first[1:])
    return first


def apportion(total: Int64Array, weight: Int64Array, group: Int64Array, num_groups: int) -> Int64Array:
    """Share each group's whole `total` among its members by `weight`, in whole numbers that add up.

    `group` (M,) is the sorted group of each member. Exact while `weight` sums to less than 2**31 per group.
    """
    after = np.cumsum(weight)
    first = np.searchsorted(group, np.arange(num_groups))
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
    size = first[1:] - first[:-1]
    level = np.add.reduceat(time, first[:-1]) // size
    for _ in range(3):
        low = np.repeat(level, size) - time > limit
        others = np.maximum(size - np.add.reduceat(low.astype(np.int64), first[:-1]), 1)
        level = np.add.reduceat(np.where(low, -limit, time), first[:-1]) // others
    return level
