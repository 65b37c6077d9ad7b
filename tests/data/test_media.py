import json
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from knapformer.data import Item, MediaOptions, read_manifest, sample_grid
from knapformer.data.media import Sample, load_item, patchify, unpatchify
from knapformer.errors import DataError, KnapFormerWarning, SpecError
from tests.data.files import frame_number, picture, write_clip


def only_item(path: Path, **entry) -> Item:
    (path.parent / "one.jsonl").write_text(json.dumps({"path": path.name, "caption": "c", **entry}))
    return read_manifest(path.parent / "one.jsonl")[0]


def frame_numbers(sample: Sample, options: MediaOptions) -> list[int]:
    video = (unpatchify(sample.patches, sample.grid, options) + 1) * 127.5
    return [frame_number(float(frame[:, -4:].median())) for frame in video.unbind(1)]


# ---- patches ----


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_unpatchify_inverts_patchify(shape: tuple, patch: int, temporal_patch: int) -> None:
    channels, frames, rows, columns = shape
    options = MediaOptions(patch=patch, temporal_patch=temporal_patch)
    video = torch.rand(channels, frames * temporal_patch, rows * patch, columns * patch)
    patches, grid = patchify(video, options)
    assert grid == (frames, rows, columns)
    assert patches.shape == (grid.num_tokens, channels * temporal_patch * patch**2)
    assert torch.equal(unpatchify(patches, grid, options), video)


def test_token_and_channel_order() -> None:
    options = MediaOptions(patch=2, temporal_patch=2)
    video = torch.arange(2 * 4 * 4 * 6).reshape(2, 4, 4, 6).float()
    patches, grid = patchify(video, options)
    assert grid == (2, 2, 3)
    for token, (t, y, x) in enumerate(np.ndindex(2, 2, 3)):
        block = video[:, 2 * t : 2 * t + 2, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
        assert torch.equal(patches[token], block.reshape(-1))  # channel, frame, row, column


def test_wrong_shapes() -> None:
    with pytest.raises(SpecError, match="not a whole number of patches"):
        patchify(torch.zeros(3, 1, 16, 17), MediaOptions())
    with pytest.raises(SpecError, match="not a whole number of patches"):
        patchify(torch.zeros(3, 0, 16, 16), MediaOptions())
    with pytest.raises(SpecError, match="do not fit the grid"):
        unpatchify(torch.zeros(3, 768), (1, 2, 2), MediaOptions())
    with pytest.raises(SpecError, match="multiple of 256"):
        unpatchify(torch.zeros(4, 100), (1, 2, 2), MediaOptions())


# ---- images ----


def test_image_pixels(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    options = MediaOptions()
    sample = load_item(only_item(tmp_path / "a.png"), options)
    assert (sample.id, sample.caption, sample.grid) == (0, "c", (1, 2, 3))
    assert sample.patches.dtype == torch.float32 and sample.patches.shape == (6, 768)
    assert sample.patches.min() == -1 and sample.patches.max() == 1
    video = unpatchify(sample.patches, sample.grid, options)
    assert torch.allclose((video[:, 0] + 1) * 127.5, torch.from_numpy(array).permute(2, 0, 1).float(), atol=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (17, 300), (333, 41), (64, 48), (7, 9)])
@pytest.mark.parametrize(
    "options",
    [
        MediaOptions(),
        MediaOptions(patch=7, max_pixels=5000),
        MediaOptions(temporal_patch=2),
        MediaOptions(patch=1, max_pixels=100),
    ],
    ids=str,
)
def test_image_grids_are_as_predicted(tmp_path: Path, size: tuple[int, int], options: MediaOptions) -> None:
    Image.fromarray(picture(*size)).save(tmp_path / "a.png")
    item = only_item(tmp_path / "a.png")
    sample = load_item(item, options)
    assert sample.grid == sample_grid(item, options)
    assert len(sample.patches) == sample.grid.num_tokens


def test_nothing_is_cut_away(tmp_path: Path) -> None:
    # Four corners of different grey: all still there after a resize that changes the aspect.
    array = np.zeros((90, 130, 3), dtype=np.uint8)
    array[:45, :65], array[:45, 65:], array[45:, :65], array[45:, 65:] = 20, 90, 160, 230
    Image.fromarray(array).save(tmp_path / "a.png")
    options = MediaOptions(max_pixels=64 * 64)
    sample = load_item(only_item(tmp_path / "a.png"), options)
    video = (unpatchify(sample.patches, sample.grid, options)[0, 0] + 1) * 127.5
    corners = [video[0, 0], video[0, -1], video[-1, 0], video[-1, -1]]
    assert [round(float(corner)) for corner in corners] == [20, 90, 160, 230]
    share = (video < 125).float().mean()
    assert share == pytest.approx(0.5, abs=0.05)


def test_rotated_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.ascontiguousarray(np.rot90(picture(32, 64)))).save(tmp_path / "a.png", exif=exif)
    item = only_item(tmp_path / "a.png")
    options = MediaOptions()
    sample = load_item(item, options)
    assert sample.grid == sample_grid(item, options) == (1, 4, 2)
    assert (sample.patches[:2] == 1).all() and (sample.patches[2:] < 0).all()  # white at the top


def test_broken_image(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"a\.jpg.*does not decode"):
        load_item(only_item(tmp_path / "a.jpg"), MediaOptions())


# ---- clips ----


@pytest.mark.parametrize(
    ("entry", "options", "numbers"),
    [
        ({}, {}, range(20)),
        ({}, {"fps": 10}, range(20)),
        ({}, {"fps": 5}, range(0, 20, 2)),
        ({}, {"fps": 20}, [k // 2 for k in range(40)]),
        ({}, {"fps": 3}, [0, 3, 6, 10, 13, 16]),
        ({"fps": 5}, {"fps": 10}, range(0, 20, 2)),
        ({}, {"max_frames": 5}, [0, 4, 8, 12, 16]),
        ({}, {"fps": 5, "max_frames": 5}, [0, 4, 8, 12, 16]),
        ({"start": 0.5, "end": 1.1}, {}, range(5, 11)),
        ({"start": 0.5, "end": 1.1}, {"fps": 5}, [5, 7, 9]),
        ({"start": 0.55, "end": 1.1}, {"fps": 5}, [5, 7, 9]),
        ({}, {"temporal_patch": 8}, [k * 20 // 24 for k in range(24)]),
        ({}, {"temporal_patch": 8, "max_frames": 20}, [k * 20 // 16 for k in range(16)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_the_right_frames_are_taken(tmp_path: Path, suffix: str, entry: dict, options: dict, numbers) -> None:
    item = only_item(write_clip(tmp_path / f"a{suffix}", 20), **entry)
    settings = MediaOptions(**options)
    sample = load_item(item, settings)
    assert sample.grid == sample_grid(item, settings)
    assert frame_numbers(sample, settings) == list(numbers)


@pytest.mark.parametrize("fps", [12, 24, 25, 30, 50])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".webm", ".avi"])
def test_the_native_rate_takes_every_frame_once(tmp_path: Path, suffix: str, fps: int) -> None:
    # Matroska rounds times to milliseconds; no frame may be doubled or missed for that.
    item = only_item(write_clip(tmp_path / f"a{suffix}", 26, fps=fps))
    options = MediaOptions(fps=fps)
    assert sample_grid(item, options).frames == 26
    assert frame_numbers(load_item(item, options), options) == list(range(26))


def test_variable_frame_rate(tmp_path: Path) -> None:
    times = [0, 40, 80, 500, 520, 1500]
    item = only_item(write_clip(tmp_path / "a.mkv", 6, times_ms=times), end=2.0)
    options = MediaOptions(fps=10)
    sample = load_item(item, options)
    assert sample.grid == sample_grid(item, options)
    shown = [max(k for k, time in enumerate(times) if time <= 100 * n) for n in range(sample.grid.frames)]
    assert frame_numbers(sample, options) == shown
    assert shown[5] == 3 and shown[6] == shown[14] == 4 and shown[15] == 5
    assert load_item(item, MediaOptions()).grid.frames == 6


@pytest.mark.parametrize("size", [(34, 50), (16, 16), (130, 22)])
@pytest.mark.parametrize("options", [MediaOptions(), MediaOptions(patch=8, max_pixels=600, fps=4)], ids=str)
def test_clip_grids_are_as_predicted(tmp_path: Path, size: tuple[int, int], options: MediaOptions) -> None:
    item = only_item(write_clip(tmp_path / "a.mp4", 7, size=size, rotation=90, pixel_aspect=Fraction(4, 3)))
    sample = load_item(item, options)
    assert sample.grid == sample_grid(item, options)
    assert sample.patches.shape == (sample.grid.num_tokens, 3 * options.patch**2)


def test_rotated_clip_is_upright(tmp_path: Path) -> None:
    item = only_item(write_clip(tmp_path / "a.mp4", 3, rotation=90))
    options = MediaOptions()
    video = unpatchify(load_item(item, options).patches, sample_grid(item, options), options)
    assert video.shape == (3, 3, 64, 48)
    # A quarter turn counterclockwise takes the white top to the left.
    assert video[:, :, :, :8].mean() > 0.9 and video[:, :, :, -8:].mean() < -0.7


def test_one_frame_clip(tmp_path: Path) -> None:
    item = only_item(write_clip(tmp_path / "a.mp4", 1))
    for options, frames in ((MediaOptions(), 1), (MediaOptions(fps=24), 3), (MediaOptions(temporal_patch=2), 2)):
        assert frame_numbers(load_item(item, options), options) == [0] * frames


@pytest.mark.parametrize("settings", [{}, {"fps": 10}, {"fps": 5}, {"temporal_patch": 4}])
def test_a_broken_tail_gives_the_part_that_decodes(tmp_path: Path, settings: dict) -> None:
    path = write_clip(tmp_path / "a.mp4", 30, noise=True)
    data = path.read_bytes()
    kept = len(data) * 6 // 10
    path.write_bytes(data[:kept] + b"\xff" * (len(data) - kept))
    item = only_item(path)
    assert item.num_frames == 30  # the index knows of them all
    (tmp_path / "whole").mkdir()
    intact = only_item(write_clip(tmp_path / "whole" / "a.mp4", 30, noise=True))
    options = MediaOptions(**settings)
    with pytest.warns(KnapFormerWarning, match="of 30 frames decode"):
        sample = load_item(item, options)
    planned = sample_grid(item, options)
    assert 0 < sample.grid.frames < planned.frames and sample.grid[1:] == planned[1:]
    points = {"fps": range(0, 30, 30 // planned.frames), "temporal_patch": [k * 30 // 32 for k in range(32)]}
    whole = frame_numbers(load_item(intact, options), options)
    assert whole == list(points.get(next(iter(settings), ""), range(30)))
    numbers = frame_numbers(sample, options)
    lost = next((k for k, (a, b) in enumerate(zip(numbers, whole, strict=False)) if a != b), len(numbers))
    assert lost > 5 and numbers[lost:] == [numbers[lost - 1]] * (len(numbers) - lost)  # then the last frame stands
    assert len(numbers) - lost < options.temporal_patch


def test_a_file_cut_short_is_planned_by_what_is_there(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", 30, noise=True)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    item = only_item(path)
    assert 10 < item.num_frames < 25
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KnapFormerWarning)  # the last packet is cut
        sample = load_item(item, MediaOptions())
    assert item.num_frames - 4 <= sample.grid.frames <= item.num_frames  # it takes along those that refer to it
    assert frame_numbers(sample, MediaOptions())[:-3] == list(range(sample.grid.frames - 3))


def test_clip_without_a_frame(tmp_path: Path) -> None:
    item = only_item(write_clip(tmp_path / "a.mp4", 5))
    (tmp_path / "a.mp4").write_bytes(b"gone")
    with pytest.raises(DataError, match=r"a\.mp4.*does not decode"):
        load_item(item, MediaOptions())
    write_clip(tmp_path / "a.mp4", 5)
    late = Item(id=0, path=item.path, kind="video", caption="", width=64, height=48, start=0.5, end=0.0, source="s")
    with pytest.raises(DataError, match="no frame of its span decodes"):
        load_item(late, MediaOptions())


# ---- encoder ----


def averaging(video: torch.Tensor) -> torch.Tensor:
    """A stand-in for a causal VAE: 8 x 8 means, the first frame alone and then groups of 4, 5 channels."""
    _, frames, height, width = video.shape
    means = video.reshape(3, frames, height // 8, 8, width // 8, 8).mean((3, 5))
    groups = [means[:, :1], *means[:, 1:].split(4, dim=1)]
    latents = torch.stack([group.mean(1) for group in groups], dim=1)
    return torch.cat([latents, latents[:2]])


def test_encoder(tmp_path: Path) -> None:
    item = only_item(write_clip(tmp_path / "a.mp4", 14))
    options = MediaOptions(patch=2, vae_spatial=8, vae_temporal=4)
    sample = load_item(item, options, encoder=averaging)
    assert sample.grid == sample_grid(item, options) == (4, 3, 4)
    assert sample.patches.shape == (48, 5 * 4)
    latents = unpatchify(sample.patches, sample.grid, options)
    assert latents.shape == (5, 4, 6, 8)
    pixels = MediaOptions()
    assert torch.allclose(latents, averaging(unpatchify(load_item(item, pixels).patches, (14, 3, 4), pixels)[:, :13]))


def test_encoder_must_match_the_options(tmp_path: Path) -> None:
    item = only_item(write_clip(tmp_path / "a.mp4", 13))
    with pytest.raises(SpecError, match=r"announce \(C, 4, 12, 16\)"):
        load_item(item, MediaOptions(patch=2, vae_spatial=4, vae_temporal=4), encoder=averaging)
    with pytest.raises(SpecError, match="no encoder was given"):
        load_item(item, MediaOptions(patch=2, vae_spatial=8))
