"""Small array idioms that several planning modules share: read-only int64 columns and vectorised ranges."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from knapformer.errors import PlanError

Int64Array = NDArray[np.int64]


def column(values: ArrayLike | Iterable[int], name: str) -> Int64Array:
    """One read-only int64 column. Raises `PlanError` if `values` are not whole numbers in one dimension."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values))  # type: ignore[arg-type]
    if array.size == 0:
        array = array.reshape(-1).astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PlanError(
            f"{name} must be a flat list of whole numbers, got shape {array.shape} of {array.dtype}; "
            "pass plain integers or an integer array"
        )
    if array.dtype == np.int64 and not array.flags.writeable:
        return array
    array = array.astype(np.int64)
    array.flags.writeable = False
    return array


def exclusive_cumsum(counts: Int64Array) -> Int64Array:
    """Start of each segment when segments of `counts` are laid end to end; same length as `counts`."""
    starts = np.cumsum(counts)
    starts -= counts
    return starts


def starts_within(group: Int64Array, counts: Int64Array) -> Int64Array:
    """Start of each segment within its group, when segments of `counts` lie end to end and `group` never decreases."""
    starts = exclusive_cumsum(counts)
    return starts - starts[np.searchsorted(group, group)] if len(starts) else starts


def ranges(starts: Int64Array, counts: Int64Array, stride: int = 1) -> Int64Array:
    """Concatenation of `starts[i] + stride * arange(counts[i])`, without a Python loop."""
    total = int(counts.sum())
    step = np.arange(total, dtype=np.int64)
    step -= np.repeat(exclusive_cumsum(counts), counts)
    if stride != 1:
        step *= stride
    step += np.repeat(starts, counts)
    return step


def exact_sum(values: Int64Array) -> int:
    """Sum as a Python integer: the load of a large cluster may exceed 64 bits although each rank's load does not."""
    high = int((values >> 32).sum())
    low = int((values & 0xFFFFFFFF).sum())
    return (high << 32) + low
