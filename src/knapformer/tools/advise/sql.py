"""SQL written by NumPy: a formula for arrays, given column names in place of arrays, gives the SQL that computes it.

    >>> np.maximum(1, np.floor(Sql("width") / 16))
    greatest(1, floor((width / 16)))

So a rule that the library has in NumPy is not written a second time for the engine, which works with the same 64-bit
floating-point numbers. An operation that has no SQL here raises `TypeError`.
"""

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

_FORMS = {
    np.add: "({} + {})",
    np.subtract: "({} - {})",
    np.multiply: "({} * {})",
    np.divide: "({} / {})",
    np.floor: "floor({})",
    np.ceil: "ceil({})",
    np.sqrt: "sqrt({})",
    np.minimum: "least({}, {})",
    np.maximum: "greatest({}, {})",
    np.greater: "({} > {})",
    np.less_equal: "({} <= {})",
    np.bitwise_and: "({} AND {})",
    np.invert: "(NOT {})",
    np.where: "CASE WHEN {} THEN {} ELSE {} END",
}


class Sql(NDArrayOperatorsMixin):
    """An SQL expression for a number (of type DOUBLE) or a truth value."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if function not in _FORMS or method != "__call__" or options:
            return NotImplemented
        return Sql(_FORMS[function].format(*map(_written, inputs)))

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Any:
        if function not in _FORMS or options:
            return NotImplemented
        return Sql(_FORMS[function].format(*map(_written, inputs)))


def _written(value: Any) -> str:
    """Numbers with a fraction are written as text to be cast: bare, they are decimals to the engine."""
    if isinstance(value, float) and not value.is_integer():
        return f"'{value!r}'::DOUBLE"
    return f"{value:.0f}" if isinstance(value, float) else str(value)
