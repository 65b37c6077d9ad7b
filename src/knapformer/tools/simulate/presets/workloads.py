"""Workloads by name beside the recorded ones: Open-Sora 2's buckets, and images of real sizes beside long clips.

    open-sora-2-stage1, -stage2     every rank draws a bucket and loads one batch of it
    mix-v45-10s                     images, and clips of 10 s that hold 45 % of the tokens on average

Numbers and sources: `workloads.toml`. Draws are by address (`knapformer.data.draws`): a longer trace or a larger world
begins with the shorter or smaller one. Which model's encoder and text they assume is in the trace's `model`.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from knapformer import files
from knapformer.data import Trace, TraceStep, load_workload
from knapformer.data.draws import fractions
from knapformer.errors import SpecError
from knapformer.tools.simulate.presets.models import ModelShape, model_preset

_MIX = re.compile(r"mix-v([0-9]{1,2})-([0-9]+(?:\.[0-9]+)?)s")
MIXES = ("mix-v35-10s", "mix-v45-10s", "mix-v50-15s", "mix-v60-15s")
"""The mixes that are listed; any share from 1 to 99 % and any duration may be named."""

ASPECT_SPREAD = 0.04


@dataclass(frozen=True, slots=True)
class _Buckets:
    """Each of `buckets`: side, first and last number of frames, step of frames, batch size, weight of each."""

    model: str
    buckets: list[tuple[int, int, int, int, int, float]]


@dataclass(frozen=True, slots=True)
class _Mix:
    """Images at every scale beside clips, each as (width, height, count)."""

    model: str
    fps: int
    images_per_rank: int
    image_scales: list[float]
    clips: list[tuple[int, int, int]]
    images: list[tuple[int, int, int]]


@cache
def _described() -> tuple[dict[str, _Buckets], _Mix]:
    data = files.read_toml(Path(__file__).with_name("workloads.toml"), dict[str, Any])
    mix = files.convert(data.pop("mix"), _Mix, "workloads.toml, mix")
    return files.convert(data, dict[str, _Buckets], "workloads.toml"), mix


def workload_names() -> tuple[str, ...]:
    """Names of the workloads made here."""
    return (*_described()[0], *MIXES)


def named_workload(text: str, *, world_size: int | None = None, num_steps: int | None = None, seed: int = 0) -> Trace:
    """A workload of this module, or whatever `knapformer.data.load_workload` makes of the text."""
    ranks, steps = 32 if world_size is None else world_size, 20 if num_steps is None else num_steps
    if min(ranks, steps) < 1:
        raise SpecError(f"workload {text!r} for {ranks} ranks and {steps} steps; both must be at least 1")
    if match := _MIX.fullmatch(text):
        share, duration = int(match[1]) / 100, float(match[2])
        if not (0 < share < 1 and duration > 0):
            raise SpecError(f"workload {text!r}: the share of video must be from 1 to 99 % and the duration above 0 s")
        return _mix(text, share, duration, ranks, steps, seed)
    if text in _described()[0]:
        return _buckets(text, ranks, steps, seed)
    try:
        return load_workload(text, world_size=world_size, num_steps=num_steps, seed=seed)
    except SpecError as error:
        if "unknown workload" not in str(error):
            raise
        raise SpecError(f"{error}. For simulation also: {', '.join(workload_names())}") from None


def _buckets(name: str, world_size: int, num_steps: int, seed: int) -> Trace:
    entry = _described()[0][name]
    model = model_preset(entry.model)
    tokens, batch, weight = [], [], []
    for side, first, last, step, size, each in entry.buckets:
        for frames in range(first, last + 1, step):
            tokens.append(model.visual_tokens(side, side, frames))
            batch.append(size)
            weight.append(each)
    edges = np.cumsum(weight) / np.sum(weight)
    steps = []
    for index in range(num_steps):
        drawn = fractions(2 * world_size, seed=seed, stream=name, index=index).reshape(world_size, 2)
        chosen = np.searchsorted(edges, drawn[:, 0], side="right")
        factor = 1 - ASPECT_SPREAD + 2 * ASPECT_SPREAD * drawn[:, 1]
        visual = np.maximum(1, np.array(tokens)[chosen] * factor).astype(np.int64)
        rows = [np.full(batch[c], v + model.text_length, dtype=np.int64) for c, v in zip(chosen, visual, strict=True)]
        steps.append(TraceStep(tuple(rows), tuple(np.full(len(row), model.text_length) for row in rows)))
    return _trace(name, model, steps, world_size, seed)


def _mix(name: str, share: float, duration: float, world_size: int, num_steps: int, seed: int) -> Trace:
    entry = _described()[1]
    model = model_preset(entry.model)
    images, image_weight = _sizes(model, entry.images, entry.image_scales, 1)
    clips, clip_weight = _sizes(model, entry.clips, [1.0], 1 + round(duration * entry.fps))
    count = entry.images_per_rank
    # A rank has `rate` clips on average, so that they hold `share` of the expected tokens.
    rate = share / (1 - share) * count * (images @ image_weight) / (clips @ clip_weight)
    steps = []
    for index in range(num_steps):
        drawn = fractions((count + 2) * world_size, seed=seed, stream="mix", index=index).reshape(world_size, -1)
        of_images = np.searchsorted(np.cumsum(image_weight)[:-1], drawn[:, :count], side="right")
        of_clips = np.searchsorted(np.cumsum(clip_weight)[:-1], drawn[:, count], side="right")
        number = np.floor(rate + drawn[:, -1]).astype(np.int64)  # the whole part always, one more by chance
        rows = [
            np.concatenate([images[i], np.full(n, clips[c])]).astype(np.int64)
            for i, c, n in zip(of_images, of_clips, number, strict=True)
        ]
        steps.append(TraceStep(tuple(rows), tuple(np.zeros_like(row) for row in rows)))
    return _trace(name, model, steps, world_size, seed)


def _sizes(
    model: ModelShape, table: list[tuple[int, int, int]], scales: list[float], frames: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each size at each scale, and how often it is drawn."""
    entries = [(int(w * s), int(h * s), c) for w, h, c in table for s in scales]
    weight = np.array([count for *_, count in entries], dtype=np.float64)
    return np.array([model.visual_tokens(w, h, frames) for w, h, _ in entries]), weight / weight.sum()


def _trace(name: str, model: ModelShape, steps: list[TraceStep], world_size: int, seed: int) -> Trace:
    meta = {"kind": "generated", "model": model.name, "seed": seed, "text": model.text}
    meta |= {"d_model": model.d_model, "heads": model.num_heads, "ranks_per_node": 8}
    return Trace(f"{name}-{world_size}", world_size, tuple(steps), meta)
