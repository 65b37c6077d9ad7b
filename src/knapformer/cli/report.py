"""`knapformer report`: tables and figures from run records."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from knapformer.errors import SpecError
from knapformer.files import write_text
from knapformer.report.pages import report_markdown, report_page
from knapformer.report.records import read_runs, write_records
from knapformer.report.tables import compare_data, grouped, report_data, summaries
from knapformer.report.terminal import report_lines


def report(
    *runs: Path,
    against: list[Path] | None = None,
    output: Annotated[list[Path] | None, Parameter(name=("--output", "-o"))] = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Make tables and figures of run records.

    Parameters
    ----------
    runs
        Record files (.jsonl), or folders of experiments.
    against
        Compare with these records instead: the same workloads, planners and seeds, side by side.
    output
        File to write; may be given several times: .html (with figures), .md, or .jsonl, a record of one line per
        workload and planner, with mean, interval and range over seeds.
    as_json
        Print one JSON object and nothing else.
    """
    for path in output or ():
        if path.suffix not in (".html", ".md", ".jsonl"):
            raise SpecError(f"cannot tell what {path.name!r} should become; a name ends in .html, .md or .jsonl")
        if path.suffix == ".jsonl" and against:
            raise SpecError(f"a comparison has no record to write into {path.name!r}; leave out --against")
    found = read_runs(runs)
    if against:
        names = (" ".join(map(str, against)), " ".join(map(str, runs)))
        data, groups = compare_data(read_runs(against), found, names), None
    else:
        data, groups = report_data(found, " ".join(map(str, runs))), grouped(found)
    for path in output or ():
        if path.suffix == ".jsonl":
            write_records(path, summaries(found))
        else:
            write_text(path, report_markdown(data) if path.suffix == ".md" else report_page(data, groups))
    if as_json:
        print(json.dumps(data))
    else:
        Console(highlight=False).print(*report_lines(data), sep="\n", soft_wrap=True)
