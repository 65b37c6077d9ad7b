"""Manifests: which pictures and clips a data set has, with captions and sizes. No torch, no pixels.

A data set is a folder (searched recursively; the caption of `cat.jpg` is in `cat.txt` beside it, else it is the name
`cat`), a Parquet file with these columns, or a JSONL file, one object a line:

    {"path": "clips/a.mp4", "caption": "A fox runs.", "start": 2.0, "end": 5.5, "fps": 8, "source": "clips"}

where all but `path` may be left out; paths are relative to the file. A folder with a `manifest.jsonl` in it is read
through that. Sizes are read from the files' headers unless a line has them (`width`, `height`, and `num_frames`,
`duration` of the span for clips), as those that `write_manifest` writes do.

Ids count the items in the order of (path, start, end), so they depend on neither the order of lines nor that of the
file system. Nothing is dropped in silence: every entry that cannot be used is a problem, and all problems are
reported together.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from knapformer.data.images import image_size
from knapformer.data.item import Item, Kind
from knapformer.data.video import probe_clip
from knapformer.errors import BackendUnavailableError, DataError, KnapFormerWarning, SpecError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
PARQUET_SUFFIXES = (".parquet", ".pq")
UNREAD_SUFFIXES = (".avif", ".flv", ".heic", ".heif", ".jxl", ".m4v", ".mpeg", ".mpg", ".tif", ".tiff", ".ts", ".wmv")
"""Media types that are a problem, not something to pass over, when a folder has them."""

_MAY_MOVE = (".gif", ".png", ".webp")  # image files that are clips if they are animated
_SHOWN = 10  # problems spelled out in one message
_ABOUT = {"image": "images", "video": "clips"}  # source of an entry that names none


@dataclass(frozen=True, slots=True)
class Manifest:
    """The usable items of a data set; `manifest[id]` is the item with that id."""

    root: Path
    items: tuple[Item, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, id: int) -> Item:
        return self.items[id]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def ids_by_source(self) -> dict[str, NDArray[np.int64]]:
        """The ids of each source, rising; sources by name."""
        sources = sorted({item.source for item in self.items})
        return {name: np.array([i.id for i in self.items if i.source == name], dtype=np.int64) for name in sources}


def read_manifest(path: str | os.PathLike[str], *, on_error: Literal["raise", "skip"] = "raise") -> Manifest:
    """Read a folder, a Parquet file or a JSONL file.

    Args:
        path: the folder or file.
        on_error: "raise": one error for all entries that cannot be used. "skip": one `KnapFormerWarning` that names
            them, and the rest is kept. On several ranks, skip only where all of them see the same files.

    Raises:
        DataError: as above (the first ten problems, each with file, line and cause), or if nothing usable is left.
    """
    root = Path(path)
    if on_error not in ("raise", "skip"):
        raise SpecError(f"on_error is {on_error!r}; it must be 'raise' or 'skip'")
    if root.is_dir() and (root / "manifest.jsonl").is_file():
        root = root / "manifest.jsonl"
    unknown: set[str] = set()
    if root.is_dir():
        entries = list(_folder_entries(root))
    elif root.is_file():
        read = _parquet_entries if root.suffix in PARQUET_SUFFIXES else _jsonl_entries
        entries = read(root, unknown)
    else:
        raise DataError(
            f"manifest {str(root)!r} is neither a folder nor a file; give a folder of media, a .jsonl or .parquet file"
        )

    items: list[Item] = []
    problems: list[str] = []
    for where, read in entries:
        try:
            items.append(read())
        except DataError as error:
            problems.append(f"{where}: {error}")
    if unknown:
        ignored = f"keys {sorted(unknown)} are ignored; known keys are {sorted(_KEYS)}"
        warnings.warn(f"manifest {str(root)!r}: {ignored}", KnapFormerWarning, stacklevel=2)
    if problems:
        message = _problem_message(root, problems, total=len(entries))
        if on_error == "raise":
            raise DataError(f"{message}\nCorrect or remove them, or skip them with on_error='skip'.")
        warnings.warn(f"skipped: {message}", KnapFormerWarning, stacklevel=2)
    if not items:
        kinds = " ".join(IMAGE_SUFFIXES + VIDEO_SUFFIXES)
        raise DataError(f"manifest {str(root)!r} has no usable entry; supported files are {kinds}")
    items.sort(key=lambda i: (i.path.as_posix(), i.start, math.inf if i.end is None else i.end, i.caption))
    return Manifest(root, tuple(replace(item, id=number) for number, item in enumerate(items)))


def write_manifest(manifest: Manifest, path: str | os.PathLike[str]) -> None:
    """Write a JSONL manifest with all sizes, so that reading it again opens no media file; paths are relative to it."""
    target = Path(path)
    lines: list[str] = []
    for item in manifest:
        try:
            name = Path(os.path.relpath(item.path, target.parent)).as_posix()
        except ValueError:  # another drive
            name = str(item.path.resolve())
        entry: dict[str, Any] = {"path": name, "caption": item.caption, "source": item.source}
        entry |= {"width": item.width, "height": item.height}
        if item.kind == "video":
            entry |= {"num_frames": item.num_frames, "duration": item.duration, "start": item.start}
            entry |= {key: value for key in ("end", "fps") if (value := getattr(item, key)) is not None}
        lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
    target.write_text("".join(lines), encoding="utf-8", newline="\n")


_Entry = tuple[str, Callable[[], Item]]  # where it stands, and how to read it


def _problem_message(root: Path, problems: list[str], *, total: int) -> str:
    shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"{len(problems)} of {total} entries of {str(root)!r} cannot be used:{shown}{more}"


def _folder_entries(root: Path) -> Iterator[_Entry]:
    known = IMAGE_SUFFIXES + VIDEO_SUFFIXES + UNREAD_SUFFIXES
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.suffix.lower() in known and not hidden and path.is_file():
            yield str(path), lambda path=path: _item(path, {})


def _jsonl_entries(file: Path, unknown: set[str]) -> list[_Entry]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"manifest {str(file)!r} cannot be read as UTF-8 text: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [(f"{file}:{number}", lambda line=line: _line_item(file.parent, line, unknown)) for number, line in lines]


def _parquet_entries(file: Path, unknown: set[str]) -> list[_Entry]:
    """Its rows; an empty value, or NaN, is one that is left out."""
    try:
        import duckdb
    except ImportError as error:
        raise BackendUnavailableError(
            "reading Parquet needs DuckDB, which is not installed; install it with: pip install 'knapformer[advise]'"
        ) from error
    try:
        with duckdb.connect() as engine:
            found = engine.execute("SELECT * FROM read_parquet(?)", [str(file)])
            names = [column[0] for column in found.description]
            rows = found.fetchall()
    except duckdb.Error as error:
        raise DataError(f"manifest {str(file)!r} cannot be read as Parquet: {error}") from error

    def entry(row: tuple[Any, ...]) -> dict[str, Any]:
        given = {n: v for n, v in zip(names, row, strict=True) if v is not None and v == v}
        return {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in given.items()}

    return [
        (f"{file}, row {number}", lambda row=row: _entry_item(file.parent, entry(row), unknown))
        for number, row in enumerate(rows, start=1)
    ]


_KEYS: dict[str, tuple[type, ...]] = {
    "path": (str,),
    "note": (str,),  # for people; nothing reads it
    "caption": (str,),
    "source": (str,),
    "start": (int, float),
    "end": (int, float),
    "fps": (int, float),
    "width": (int,),
    "height": (int,),
    "num_frames": (int,),
    "duration": (int, float),
}


def _line_item(root: Path, line: str, unknown: set[str]) -> Item:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise DataError(f'must be a JSON object like {{"path": ..., "caption": ...}}, got {line.strip():.60}')
    return _entry_item(root, entry, unknown)


def _entry_item(root: Path, entry: dict[str, Any], unknown: set[str]) -> Item:
    unknown.update(entry.keys() - _KEYS.keys())
    values = {key: entry[key] for key in _KEYS if entry.get(key) is not None}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, _KEYS[key]):
            raise DataError(f"{key} is {value!r}; it must be a {' or '.join(k.__name__ for k in _KEYS[key])}")
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
            raise DataError(f"{key} is {value!r}; it must be a finite number of 0 or more")
    for key in ("path", "source", "fps", "width", "height", "num_frames", "duration"):
        if key in values and not values[key]:
            raise DataError(f"{key} is {values[key]!r}; leave it out or give a value that is not empty or zero")
    if "path" not in values:
        raise DataError("has no 'path'; every line names its media file")
    return _item(root / values.pop("path"), values)


def _item(path: Path, values: dict[str, Any]) -> Item:
    suffix = path.suffix.lower()
    if suffix not in IMAGE_SUFFIXES + VIDEO_SUFFIXES:
        kinds = " ".join(IMAGE_SUFFIXES + VIDEO_SUFFIXES)
        raise DataError(
            f"{path.name!r}: file type {suffix or 'without a name'} is not supported; convert it to one of {kinds}"
        )
    if not path.is_file():
        raise DataError(f"{str(path)!r} does not exist or is no file; correct the path")
    start, end = float(values.get("start", 0.0)), values.get("end")
    if end is not None and end <= start:
        raise DataError(f"end {end:g} s is not after start {start:g} s")
    try:
        kind, sizes = _measure(path, suffix, values, start=start, end=end)
    except DataError as error:
        raise DataError(f"{path.name!r} {error}") from error
    if kind == "image" and (start or values.keys() & {"end", "fps"}):
        raise DataError(f"{path.name!r} is an image; start, end and fps are for clips")
    return Item(
        id=-1,  # known once all entries are sorted
        path=path,
        kind=kind,
        caption=values["caption"] if "caption" in values else _caption_beside(path),
        start=start,
        end=None if end is None else float(end),
        fps=values.get("fps"),
        source=values.get("source", _ABOUT[kind]),
        **sizes,
    )


def _measure(
    path: Path, suffix: str, given: dict[str, Any], *, start: float, end: float | None
) -> tuple[Kind, dict[str, Any]]:
    is_clip = suffix in VIDEO_SUFFIXES or (suffix in _MAY_MOVE and "num_frames" in given)
    wanted = ("width", "height", "num_frames", "duration") if is_clip else ("width", "height")
    if all(key in given for key in wanted):
        return ("video" if is_clip else "image"), {key: given[key] for key in wanted}
    if not is_clip:
        width, height, moving = image_size(path)
        if not moving:
            return "image", {"width": width, "height": height}
    clip = probe_clip(path, start=start, end=end)
    return "video", {key: getattr(clip, key) for key in ("width", "height", "num_frames", "duration")}


def _caption_beside(path: Path) -> str:
    beside = path.with_suffix(".txt")
    if not beside.is_file():
        return path.stem
    try:
        return beside.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"caption file {str(beside)!r} cannot be read as UTF-8 text: {error}") from error
