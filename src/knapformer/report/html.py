"""HTML pages of reports and tools: one style sheet, light and dark. A page is one file that needs no network.

    page(title, [f"<h1>{escape(title)}</h1>", table(heads, rows), figure(drawn, "what it shows")])

Whatever is wider than the screen scrolls by itself, so a page is never wider than its window. Text that is not markup
goes through `escape`; `table` and `figure` do that themselves.
"""

from collections.abc import Container, Iterable, Sequence
from html import escape
from typing import Any

from knapformer.report.drawing import inline_svg

__all__ = ["bullets", "escape", "figure", "page", "table"]

_STYLE = """
:root {
  color-scheme: light dark;
  --paper: light-dark(#ffffff, #15171a); --ink: light-dark(#222222, #e4e4e4); --dim: light-dark(#5f6368, #9aa0a6);
  --faint: light-dark(#f3f5f7, #1f2226); --line: light-dark(#d9dce0, #3a3f45); --ours: light-dark(#e9f3fa, #1d2a33);
  --good: light-dark(#0072b2, #56b4e9); --unsure: light-dark(#b47800, #e69f00); --bad: light-dark(#b03a00, #f2b48a);
}
:root[data-theme="light"] { color-scheme: light; }
:root[data-theme="dark"] { color-scheme: dark; }
body {
  font: 16px/1.5 system-ui, sans-serif; max-width: 82rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: break-word;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
p, li { max-width: 60rem; }
.dim, figcaption { color: var(--dim); }
.bad { color: var(--bad); }
.wide, figure { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: bottom; }
td { white-space: nowrap; }
table.facts td { text-align: left; vertical-align: top; }
table.facts td + td { white-space: normal; overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; }
tr.ours td { font-weight: 600; background: var(--ours); }
figure { margin: 1rem 0; }
figure svg {
  display: block; width: 100%; height: auto; min-width: calc(.75 * var(--drawn)); max-width: calc(1.25 * var(--drawn));
}
figcaption { font-size: .9rem; }
pre { background: var(--faint); padding: .8rem; overflow-x: auto; }
"""


def page(title: str, body: Iterable[str], *, style: str = "", theme: str | None = None) -> str:
    """A whole page.

    Args:
        title: of the window, plain text.
        body: elements, as markup.
        style: what the page needs beside the common style sheet.
        theme: "light" or "dark" to begin with; None follows the reader's browser.
    """
    root = f'<html lang="en" data-theme="{theme}">' if theme else '<html lang="en">'
    return (
        f'<!doctype html>\n{root}\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, ours: Container[str] = ()) -> str:
    """A table of plain text: the first column to the left, all others to the right.

    Args:
        heads: of the columns; all empty for a list of facts, whose cells are texts.
        rows: their cells.
        ours: first cells of the rows that stand out.
    """
    opening = f"<table><thead><tr>{_cells('th', heads)}</tr></thead>" if any(heads) else '<table class="facts">'
    lines = []
    for row in rows:
        mark = ' class="ours"' if row[0] in ours else ""
        lines.append(f"<tr{mark}>{_cells('td', row)}</tr>")
    return f'<div class="wide">{opening}<tbody>{"".join(lines)}</tbody></table></div>'


def figure(drawn: Any, caption: str = "") -> str:
    """A matplotlib figure inside the page. Raises `BackendUnavailableError` without matplotlib."""
    told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    width = 96 * drawn.get_figwidth()  # CSS pixels: below three quarters of it texts are too small to read
    return f'<figure style="--drawn: {width:.0f}px">{inline_svg(drawn)}{told}</figure>'


def bullets(lines: Iterable[str]) -> str:
    """A list; its lines are markup."""
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _cells(kind: str, cells: Iterable[str]) -> str:
    return "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells)
