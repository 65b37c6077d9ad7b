"""Least squares with prices that cannot be negative, for the few prices of a cost model."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from knapformer.errors import CalibrationError

Floats = NDArray[np.float64]


def non_negative(columns: Floats, target: Floats) -> Floats:
    """Least squares with non-negative coefficients, exactly, by trying every subset of columns (a few at most).

    Raises:
        CalibrationError: if no subset gives a solution, because columns or target are zero or not finite.
    """
    if not (np.isfinite(columns).all() and np.isfinite(target).all()):
        raise CalibrationError("measurements are not finite; no prices fit them")
    scale = np.linalg.norm(columns, axis=0)
    best, least = np.zeros(columns.shape[1]), float(target @ target)
    usable = np.flatnonzero(scale)
    for size in range(1, len(usable) + 1):
        for subset in combinations(usable.tolist(), size):
            chosen = columns[:, subset] / scale[[*subset]]
            found, _, rank, _ = np.linalg.lstsq(chosen, target)
            residual = float(np.square(chosen @ found - target).sum())
            if rank == size and (found >= 0).all() and residual < least:
                best, least = np.zeros(columns.shape[1]), residual
                best[[*subset]] = found / scale[[*subset]]
    if not best.any():
        raise CalibrationError("no positive prices fit the measurements; measure more lengths, or on a quieter machine")
    return best
