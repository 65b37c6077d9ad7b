"""From latents to rows and back: patches in the order each model reads and writes them, and grids of positions.

(C, F, H, W) --patchify (pt, ph, pw)--> (f h w, C pt ph pw)     channel first: (C, pt, ph, pw) within a row
                                                                channel last:  (pt, ph, pw, C)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from knapformer.errors import DataError

Extent = tuple[int, int, int]


def grid_of(latent: Tensor, patch: Extent) -> Extent:
    """Patches (frames, rows, columns) of a (C, F, H, W) latent.

    Raises:
        DataError: if it is no such tensor, or its sizes are no multiples of the patch.
    """
    if latent.ndim != 4 or any(size % p for size, p in zip(latent.shape[1:], patch, strict=True)):
        raise DataError(
            f"a latent has shape {tuple(latent.shape)}; expected (channels, frames, height, width) with sizes that are "
            f"multiples of {patch}: crop or pad it before it is packed"
        )
    frames, rows, columns = (size // p for size, p in zip(latent.shape[1:], patch, strict=True))
    return frames, rows, columns


def patchify(latent: Tensor, patch: Extent, *, channels_last: bool = False) -> Tensor:
    """(C, F, H, W) to (frames * rows * columns, C pt ph pw)."""
    frames, rows, columns = grid_of(latent, patch)
    pt, ph, pw = patch
    blocks = latent.reshape(latent.shape[0], frames, pt, rows, ph, columns, pw)
    order = (1, 3, 5, 2, 4, 6, 0) if channels_last else (1, 3, 5, 0, 2, 4, 6)
    return blocks.permute(order).reshape(frames * rows * columns, latent.shape[0] * pt * ph * pw)


def unpatchify(rows: Tensor, grid: Extent, patch: Extent, *, channels_last: bool = False) -> Tensor:
    """Inverse of `patchify`, for any number of channels."""
    (frames, height, width), (pt, ph, pw) = grid, patch
    channels = rows.shape[1] // (pt * ph * pw)
    if channels_last:
        blocks = rows.reshape(frames, height, width, pt, ph, pw, channels).permute(6, 0, 3, 1, 4, 2, 5)
    else:
        blocks = rows.reshape(frames, height, width, channels, pt, ph, pw).permute(3, 0, 4, 1, 5, 2, 6)
    return blocks.reshape(channels, frames * pt, height * ph, width * pw)


def grid_positions(grid: Extent, start: Sequence[int] = (0, 0, 0)) -> Tensor:
    """(frames * rows * columns, 3) positions (frame, row, column), counted from `start`."""
    axes = [torch.arange(first, first + size, dtype=torch.int32) for size, first in zip(grid, start, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)


def after_text(num_text: int, positions: Tensor) -> Tensor:
    """The same positions, after those of text at 0."""
    return torch.cat((positions.new_zeros(num_text, positions.shape[1]), positions))
