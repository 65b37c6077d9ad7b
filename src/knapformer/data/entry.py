"""What a data set says of one sample, before its file is looked at: one validation for every source.

A line of a manifest, a row of a table and the JSON in a shard are checked here alike. What is None, or NaN as in tables
of floating-point columns, is left out. Whole numbers may be written `48.0`. Reading needs msgspec.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from knapformer import files
from knapformer.errors import DataError

LIMITS = {"width": 1e6, "height": 1e6, "num_frames": 1e8, "duration": 1e9, "start": 1e9, "end": 1e9, "fps": 1e3}
"""Largest value of each number that is believed [pixels, frames, s, frames/s]."""

T = TypeVar("T", bound="Described")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Caption and sizes of a sample; see `Item`. None: not said."""

    caption: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            value = getattr(self, name, None)
            may_be_zero = name in ("start", "end")
            if value is not None and not ((value > 0 or (may_be_zero and value == 0)) and value <= most):
                least = "0" if may_be_zero else "above 0"
                raise DataError(f"{name} is {value!r:.60}; it must be {least} to {most:g}, or left out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Described):
    """An entry of a manifest: also which file it is, and what to take of it; see `Item`."""

    path: str
    source: str | None = None
    start: float | None = None
    end: float | None = None
    fps: float | None = None
    note: str | None = None  # for people; nothing reads it

    def __post_init__(self) -> None:
        Described.__post_init__(self)
        for name in ("path", "source"):
            if getattr(self, name) == "":
                raise DataError(f"{name} is ''; it must not be empty")


def read_entry(values: Mapping[str, Any], kind: type[T], source: str = "") -> T:
    """Check what is said of a sample. Raises `DataError` naming `source`, key, value and what is allowed."""
    given = {key: _plain(value) for key, value in values.items() if value is not None and value == value}
    return files.convert(given, kind, source)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
