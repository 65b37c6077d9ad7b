"""From the size of a picture or clip to its token grid, by arithmetic alone: no file is opened, no torch.

`token_grid` is the one rule. The loader follows it, the simulator and the advisor ask it, the latter in SQL: it runs
the rule on names of columns. So it is written with NumPy's functions only.

Nothing is cut away. Both sides of a frame are scaled alike to stay within `max_pixels` and then rounded to whole
patches by resizing; a clip with more than `max_frames` frames is sampled more sparsely over its whole span (use
`start` and `end` in the manifest to take a part of it). Nothing becomes empty: a 3-pixel-wide image still has one
patch across.

    pixels (3, F, H, W) -> [VAE] -> (C, N, H / vae_spatial, W / vae_spatial), F = 1 + vae_temporal * (N - 1)
                        -> grid (N / temporal_patch, H / vae_spatial / patch, W / vae_spatial / patch)

The VAE factors describe an encoder the user may put in front of the patches; 1 means there is none. Its first latent
frame stands for one pixel frame, as in the causal video VAEs of Wan, HunyuanVideo and CogVideoX. An image is a clip
of one frame, repeated where a temporal patch wants more.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knapformer.data.item import TIME_TOLERANCE, Item
from knapformer.errors import SpecError


class Grid(NamedTuple):
    """Tokens of a sample along time, height and width; row-major, width fastest."""

    frames: int
    height: int
    width: int

    @property
    def num_tokens(self) -> int:
        return self.frames * self.height * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """How pictures and clips become tokens.

    Attributes:
        patch: side of a patch, in pixels or, with an encoder, in latent pixels.
        temporal_patch: frames (latent frames) in a patch.
        max_pixels: most pixels of one frame; larger ones are scaled down, others stay as they are. None: no limit.
        fps: frames per second to sample clips at; None takes every frame. A manifest entry's own `fps` comes first.
        max_frames: most frames of a clip. None: no limit.
        vae_spatial: pixels per latent pixel along one side of the encoder in use.
        vae_temporal: frames per latent frame of the encoder in use.

    Raises:
        SpecError: if a value is out of range, or a limit leaves no room for a single patch.
    """

    patch: int = 16
    temporal_patch: int = 1
    max_pixels: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    vae_spatial: int = 1
    vae_temporal: int = 1

    def __post_init__(self) -> None:
        for name in ("patch", "temporal_patch", "vae_spatial", "vae_temporal"):
            if getattr(self, name) < 1:
                raise SpecError(f"media option {name} is {getattr(self, name)}; it must be at least 1")
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise SpecError(f"media option fps is {self.fps}; it must be above 0, or None to take every frame")
        for name, least in (("max_pixels", self.unit**2), ("max_frames", self.frames_of(self.temporal_patch))):
            limit = getattr(self, name)
            if limit is not None and limit < least:
                raise SpecError(
                    f"media option {name} is {limit}; one patch alone needs {least}, so allow at least that"
                )

    @property
    def unit(self) -> int:
        """Side of a patch on the picture [pixels]."""
        return self.patch * self.vae_spatial

    def frames_of(self, latent_frames: int) -> int:
        """Pixel frames that the encoder turns into so many latent frames."""
        return 1 + self.vae_temporal * (latent_frames - 1)


def token_grid(width: Any, height: Any, frames: Any, options: MediaOptions) -> tuple[Any, Any, Any]:
    """The rule: tokens along time, height and width, of numbers or arrays (floats that are whole).

    Args:
        width, height: as displayed [pixels].
        frames: at the asked rate, before limits; 1 for an image.
        options: patches and limits.
    """
    wide, high = resized_frame(width, height, options)
    time = sampled_latents(frames, options) / options.temporal_patch
    return time, high / options.unit, wide / options.unit


def resized_frame(width: Any, height: Any, options: MediaOptions) -> tuple[Any, Any]:
    """Width and height that frames are resized to: multiples of `options.unit` within `max_pixels` [pixels]."""
    unit, limit = options.unit, options.max_pixels
    if limit is None:
        return _nearest_multiple(width, unit), _nearest_multiple(height, unit)
    scale = np.minimum(1.0, np.sqrt(limit / (width * height)))
    ideal_width, ideal_height = width * scale, height * scale
    wide, high = _nearest_multiple(ideal_width, unit), _nearest_multiple(ideal_height, unit)
    # Where rounding went over the limit, the side that was rounded up more gives, or the one that can.
    widest = np.floor(limit / (high * unit)) * unit
    highest = np.floor(limit / (wide * unit)) * unit
    height_gives = np.where(high / ideal_height > wide / ideal_width, highest > 0, widest <= 0)
    over = wide * high > limit
    return np.where(over & ~height_gives, widest, wide), np.where(over & height_gives, highest, high)


def frames_at_rate(duration: Any, fps: Any) -> Any:
    """Frames of a clip of `duration` seconds at `fps`: those at 0, 1 / fps, 2 / fps, ... that it shows."""
    return np.maximum(1, np.ceil((duration - TIME_TOLERANCE) * fps))


def sampled_latents(frames: Any, options: MediaOptions) -> Any:
    """Latent frames for `frames` at the asked rate: whole temporal patches within `max_frames`."""
    limit = options.max_frames
    if limit is not None:
        frames = np.minimum(frames, limit)
    latents = _nearest_multiple((frames - 1) / options.vae_temporal + 1, options.temporal_patch)
    if limit is None:
        return latents
    most = 1 + (limit - 1) // options.vae_temporal
    return np.minimum(latents, most // options.temporal_patch * options.temporal_patch)


def _nearest_multiple(value: Any, unit: int) -> Any:
    return np.maximum(1, np.floor(value / unit + 0.5)) * unit


def frame_size(item: Item, options: MediaOptions) -> tuple[int, int]:
    """Width and height that the item's frames are resized to [pixels]."""
    width, height = resized_frame(float(item.width), float(item.height), options)
    return int(width), int(height)


def natural_frames(item: Item, options: MediaOptions) -> int:
    """Frames of the item at the asked rate, before limits and whole patches."""
    fps = options.fps if item.fps is None else item.fps
    if item.kind == "image":
        return 1
    return item.num_frames if fps is None else int(frames_at_rate(item.duration, fps))


def sampled_frames(item: Item, options: MediaOptions) -> int:
    """Frames that are taken from the item: a whole number of temporal patches within `max_frames`."""
    return options.frames_of(int(sampled_latents(natural_frames(item, options), options)))


def sample_grid(item: Item, options: MediaOptions) -> Grid:
    """The token grid of an item, from the sizes in the manifest alone.

    Equals the grid that `knapformer.data.media.load_item` returns, except for a clip whose tail does not decode: that
    one comes out shorter.
    """
    grid = token_grid(float(item.width), float(item.height), natural_frames(item, options), options)
    return Grid(*map(int, grid))


def token_pixels(grid: Grid | tuple[int, int, int], options: MediaOptions) -> NDArray[np.int64]:
    """(num_tokens,) pixels that each token stands for, over all of its frames, in token order.

    The encoder's first latent frame stands for one frame. A picture counts as often as a temporal patch repeats it.
    """
    grid = Grid(*grid)
    frames = np.full(grid.frames * options.temporal_patch, options.vae_temporal, dtype=np.int64)
    frames[:1] = 1
    per_token = frames.reshape(grid.frames, options.temporal_patch).sum(axis=1) * options.unit**2
    return np.repeat(per_token, grid.height * grid.width)


def sample_points(item: Item, options: MediaOptions) -> tuple[NDArray[np.float64], bool]:
    """Where to take each frame, and whether that is in time.

    If a rate is asked, points are times [s from the start of the clip]; else they are indices among the frames shown in
    the item's span. Points are evenly spaced, at the asked rate unless a limit or whole patches changed their number.
    """
    fps = options.fps if item.fps is None else item.fps
    count = sampled_frames(item, options)
    if fps is None:
        return np.floor(np.arange(count) * (item.num_frames / count) + 1e-9), False
    step = 1 / fps if count == natural_frames(item, options) else item.duration / count
    return item.start + step * np.arange(count, dtype=np.float64), True


def grid_positions(grid: Grid | tuple[int, int, int]) -> NDArray[np.int32]:
    """(t, y, x) of each token of a grid, in token order: (num_tokens, 3) int32."""
    return np.ascontiguousarray(np.indices(tuple(grid), dtype=np.int32).reshape(3, -1).T)
