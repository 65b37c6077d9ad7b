"""A report as it stands in a terminal: `rich` tables of what fits 80 columns. Files and --json have all columns."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from knapformer.report.tables import COLUMNS, COMPARED, table

_SHOWN = (
    *("step_seconds", "hfu", "imbalance", "split_traffic", "speedup"),
    *("step_seconds_before", "step_seconds_after", "speed_ratio", "loss_difference"),
)


def plain_table(title: str, heads: list[str], rows: list[list[str]]) -> Table:
    """A table without a frame: its first column to the left, where it names rows, all others to the right."""
    drawn = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for index, head in enumerate(heads):
        drawn.add_column(head, justify="left" if index == 0 and len(rows) > 1 else "right", no_wrap=True)
    for cells in rows:
        drawn.add_row(*(escape(cell) for cell in cells))
    return drawn


def report_lines(data: dict[str, Any]) -> list[Table | str]:
    """What a terminal shows of `report_data` or `compare_data`: the tables, and what failed."""
    lines: list[Table | str] = []
    for group in data["groups"]:
        columns = COLUMNS if "baseline" in group else COMPARED
        heads, rows = table(group, [column for column in columns if column[0] in _SHOWN])
        lines += [plain_table(group["title"], heads, rows), ""]
    for failure in data.get("failures", ()):
        lines.append(f"[bold red]failed:[/] {escape(failure['run'])}: {escape(failure['cause'])}")
    return lines
