"""Still images by Pillow: size from the header, and pixels as 8-bit RGB in display orientation. No torch.

Every mode that the supported file types can have is brought to RGB: palette, grey, 16-bit grey (scaled, not clipped),
CMYK, and transparency (laid over white). The EXIF orientation is applied.
"""

import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from knapformer.errors import BackendUnavailableError, DataError

_EXIF_ORIENTATION = 0x0112
_MOVING = ("GIF", "PNG", "WEBP")  # formats whose further pictures are frames; in MPO (JPEG) they are previews


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise BackendUnavailableError(
            "reading images needs Pillow, which is not installed; install it with: pip install 'knapformer[media]'"
        ) from error
    return PIL


def image_size(path: Path | BinaryIO) -> tuple[int, int, bool]:
    """Width and height as displayed [pixels], and whether the file is an animation. Raises `DataError`.

    Reads the header only, except of a PNG, which may keep its orientation behind the pixels.
    """
    pillow = _pillow()
    try:
        with warnings.catch_warnings(), pillow.Image.open(path) as image:
            warnings.simplefilter("ignore")  # odd metadata is no reason to stop; pixels are checked when loaded
            width, height = image.size
            moving = image.format in _MOVING and getattr(image, "n_frames", 1) > 1
            if image.getexif().get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8):
                width, height = height, width
    except (OSError, ValueError, SyntaxError, pillow.Image.DecompressionBombError) as error:
        raise DataError(f"cannot be opened as an image: {error}") from error
    return width, height, moving


def read_image(path: Path | BinaryIO) -> Any:
    """The picture as a `PIL.Image` in RGB. Raises `DataError` naming the file if it does not decode."""
    pillow = _pillow()
    try:
        with warnings.catch_warnings(), pillow.Image.open(path) as image:
            warnings.simplefilter("ignore")
            image.load()
            return _to_rgb(pillow.ImageOps.exif_transpose(image))
    except (OSError, ValueError, SyntaxError, pillow.Image.DecompressionBombError) as error:
        raise DataError(f"image {str(path)!r} does not decode: {error}; replace or remove the file") from error


def _to_rgb(image: Any) -> Any:
    pillow = _pillow()
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return pillow.Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return pillow.Image.alpha_composite(pillow.Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def resize_pixels(picture: Any, size: tuple[int, int]) -> NDArray[np.uint8]:
    """(H, W, 3) pixels of a `PIL.Image` or an array, resized (bicubic, antialiased) to `size` = (width, height)."""
    image = _pillow().Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    return np.asarray(image if image.size == size else image.resize(size, _pillow().Image.Resampling.BICUBIC))
