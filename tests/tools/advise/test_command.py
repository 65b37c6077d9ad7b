"""`knapformer advise` as its users run it: a page in the terminal, a page of HTML, one JSON object, and errors."""

import json
import re

import pytest

from knapformer.cli.app import run
from tests.browser import needs_browser, width_in_browser

ROWS = "width,height,frames,caption\n640,480,1,a dog\n832,480,49,<b>waves</b>\n-1,480,1,x\n832,480,33,sea\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "a<b>.csv"
    file.write_text(ROWS)
    return str(file)


ARGUMENTS = ("--model", "cogvideox-2b", "--cluster", "h100x2", "--steps", "3")


@pytest.mark.filterwarnings("default::knapformer.errors.KnapFormerWarning")
def test_terminal_page_and_html(source, tmp_path, capsys):
    page = tmp_path / "out" / "advice.html"
    assert run(["advise", source, *ARGUMENTS, "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    for part in ("3 samples", "model's figures", "max_tokens_per_rank", "balanced", "fixed-degree", "plan_routing"):
        assert part in out
    assert "…" not in out and max(map(len, re.sub(r"^    .*", "", out, flags=re.M).splitlines())) <= 80
    assert "column 'width': is out of range" in err and "row 3 ('-1')" in err and "1 of 4 rows" in err

    html = page.read_text()
    assert html.count("<svg") == 2 and "<b>.csv" not in html and "a&lt;b&gt;.csv" in html
    assert not re.search(r"""(src|href)=["']https?:""", html) and "<script" not in html
    assert "is out of range" in html and "not measurements" in html


def test_json_is_one_object_and_says_what_is_wrong(source, capsys):
    assert run(["advise", source, *ARGUMENTS, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and out.count("\n") == 1
    assert found["source"]["bad_rows"] == 1 and found["source"]["problems"][0]["rows"] == [[3, "'-1'"]]
    assert found["basis"].startswith("modelled")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.csv"], "no such file"),
        ([], "nothing to advise on"),
        (["--column", "width"], "ROLE=NAME"),
        (["--column", "width=wide"], "no column 'wide'"),
        (["--cluster", "h1000"], "cannot read 'h1000'"),
        (["--model", "fluxx1"], "unknown model 'fluxx1'"),
    ],
)
def test_errors_are_one_line(source, capsys, arguments, message):
    sources = [source] if arguments and arguments[0].startswith("--") else []
    assert run(["advise", *sources, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@needs_browser
@pytest.mark.filterwarnings("default::knapformer.errors.KnapFormerWarning")
def test_the_page_is_as_wide_as_its_window(source, tmp_path):
    page = tmp_path / "advice.html"
    assert run(["advise", source, *ARGUMENTS, "--html", str(page)]) == 0
    assert width_in_browser(page, tmp_path, 500) == 500
