"""Run records to one object of plain data, which every form of a report shows: text, Markdown, HTML and `--json`.

    {"groups": [{"title", "baseline", "rows": [{"planner", "step_seconds": {"mean", "half"}, ...}]}], "failures", ...}

Runs of a workload and a model are a group, runs of a planner in it a row; seeds are averaged (`report.statistics`).
A speed-up is the mean over steps of step time of the baseline over that of the planner, in the same step of the same
seed. Imbalance *before* is the baseline's. What a record does not have is None.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from knapformer.errors import DataError
from knapformer.report.records import RunRecord
from knapformer.report.statistics import Estimate

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step_seconds", "step", "{:.3f} s"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("hfu", "HFU", "{:.1%}"),
    ("imbalance_before", "imbalance before", "{:.3f}"),
    ("imbalance", "imbalance", "{:.3f}"),
    ("rank_tokens", "tokens, fullest rank", "{:,.0f}"),
    ("token_imbalance", "over mean", "{:.3f}"),
    ("split_traffic", "split traffic", "{:.1%}"),
    ("routed_fraction", "routed", "{:.1%}"),
    ("exposed_seconds", "exposed comm.", "{:.3f} s"),
    ("speedup", "speed-up", "{:.3f}"),
)
"""Key, head and form of each figure of a row."""
COMPARED: tuple[tuple[str, str, str], ...] = (
    ("step_seconds_before", "step before", "{:.3f} s"),
    ("step_seconds_after", "step after", "{:.3f} s"),
    ("imbalance_before", "imbalance before", "{:.3f}"),
    ("imbalance_after", "imbalance after", "{:.3f}"),
    ("speed_ratio", "times as fast", "{:.3f}"),
    ("loss_difference", "loss difference", "{:.1e}"),
)
"""As COLUMNS, of a comparison."""
INTERVALS = ("step_seconds", "speedup", "speed_ratio")
"""Figures that are shown with their interval."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What a run is a run of."""

    workload: str
    model: str
    planner: str
    seed: int
    engine: str
    warmup: int
    baseline: str

    @classmethod
    def of(cls, run: RunRecord) -> "Labels":
        """From a cell's header; of other runs, from the training configuration."""
        config: Mapping[str, Any] = run.header["config"]
        cell = config.get("cell")
        if cell is not None:
            shape = config.get("model")
            model = cell["model"] or (shape if isinstance(shape, str) else "")
            keys = ("workload", "planner", "seed", "engine", "warmup", "baseline")
            return cls(model=model, **{key: cell[key] for key in keys})
        balancer, data = config.get("balancer", config), config.get("data", {})
        planner = balancer.get("topology") or balancer.get("planner") or run.name
        workload = config.get("workload") or data.get("manifest") or run.name
        seed = config.get("train", config).get("seed", 0)
        return cls(str(workload), "", str(planner), int(seed), "train", 1, "local")


Group = tuple[str, str]
Runs = dict[Group, dict[str, dict[int, RunRecord]]]


def grouped(runs: Iterable[RunRecord]) -> Runs:
    """(workload, model) -> planner -> seed -> run, of the runs that did not fail, in their order.

    Raises:
        DataError: if two runs are of the same cell.
    """
    groups: Runs = {}
    for run in runs:
        if run.failures or not run.steps:
            continue
        labels = Labels.of(run)
        seeds = groups.setdefault((labels.workload, labels.model), {}).setdefault(labels.planner, {})
        if labels.seed in seeds:
            raise DataError(
                f"runs {seeds[labels.seed].name!r} and {run.name!r} are both of {labels.workload!r}, planner "
                f"{labels.planner!r}, seed {labels.seed}; give one of them, or compare the files with --against"
            )
        seeds[labels.seed] = run
    return groups


def report_data(runs: Sequence[RunRecord], title: str) -> dict[str, Any]:
    """The report.

    Args:
        runs: any; failed ones are listed.
        title: what they are.

    Raises:
        DataError: if there is no run, or two of the same cell.
    """
    if not runs:
        raise DataError("no runs to report on")
    return {
        "title": title,
        "groups": [_group(*key, planners) for key, planners in grouped(runs).items()],
        "failures": [{"run": run.name, "cause": cause} for run in runs for cause in run.failures],
        "environments": _unique({k: v for k, v in run.header["environment"].items() if k != "time"} for run in runs),
        "commands": _unique(" ".join(run.header["command"]) for run in runs),
    }


def compare_data(before: Sequence[RunRecord], after: Sequence[RunRecord], names: tuple[str, str]) -> dict[str, Any]:
    """Two sets of runs side by side: the planners that both have, in the steps and seeds that both have.

    Raises:
        DataError: if they share none.
    """
    first, second = grouped(before), grouped(after)
    groups = []
    for key, planners in first.items():
        shared = {p: (planners[p], second[key][p]) for p in planners if p in second.get(key, {})}
        if rows := [_compared(planner, a, b) for planner, (a, b) in shared.items() if a.keys() & b.keys()]:
            groups.append({"title": _title(*key), "rows": rows})
    if not groups:
        raise DataError(f"{names[0]} and {names[1]} have no workload, planner and seed in common")
    return {"title": f"{names[1]} against {names[0]}", "names": list(names), "groups": groups}


def text(key: str, value: Mapping[str, Any] | None) -> str:
    """A figure as every form of a report shows it."""
    if value is None:
        return "-"
    form = next(form for name, _, form in (*COLUMNS, *COMPARED) if name == key)
    number, _, unit = form.partition(" ")
    half = f" ± {number.format(value['half'])}" if key in INTERVALS and value["half"] is not None else ""
    return f"{number.format(value['mean'])}{half} {unit}".strip()


def table(group: Mapping[str, Any], columns: Sequence[tuple[str, str, str]]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of a group's table, as text; columns that no row has are left out."""
    shown = [column for column in columns if any(row[column[0]] is not None for row in group["rows"])]
    rows = [[row["planner"], *(text(key, row[key]) for key, _, _ in shown)] for row in group["rows"]]
    return ["planner", *(head for _, head, _ in shown)], rows


# ---- rows ----------------------------------------------------------------------------------------------------------


def _group(workload: str, model: str, planners: Mapping[str, Mapping[int, RunRecord]]) -> dict[str, Any]:
    labels = Labels.of(next(iter(next(iter(planners.values())).values())))
    base = planners.get(labels.baseline, {})
    rows = [_row(planner, seeds, base) for planner, seeds in planners.items()]
    return {
        "title": _title(workload, model),
        "engine": labels.engine,
        "baseline": labels.baseline,
        "warmup": labels.warmup,
        "rows": rows,
    }


def _row(planner: str, seeds: Mapping[int, RunRecord], base: Mapping[int, RunRecord]) -> dict[str, Any]:
    runs = list(seeds.values())
    pairs = [(base[seed], run) for seed, run in seeds.items() if seed in base]
    figures: dict[str, Estimate | None] = {
        "step_seconds": _over_seeds(runs, _mean_of("seconds")),
        "tokens_per_second": _over_seeds(runs, lambda run: _sum(run, "tokens") / _sum(run, "seconds")),
        "hfu": _over_seeds(runs, _hfu),
        "imbalance_before": _over_seeds([a for a, _ in pairs], _imbalance),
        "imbalance": _over_seeds(runs, _imbalance),
        "rank_tokens": _over_seeds(runs, lambda run: fmean(max(row) for row in steps_of(run, "rank_tokens"))),
        "token_imbalance": _over_seeds(
            runs, lambda run: fmean(max(row) * len(row) / sum(row) for row in steps_of(run, "rank_tokens"))
        ),
        "split_traffic": _over_seeds(runs, _mean_of("split_traffic")),
        "routed_fraction": _over_seeds(runs, _mean_of("routed_fraction")),
        "exposed_seconds": _over_seeds(runs, _mean_of("exposed_seconds")),
        "speedup": _over_seeds(pairs, lambda pair: _paired(*pair)),
    }
    plain = {name: None if figure is None else figure.to_json() for name, figure in figures.items()}
    return {"planner": planner, "seeds": sorted(seeds), "steps": len(runs[0].steps), **plain}


def _compared(planner: str, a: Mapping[int, RunRecord], b: Mapping[int, RunRecord]) -> dict[str, Any]:
    pairs = [(a[seed], b[seed]) for seed in a if seed in b]
    first, second = [one for one, _ in pairs], [two for _, two in pairs]
    figures = {
        "step_seconds_before": _over_seeds(first, _mean_of("seconds")),
        "step_seconds_after": _over_seeds(second, _mean_of("seconds")),
        "imbalance_before": _over_seeds(first, _imbalance),
        "imbalance_after": _over_seeds(second, _imbalance),
        "speed_ratio": _over_seeds(pairs, lambda pair: _paired(*pair)),
        "loss_difference": _over_seeds([pairs], _loss_difference),
    }
    plain = {name: None if figure is None else figure.to_json() for name, figure in figures.items()}
    return {"planner": planner, "seeds": sorted(a.keys() & b.keys()), **plain}


def _over_seeds(items: Sequence[Any], figure: Callable[[Any], float]) -> Estimate | None:
    """Estimate of a figure; None where there is no item, or a step lacks what the figure needs."""
    try:
        return Estimate.of([figure(item) for item in items]) if items else None
    except MissingError:
        return None


class MissingError(Exception):
    """A step lacks a value."""


def steps_of(run: RunRecord, name: str) -> list[Any]:
    """A value of every step, warm-up left out."""
    warmup = Labels.of(run).warmup if len(run.steps) > 1 else 0
    values = [step.get(name) for step in run.steps[warmup:]]
    if any(value is None or value == [] for value in values):
        raise MissingError
    return values


def _sum(run: RunRecord, name: str) -> float:
    return sum(steps_of(run, name))


def _mean_of(name: str) -> Callable[[RunRecord], float]:
    return lambda run: fmean(steps_of(run, name))


def _imbalance(run: RunRecord) -> float:
    """Of measured time; of modelled load where none was measured."""
    try:
        return fmean(steps_of(run, "measured_imbalance"))
    except MissingError:
        return fmean(steps_of(run, "modelled_imbalance"))


def _hfu(run: RunRecord) -> float:
    peak = run.header["config"].get("peak_flops")
    if not peak:
        raise MissingError
    ranks = run.header["config"]["cell"]["ranks"]
    return _sum(run, "flop") / (_sum(run, "seconds") * ranks * peak)


def _paired(base: RunRecord, run: RunRecord) -> float:
    """Mean over steps of the base's step time over that of the run."""
    return fmean(a / b for a, b in zip(steps_of(base, "seconds"), steps_of(run, "seconds"), strict=False))


def _loss_difference(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> float:
    """Largest over all steps, relative."""
    differences = []
    for first, second in pairs:
        for a, b in zip(first.steps, second.steps, strict=False):
            if a.get("loss") is None or b.get("loss") is None:
                raise MissingError
            differences.append(abs(a["loss"] - b["loss"]) / max(abs(a["loss"]), 1e-30))
    return max(differences)


def _title(workload: str, model: str) -> str:
    return f"{workload}, {model}" if model else workload


def _unique(items: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found
