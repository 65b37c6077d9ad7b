import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer.data import Grid, Item, MediaOptions, grid_positions, sample_grid
from knapformer.data.grid import frame_size, sample_points, sampled_frames
from knapformer.errors import SpecError


def image(width: int, height: int) -> Item:
    return Item(id=0, path=Path("a.png"), kind="image", caption="", width=width, height=height, source="images")


def clip(num_frames: int, duration: float, **more) -> Item:
    settings = {"id": 0, "path": Path("a.mp4"), "caption": "", "width": 64, "height": 48, "source": "clips"} | more
    return Item(kind="video", num_frames=num_frames, duration=duration, **settings)


@pytest.mark.parametrize(
    ("width", "height", "limit", "grid"),
    [
        (64, 48, None, (1, 3, 4)),
        (71, 41, None, (1, 3, 4)),  # nearest: 71 -> 64, 41 -> 48
        (72, 39, None, (1, 2, 5)),  # halves go up: 72 -> 80
        (3, 1000, None, (1, 63, 1)),  # never zero
        (1, 1, None, (1, 1, 1)),
        (1024, 1024, 256 * 256, (1, 16, 16)),
        (640, 427, 256 * 256, (1, 13, 19)),  # 313.4 x 209.1
        (512, 512, 216 * 216, (1, 13, 14)),  # 216 rounds to 224, and 224 x 224 is too much: one side gives
        (100, 80, 256 * 256, (1, 5, 6)),  # small ones are not enlarged
    ],
)
def test_image_grids(width: int, height: int, limit: int | None, grid: tuple) -> None:
    got = sample_grid(image(width, height), MediaOptions(max_pixels=limit))
    assert got.frames == 1 and got.num_tokens == math.prod(got)
    assert sorted(got) == sorted(grid) and (width == height or got == grid)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 40), st.integers(1, 400))
def test_sizes_stay_within_the_limit_and_near_the_aspect(width: int, height: int, patch: int, cells: int) -> None:
    limit = cells * patch**2
    options = MediaOptions(patch=patch, max_pixels=limit)
    w, h = frame_size(image(width, height), options)
    assert w % patch == 0 and h % patch == 0 and w >= patch and h >= patch
    assert w * h <= limit
    scale = min(1.0, math.sqrt(limit / (width * height)))
    ideal = np.array([width * scale, height * scale])
    sides = np.array([w, h])
    if (ideal >= patch).all():
        # Rounding moves a side by half a patch; keeping the limit may take one more patch from one of them.
        assert (np.abs(sides - ideal) <= patch * 1.5 + 1e-6).all()
        assert (np.abs(sides - ideal) <= patch * 0.5 + 1e-6).any()


@pytest.mark.parametrize(
    ("item", "options", "frames"),
    [
        (clip(30, 3.0), {}, 30),
        (clip(30, 3.0), {"fps": 10}, 30),
        (clip(30, 3.0), {"fps": 5}, 15),
        (clip(30, 3.0), {"fps": 7}, 21),
        (clip(30, 3.1), {"fps": 5}, 16),  # the 16th moment, 3.0 s, is within
        (clip(30, 3.0, fps=2), {"fps": 5}, 6),  # the manifest's rate comes first
        (clip(1, 0.04), {"fps": 5}, 1),
        (clip(30, 3.0), {"max_frames": 8}, 8),
        (clip(30, 3.0), {"temporal_patch": 4}, 32),  # nearest multiple
        (clip(29, 2.9), {"temporal_patch": 4}, 28),
        (clip(30, 3.0), {"temporal_patch": 4, "max_frames": 31}, 28),  # but within the limit
        (clip(1, 0.1), {"temporal_patch": 4}, 4),  # never zero
        (image(64, 48), {"fps": 5, "max_frames": 2}, 1),
        (clip(30, 3.0), {"vae_temporal": 4}, 29),  # 1 + 4 * 7
        (clip(33, 3.3), {"vae_temporal": 4}, 33),
        (clip(33, 3.3), {"vae_temporal": 4, "temporal_patch": 2}, 37),  # 9 latent frames become 10
        (clip(33, 3.3), {"vae_temporal": 4, "temporal_patch": 2, "max_frames": 36}, 29),
        (image(64, 48), {"vae_temporal": 4}, 1),
    ],
)
def test_frames(item: Item, options: dict, frames: int) -> None:
    assert sampled_frames(item, MediaOptions(**options)) == frames
    points, _ = sample_points(item, MediaOptions(**options))
    assert len(points) == frames


def test_grid_of_a_clip() -> None:
    item = clip(33, 3.3, width=128, height=64)
    assert sample_grid(item, MediaOptions()) == (33, 4, 8)
    assert sample_grid(item, MediaOptions(patch=2, vae_spatial=8, vae_temporal=4)) == (9, 4, 8)
    assert sample_grid(item, MediaOptions(patch=8, temporal_patch=3)) == (11, 8, 16)


def test_points_in_time() -> None:
    points, by_time = sample_points(clip(30, 3.0, start=1.5), MediaOptions(fps=2))
    assert by_time and points.tolist() == pytest.approx([1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    # Too many for the limit: the whole span all the same, at a lower rate.
    points, _ = sample_points(clip(30, 3.0, start=1.5), MediaOptions(fps=2, max_frames=3))
    assert points.tolist() == pytest.approx([1.5, 2.5, 3.5])


def test_points_by_index() -> None:
    points, by_time = sample_points(clip(10, 1.0), MediaOptions(max_frames=5))
    assert not by_time and points.tolist() == [0, 2, 4, 6, 8]
    points, _ = sample_points(clip(3, 0.3), MediaOptions(temporal_patch=4))
    assert points.tolist() == [0, 0, 1, 2]
    for count, limit in itertools.product(range(1, 60), (1, 7, 59)):
        points, _ = sample_points(clip(count, 1.0), MediaOptions(max_frames=limit))
        assert points[0] == 0 and points[-1] < count and (np.diff(points) >= 1).all()


def test_positions() -> None:
    positions = grid_positions(Grid(2, 3, 4))
    assert positions.dtype == np.int32 and positions.shape == (24, 3)
    assert positions.tolist() == [list(p) for p in itertools.product(range(2), range(3), range(4))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 0}, "patch is 0"),
        ({"temporal_patch": 0}, "temporal_patch is 0"),
        ({"vae_spatial": -1}, "vae_spatial is -1"),
        ({"fps": 0}, "fps is 0"),
        ({"fps": math.inf}, "fps is inf"),
        ({"max_pixels": 255}, "one patch alone needs 256"),
        ({"max_pixels": 255, "patch": 2, "vae_spatial": 8}, "one patch alone needs 256"),
        ({"max_frames": 0}, "one patch alone needs 1"),
        ({"max_frames": 4, "temporal_patch": 2, "vae_temporal": 4}, "one patch alone needs 5"),
    ],
)
def test_options_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        MediaOptions(**options)
