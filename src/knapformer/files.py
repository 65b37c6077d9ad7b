"""Files: the one place that writes them whole, and reads JSON and TOML checked.

A file is written beside its place and renamed into it, so no reader ever sees half of one. What is read is decoded by
msgspec into a type that says what is allowed, so a wrong file gives one line: the file, the place in it, what was found
and what is expected. Size and depth are bounded before anything is built from a file.
"""

import gzip
import io
import json
import os
import threading
import zlib
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
    return write_bytes(path, text.encode("utf-8"), error=error)


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
    return _decode(_msgspec().convert, value, kind, source, "", error)


def read_json(path: str | os.PathLike[str], kind: type[T], *, error: type[KnapFormerError] = DataError) -> T:
    """`decode_json` of a file, plain or gzip."""
    return decode_json(read_bytes(path, error=error), kind, os.fspath(path), error=error)


def read_toml(path: str | os.PathLike[str], kind: type[T], *, error: type[KnapFormerError] = DataError) -> T:
    """`decode_toml` of a file."""
    return decode_toml(read_bytes(path, error=error), kind, os.fspath(path), error=error)


def _decode(decode: Any, data: object, kind: type[T], source: str, language: str, error: type[KnapFormerError]) -> T:
    msgspec = _msgspec()
    try:
        return decode(data, type=kind)
    except msgspec.ValidationError as problem:
        raise error(f"{source}: {problem}") from problem
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as problem:
        raise error(f"{source} is not {language}: {problem}") from problem


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
        raise BackendUnavailableError(
            "reading files needs msgspec; install it with: pip install 'knapformer[cli]'"
        ) from error
    return msgspec
