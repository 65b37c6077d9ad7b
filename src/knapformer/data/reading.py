"""Reading numbers out of JSON that people may have edited: what is missing or makes no sense is named and placed."""

import math
from dataclasses import fields
from typing import Any, TypeVar

from knapformer.errors import CalibrationError

T = TypeVar("T")


class Reader:
    """A JSON object and where it stands in its file, such as "fits.terms.phases.forward".

    Args:
        data: what `json.loads` gave.
        source: name of the file.
        where: dotted path of the object; empty for the whole file.
    """

    def __init__(self, data: object, source: str, where: str = "") -> None:
        self._source, self._where = source, where
        if not isinstance(data, dict):
            raise CalibrationError(f"{source}: {where or 'the file'} is {_short(data)}; expected a JSON object")
        self._data: dict[str, Any] = data

    def error(self, key: str, value: object, expected: str) -> CalibrationError:
        """An error that names file, key, value and what is allowed."""
        return CalibrationError(f"{self._source}: {self._path(key)} is {_short(value)}; expected {expected}")

    def get(self, key: str, kind: type[T]) -> T:
        """A value of one type."""
        if key not in self._data:
            raise CalibrationError(f"{self._source}: {self._path(key)} is missing; expected {_NAMES[kind]}")
        value = self._data[key]
        if type(value) is not kind:
            raise self.error(key, value, _NAMES[kind])
        return value

    def number(self, key: str) -> float:
        """A finite number from 0."""
        expected = "a finite number of at least 0"
        if key not in self._data:
            raise CalibrationError(f"{self._source}: {self._path(key)} is missing; expected {expected}")
        value = self._data[key]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.error(key, value, expected)
        return float(value)

    def whole(self, key: str) -> int:
        """An integer from 1."""
        value = self.get(key, int)
        if value < 1:
            raise self.error(key, value, "an integer of at least 1")
        return value

    def column(self, key: str, *, whole: bool = False) -> list[float]:
        """A list of finite numbers from 0; with `whole`, of integers from 1."""
        values = self.get(key, list)
        for value in values:
            if type(value) not in ((int,) if whole else (int, float)) or not (1 if whole else 0) <= value < math.inf:
                raise self.error(key, value, "integers of at least 1" if whole else "finite numbers of at least 0")
        return values

    def child(self, key: str) -> "Reader":
        """The object at `key`."""
        return Reader(self.get(key, dict), self._source, self._path(key))

    def children(self, key: str) -> list["Reader"]:
        """The objects in the list at `key`."""
        return [Reader(v, self._source, f"{self._path(key)}[{i}]") for i, v in enumerate(self.get(key, list))]

    def numbers(self, kind: type[T]) -> T:
        """A dataclass of finite numbers from 0, by the names of its fields."""
        return kind(**{field.name: self.number(field.name) for field in fields(kind)})  # type: ignore[arg-type]

    def _path(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


_NAMES: dict[type, str] = {str: "a string", int: "an integer", list: "a list", dict: "an object", bool: "true or false"}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
