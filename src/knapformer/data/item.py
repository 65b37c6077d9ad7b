"""One sample of a data set, described without its pixels. Standard library only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["image", "video"]

TIME_TOLERANCE = 1e-3
"""Containers such as Matroska round frame times to milliseconds; closer times count as equal [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A picture, a clip, or a span of a clip, with its caption.

    Attributes:
        id: its index in the manifest.
        path: the media file.
        kind: "image" or "video".
        caption: may be empty.
        width: as displayed, after EXIF or display rotation [pixels].
        height: likewise [pixels].
        num_frames: frames shown within the span at their native rate; 1 for an image.
        duration: length of the span; 0 for an image [s].
        start: where the span begins [s].
        end: where it ends [s]; None: with the file.
        fps: rate to sample this clip at, before that of the media options; None: as they say.
        source: what it belongs to; a data loader draws from one source.
    """

    id: int
    path: Path
    kind: Kind
    caption: str
    width: int
    height: int
    num_frames: int = 1
    duration: float = 0.0
    start: float = 0.0
    end: float | None = None
    fps: float | None = None
    source: str
