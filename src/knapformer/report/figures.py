"""Figures of a report's group: step times, load of ranks before and after, where the time goes, loss curves.

A figure whose values no run recorded is left out. The baseline is vermilion, other planners blue; loss curves, which
should cover each other, get thinner from the first to the last.
"""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from knapformer.report.drawing import AFTER, AFTER_LIGHT, BEFORE, BEFORE_LIGHT, HUES, new_figure
from knapformer.report.records import RunRecord
from knapformer.report.tables import MissingError, steps_of

Planners = Mapping[str, Mapping[int, RunRecord]]
_HUES = [HUES[number] for number in (5, 1, 4, 2, 6, 0, 3)]


def group_figures(group: Mapping[str, Any], planners: Planners) -> list[tuple[str, Any]]:
    """(caption, matplotlib figure) of a group of `report_data` and its runs."""
    drawn = (
        ("Step time, mean over seeds with its 95 % interval", _step_times),
        ("Time each rank computes in one step, before and after", _loads),
        ("Where the time of all ranks goes", _shares),
        ("Loss of the first seed: the same batches, so the same curve", _losses),
    )
    found = []
    for caption, draw in drawn:
        try:
            found.append((caption, draw(group, planners)))
        except MissingError:
            continue
    return found


def _step_times(group: Mapping[str, Any], planners: Planners) -> Any:
    figure = new_figure(6.2, 0.9 + 0.36 * len(group["rows"]))
    axes = figure.subplots()
    for place, row in enumerate(group["rows"]):
        time = row["step_seconds"]
        if time is None:
            raise MissingError
        colour = BEFORE if row["planner"] == group["baseline"] else AFTER
        axes.barh(place, time["mean"], xerr=time["half"], color=colour, height=0.7, capsize=3)
    _name_rows(axes, [row["planner"] for row in group["rows"]])
    axes.set(xlabel="step time [s]", xlim=(0, None))
    return figure


def _loads(group: Mapping[str, Any], planners: Planners) -> Any:
    """One measured step of the first seed that both have: the baseline, and the planner that comes last."""
    base, name = planners.get(group["baseline"], {}), list(planners)[-1]
    seeds = [seed for seed in planners[name] if seed in base]
    if not seeds or name == group["baseline"]:
        raise MissingError
    figure = new_figure(6.2, 3.0)
    axes = figure.subplots()
    sides = ((group["baseline"], base, BEFORE, -0.2), (name, planners[name], AFTER, 0.2))
    for label, runs, colour, shift in sides:
        busy = steps_of(runs[seeds[0]], "busy_seconds")[0]
        axes.bar([rank + shift for rank in range(len(busy))], busy, 0.4, color=colour, label=label)
    axes.set(xlabel="rank", ylabel="computing [s]")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return figure


def _shares(group: Mapping[str, Any], planners: Planners) -> Any:
    figure = new_figure(6.2, 1.2 + 0.36 * len(planners))
    axes = figure.subplots()
    shares: list[tuple[str, str, Callable[[RunRecord], float]]] = [
        ("computing", AFTER, lambda run: fmean(fmean(row) for row in steps_of(run, "busy_seconds"))),
        ("waiting for ranks", BEFORE_LIGHT, lambda run: fmean(steps_of(run, "waiting_seconds"))),
        ("waiting for bytes", BEFORE, lambda run: fmean(steps_of(run, "exposed_seconds"))),
    ]
    if not all("waiting_seconds" in run.steps[0] for runs in planners.values() for run in runs.values()):
        shares = shares[:1]
    left = [0.0] * len(planners)
    whole = [_mean(runs, lambda run: fmean(steps_of(run, "seconds"))) for runs in planners.values()]
    for label, colour, value in shares:
        widths = [100 * _mean(runs, value) / total for runs, total in zip(planners.values(), whole, strict=True)]
        axes.barh(range(len(planners)), widths, left=left, color=colour, height=0.7, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rest = "update and launches" if len(shares) > 1 else "waiting and all else"
    axes.barh(
        range(len(planners)), [max(0, 100 - at) for at in left], left=left, color=AFTER_LIGHT, height=0.7, label=rest
    )
    _name_rows(axes, list(planners))
    axes.set(xlabel="share of rank time [%]", xlim=(0, 100))
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return figure


def _losses(group: Mapping[str, Any], planners: Planners) -> Any:
    figure = new_figure(6.2, 3.0)
    axes = figure.subplots()
    for number, (planner, runs) in enumerate(planners.items()):
        losses = [step.get("loss") for step in runs[min(runs)].steps]
        if None in losses:
            raise MissingError
        width = 1.5 + 2.5 * (len(planners) - 1 - number)  # each curve is seen behind those drawn over it
        axes.plot(losses, color=_HUES[number % len(_HUES)], linewidth=width, label=planner, solid_capstyle="round")
    axes.set(xlabel="step", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False)
    return figure


def _mean(runs: Mapping[int, RunRecord], value: Callable[[RunRecord], float]) -> float:
    return fmean(value(run) for run in runs.values())


def _name_rows(axes: Any, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
