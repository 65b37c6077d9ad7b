"""Pixels to tokens and back: `load_item` reads a picture or clip, resizes it and cuts it into patches. Needs torch.

    frames (3, F, H, W) in [-1, 1] -> [encoder] -> (C, N, h, w) -> patches (L, C * temporal_patch * patch**2)

Sizes are those of `knapformer.data.grid`, so a step can be planned before a single file is opened. Tokens are in grid
order, width fastest; within a token the order is channel, frame, row, column. `unpatchify` is the exact inverse of
`patchify`.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from knapformer.data.grid import (
    Grid,
    MediaOptions,
    frame_size,
    grid_positions,
    sample_grid,
    sample_points,
)
from knapformer.data.images import read_image, resize_pixels
from knapformer.data.item import TIME_TOLERANCE, Item
from knapformer.data.video import frame_pixels, shown_frames
from knapformer.errors import DataError, KnapFormerWarning, SpecError

if TYPE_CHECKING:
    from av import VideoFrame

__all__ = ["Encoder", "MediaOptions", "Sample", "grid_positions", "load_item", "patchify", "sample_grid", "unpatchify"]

Encoder = Callable[[torch.Tensor], torch.Tensor]
"""A VAE encoder: pixels (3, F, H, W) in [-1, 1] to latents (C, N, H / vae_spatial, W / vae_spatial)."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A loaded item.

    Attributes:
        id: of its item.
        patches: (grid.num_tokens, C * temporal_patch * patch**2) float32; pixels are in [-1, 1].
        grid: tokens along time, height, width.
        caption: of its item.
    """

    id: int
    patches: torch.Tensor
    grid: Grid
    caption: str


def load_item(item: Item, options: MediaOptions, *, encoder: Encoder | None = None) -> Sample:
    """Read an item and cut it into patches.

    Args:
        item: from a manifest.
        options: sizes and rates; with an encoder, its `vae_*` factors must be the encoder's.
        encoder: put in front of the patches.

    Raises:
        DataError: naming the file, if nothing of it decodes.
        SpecError: if the encoder's latents are not of the size that `options` announce.

    Warns:
        KnapFormerWarning: if only the first part of a clip decodes; the sample is then shorter than its planned grid.
    """
    video = torch.from_numpy(_read(item, options)).permute(3, 0, 1, 2).to(torch.float32).div_(127.5).sub_(1.0)
    if encoder is not None:
        video = _encode(video, options, encoder)
    elif options.vae_spatial * options.vae_temporal != 1:
        raise SpecError(
            f"media options name a VAE (spatial factor {options.vae_spatial}, temporal factor {options.vae_temporal}) "
            "but no encoder was given; pass encoder=... or leave the factors at 1"
        )
    patches, grid = patchify(video, options)
    return Sample(item.id, patches.to(torch.float32), grid, item.caption)


def _encode(video: torch.Tensor, options: MediaOptions, encoder: Encoder) -> torch.Tensor:
    _, frames, height, width = video.shape
    latents = encoder(video)
    wanted = ((frames - 1) // options.vae_temporal + 1, height // options.vae_spatial, width // options.vae_spatial)
    if latents.ndim != 4 or tuple(latents.shape[1:]) != wanted:
        raise SpecError(
            f"the encoder made latents of shape {tuple(latents.shape)} from pixels of shape {tuple(video.shape)}; "
            f"its media options (vae_temporal={options.vae_temporal}, vae_spatial={options.vae_spatial}) announce (C, "
            f"{wanted[0]}, {wanted[1]}, {wanted[2]}); set them to the encoder's factors"
        )
    return latents


def _read(item: Item, options: MediaOptions) -> NDArray[np.uint8]:
    """(F, H, W, 3) pixels, resized."""
    size = frame_size(item, options)
    if item.kind == "image":
        frames = [resize_pixels(read_image(item.path), size)]
    else:
        frames = _read_clip(item, options, size)
    latents = (len(frames) - 1) / options.vae_temporal + 1
    whole = math.ceil(latents / options.temporal_patch) * options.temporal_patch
    frames += [frames[-1]] * (options.frames_of(whole) - len(frames))  # an image, or a clip cut short: fill the patch
    return np.stack(frames)


def _read_clip(item: Item, options: MediaOptions, size: tuple[int, int]) -> list[NDArray[np.uint8]]:
    """The frames to sample; fewer where the clip's tail does not decode."""
    points, by_time = sample_points(item, options)
    wanted = len(points)
    taken: list[NDArray[np.uint8]] = []

    def take(frame: "VideoFrame", until: float) -> None:
        """`frame` was on screen up to `until`: it serves all points before that."""
        due = int(np.searchsorted(points, until - TIME_TOLERANCE)) - len(taken)
        if due > 0:
            taken.extend([resize_pixels(frame_pixels(frame), size)] * due)

    previous, last, decoded = None, 0.0, 0
    for time, frame in shown_frames(item.path, start=item.start, end=item.end):
        last = time if by_time else float(decoded)
        take(previous or frame, last)
        previous, decoded = frame, decoded + 1
        if len(taken) == wanted:
            return taken
    if previous is None:
        raise DataError(f"clip {str(item.path)!r}: no frame of its span decodes; replace or remove the file")
    # The last frame stays on screen to the end of the span, unless frames after it are missing.
    usual = item.duration / item.num_frames if by_time else 1.0
    take(previous, math.inf if decoded >= item.num_frames else last + usual)
    if len(taken) < wanted:
        warnings.warn(
            f"clip {str(item.path)!r}: {decoded} of {item.num_frames} frames decode; {len(taken)} of {wanted} are used",
            KnapFormerWarning,
            stacklevel=4,
        )
    return taken


def patchify(video: torch.Tensor, options: MediaOptions) -> tuple[torch.Tensor, Grid]:
    """Cut (C, F, H, W) into patches (L, C * temporal_patch * patch**2), and say on which grid they lie.

    Raises:
        SpecError: if F, H or W is not a whole number of patches.
    """
    channels, *sides = video.shape
    cells = (options.temporal_patch, options.patch, options.patch)
    if any(side % cell or not side for side, cell in zip(sides, cells, strict=True)):
        raise SpecError(
            f"a video of shape {tuple(video.shape)} is not a whole number of patches of {cells} frames, rows and "
            "columns; resize it first, as load_item does"
        )
    grid = Grid(*(side // cell for side, cell in zip(sides, cells, strict=True)))
    split = video.reshape(channels, grid.frames, cells[0], grid.height, cells[1], grid.width, cells[2])
    return split.permute(1, 3, 5, 0, 2, 4, 6).reshape(grid.num_tokens, -1), grid


def unpatchify(patches: torch.Tensor, grid: Grid | tuple[int, int, int], options: MediaOptions) -> torch.Tensor:
    """The video (C, F, H, W) that `patchify` cut into `patches` (L, C * temporal_patch * patch**2)."""
    grid, time, side = Grid(*grid), options.temporal_patch, options.patch
    if patches.ndim != 2 or len(patches) != grid.num_tokens or patches.shape[1] % (time * side**2):
        raise SpecError(
            f"patches of shape {tuple(patches.shape)} do not fit the grid {tuple(grid)}; expected ({grid.num_tokens}, "
            f"a multiple of {time * side**2})"
        )
    split = patches.reshape(*grid, -1, time, side, side)
    return split.permute(3, 0, 4, 1, 5, 2, 6).reshape(-1, grid.frames * time, grid.height * side, grid.width * side)
