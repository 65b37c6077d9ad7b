from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knapformer.data.images import image_size, read_image, resize_pixels
from knapformer.errors import DataError
from tests.data.files import picture


def pixels(path: Path) -> np.ndarray:
    return np.asarray(read_image(path))


def test_rgb_is_exact(tmp_path: Path) -> None:
    array = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    Image.fromarray(array).save(tmp_path / "a.png")
    assert image_size(tmp_path / "a.png") == (7, 5, False)
    assert np.array_equal(pixels(tmp_path / "a.png"), array)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int) -> None:
    upright = picture(48, 32)
    upright[:, :12] = 0  # dark left, white top: tells all eight orientations apart
    # What a camera would store, so that the named orientation shows it upright.
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(undo[orientation](upright))
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    assert image_size(tmp_path / "a.png")[:2] == (48, 32)
    assert np.array_equal(pixels(tmp_path / "a.png"), upright)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "I;16"])
def test_modes(tmp_path: Path, mode: str) -> None:
    grey = np.zeros((6, 8), dtype=np.uint8)
    grey[:3] = 255
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 257)
    else:
        image = Image.fromarray(grey).convert("RGBA" if mode == "RGBA" else mode)
    image.save(tmp_path / "a.png")
    assert pixels(tmp_path / "a.png").shape == (6, 8, 3)
    assert pixels(tmp_path / "a.png")[..., 1].tolist() == grey.tolist()


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    assert np.abs(pixels(tmp_path / "a.png")[..., 0] - ramp / 257).max() <= 0.5


def test_transparency_shows_white(tmp_path: Path) -> None:
    array = np.zeros((4, 4, 4), dtype=np.uint8)
    array[:2, :, 3] = 255
    Image.fromarray(array).save(tmp_path / "a.png")
    assert pixels(tmp_path / "a.png")[..., 0].tolist() == [[0] * 4] * 2 + [[255] * 4] * 2
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.save(tmp_path / "p.png", transparency=1)
    assert pixels(tmp_path / "p.png").tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_cmyk_jpeg(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), (200, 40, 40)).convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    assert np.abs(pixels(tmp_path / "a.jpg").astype(int) - [200, 40, 40]).max() < 8


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".bmp", ".gif"])
def test_formats(tmp_path: Path, suffix: str) -> None:
    Image.fromarray(picture(40, 24)).save(tmp_path / f"a{suffix}")
    assert image_size(tmp_path / f"a{suffix}") == (40, 24, False)
    got = pixels(tmp_path / f"a{suffix}").astype(int)
    assert np.abs(got[:4] - 255).max() < 30 and np.abs(got[-8:] - 60).max() < 30


def test_animations_are_told_apart(tmp_path: Path) -> None:
    frames = [Image.fromarray(picture(16, 16, level)) for level in (10, 90, 200)]
    for name in ("a.gif", "a.png", "a.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=100)
        assert image_size(tmp_path / name) == (16, 16, True)


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(DataError, match="cannot be opened as an image"):
        image_size(tmp_path / "text.png")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for name in ("a.jpg", "b.png"):
        noise.save(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(DataError, match=rf"{name}.*does not decode"):
            read_image(tmp_path / name)
    assert image_size(tmp_path / "a.jpg")[:2] == (64, 64)  # the header is whole
    with pytest.raises(DataError, match="truncated"):
        image_size(tmp_path / "b.png")


def test_resize() -> None:
    array = picture(64, 64)
    assert np.array_equal(resize_pixels(array, (64, 64)), array)
    small = resize_pixels(array, (16, 32))
    assert small.shape == (32, 16, 3)
    assert (small[:7] > 250).all() and (np.abs(small[9:].astype(int) - 60) < 5).all()
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    assert resize_pixels(noise, (16, 16)).std() < 12  # averaged over the area, not picked (which keeps 74)
