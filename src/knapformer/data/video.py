"""Clips by PyAV: size and timing without decoding them, and the frames one wants in display orientation. No torch.

A frame is *shown* from its own time until that of the next one, so rates may vary. Of a span [start, end) the shown
frames are the one on screen at `start` and all that follow before `end`. Times count from the start of the video
stream. Packets that do not decode are passed over; whoever asks for frames gets those that do.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knapformer.data.item import TIME_TOLERANCE
from knapformer.errors import BackendUnavailableError, DataError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

_SEEK_FROM = 2.0  # seconds; below that, decoding from the start costs less than it could go wrong


@dataclass(frozen=True, slots=True)
class ClipInfo:
    """What a clip's span holds: display size [pixels], shown frames, and duration [s]."""

    width: int
    height: int
    num_frames: int
    duration: float


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise BackendUnavailableError(
            "reading clips needs PyAV, which is not installed; install it with: pip install 'knapformer[media]'"
        ) from error
    return av


def probe_clip(path: Path, *, start: float = 0.0, end: float | None = None) -> ClipInfo:
    """Size, shown frames and duration of a span; only the first frame is decoded. Raises `DataError`."""
    av = _av()
    try:
        with av.open(str(path)) as container:
            stream = _video_stream(container)
            first = next(_decoded(container, stream), None)
            pixel_aspect = float(stream.sample_aspect_ratio or 1)
        if first is None:
            raise DataError("cannot be read as a clip: no frame decodes")
        with av.open(str(path)) as container:
            times, stop = _packet_times(container, _video_stream(container))
    except (OSError, av.FFmpegError) as error:
        raise DataError(f"cannot be read as a clip: {error}") from error
    stop = stop if end is None else min(end, stop)
    if start >= stop - TIME_TOLERANCE:
        raise DataError(
            f"has no frame in the span from {start:g} s on: the clip ends after {stop:.3f} s; correct start and end"
        )
    shown = int(np.count_nonzero((times > start + TIME_TOLERANCE) & (times < stop - TIME_TOLERANCE)))
    shown += bool((times <= start + TIME_TOLERANCE).any())
    if shown == 0:
        raise DataError(f"has no frame in the span {start:g} to {stop:g} s; correct start and end")
    width, height = _display_size(first, pixel_aspect)
    return ClipInfo(width, height, shown, float(stop - start))


def shown_frames(path: Path, *, start: float = 0.0, end: float | None = None) -> Iterator[tuple[float, "VideoFrame"]]:
    """The shown frames of a span that decode, in order, with their times [s]. Raises `DataError` if none can."""
    av = _av()
    try:
        with av.open(str(path)) as container:
            stream = _video_stream(container)
            stream.thread_type = "AUTO"
            frames = _timed(container, stream, seek_to=start if start >= _SEEK_FROM else None)
            yield from _within(frames, start, math.inf if end is None else end)
    except (OSError, DataError, av.FFmpegError) as error:
        raise DataError(f"clip {str(path)!r} does not decode: {error}; replace or remove the file") from error


def _within(
    frames: Iterator[tuple[float, "VideoFrame"]], start: float, end: float
) -> Iterator[tuple[float, "VideoFrame"]]:
    on_screen: tuple[float, VideoFrame] | None = None
    for time, frame in frames:
        if time >= end - TIME_TOLERANCE:
            break
        if time <= start + TIME_TOLERANCE:
            on_screen = (time, frame)
            continue
        if on_screen is not None:
            yield on_screen
            on_screen = None
        yield time, frame
    if on_screen is not None:
        yield on_screen


def _video_stream(container: "InputContainer") -> "VideoStream":
    if not container.streams.video:
        raise DataError("cannot be read as a clip: it has no video stream")
    return container.streams.video[0]


def _origin(stream: "VideoStream") -> int:
    return stream.start_time or 0


def _seconds_per_frame(stream: "VideoStream") -> float:
    return float(1 / (stream.average_rate or stream.guessed_rate or 25))


def _packet_times(container: "InputContainer", stream: "VideoStream") -> tuple[NDArray[np.float64], float]:
    """Show times of all packets, sorted, and when the last one ends."""
    spans: list[tuple[float, float]] = []
    base = float(stream.time_base or 1)
    usual = _seconds_per_frame(stream)
    try:
        for packet in container.demux(stream):
            if not packet.size or packet.is_discard:
                continue
            stamp = packet.pts if packet.pts is not None else packet.dts
            time = len(spans) * usual if stamp is None else (stamp - _origin(stream)) * base
            spans.append((time, (packet.duration or 0) * base or usual))
    except _av().FFmpegError:
        if not spans:
            raise
    spans.sort()
    return np.array([time for time, _ in spans]), spans[-1][0] + spans[-1][1] if spans else 0.0


def _decoded(container: "InputContainer", stream: "VideoStream") -> Iterator["VideoFrame"]:
    """Frames in display order; what does not decode is left out."""
    av = _av()
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError:
            packet = None  # the file ends here, broken; what the decoder still holds comes out below
        try:
            frames = stream.decode(packet)
        except av.EOFError:
            return
        except av.FFmpegError:
            frames = []
        yield from (frame for frame in frames if not frame.is_corrupt)
        if packet is None or not packet.size:
            return


def _timed(
    container: "InputContainer", stream: "VideoStream", *, seek_to: float | None
) -> Iterator[tuple[float, "VideoFrame"]]:
    base = float(stream.time_base or 1)
    if seek_to is not None:
        container.seek(round(seek_to / base) + _origin(stream), stream=stream)
    usual = _seconds_per_frame(stream)
    for number, frame in enumerate(_decoded(container, stream)):
        time = number * usual if frame.pts is None else (frame.pts - _origin(stream)) * base
        if number == 0 and seek_to is not None and time > seek_to + TIME_TOLERANCE:
            container.seek(_origin(stream), stream=stream)  # a wrong index led past the span: read from the start
            yield from _timed(container, stream, seek_to=None)
            return
        yield time, frame


def _quarter_turns(frame: "VideoFrame") -> int:
    return round(frame.rotation / 90) % 4  # counterclockwise


def _display_size(frame: "VideoFrame", pixel_aspect: float) -> tuple[int, int]:
    """Width and height as displayed: square pixels (the coarser side is stretched), then the display rotation."""
    width, height = round(frame.width * max(1.0, pixel_aspect)), round(frame.height * max(1.0, 1 / pixel_aspect))
    return (height, width) if _quarter_turns(frame) % 2 else (width, height)


def frame_pixels(frame: "VideoFrame") -> NDArray[np.uint8]:
    """(H, W, 3) RGB pixels in display orientation, before non-square pixels are stretched."""
    return np.rot90(np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8), _quarter_turns(frame))
