"""Presets that are shipped as TOML files beside this module: `[name]`, then the fields of a dataclass."""

import difflib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, TypeVar

from knapformer.errors import SpecError
from knapformer.files import convert, decode_toml

T = TypeVar("T")


def read_presets(file: str, kind: type[T]) -> dict[str, T]:
    """All presets of a file by name. Raises `SpecError` naming the preset and its field, if one is not a `kind`."""
    data = (files("knapformer.tools.simulate.presets") / file).read_bytes()
    tables = decode_toml(data, dict[str, dict[str, Any]], file, error=SpecError)
    return {
        name: convert({"name": name, **fields}, kind, f"{file}, [{name}]", error=SpecError)
        for name, fields in tables.items()
    }


def find_preset(presets: Mapping[str, T], name: str, what: str) -> T:
    """A preset by name. Raises `SpecError` that lists the names, the closest first."""
    if name in presets:
        return presets[name]
    close = difflib.get_close_matches(name, presets, n=2)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise SpecError(f"unknown {what} {name!r}; {hint}known {what}s are {', '.join(presets)}")
