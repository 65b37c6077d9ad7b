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
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from knapformer import files
from knapformer.data.entry import Entry, read_entry
from knapformer.data.images import image_size
from knapformer.data.item import Item, Kind
from knapformer.data.tables import open_engine, open_table, read_columns
from knapformer.data.video import probe_clip
from knapformer.errors import DataError, KnapFormerWarning, SpecError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
PARQUET_SUFFIXES = (".parquet", ".pq")
UNREAD_SUFFIXES = (".avif", ".flv", ".heic", ".heif", ".jxl", ".m4v", ".mpeg", ".mpg", ".tif", ".tiff", ".ts", ".wmv")
"""Media types that are a problem, not something to pass over, when a folder has them."""

SIZES: dict[Kind, tuple[str, ...]] = {
    "image": ("width", "height"),
    "video": ("width", "height", "num_frames", "duration"),
}
"""What has to be known of a sample before it is loaded."""

_KEYS = {field.name for field in fields(Entry)}
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
    files.write_text(target, "".join(lines))


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
            yield str(path), partial(_item, path, Entry(path=path.name))


def _jsonl_entries(file: Path, unknown: set[str]) -> list[_Entry]:
    def item(line: bytes) -> Item:
        return _entry_item(file.parent, files.decode_json(line, dict[str, Any], ""), unknown)

    return [(f"{file}:{number}", partial(item, line)) for number, line in files.read_lines(file)]


def _parquet_entries(file: Path, unknown: set[str]) -> list[_Entry]:
    with open_engine() as run:
        names, columns = read_columns(run, open_table(run, file))
    rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
    return [
        (f"{file}, row {number}", partial(_entry_item, file.parent, row, unknown))
        for number, row in enumerate(rows, start=1)
    ]


def _entry_item(root: Path, values: dict[str, Any], unknown: set[str]) -> Item:
    unknown.update(values.keys() - _KEYS)
    entry = read_entry(values, Entry)
    return _item(root / entry.path, entry)


def _item(path: Path, entry: Entry) -> Item:
    suffix = path.suffix.lower()
    if suffix not in IMAGE_SUFFIXES + VIDEO_SUFFIXES:
        kinds = " ".join(IMAGE_SUFFIXES + VIDEO_SUFFIXES)
        raise DataError(
            f"{path.name!r}: file type {suffix or 'without a name'} is not supported; convert it to one of {kinds}"
        )
    if not path.is_file():
        raise DataError(f"{str(path)!r} does not exist or is no file; correct the path")
    start = entry.start or 0.0
    if entry.end is not None and entry.end <= start:
        raise DataError(f"end {entry.end:g} s is not after start {start:g} s")
    try:
        kind, sizes = _measure(path, suffix, entry)
    except DataError as error:
        raise DataError(f"{path.name!r} {error}") from error
    if kind == "image" and (start or entry.end is not None or entry.fps is not None):
        raise DataError(f"{path.name!r} is an image; start, end and fps are for clips")
    return Item(
        id=-1,  # known once all entries are sorted
        path=path,
        kind=kind,
        caption=_caption_beside(path) if entry.caption is None else entry.caption,
        start=start,
        end=entry.end,
        fps=entry.fps,
        source=entry.source or _ABOUT[kind],
        **sizes,
    )


def _measure(path: Path, suffix: str, entry: Entry) -> tuple[Kind, dict[str, Any]]:
    """Kind and sizes: those that the entry has, else those of the file."""
    is_clip = suffix in VIDEO_SUFFIXES or (suffix in _MAY_MOVE and entry.num_frames is not None)
    kind: Kind = "video" if is_clip else "image"
    given = {key: getattr(entry, key) for key in SIZES[kind]}
    if None not in given.values():
        return kind, given
    if not is_clip:
        width, height, moving = image_size(path)
        if not moving:
            return "image", {"width": width, "height": height}
    clip = probe_clip(path, start=entry.start or 0.0, end=entry.end)
    return "video", {key: getattr(clip, key) for key in SIZES["video"]}


def _caption_beside(path: Path) -> str:
    beside = path.with_suffix(".txt")
    if not beside.is_file():
        return path.stem
    try:
        return beside.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"caption file {str(beside)!r} cannot be read as UTF-8 text: {error}") from error
