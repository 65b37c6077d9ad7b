"""WebDataset shards as a data set with random access: tar files in which `key.jpg`, `key.txt`, `key.json` are a sample.

A balanced sampler has to know sizes before anything is loaded, and to read a sample on the rank that will use it. Plain
tar files allow both: their headers are read once, and any member is a seek away. No library is needed.

    data = TarShards(["a-000.tar", "a-001.tar"])
    lengths = [sample_grid(item, options).num_tokens for item in data.items]
    data[7]["jpg"]                                               # bytes; decode them as you do

Sizes are those of the sample's JSON (`width`, `height`, and `num_frames`, `duration` for clips), else those in the
picture's own header. Compressed shards have no random access and are refused.
"""

import io
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knapformer import files
from knapformer.data.entry import Described, read_entry
from knapformer.data.images import image_size
from knapformer.data.item import Item, Kind
from knapformer.data.manifest import IMAGE_SUFFIXES, SIZES, VIDEO_SUFFIXES
from knapformer.errors import DataError


@dataclass(frozen=True, slots=True)
class _Member:
    shard: Path
    start: int
    size: int

    def read(self) -> bytes:
        with self.shard.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


class TarShards:
    """Samples of WebDataset tar shards, by index. Works as a map-style data set, also in loader workers.

    Args:
        shards: the tar files, in order.
        source: of the items.

    Attributes:
        items: one per sample, with its size and caption; `path` names shard and member and cannot be opened.

    Raises:
        DataError: naming shard and key, for what cannot be read or has no size.
    """

    def __init__(self, shards: Iterable[str | os.PathLike[str]], *, source: str = "shards") -> None:
        self._samples: list[dict[str, _Member]] = []
        items = []
        for shard in map(Path, shards):
            for key, members in _read_index(shard).items():
                items.append(_item(len(items), shard, key, members, source))
                self._samples.append(members)
        self.items = tuple(items)
        if not items:
            raise DataError("the shards hold no samples")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, bytes]:
        """Extension -> bytes, of one sample."""
        return {extension: member.read() for extension, member in self._samples[index].items()}


def _read_index(shard: Path) -> dict[str, dict[str, _Member]]:
    """Key -> extension -> where it is."""
    samples: dict[str, dict[str, _Member]] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for entry in tar:
                folder, _, name = entry.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if entry.isfile() and stem and dot:
                    member = _Member(shard, entry.offset_data, entry.size)
                    samples.setdefault(f"{folder}/{stem}".lstrip("/"), {})[extension.lower()] = member
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"shard {str(shard)!r} cannot be read as an uncompressed tar file: {error}") from error
    return samples


def _item(id: int, shard: Path, key: str, members: dict[str, _Member], source: str) -> Item:
    where = f"shard {str(shard)!r}, sample {key!r}"
    told = Described()
    if "json" in members:
        told = read_entry(files.decode_json(members["json"].read(), dict[str, Any], where + ", json"), Described, where)
    try:
        caption = members["txt"].read().decode() if "txt" in members else told.caption or ""
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: its txt cannot be read as UTF-8 text: {error}") from error
    media = [e for e in members if f".{e}" in IMAGE_SUFFIXES + VIDEO_SUFFIXES]
    if len(media) != 1:
        raise DataError(f"{where}: has {sorted(members)}; a sample has one picture or clip")
    kind: Kind = "image" if f".{media[0]}" in IMAGE_SUFFIXES else "video"
    sizes: dict[str, Any] = {name: getattr(told, name) for name in SIZES[kind]}
    if kind == "image" and None in sizes.values():
        try:
            sizes["width"], sizes["height"], _ = image_size(io.BytesIO(members[media[0]].read()))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    if missing := [name for name, value in sizes.items() if value is None]:
        raise DataError(f"{where}: {missing[0]} is not given; its json must have {', '.join(sizes)}")
    path = shard / f"{key}.{media[0]}"
    return Item(id=id, path=path, kind=kind, caption=caption.strip(), source=source, **sizes)
