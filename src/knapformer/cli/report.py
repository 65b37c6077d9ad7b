"""`knapformer report`: tables and figures from run records."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from knapformer.errors import DataError, SpecError
from knapformer.report.pages import report_markdown, report_page, write_text
from knapformer.report.records import RunRecord, read_records
from knapformer.report.tables import COLUMNS, COMPARED, compare_data, grouped, report_data, table

_IN_TERMINAL = (
    *("step_seconds", "hfu", "imbalance", "split_traffic", "speedup"),
    *("step_seconds_before", "step_seconds_after", "speed_ratio", "loss_difference"),
)
"""What fits 80 columns; files and --json have all."""


def report(
    *runs: Path,
    against: Annotated[list[Path] | None, Parameter(negative=())] = None,
    output: Annotated[list[Path] | None, Parameter(name=("--output", "-o"), negative=())] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Make tables and figures of run records.

    Parameters
    ----------
    runs
        Record files (.jsonl), or folders of experiments.
    against
        Compare with these records instead: the same workloads, planners and seeds, side by side.
    output
        File to write, .html (with figures) or .md; may be given several times.
    as_json
        Print one JSON object and nothing else.
    """
    for path in output or ():
        if path.suffix not in (".html", ".md"):
            raise SpecError(f"cannot tell what {path.name!r} should become; a name ends in .html or .md")
    found = read_runs(runs)
    if against:
        names = (" ".join(map(str, against)), " ".join(map(str, runs)))
        data, groups = compare_data(read_runs(against), found, names), None
    else:
        data, groups = report_data(found, " ".join(map(str, runs))), grouped(found)
    for path in output or ():
        write_text(path, report_markdown(data) if path.suffix == ".md" else report_page(data, groups))
    if as_json:
        print(json.dumps(data))
    else:
        print_report(data)


def read_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """All runs of files and of experiments' folders. Raises `DataError` for what cannot be read."""
    found: list[RunRecord] = []
    for path in paths:
        file = path / "records.jsonl" if path.is_dir() else path
        try:
            found += read_records(file).values()
        except OSError as error:
            raise DataError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    if not found:
        raise DataError("no runs to report on; give a record file or the folder of an experiment")
    return found


def print_report(data: dict[str, Any]) -> None:
    """The tables, and what failed."""
    console = Console(highlight=False)
    for group in data["groups"]:
        columns = COLUMNS if "baseline" in group else COMPARED
        heads, rows = table(group, [column for column in columns if column[0] in _IN_TERMINAL])
        plain = {"title_justify": "left", "box": SIMPLE_HEAD, "pad_edge": False, "show_edge": False}
        drawn = Table(title=group["title"], padding=(0, 1, 0, 0), **plain)
        for head in heads:
            drawn.add_column(head, justify="left" if head == "planner" else "right", no_wrap=True)
        for cells in rows:
            drawn.add_row(*(escape(cell) for cell in cells))
        console.print(drawn, "")
    for failure in data.get("failures", ()):
        console.print(f"[bold red]failed:[/] {escape(failure['run'])}: {escape(failure['cause'])}", soft_wrap=True)
