"""Puts tables of run records where a page asks for them, so that no number of the benchmarks is copied by hand.

    <!-- record: sampler.jsonl
    rows: name                        what tells the rows apart: the run's name, or fields of its steps
    statistic: median                 of a row's steps; or max, mean (the default)
    routed_blind: moved, blindly      a column: a field of the steps, and its heading
    routed_ahead: moved, by plan
    -->

`<!-- record: planners -->` is the README's table of planners. Below each table stands where its numbers come from.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STATISTICS = {"mean": fmean, "median": median, "max": max}
MARK = re.compile(r"<!-- record: (?P<file>[\w.-]+)\s*?\n?(?P<body>.*?)-->", re.DOTALL)


def render(text: str, up: str) -> str:
    """A page's Markdown with its tables. `up` leads from the page's folder to the repository."""
    return MARK.sub(lambda found: table(found["file"], found["body"], up), text)


def table(file: str, body: str, up: str) -> str:
    """One table, with its source."""
    if file == "planners":
        return planners_table() + "\n\n" + source_line("planners.jsonl", up)
    fields = dict(line.split(": ", 1) for line in body.strip().splitlines())
    keys, statistic = fields.pop("rows").split(", "), STATISTICS[fields.pop("statistic", "mean")]
    rows: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for step in steps_of(file):
        if step.keys() >= set(keys):  # a run's summary has none of them
            rows.setdefault(tuple(str(step[key]) for key in keys), []).append(step)
    lines = ["| " + " | ".join([*keys, *fields.values()]) + " |", "|" + "---|" * (len(keys) + len(fields))]
    for row, steps in rows.items():
        values = ([step[field] for step in steps if field in step] for field in fields)
        cells = [f"{statistic(known):.4g}" if known else "-" for known in values]
        lines.append("| " + " | ".join([*row, *cells]) + " |")
    return "\n".join(lines) + "\n\n" + source_line(file, up)


def steps_of(file: str) -> Iterator[dict[str, Any]]:
    """The steps of every run of a record, with the run's name."""
    from knapformer.report import read_records

    for run in read_records(RESULTS / file).values():
        for step in run.steps:
            yield {"name": run.name, **step}


def source_line(file: str, up: str) -> str:
    """What the numbers were made by: command, device, versions, commit, day."""
    first = first_line(RESULTS / file)
    made, command = first["environment"], first["command"]
    shown = command if isinstance(command, str) else " ".join(command)
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version)
    return (
        f"Record: [{file}]({up}benchmarks/results/{file}), by `{shown}` on {made['device']} ({made['processor']}, "
        f"{made['cores']} cores), Python {made['python']}, {versions}, commit `{made['commit']}`, {made['time'][:10]}."
    )


def first_line(path: Path) -> dict[str, Any]:
    """The first object of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return json.loads(file.readline())


def planners_table() -> str:
    """The table of the README, by the program that wrote the record."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from benchmarks.planners import render_table

    return render_table(RESULTS / "planners.jsonl")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: put tables into a page."""
    depth = page.file.src_uri.count("/") + 1  # docs/ itself lies one below the repository
    return render(markdown, "../" * depth)
