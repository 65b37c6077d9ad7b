"""Least squares with prices that cannot be negative."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import CalibrationError
from knapformer.train.least_squares import non_negative


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_non_negative_least_squares_is_optimal(seed, num_columns):
    """Kuhn and Tucker: no gradient where a price is positive, and none that asks for more where it is zero."""
    rng = np.random.default_rng(seed)
    columns, target = rng.standard_normal((9, num_columns)), rng.standard_normal(9)
    try:
        found = non_negative(columns, target)
    except CalibrationError:
        assert (columns.T @ target <= 1e-9).all()
        return
    gradient = columns.T @ (target - columns @ found)
    assert (found >= 0).all() and (gradient <= 1e-8).all() and np.abs(gradient[found > 0]).max() < 1e-8
    plain = np.linalg.lstsq(columns, target)[0]
    assert (plain >= 0).all() or not np.allclose(plain, found)  # plain least squares would not pass


def test_measurements_that_fit_no_prices() -> None:
    with pytest.raises(CalibrationError, match="not finite"):
        non_negative(np.array([[np.nan]]), np.ones(1))
    with pytest.raises(CalibrationError, match="no positive prices"):
        non_negative(np.ones((3, 1)), -np.ones(3))
