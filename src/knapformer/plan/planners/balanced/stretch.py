"""How much of a node's line of ranks each of its split sequences gets.

A sequence of L tokens on k ranks alike gives each of them traffic of 4 L (1 - 1/k) / k tokens, so longer sequences
should have longer stretches; but none may have less than its tokens and area need. Which of the two matters more
depends on what else has to fit, so variants blend between *tight* (all but the longest get what they need) and
*fair* (in proportion to length), and may end stretches between ranks, so that fewer ranks work on two sequences.
"""

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.planners.balanced.fill import opens

BLEND = 64
"""Blends are given in parts of this many: 0 is tight, this is fair."""


def stretches(
    need: Int64Array, weight: Int64Array, node: Int64Array, room: Int64Array, blend: Int64Array
) -> Int64Array:
    """Stretch of each split sequence; those of a node add up to its room.

    Args:
        need: (K,) least stretch that holds each, sorted by node and falling.
        weight: (K,) what fair stretches are proportional to.
        node: (K,) its node.
        room: (N,) length of each node's line, in the units of `need`.
        blend: (K,) see `BLEND`.
    """
    longest = opens(node)
    first = longest.nonzero()[0]
    group = longest.cumsum() - 1
    total = room[node[first]]
    tight = need.copy()
    tight[first] += np.maximum(total - np.add.reduceat(need, first), 0)
    fair = _proportional(need, weight, total, first, group)
    return _scaled(tight + (fair - tight) * blend // BLEND, total, first, group)


def snapped(
    stretch: Int64Array, need: Int64Array, node: Int64Array, room: Int64Array, wanted: np.ndarray
) -> Int64Array:
    """`stretch` with every end at the nearest end of a rank, for the nodes in `wanted` where each still fits.

    `room` (W,) is what each rank has; `wanted` (N,) a mask.
    """
    ends, stop = room.cumsum(), stretch.cumsum()
    after = np.minimum(ends.searchsorted(stop), len(ends) - 1)
    before = np.maximum(after - 1, 0)
    near = np.where(ends[after] - stop <= np.abs(stop - ends[before]), ends[after], ends[before])
    near[-1] = stop[-1]
    moved = near.copy()
    moved[1:] -= near[:-1]
    fits = wanted.copy()
    fits[node[(moved * 101 < need * 100) | (moved <= 0)]] = False
    return np.where(fits[node], moved, stretch)


def _proportional(
    need: Int64Array, weight: Int64Array, total: Int64Array, first: Int64Array, group: Int64Array
) -> Int64Array:
    """At least `need`, and what is left of `total` by `weight`."""
    fixed = np.zeros(len(need), dtype=bool)
    result = need
    for _ in range(3):
        left = np.maximum(total - np.add.reduceat(need * fixed, first), 0)
        free = np.maximum(np.add.reduceat(weight * ~fixed, first), 1)
        result = np.where(fixed, need, _times_ratio(weight, left[group], free[group]))
        short = result < need
        if not (short & ~fixed).any():
            break
        fixed |= short
    return np.maximum(result, need)


def _times_ratio(weight: Int64Array, left: Int64Array, free: Int64Array) -> Int64Array:
    """weight * left / free without leaving 64 bits, with at least 31 bits of the ratio's denominator."""
    shift = max(0, int(free.max()).bit_length() - 31)
    return (weight >> shift) * left // np.maximum(free >> shift, 1)


def _scaled(stretch: Int64Array, total: Int64Array, first: Int64Array, group: Int64Array) -> Int64Array:
    """Stretches in proportion that add up to `total` of each group exactly."""
    stretch = np.maximum(stretch, 1)
    sums = np.add.reduceat(stretch, first)
    after = stretch.cumsum()
    after -= (after - stretch)[first][group]
    stop = np.minimum(_times_ratio(after, total[group], sums[group]), total[group])
    stop[first[1:] - 1], stop[-1] = total[:-1], total[-1]
    result = stop.copy()
    result[1:] -= stop[:-1]
    result[first] = stop[first]
    return result
