"""A report as one HTML file, figures included, and as Markdown.

Both show the object of `knapformer report --json`, each figure in the same form (`report.tables.text`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from knapformer.report.figures import Planners, group_figures
from knapformer.report.html import bullets, escape, figure, page
from knapformer.report.html import table as html_table
from knapformer.report.tables import COLUMNS, COMPARED, Column, table


def report_page(data: Mapping[str, Any], runs: Mapping[Any, Planners] | None = None) -> str:
    """The HTML of a report, or of a comparison, which has no figures.

    Args:
        data: of `report_data` or `compare_data`.
        runs: of `grouped`, in the order of the data's groups.

    Raises:
        BackendUnavailableError: without matplotlib, where there are figures.
    """
    return page(data["title"], _html(data, list(runs.values()) if runs else []), style=_STYLE)


_STYLE = """
.figures { display: grid; gap: 0 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); }
"""


def _html(data: Mapping[str, Any], runs: Sequence[Planners]) -> Iterator[str]:
    yield f"<h1>{escape(data['title'])}</h1>"
    for number, group in enumerate(data["groups"]):
        yield f'<h2>{escape(group["title"])}</h2><p class="dim">{escape(_note(group))}</p>'
        heads, rows = table(group, _columns(group))
        yield html_table(heads, rows, ours=rows[-1][:1])
        if runs:
            drawn = (figure(drawing, caption) for caption, drawing in group_figures(group, runs[number]))
            yield f'<div class="figures">{"".join(drawn)}</div>'
    if data.get("failures"):
        yield '<h2 class="bad">Failed</h2>'
        yield bullets(f"<b>{escape(run)}</b>: {escape(cause)}" for run, cause in _failures(data))
    if "environments" in data:
        yield "<h2>Environment</h2>"
        yield from (html_table(["", ""], _environment(environment)) for environment in data["environments"])
        yield f"<h2>Commands</h2><pre>{escape(chr(10).join(data['commands']))}</pre>"


def report_markdown(data: Mapping[str, Any]) -> str:
    """The same as Markdown, without figures."""
    parts = [f"# {data['title']}"]
    for group in data["groups"]:
        parts += [f"## {group['title']}", _note(group), _markdown_table(*table(group, _columns(group)))]
    if data.get("failures"):
        parts += ["## Failed", _markdown_table(["run", "cause"], _failures(data))]
    if "environments" in data:
        parts.append("## Environment")
        parts += [_markdown_table(["", ""], _environment(environment)) for environment in data["environments"]]
        parts += ["## Commands", "\n".join(f"    {command}" for command in data["commands"])]
    return "\n\n".join(parts) + "\n"


def _columns(group: Mapping[str, Any]) -> tuple[Column, ...]:
    return COLUMNS if "baseline" in group else COMPARED


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


def _failures(data: Mapping[str, Any]) -> list[list[str]]:
    return [[failure["run"], failure["cause"]] for failure in data["failures"]]


def _environment(environment: Mapping[str, Any]) -> list[list[str]]:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    plain = {**environment, "versions": versions}
    return [[name, str(value)] for name, value in plain.items()]


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(heads), "|---" + "|---:" * (len(heads) - 1) + "|", *map(line, rows)])
