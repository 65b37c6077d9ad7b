"""Small pictures and clips made for tests. Frames are recognisable: frame k has grey level `frame_level(k)`, and the
top quarter of each frame is white, so that both order and orientation can be read from the pixels."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray


def frame_level(number: int) -> int:
    return 8 * number + 8


def frame_number(level: float) -> int:
    return round((level - 8) / 8)


def picture(width: int, height: int, level: int = 60) -> NDArray[np.uint8]:
    pixels = np.full((height, width, 3), level, dtype=np.uint8)
    pixels[: height // 4] = 255
    return pixels


def write_clip(
    path: Path,
    num_frames: int = 8,
    *,
    size: tuple[int, int] = (64, 48),
    fps: int = 10,
    times_ms: Sequence[int] | None = None,
    rotation: int | None = None,
    pixel_aspect: Fraction | None = None,
    key_every: int = 4,
    noise: bool = False,
) -> Path:
    """A clip whose codec follows from the suffix; `times_ms` gives it a variable frame rate, `noise` a middle band that
    does not compress, so that most of the file is picture data."""
    codec, pixels = {".webm": ("libvpx-vp9", "yuv420p"), ".avi": ("mpeg4", "yuv420p"), ".gif": ("gif", "gray")}.get(
        path.suffix, ("libx264", "yuv420p")
    )
    options = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        stream.codec_context.gop_size = key_every
        if codec == "mpeg4":
            stream.codec_context.qmin, stream.codec_context.qmax = 1, 1
        if codec == "libx264":
            stream.options = {"crf": "4", "bf": "2"}
        if pixel_aspect is not None:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        if rotation is not None:
            stream.set_display_rotation(rotation)
        if times_ms is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(num_frames):
            image = picture(*size, level=frame_level(number))
            if noise:
                band = image[size[1] // 4 : size[1] * 3 // 4]
                band[:] = np.random.default_rng(number).integers(0, 256, band.shape, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if times_ms is not None:
                frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
