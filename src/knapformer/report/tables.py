"""Run records to one object of plain data, which every form of a report shows: text, Markdown, HTML and `--json`.

    {"groups": [{"title", "baseline", "rows": [{"planner", "step_seconds": ESTIMATE, ...}]}], "failures", ...}
    ESTIMATE: {"mean", "half", "least", "most"}

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

BASE, RUN, BOTH = (0,), (1,), (0, 1)


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of every row.

    Attributes:
        key: its name in the report's data.
        head: of the table's column.
        form: of the number, and its unit after a blank.
        value: of a seed. Raises `MissingError` if a step lacks what it needs.
        of: what the value is of: the run of that seed, the one it is compared with, or both.
        interval: whether it is shown with its interval.
        over_seeds: the estimate from the values of all seeds.
    """

    key: str
    head: str
    form: str
    value: Callable[..., float]
    of: tuple[int, ...] = RUN
    interval: bool = False
    over_seeds: Callable[[Sequence[float]], Estimate] = Estimate.of

    def figure(self, pairs: Iterable[tuple[RunRecord | None, RunRecord]]) -> dict[str, Any] | None:
        """Over (compared with, run) of all seeds, as plain data; None where no seed has what it needs."""
        needed = [[pair[index] for index in self.of] for pair in pairs]
        try:
            values = [self.value(*runs) for runs in needed if None not in runs]
        except MissingError:
            return None
        return self.over_seeds(values).to_json() if values else None

    def text(self, figure: Mapping[str, Any] | None) -> str:
        """A figure as every form of a report shows it."""
        if figure is None:
            return "-"
        number, _, unit = self.form.partition(" ")
        half = f" ± {number.format(figure['half'])}" if self.interval and figure["half"] is not None else ""
        return f"{number.format(figure['mean'])}{half} {unit}".strip()


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


def summaries(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """One run per workload and model with one step per planner: a record small enough to keep, of any number of runs.

    Numbers have seven significant digits. Header: that of the group's first run, without its cell.
    """
    found = []
    for key, planners in grouped(runs).items():
        group, seeds = _group(*key, planners), next(iter(planners.values()))
        header = dict(next(iter(seeds.values())).header)
        header["config"] = {name: value for name, value in group.items() if name != "rows"}
        steps = [{"step": index, **_short(row)} for index, row in enumerate(group["rows"])]
        found.append(RunRecord(group["title"], header, steps))
    return found


def compare_data(before: Sequence[RunRecord], after: Sequence[RunRecord], names: tuple[str, str]) -> dict[str, Any]:
    """Two sets of runs side by side: the planners that both have, in the steps and seeds that both have.

    Raises:
        DataError: if they share none.
    """
    first, second = grouped(before), grouped(after)
    groups = []
    for key, planners in first.items():
        rows = []
        for planner, runs in planners.items():
            others = second.get(key, {}).get(planner, {})
            if pairs := {seed: (run, others[seed]) for seed, run in runs.items() if seed in others}:
                rows.append(_row(planner, pairs, COMPARED))
        if rows:
            groups.append({"title": _title(*key), "rows": rows})
    if not groups:
        raise DataError(f"{names[0]} and {names[1]} have no workload, planner and seed in common")
    return {"title": f"{names[1]} against {names[0]}", "names": list(names), "groups": groups}


def table(group: Mapping[str, Any], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of a group's table, as text; columns that no row has are left out."""
    shown = [column for column in columns if any(row[column.key] is not None for row in group["rows"])]
    rows = [[row["planner"], *(column.text(row[column.key]) for column in shown)] for row in group["rows"]]
    return ["planner", *(column.head for column in shown)], rows


def _group(workload: str, model: str, planners: Mapping[str, Mapping[int, RunRecord]]) -> dict[str, Any]:
    labels = Labels.of(next(iter(next(iter(planners.values())).values())))
    base = planners.get(labels.baseline, {})
    rows = []
    for planner, runs in planners.items():
        row = _row(planner, {seed: (base.get(seed), run) for seed, run in runs.items()}, COLUMNS)
        rows.append(row | {"steps": len(next(iter(runs.values())).steps)})
    return {
        "title": _title(workload, model),
        "engine": labels.engine,
        "baseline": labels.baseline,
        "warmup": labels.warmup,
        "rows": rows,
    }


def _row(planner: str, pairs: Mapping[int, tuple[RunRecord | None, RunRecord]], columns: Sequence[Column]) -> Any:
    figures = {column.key: column.figure(pairs.values()) for column in columns}
    return {"planner": planner, "seeds": sorted(pairs), **figures}


def _short(value: Any) -> Any:
    """Without figures that are missing, and with seven digits of the others."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items() if one is not None}
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _title(workload: str, model: str) -> str:
    return f"{workload}, {model}" if model else workload


def _unique(items: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


# ---- figures of a run ----------------------------------------------------------------------------------------------


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


def _mean(name: str) -> Callable[[RunRecord], float]:
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


def _token_imbalance(run: RunRecord) -> float:
    return fmean(max(row) * len(row) / sum(row) for row in steps_of(run, "rank_tokens"))


def _speed_ratio(base: RunRecord, run: RunRecord) -> float:
    """Mean over steps of the base's step time over that of the run."""
    return fmean(a / b for a, b in zip(steps_of(base, "seconds"), steps_of(run, "seconds"), strict=False))


def _loss_difference(base: RunRecord, run: RunRecord) -> float:
    """Largest over all steps, relative."""
    largest = 0.0
    for before, after in zip(base.steps, run.steps, strict=False):
        a, b = before.get("loss"), after.get("loss")
        if a is None or b is None:
            raise MissingError
        largest = max(largest, abs(a - b) / max(abs(a), 1e-30))
    return largest


COLUMNS = (
    Column("step_seconds", "step", "{:.3f} s", _mean("seconds"), interval=True),
    Column("tokens_per_second", "tokens/s", "{:,.0f}", lambda run: _sum(run, "tokens") / _sum(run, "seconds")),
    Column("hfu", "HFU", "{:.1%}", _hfu),
    Column("imbalance_before", "imbalance before", "{:.3f}", _imbalance, BASE),
    Column("imbalance", "imbalance", "{:.3f}", _imbalance),
    Column("rank_tokens", "tokens, fullest rank", "{:,.0f}", lambda run: fmean(map(max, steps_of(run, "rank_tokens")))),
    Column("token_imbalance", "over mean", "{:.3f}", _token_imbalance),
    Column("split_traffic", "split traffic", "{:.1%}", _mean("split_traffic")),
    Column("routed_fraction", "routed", "{:.1%}", _mean("routed_fraction")),
    Column("exposed_seconds", "exposed comm.", "{:.3f} s", _mean("exposed_seconds")),
    Column("speedup", "speed-up", "{:.3f}", _speed_ratio, BOTH, interval=True),
)
"""Of a report's groups; each run is compared with that of the baseline."""
COMPARED = (
    Column("step_seconds_before", "step before", "{:.3f} s", _mean("seconds"), BASE),
    Column("step_seconds_after", "step after", "{:.3f} s", _mean("seconds")),
    Column("imbalance_before", "imbalance before", "{:.3f}", _imbalance, BASE),
    Column("imbalance_after", "imbalance after", "{:.3f}", _imbalance),
    Column("speed_ratio", "times as fast", "{:.3f}", _speed_ratio, BOTH, interval=True),
    Column("loss_difference", "loss difference", "{:.1e}", _loss_difference, BOTH, over_seeds=Estimate.largest),
)
"""Of two sets of runs side by side."""
