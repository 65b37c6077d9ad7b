"""What the pages show is run: blocks after `<!-- run -->`, and every `knapformer` command is parsed."""

import os
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

from tests.docs.hooks import DOCS, ROOT

BLOCK = re.compile(r"<!-- run -->\n```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]
COMMAND = re.compile(r"^(?: {4})?(?:torchrun .*--no-python )?knapformer (?P<arguments>.+)$", re.MULTILINE)


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [block["code"] for block in found if block["language"] == language]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{name_of(page)}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=name_of)
def test_shell_blocks_run(page, tmp_path):
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for code in blocks(page, "bash"):
        done = subprocess.run(
            ["bash", "-euc", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]


def test_blocks_are_found():
    assert {name_of(page) for page in PAGES} >= {
        "docs/start/five-minutes.md",
        "docs/concepts/placements.md",
        "docs/migrate.md",
    }


def test_the_runner_sees_a_block_that_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        textwrap.dedent("""
        <!-- run -->
        ```python
        assert False
        ```
        ```python
        not run
        ```
    """)
    )
    assert blocks(page, "python") == ["assert False\n"]


def commands():
    pages = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
    for page in pages:
        for found in COMMAND.finditer(page.read_text(encoding="utf-8")):
            yield pytest.param(found["arguments"], id=f"{name_of(page)}: {found['arguments'][:40]}")


@pytest.mark.parametrize("arguments", list(commands()))
def test_commands_take_the_arguments_that_pages_give(arguments):
    app = pytest.importorskip("knapformer.cli.app").make_app()
    app.parse_args(shlex.split(arguments, comments=True), exit_on_error=False, print_error=False)
