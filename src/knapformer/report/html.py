"""HTML pages of reports and tools: one style sheet (`style.css`), light and dark; a page needs no other file.

    page(title, [f"<h1>{escape(title)}</h1>", table(heads, rows), figure(drawn, "what it shows")])

Whatever is wider than the screen scrolls by itself, so a page is never wider than its window. Text that is not markup
goes through `escape`; `table` and `figure` do that themselves.
"""

from collections.abc import Container, Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from knapformer.report.drawing import inline_svg

__all__ = ["bullets", "escape", "figure", "page", "table"]


def page(title: str, body: Iterable[str], *, style: str = "", theme: str | None = None) -> str:
    """A whole page.

    Args:
        title: of the window, plain text.
        body: elements, as markup.
        style: what the page needs beside the common style sheet.
        theme: "light" or "dark" to begin with; None follows the reader's browser.
    """
    common = (files("knapformer.report") / "style.css").read_text(encoding="utf-8")
    root = f'<html lang="en" data-theme="{theme}">' if theme else '<html lang="en">'
    return (
        f'<!doctype html>\n{root}\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{common}{style}</style>\n</head>\n"
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
