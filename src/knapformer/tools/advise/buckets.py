"""Buckets: samples of like length that are batched together, and how many of them a rank takes.

Two kinds: from an Open-Sora bucket config, whose batch sizes somebody tuned by hand, or cut from a histogram at
half-octaves of length, with the batch sizes a careful hand would choose: as much modelled work as a batch of the
heaviest bucket, within the token limit.

    bucket_config = {"144p": {1: (1.0, 48), 16: (1.0, 6)}, "256px": {1: (0.5, 24)}, ...}
                     resolution -> frames -> (probability, batch size)

A config says how a sample falls into buckets, not what the data set holds. Taken here: each number of frames is as
frequent as any other, and all samples are large enough for all resolutions; they try them from the largest down and
stay with the bucket's probability.
"""

import ast
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from knapformer import files
from knapformer.errors import DataError
from knapformer.plan import CostModel
from knapformer.plan.arrays import Int64Array
from knapformer.tools.advise.histogram import Histogram
from knapformer.tools.simulate.presets import ModelShape

_LINES = {"144p": (256, 144), "240p": (426, 240), "360p": (640, 360), "480p": (854, 480), "720p": (1280, 720),
          "1080p": (1920, 1080), "2k": (2048, 1080), "4k": (3840, 2160)}  # fmt: skip
_EXPECTED = "expected {resolution: {frames: (probability, batch size)}}"
_WEIGHT = 10**6  # samples that stand for all of one number of frames


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """Consecutive entries of a histogram that are batched together.

    Attributes:
        first: (B,) samples before each bucket.
        count: (B,) samples of each.
        longest: (B,) longest sequence of each [tokens].
        batch: (B,) samples a rank takes of it at once.
    """

    first: Int64Array
    count: Int64Array
    longest: Int64Array
    batch: Int64Array

    @classmethod
    def cut(cls, histogram: Histogram, cost: CostModel, batch: int, max_tokens: int) -> "Buckets":
        """Half-octaves of length; `batch` is for the heaviest, others as by hand (see the module)."""
        octave = np.floor(2 * np.log2(histogram.length)).astype(np.int64)
        start = np.flatnonzero(np.diff(octave, prepend=-1))
        stop = np.append(start[1:], len(octave))
        count = np.add.reduceat(histogram.count, start)
        work = np.add.reduceat(histogram.work(cost) * histogram.count, start) / count
        longest = histogram.length[stop - 1]
        batches = np.maximum(1, np.floor(np.minimum(batch * work.max() / work, max_tokens / longest)))
        return cls(histogram.cumulative[stop - 1] - count, count, longest, batches.astype(np.int64))

    def draw(self, fraction: np.ndarray) -> Int64Array:
        """Bucket of a batch: each as often as it has batches."""
        batches = np.cumsum(self.count / self.batch)
        return np.minimum(np.searchsorted(batches, fraction * batches[-1], side="right"), len(batches) - 1)

    def dropped(self, ranks: int) -> float:
        """Share of samples left over at the end of an epoch, when `ranks` ranks take full batches together."""
        return float((self.count % (self.batch * ranks)).sum() / self.count.sum())


def read_buckets(path: Path, model: ModelShape) -> tuple[Histogram, Buckets]:
    """An Open-Sora bucket config: a Python file that assigns `bucket_config`, or the same as JSON. Nothing is run.

    Raises:
        DataError: naming file and bucket, if it cannot be read as one.
    """
    config = read_config(path)
    length, weight, batch = [], [], []
    for frames in sorted({f for resolution in config for f in resolution.buckets}):
        left = 1.0  # of the samples of this number of frames, those not yet in a bucket
        for width, height, table in config:
            probability, size = table.get(frames, (0.0, 1))
            if probability > 0 and left > 0:
                length.append(model.sequence_length(width, height, frames))
                weight.append(max(1, round(left * probability * _WEIGHT)))
                batch.append(size)
            left *= 1 - probability
    if not length:
        raise DataError(f"{path}: no bucket has a probability above 0")
    lengths, weights, batches = (np.array(x, dtype=np.int64) for x in (length, weight, batch))
    text = np.full_like(lengths, model.text_length if model.text == "joint" else 0)
    histogram = Histogram.of(lengths, text, weights)
    # Buckets of one length are one here, with the smaller of their batches.
    least = np.array([batches[lengths == n].min() for n in histogram.length])
    return histogram, Buckets(histogram.cumulative - histogram.count, histogram.count, histogram.length, least)


class Resolution(NamedTuple):
    """The buckets of one resolution: frames -> probability and batch size."""

    width: int
    height: int
    buckets: dict[int, tuple[float, int]]


def read_config(path: Path) -> list[Resolution]:
    """The resolutions of an Open-Sora config, the largest first. Raises `DataError` as `read_buckets` does."""
    config = _config(path)
    config = config.get("bucket_config", config)
    if not isinstance(config, dict) or not config:
        raise DataError(f"{path}: has no bucket config; {_EXPECTED}")
    found: list[Resolution] = []
    for name, table in config.items():
        if str(name).startswith("_"):  # Open-Sora 2 keeps settings beside the resolutions
            continue
        where = f"{path}: bucket {name!r}"
        entries = files.convert(table, dict[int, tuple[float | tuple[float, ...], int | None]], where)
        buckets = {n: _checked(f"{where}, {n} frames", n, *entry) for n, entry in entries.items()}
        found.append(Resolution(*_size(path, str(name)), buckets))
    return sorted(found, key=lambda one: -one.width * one.height)


def _config(path: Path) -> dict[Any, Any]:
    if path.suffix == ".json":
        return files.read_json(path, dict[str, Any])
    try:
        found = _assigned(files.read_bytes(path).decode(), "bucket_config")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{path}: cannot be read as a bucket config: {error}; {_EXPECTED}") from error
    return files.convert(found, dict, str(path))


def _assigned(text: str, name: str) -> Any:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    raise ValueError(f"it does not assign {name!r}")


def _size(path: Path, name: str) -> tuple[int, int]:
    if name.lower() in _LINES:
        return _LINES[name.lower()]
    if match := re.fullmatch(r"([0-9]+)(?:px)?", name):
        return int(match[1]), int(match[1])
    if match := re.fullmatch(r"([0-9]+)x([0-9]+)", name):
        return int(match[1]), int(match[2])
    raise DataError(
        f"{path}: unknown resolution {name!r}; known are {', '.join(_LINES)}, sides such as '256px', and sizes such as "
        "'640x360'"
    )


def _checked(where: str, frames: int, probability: float | tuple[float, ...], batch: int | None) -> tuple[float, int]:
    """Probability and batch size; a pair of probabilities (frames, resolution) counts as their product."""
    pair = probability if isinstance(probability, tuple) else (probability,)
    product = math.prod(pair)
    size = 1 if product == 0 else batch or 0  # a bucket that nothing goes to may have no batch size
    if frames < 1 or not all(0 <= share <= 1 for share in pair) or size < 1:
        raise DataError(
            f"{where} is ({probability}, {batch}); expected frames of 1 or more, a probability from 0 to 1, and a "
            "batch of 1 or more"
        )
    return product, size
