"""A plan as an animation: blocks leave their home ranks for where they are planned, and tokens return, as GIF or MP4.

    before balancing --route--> planned (the layers run) --reverse route--> back home

Frames are drawn by matplotlib and encoded by Pillow or PyAV; no system package is called.
"""

import io
import os
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np

from knapformer.errors import BackendUnavailableError, DataError
from knapformer.files import write_bytes
from knapformer.report.drawing import new_figure
from knapformer.tools.show.picture import add_blocks, add_legend, frame, rectangles
from knapformer.tools.show.style import THEMES
from knapformer.tools.show.view import PlanView

FRAMES_PER_SECOND = 15
_HOLD, _MOVE = 15, 30  # frames


def animate_plan(view: PlanView, path: str | os.PathLike[str], *, theme: str = "light") -> Path:
    """Write a .gif or .mp4 file.

    Raises:
        DataError: for another ending, or if the file cannot be written.
        BackendUnavailableError: without matplotlib, or without PyAV for MP4.
    """
    target = Path(path)
    encode = {".gif": _gif, ".mp4": _mp4}.get(target.suffix)
    if encode is None:
        raise DataError(f"cannot animate into {str(target)!r}; a name ends in .gif or .mp4")
    return write_bytes(target, encode(frames(view, theme)))


def schedule() -> list[tuple[float, str]]:
    """(progress from home to planned, what happens) of every frame."""
    ease = [t * t * (3 - 2 * t) for t in (np.arange(1, _MOVE) / _MOVE).tolist()]
    return [
        *[(0.0, "before balancing")] * _HOLD,
        *[(t, "route") for t in ease],
        *[(1.0, "planned: layers run")] * (2 * _HOLD),
        *[(1 - t, "reverse route") for t in ease],
        *[(0.0, "outputs back home")] * _HOLD,
    ]


def frames(view: PlanView, theme: str) -> Iterator[np.ndarray]:
    """(height, width, 3) pictures of 8 bits; sides are even, as video wants them."""
    colours = THEMES[theme]
    figure = new_figure(min(14.0, 8.0 + 0.03 * view.world_size), 4.5)
    figure.set_facecolor(colours.background)
    axes = figure.subplots()
    frame(axes, view, colours, max(view.top(home=True), view.top(home=False)) * 1.08)
    axes.set_xlabel("rank", color=colours.ink)
    axes.spines[["top", "right"]].set_visible(False)
    blocks = add_blocks(axes, view, colours, rectangles(view, 0.0))
    add_legend(axes, view, colours)
    figure.suptitle(view.title, color=colours.ink)
    for progress, phase in schedule():
        blocks.set_verts(rectangles(view, progress))
        metrics = view.after if progress == 1.0 else view.before
        load = f", slowest rank {metrics.time_imbalance:.3f} x the mean" if progress in (0.0, 1.0) else ""
        axes.set_title(f"{phase}{load}", loc="left", color=colours.ink, fontsize=10)
        figure.canvas.draw()
        picture = np.asarray(figure.canvas.buffer_rgba())[..., :3]
        yield np.ascontiguousarray(picture[: len(picture) // 2 * 2, : picture.shape[1] // 2 * 2])


def _gif(pictures: Iterator[np.ndarray]) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise BackendUnavailableError("a GIF needs Pillow; install it with: pip install 'knapformer[media]'") from error
    images = [Image.fromarray(picture) for picture in pictures]
    palette = images[len(images) // 2].quantize(255)  # one palette for all, so that still parts do not flicker
    first, *rest = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=round(1000 / FRAMES_PER_SECOND), loop=0)
    return buffer.getvalue()


def _mp4(pictures: Iterator[np.ndarray]) -> bytes:
    try:
        import av
    except ImportError as error:
        raise BackendUnavailableError("an MP4 needs PyAV; install it with: pip install 'knapformer[media]'") from error
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=Fraction(FRAMES_PER_SECOND))
        stream.pix_fmt = "yuv420p"
        first = next(pictures)
        stream.height, stream.width = first.shape[:2]
        for picture in chain([first], pictures):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
