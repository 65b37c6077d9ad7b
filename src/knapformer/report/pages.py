"""A report as one HTML file that needs nothing else, figures included, and as Markdown. Light and dark.

Both show the object of `knapformer report --json`, each figure in the same form (`report.tables.text`).
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from knapformer.errors import DataError
from knapformer.report.drawing import inline_svg
from knapformer.report.figures import Planners, group_figures
from knapformer.report.tables import COLUMNS, COMPARED, table

_STYLE = """
:root { color-scheme: light dark;
  --ink: #222; --paper: #fff; --line: #ddd; --ours: #F2F8FC; --dim: #666; --bad: #B03A00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #E4E4E4; --paper: #15171A; --line: #3a3f45; --ours: #1d2a33; --dim: #9aa0a6; --bad: #F2B48A; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 82rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); } .dim { color: var(--dim); } .bad { color: var(--bad); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { text-align: right; padding: .3rem .45rem; border-bottom: 1px solid var(--line); vertical-align: bottom; }
td { white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
.planners tbody tr:last-child td { font-weight: 600; background: var(--ours); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(32rem, 1fr)); gap: 1rem 2rem; }
figure { margin: 1rem 0; } figcaption { color: var(--dim); font-size: .9rem; } figure svg { width: 100%; height: auto; }
pre { background: var(--ours); padding: .8rem; overflow-x: auto; }
"""


def report_page(data: Mapping[str, Any], runs: Mapping[Any, Planners] | None = None) -> str:
    """The HTML of a report, or of a comparison, which has no figures.

    Args:
        data: of `report_data` or `compare_data`.
        runs: of `grouped`, in the order of the data's groups.

    Raises:
        BackendUnavailableError: without matplotlib, where there are figures.
    """
    parts = [f"<h1>{escape(data['title'])}</h1>"]
    groups = data["groups"]
    for group, planners in zip(groups, list(runs.values()) if runs else [None] * len(groups), strict=True):
        parts += [f"<h2>{escape(group['title'])}</h2>", f'<p class="dim">{escape(_note(group))}</p>']
        parts.append(_html_table(*table(group, COLUMNS if "baseline" in group else COMPARED), "planners"))
        if planners:
            figures = group_figures(group, planners)
            drawn = (f"<figure>{inline_svg(f)}<figcaption>{escape(c)}</figcaption></figure>" for c, f in figures)
            parts.append(f'<div class="figures">{"".join(drawn)}</div>')
    if data.get("failures"):
        rows = [[failure["run"], failure["cause"]] for failure in data["failures"]]
        parts += ['<h2 class="bad">Failed</h2>', _html_table(["run", "cause"], rows)]
    if "environments" in data:
        parts.append("<h2>Environment</h2>")
        parts += [_html_table(["", ""], _environment(environment)) for environment in data["environments"]]
        parts.append(f"<h2>Commands</h2><pre>{escape(chr(10).join(data['commands']))}</pre>")
    head = f'<meta charset="utf-8"><title>{escape(data["title"])}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{"".join(parts)}\n</body></html>\n'


def report_markdown(data: Mapping[str, Any]) -> str:
    """The same as Markdown, without figures."""
    parts = [f"# {data['title']}"]
    for group in data["groups"]:
        parts += [f"## {group['title']}", _note(group)]
        parts.append(_markdown_table(*table(group, COLUMNS if "baseline" in group else COMPARED)))
    if data.get("failures"):
        rows = [[failure["run"], failure["cause"]] for failure in data["failures"]]
        parts += ["## Failed", _markdown_table(["run", "cause"], rows)]
    if "environments" in data:
        parts.append("## Environment")
        parts += [_markdown_table(["", ""], _environment(environment)) for environment in data["environments"]]
        parts += ["## Commands", "\n".join(f"    {command}" for command in data["commands"])]
    return "\n\n".join(parts) + "\n"


def write_text(path: str | os.PathLike[str], content: str) -> Path:
    """Write a report; its folder is made. Raises `DataError` if it cannot be written."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8", newline="\n")
    except OSError as error:
        raise DataError(f"cannot write {str(target)!r}: {error}") from error
    return target


def _note(group: Mapping[str, Any]) -> str:
    """What the rows are means of."""
    count, pair = len(group["rows"][0]["seeds"]), "paired by step and seed"
    seeds = f"{count} seeds" if count > 1 else "one seed"
    interval = ", ± 95 % confidence (Student's t over seeds)" if count > 1 else ", so no interval"
    if "baseline" not in group:
        return f"{seeds}{interval}; {pair}"
    basis = "modelled, not measured; " if group["engine"] == "simulate" else ""
    steps = group["rows"][0]["steps"]
    warmup = f", the first {group['warmup']} left out" if group["warmup"] and steps > 1 else ""
    return (
        f"{group['engine']}: {basis}{seeds} of {steps} steps{warmup}{interval}; speed-up over "
        f"{group['baseline']}, {pair}"
    )


def _environment(environment: Mapping[str, Any]) -> list[list[str]]:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    plain = {**environment, "versions": versions}
    return [[name, str(value)] for name, value in plain.items()]


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads if any(heads))
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
    return f'<div class="wide {kind}"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(heads), "|---" + "|---:" * (len(heads) - 1) + "|", *map(line, rows)])
