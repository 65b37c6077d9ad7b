"""A report as it stands in a terminal: `rich` tables of what fits 80 columns. Files and --json have all columns."""

from collections.abc import Container, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from knapformer.report.tables import COLUMNS, COMPARED, table

_SHOWN = (
    *("step_seconds", "hfu", "imbalance", "split_traffic", "speedup"),
    *("step_seconds_before", "step_seconds_after", "speed_ratio", "loss_difference"),
)


def plain_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, ours: Container[str] = (), caption: str = ""
) -> Table:
    """A table of plain text without a frame: the first column, if it names rows, to the left, others to the right.

    Args:
        title: above it.
        heads: of the columns; all empty for a table without a head.
        rows: their cells.
        ours: first cells of the rows that stand out.
        caption: below it.
    """
    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, show_header=any(heads))
    drawn.title, drawn.title_justify = escape(title), "left"
    drawn.caption, drawn.caption_justify = escape(caption) or None, "left"
    for index, head in enumerate(heads):
        drawn.add_column(escape(head), justify="left" if index == 0 and len(rows) > 1 else "right", no_wrap=True)
    for cells in rows:
        drawn.add_row(*map(escape, cells), style="bold" if cells[0] in ours else "")
    return drawn


def report_lines(data: dict[str, Any]) -> list[Table | str]:
    """What a terminal shows of `report_data` or `compare_data`: the tables, and what failed."""
    lines: list[Table | str] = []
    for group in data["groups"]:
        columns = COLUMNS if "baseline" in group else COMPARED
        heads, rows = table(group, [column for column in columns if column.key in _SHOWN])
        lines += [plain_table(group["title"], heads, rows), ""]
    for failure in data.get("failures", ()):
        lines.append(f"[bold red]failed:[/] {escape(failure['run'])}: {escape(failure['cause'])}")
    return lines
