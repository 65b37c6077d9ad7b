"""Two runs of the same batches side by side: the table and the figure of the demo.

The measured imbalance is max/mean over ranks of busy time (time spent computing, not waiting for others); the ideal
speed-up is what remains if the slowest rank's busy time fell to the mean.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from knapformer.errors import DataError
from knapformer.report.drawing import AFTER, BEFORE, new_figure, save
from knapformer.report.records import RunRecord


@dataclass(frozen=True, slots=True)
class Comparison:
    """Figures of an unbalanced and a balanced run.

    Attributes:
        step_seconds: run -> median step time [s].
        tokens_per_second: run -> tokens of a step over median step time.
        measured_imbalance, modelled_imbalance: run -> mean over steps of max/mean over ranks.
        speedup: median over steps of unbalanced over balanced step time.
        ideal_speedup: mean over steps of unbalanced over balanced modelled makespan if balance were perfect.
        largest_loss_difference: over all steps, relative.
        steps: steps compared, warm-up left out of the times.
    """

    step_seconds: Mapping[str, float]
    tokens_per_second: Mapping[str, float]
    measured_imbalance: Mapping[str, float]
    modelled_imbalance: Mapping[str, float]
    speedup: float
    ideal_speedup: float
    largest_loss_difference: float
    steps: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(before: RunRecord, after: RunRecord, *, warmup: int = 1) -> Comparison:
    """Compare two runs step by step.

    Raises:
        DataError: if they have different numbers of steps, or too few.
    """
    if len(before.steps) != len(after.steps) or len(before.steps) <= warmup:
        raise DataError(
            f"runs {before.name!r} and {after.name!r} have {len(before.steps)} and {len(after.steps)} steps; "
            f"expected the same number, above the {warmup} warm-up steps"
        )
    if before.name == after.name:
        raise DataError(f"both runs are named {before.name!r}; give the runs of a comparison different names")
    runs = {run.name: run for run in (before, after)}
    timed = {name: run.column("seconds")[warmup:] for name, run in runs.items()}

    def mean_of(column: str) -> dict[str, float]:
        return {name: fmean(run.column(column)[warmup:]) for name, run in runs.items()}

    losses = zip(before.column("loss"), after.column("loss"), strict=True)
    ratios = [a / b for a, b in zip(timed[before.name], timed[after.name], strict=True)]
    seconds = {name: median(values) for name, values in timed.items()}
    modelled = mean_of("modelled_imbalance")
    return Comparison(
        step_seconds=seconds,
        tokens_per_second={name: fmean(run.column("tokens")[warmup:]) / seconds[name] for name, run in runs.items()},
        measured_imbalance=mean_of("measured_imbalance"),
        modelled_imbalance=modelled,
        speedup=median(ratios),
        ideal_speedup=modelled[before.name],
        largest_loss_difference=max(abs(a - b) / abs(a) if a != b else 0.0 for a, b in losses),
        steps=len(before.steps),
    )


def draw_comparison(before: RunRecord, after: RunRecord, path: str | os.PathLike[str], *, warmup: int = 1) -> Path:
    """A picture of two runs: loss curves over each other, step times, and each rank's busy time before and after.

    Raises:
        BackendUnavailableError: without matplotlib.
    """
    colours = {before.name: BEFORE, after.name: AFTER}
    figure = new_figure(12, 4)
    loss, times, busy = figure.subplots(1, 3)
    for run, marker in ((before, "o"), (after, "x")):
        loss.plot(run.column("loss"), marker=marker, markersize=4, color=colours[run.name], label=run.name)
        times.plot(run.column("seconds"), marker=marker, markersize=4, color=colours[run.name], label=run.name)
    loss.set(title="loss: the same batch, the same loss", xlabel="step", ylabel="loss")
    times.set(title="step time", xlabel="step", ylabel="seconds")
    times.set_ylim(bottom=0)
    for axes in (loss, times):
        axes.locator_params(axis="x", integer=True)
    for offset, run in ((-0.2, before), (0.2, after)):
        ranks = list(zip(*run.column("busy_seconds")[warmup:], strict=True))
        heights = [fmean(values) for values in ranks]
        busy.bar([r + offset for r in range(len(ranks))], heights, 0.36, color=colours[run.name], label=run.name)
    busy.set(title="computing per rank and step", xlabel="rank", ylabel="seconds", xticks=range(len(ranks)))
    for axes in (loss, times, busy):
        axes.legend(frameon=False)
    return save(figure, path)
