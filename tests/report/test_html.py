"""The common page: text stays text, rows stand out where told, and wide things scroll in a real browser."""

from pathlib import Path

import pytest

from knapformer.report.drawing import new_figure
from knapformer.report.html import bullets, figure, page, table
from tests.browser import needs_browser, open_in_browser, width_in_browser


def test_text_stays_text() -> None:
    text = page("<b> & co", [table(["<i>"], [["</table>"]]), figure(new_figure(2, 1), "<u>")], theme="dark")
    assert not any(tag in text for tag in ("<b>", "<i>", "</table></td>", "<u>"))
    assert all(tag in text for tag in ("&lt;b&gt; &amp; co", "&lt;i&gt;", "&lt;/table&gt;", "&lt;u&gt;"))
    assert '<html lang="en" data-theme="dark">' in text and "viewport" in text
    assert "data-theme=" not in page("t", []).split("<style>")[0]


def test_rows_stand_out_where_told() -> None:
    text = table(["name", "value"], [["a", "1"], ["b", "2"]], ours=("b",))
    assert text.count("<tr>") == 2 and '<tr class="ours"><td>b</td><td>2</td></tr>' in text
    facts = table(["", ""], [["a", "1"]])
    assert "<th>" not in facts and 'class="facts"' in facts
    assert bullets(["<b>x</b>"]) == "<ul><li><b>x</b></li></ul>"


@needs_browser
@pytest.mark.parametrize("width", [500, 1200])
def test_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    wide = table(["column"] * 40, [["1,000,000"] * 40])
    facts = table(["", ""], [["command", "x" * 900]])
    parts = [f"<h1>{'long' * 300}</h1>", wide, facts, figure(new_figure(30, 2)), f"<pre>{'y' * 900}</pre>"]
    (tmp_path / "page.html").write_text(page("t", parts))
    assert width_in_browser(tmp_path / "page.html", tmp_path, width) == width
    (tmp_path / "wide.html").write_text(page("t", ['<div style="width: 1300px">x</div>']))  # the check can fail
    assert width_in_browser(tmp_path / "wide.html", tmp_path, width) > width


@needs_browser
@pytest.mark.parametrize(
    ("theme", "colours"), [("light", "34, 34, 34|255, 255, 255"), ("dark", "228, 228, 228|21, 23, 26")]
)
def test_themes_have_their_colours(tmp_path: Path, theme: str, colours: str) -> None:
    script = (
        "<script>const seen = getComputedStyle(document.body);"
        "document.title = [seen.color, seen.backgroundColor].join('|').replaceAll(/rgb\\(|\\)/g, '')</script>"
    )
    (tmp_path / "page.html").write_text(page("t", [script], theme=theme))
    assert f"<title>{colours}</title>" in open_in_browser(tmp_path / "page.html", tmp_path)
