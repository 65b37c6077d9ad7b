"""Files: the one place that writes them whole, and reads JSON and TOML checked.

A file is written beside its place and renamed into it, so no reader ever sees half of one. What is read is decoded by
msgspec into a type that says what is allowed, so a wrong file gives one line: the file, the place in it, what was found
and what is expected. A type may check itself in `__post_init__`: msgspec places its `ValueError` likewise. Size and
depth are bounded before anything is built from a file.
"""

import gzip
import io
import json
import os
import re
import reprlib
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from knapformer.errors import BackendUnavailableError, DataError, KnapFormerError

T = TypeVar("T")
MOST_BYTES = 1 << 30
"""A larger file, or one that unpacks to more, is refused [bytes]."""


def write_bytes(path: str | os.PathLike[str], data: bytes, *, error: type[KnapFormerError] = DataError) -> Path:
    """Write a file whole; its folder is made. Raises `error`, naming the file, if that fails."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a pipe takes no renaming; a folder says itself what is wrong
            target.write_bytes(data)
            return target
        beside = target.with_name(f".{target.name[:40]}-{os.getpid()}-{threading.get_ident()}")
        try:
            beside.write_bytes(data)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as problem:
        raise error(f"cannot write {str(target)!r}: {problem.strerror or problem}") from problem
    return target


def write_text(path: str | os.PathLike[str], text: str, *, error: type[KnapFormerError] = DataError) -> Path:
    """`write_bytes` of a text in UTF-8."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as problem:  # a lone surrogate, as of a file name that is not UTF-8
        raise error(f"cannot write {os.fspath(path)!r}: {problem}") from problem
    return write_bytes(path, data, error=error)


def write_json(
    path: str | os.PathLike[str], value: Any, *, indent: int | None = None, error: type[KnapFormerError] = DataError
) -> Path:
    """`write_bytes` of plain data as JSON. Numbers that are not finite have no JSON: they raise `error`."""
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise error(f"cannot write {str(path)!r}: {problem}") from problem
    return write_text(path, text + "\n", error=error)


def read_bytes(path: str | os.PathLike[str], *, error: type[KnapFormerError] = DataError) -> bytes:
    """What a file holds; gzip is recognised by content. Raises `error` if it cannot be read or is too large."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise error(f"cannot read {os.fspath(path)!r}: {problem.strerror or problem}") from problem
    if data[:2] == b"\x1f\x8b":
        data = _unzip(data, os.fspath(path), error)
    if len(data) > MOST_BYTES:
        raise error(
            f"{os.fspath(path)!r} is larger than {MOST_BYTES:,} bytes, more than any file of this kind should be"
        )
    return data


def decode_json(data: bytes | str, kind: type[T], source: str, *, error: type[KnapFormerError] = DataError) -> T:
    """JSON as a `kind`: a msgspec Struct, a dataclass, `dict[str, int]`, or anything else that msgspec checks.

    Raises:
        error: naming `source`, the place and what is expected there.
    """
    return _decode(_msgspec().json.decode, data, kind, source, "JSON", error)


def decode_toml(data: bytes | str, kind: type[T], source: str, *, error: type[KnapFormerError] = DataError) -> T:
    """`decode_json` for TOML."""
    return _decode(_msgspec().toml.decode, data, kind, source, "TOML", error)


def convert(value: object, kind: type[T], source: str, *, error: type[KnapFormerError] = DataError) -> T:
    """Plain data that is in memory already, checked as `decode_json` checks a file."""
    return _decode(_plain_convert, value, kind, source, "plain data", error)


def read_json(path: str | os.PathLike[str], kind: type[T], *, error: type[KnapFormerError] = DataError) -> T:
    """`decode_json` of a file, plain or gzip."""
    return decode_json(read_bytes(path, error=error), kind, os.fspath(path), error=error)


def read_toml(path: str | os.PathLike[str], kind: type[T], *, error: type[KnapFormerError] = DataError) -> T:
    """`decode_toml` of a file."""
    return decode_toml(read_bytes(path, error=error), kind, os.fspath(path), error=error)


def read_lines(path: str | os.PathLike[str], *, error: type[KnapFormerError] = DataError) -> list[tuple[int, bytes]]:
    """The lines of a file, plain or gzip, that are not blank, each with its number from 1; for JSON lines."""
    lines = read_bytes(path, error=error).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _plain_convert(value: object, type: Any) -> Any:
    return _msgspec().convert(value, type=type, str_keys=True)


def _decode(decode: Any, data: object, kind: type[T], source: str, language: str, error: type[KnapFormerError]) -> T:
    msgspec = _msgspec()
    where = f"{source}: " if source else ""
    try:
        return decode(data, type=kind)
    except msgspec.ValidationError as problem:
        raise error(where + _explained(str(problem), decode, data, kind)) from problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as problem:
        raise error(f"{source or 'it'} is not {language}: {problem}") from problem


def _explained(message: str, decode: Any, data: Any, kind: Any) -> str:
    """A message of msgspec with what it leaves out: which keys `[...]` stands for, and the value that is wrong."""
    found = re.fullmatch(r"(.*) - at (`key` in )?`\$(.*)`", message, re.DOTALL)
    if not found:
        return message
    try:
        at = data = decode(data, type=Any)
    except (_msgspec().MsgspecError, RecursionError):
        return message
    problem, in_key, place = found.groups(default="")
    steps: list[Any] = []
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place):
        step = name or (_wrong_key(place, data, steps, at, kind) if index == "..." else int(index))
        if step is None:
            return message
        steps.append(step)
        at = at[step]
    shown = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    told = f", which is {_short(at)}" if isinstance(at, (str, int, float)) else ""
    return f"{problem} - at {in_key}`${shown}`{told}"


def _wrong_key(place: str, data: Any, steps: list[Any], holder: Any, kind: Any) -> Any:
    """The key of a mapping that is wrong: with that one alone, an error is in the same place."""
    for key in holder:
        try:
            _plain_convert(_replaced(data, steps, {key: holder[key]}), kind)
        except (_msgspec().ValidationError, RecursionError) as problem:
            if f"`${place}`" in str(problem):
                return key
    return None


def _replaced(data: Any, steps: list[Any], value: Any) -> Any:
    """A copy of plain data with another value in one place."""
    if not steps:
        return value
    copy = dict(data) if isinstance(data, Mapping) else list(data)
    copy[steps[0]] = _replaced(copy[steps[0]], steps[1:], value)
    return copy


def _short(value: object) -> str:
    try:
        return reprlib.repr(value)  # a line at most
    except ValueError:
        return "a very large number"


def _unzip(data: bytes, source: str, error: type[KnapFormerError]) -> bytes:
    """At most one byte more than is allowed, so that a small file cannot fill the memory."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise error(f"{source} is a damaged gzip file: {problem}") from problem


def _msgspec() -> Any:
    try:
        import msgspec
    except ImportError as error:
        raise BackendUnavailableError("reading files needs msgspec; install it with: pip install msgspec") from error
    return msgspec
