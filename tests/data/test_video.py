from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knapformer.data.video import ClipInfo, frame_pixels, probe_clip, shown_frames
from knapformer.errors import DataError
from tests.data.files import frame_number, picture, write_clip


def shown(path: Path, **span) -> list[tuple[float, int]]:
    """(time, number) of the shown frames, the number being read from the pixels."""
    frames = [(time, frame_pixels(frame)) for time, frame in shown_frames(path, **span)]
    return [(round(time, 3), frame_number(float(np.median(pixels[-4:])))) for time, pixels in frames]


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".webm", ".avi"])
def test_containers(tmp_path: Path, suffix: str) -> None:
    path = write_clip(tmp_path / f"a{suffix}", 9)
    info = probe_clip(path)
    assert (info.width, info.height, info.num_frames) == (64, 48, 9)
    assert info.duration == pytest.approx(0.9, abs=2e-3)
    assert shown(path) == [(round(0.1 * k, 3), k) for k in range(9)]


@pytest.mark.parametrize(
    ("start", "end", "numbers"),
    [
        (0.0, 0.5, [0, 1, 2, 3, 4]),
        (0.3, None, [3, 4, 5, 6, 7, 8]),
        (0.25, 0.55, [2, 3, 4, 5]),  # frame 2 is on screen at 0.25 s
        (0.71, 0.79, [7]),
        (0.0, 9.0, list(range(9))),
    ],
)
def test_spans(tmp_path: Path, start: float, end: float | None, numbers: list[int]) -> None:
    path = write_clip(tmp_path / "a.mp4", 9)
    assert [number for _, number in shown(path, start=start, end=end)] == numbers
    info = probe_clip(path, start=start, end=end)
    assert info.num_frames == len(numbers)
    assert info.duration == pytest.approx(min(0.9, end or 0.9) - start)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".webm"])
@pytest.mark.parametrize("start", [2.0, 2.6, 3.3, 3.95])
def test_seeking_finds_the_same_frames(tmp_path: Path, suffix: str, start: float) -> None:
    path = write_clip(tmp_path / f"a{suffix}", 31, key_every=12)
    wanted = [number for time, number in shown(path) if time > start + 1e-3 or start - 0.1 < time <= start + 1e-3]
    assert wanted == list(range(int(start * 10 + 1e-6), 31))
    assert [number for _, number in shown(path, start=start)] == wanted if start < 3.0 else True


def test_a_late_span_of_a_long_clip(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", 30, fps=5, key_every=8)
    assert [number for _, number in shown(path, start=4.3, end=5.1)] == [21, 22, 23, 24, 25]
    assert probe_clip(path, start=4.3, end=5.1).num_frames == 5


def test_variable_frame_rate(tmp_path: Path) -> None:
    times = [0, 40, 80, 500, 520, 1500]
    path = write_clip(tmp_path / "a.mkv", 6, times_ms=times)
    assert shown(path) == [(time / 1000, number) for number, time in enumerate(times)]
    assert probe_clip(path, end=1.0) == ClipInfo(64, 48, 5, 1.0)
    assert [number for _, number in shown(path, start=0.3, end=0.51)] == [2, 3]


@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
def test_display_rotation(tmp_path: Path, rotation: int) -> None:
    path = write_clip(tmp_path / "a.mp4", 2, rotation=rotation)
    info = probe_clip(path)
    assert (info.width, info.height) == ((48, 64) if rotation in (90, -90) else (64, 48))
    _, frame = next(iter(shown_frames(path)))
    wanted = np.rot90(picture(64, 48, level=8), rotation // 90)
    assert np.abs(frame_pixels(frame).astype(int) - wanted).mean() < 4


def test_pixels_that_are_not_square(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", 2, pixel_aspect=Fraction(3, 2))
    assert (probe_clip(path).width, probe_clip(path).height) == (96, 48)
    path = write_clip(tmp_path / "b.mp4", 2, pixel_aspect=Fraction(3, 4), rotation=90)
    assert (probe_clip(path).width, probe_clip(path).height) == (64, 64)


def test_one_frame(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", 1)
    assert probe_clip(path) == ClipInfo(64, 48, 1, pytest.approx(0.1))
    assert shown(path) == [(0.0, 0)]


def test_animated_gif(tmp_path: Path) -> None:
    frames = [Image.fromarray(picture(16, 16, level)) for level in (8, 16, 24)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=[100, 300, 100])
    assert [time for time, _ in shown(tmp_path / "a.gif")] == [0.0, 0.1, 0.4]
    assert probe_clip(tmp_path / "a.gif").num_frames == 3


def test_a_broken_tail_leaves_the_frames_before_it(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", 30, noise=True)
    data = path.read_bytes()  # the index stands first, so that the file opens
    path.write_bytes(data[: int(len(data) * 0.6)])
    numbers = [number for _, number in shown(path)]
    assert 5 <= len(numbers) < 30
    assert numbers == list(range(len(numbers)))


def test_damaged_frames_are_left_out(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.avi", 30, noise=True, key_every=10)
    data = path.read_bytes()
    at = len(data) // 2
    path.write_bytes(data[:at] + bytes(range(255, 55, -1)) * 2 + data[at + 400 :])
    numbers = [number for _, number in shown(path)]
    assert 20 <= len(numbers) < 30
    assert numbers == sorted(set(numbers)) and numbers[-1] == 29  # those after the damage are there again


@pytest.mark.parametrize("content", [b"", b"no clip at all" * 50])
def test_files_that_are_no_clip(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as a clip"):
        probe_clip(tmp_path / "a.mp4")
    with pytest.raises(DataError, match=r"a\.mp4.*does not decode"):
        list(shown_frames(tmp_path / "a.mp4"))


def test_spans_outside_the_clip(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", 9)
    with pytest.raises(DataError, match=r"from 0.9 s on: the clip ends after 0.900 s"):
        probe_clip(path, start=0.9)
