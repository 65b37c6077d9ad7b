"""A calibration run: every pack again and again in random order for as long as there is time, then times and laws.

Rounds in random order, rather than one pack after the other, spread a machine's moods over all packs alike. Short packs
are run several times a round. A pack's time is the median of the faster half of its runs, since what disturbs a run
only adds time; its interval is the middle 95 % of those of resampled runs (bootstrap).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from knapformer.attention import KERNELS, choose_kernel
from knapformer.data.profile import PHASES, MeasuredPack, Profile, Timing
from knapformer.report import environment
from knapformer.tools.calibrate.fitting import additivity, fit_laws
from knapformer.tools.calibrate.flops import count_flops
from knapformer.tools.calibrate.layers import Layers
from knapformer.tools.calibrate.packs import Pack, choose_packs
from knapformer.tools.calibrate.timing import Clock, time_pack

FASTER_HALF = 0.25
"""Quantile of the runs that is the median of their faster half."""

Runs = list[tuple[dict[str, float], dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to measure.

    Attributes:
        seconds: no round begins that would end after this time [s]; warm-up is not counted.
        min_rounds, max_rounds: however long they take.
        repeats: most runs of a pack in a round; short packs are run again until they had a 500th of the time.
    """

    seconds: float = 90.0
    min_rounds: int = 3
    max_rounds: int = 200
    repeats: int = 8


def calibrate(
    layers: Layers,
    *,
    lengths: tuple[int, int] = (64, 4096),
    kernel: str | None = None,
    budget: Budget | None = None,
    name: str = "profile",
    progress: Callable[[float], None] = lambda share: None,
) -> Profile:
    """Measure layers and fit their costs.

    Args:
        layers: to measure.
        lengths: shortest and longest sequence [tokens].
        kernel: attention kernel; default as in training.
        budget: how long to measure.
        name: of the profile.
        progress: told now and then which share of the time has gone.

    Raises:
        CalibrationError: if measurements determine no prices.
    """
    kernel = kernel_name(layers, kernel)
    packs = choose_packs(*lengths)
    runs = _measure(layers, packs, kernel, budget or Budget(), progress)
    samples = [_sample(pack, of_pack) for pack, of_pack in zip(packs, runs, strict=True)]
    flops = count_flops(layers)
    fits, recommended = fit_laws(samples, layers.shape.num_heads, flops)
    return Profile(
        name=name,
        device=describe_device(layers.device),
        versions=environment()["versions"],
        kernel=kernel,
        shape=layers.shape,
        flops=flops,
        fits=fits,
        recommended=recommended,
        additivity=additivity(samples, dict(fits["terms"].phases)),
        samples=tuple(samples),
    )


def describe_device(device: torch.device) -> dict[str, Any]:
    """Device of a profile, in words."""
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    return {"type": device.type, "name": environment()["processor"], "threads": torch.get_num_threads()}


def kernel_name(layers: Layers, kernel: str | None) -> str:
    """Name of the kernel that attention runs by. Raises as `choose_kernel` does."""
    chosen = choose_kernel(kernel, layers.device, layers.dtype, head_dim=layers.shape.head_dim)
    return next(name for name, registered in KERNELS.items() if registered.kernel is chosen)


def _measure(
    layers: Layers, packs: list[Pack], kernel: str | None, budget: Budget, progress: Callable[[float], None]
) -> list[Runs]:
    """Runs of each pack."""
    clock = Clock(layers.device)
    layouts = [layers.layout(pack.lengths, kernel) for pack in packs]
    typical = []
    for layout in layouts:  # warm-up: kernels are chosen and buffers allocated
        typical.append(sum(time_pack(layers, layout, clock)[0].values()) * layers.shape.num_layers)
    runs: list[Runs] = [[] for _ in packs]
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for number in range(budget.max_rounds):
        gone = (time.perf_counter() - start) / budget.seconds
        if number >= budget.min_rounds and gone * (number + 1) / number > 1:  # another round would not be done in time
            break
        progress(min(gone, 1.0))
        for i in rng.permutation(len(packs)):
            repeats = int(np.clip(budget.seconds / 500 / typical[i], 1, budget.repeats))
            runs[i] += [time_pack(layers, layouts[i], clock) for _ in range(repeats)]
    return runs


def _sample(pack: Pack, runs: Runs) -> MeasuredPack:
    layer, attention = ({p: _timing([run[k][p] for run in runs]) for p in PHASES} for k in (0, 1))
    return MeasuredPack(pack.lengths, pack.held_out, len(runs), layer, attention)


def _timing(runs: list[float]) -> Timing:
    """Of a phase's runs [s]."""
    seconds = np.array(runs)
    picks = np.random.default_rng(0).integers(0, len(seconds), (400, len(seconds)))
    low, high = np.quantile(np.quantile(seconds[picks], FASTER_HALF, axis=1), [0.025, 0.975])
    return Timing(float(np.quantile(seconds, FASTER_HALF)), float(low), float(high))
