"""The command line as a whole: help that knows every option, exit statuses, and messages printed as they are."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules

import pytest

import knapformer
from knapformer import tools
from knapformer.cli import app
from knapformer.cli.demo import demo
from knapformer.errors import DataError
from tests.cli.test_plan import knapformer as run_knapformer

PLACES = {name: f"knapformer.cli.{name}" for name in app.COMMANDS}
PLACES |= {tool.name: f"knapformer.tools.{tool.name}.command" for tool in iter_modules(tools.__path__)}


def function(name: str) -> Callable[..., None]:
    """Of a command."""
    return getattr(import_module(PLACES[name]), name if name in app.COMMANDS else "command")


@pytest.fixture(autouse=True)
def plain_wide_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def status(arguments: Sequence[str]) -> int:
    """Exit status of a command run in this process."""
    try:
        return app.run(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def options(command: Callable[..., None]) -> list[str]:
    """As the user writes them."""
    names = inspect.signature(command).parameters
    lists = [name for name, one in names.items() if one.kind is inspect.Parameter.VAR_POSITIONAL]
    return ["--json" if n == "as_json" else n.upper() if n in lists else "--" + n.replace("_", "-") for n in names]


@pytest.mark.parametrize("name", PLACES)
def test_help_explains_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([name, "--help"]) == 0
    output = capsys.readouterr()
    assert output.err == "" and "--no-" not in output.out and "--empty-" not in output.out
    lines = [line.replace("│", " ") for line in output.out.splitlines()]
    for option in options(function(name)):
        (line,) = [line for line in lines if option in line.split()[:3]]
        words = line.split(option, 1)[1].split()
        assert len([word for word in words if word.strip(".,:;").islower()]) >= 2, f"{option} is not explained: {line}"


@pytest.mark.parametrize("name", PLACES)
def test_help_of_a_command_is_its_docstring(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([name, "--help"]) == 0
    description = (function(name).__doc__ or "").partition("Parameters\n")[0]
    assert " ".join(description.split()) in " ".join(capsys.readouterr().out.split())


def test_the_check_of_the_help_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["train", "--help"]) == 0
    words = capsys.readouterr().out.split()
    assert "--topology" in options(demo)
    assert "--topology" not in words and "--config" in words


def test_help_lists_every_command() -> None:
    done = run_knapformer("--help")
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    assert all(name in words for name in PLACES)
    assert "nothing" not in words
    lines = [" ".join(line.strip(" │").split()) for line in done.stdout.splitlines()]
    for name, line in app.COMMANDS.items():
        assert f"{name} {line}" in lines
    assert f"replay {import_module('knapformer.tools.replay').__doc__}" in lines


def test_version() -> None:
    done = run_knapformer("--version")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, knapformer.__version__, "")


@pytest.mark.parametrize("argument", ["optimise", "--fast"])
def test_an_unknown_command(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([argument]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert argument in output.err


def test_train_without_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["train", "nothing.toml"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("error: ") and "nothing.toml" in line


@pytest.mark.parametrize("workload", ["[red]x[/red]", "[/]", "[", "a]b", "x" * 250, "{curly} %s"])
def test_messages_are_printed_as_they_are(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in a message are no markup, and a long line is one line."""
    assert status(["plan", workload, "--planner", "local"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"error: unknown workload '{workload}'")


def test_markup_would_be_noticed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "escape", str)
    assert status(["plan", "[red]x[/red]", "--planner", "local"]) == 2
    assert "[red]" not in capsys.readouterr().err


ARGUMENTS = ["plan", "flux-lowres-32", "--planner", "local", "--steps", "1", "--json"]


def test_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(ARGUMENTS) == 0
    output = capsys.readouterr()
    assert output.err == "" and output.out.startswith("{")


def test_an_error_on_purpose_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DataError("the file is cut")

    monkeypatch.setattr("knapformer.cli.plan.load_workload", fail)
    assert status(ARGUMENTS) == 2
    assert capsys.readouterr().err == "error: the file is cut\n"


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("knapformer.cli.plan.load_workload", fail)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        status(ARGUMENTS)


# Runs the command line as if a package were not installed.
MISSING = """
import runpy, sys

missing = sys.argv.pop(1)


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Finder())
runpy.run_module("knapformer.cli.main", run_name="__main__")
"""


def run_without(package: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MISSING, package, *ARGUMENTS]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("package", ["cyclopts", "rich"])
def test_without_the_packages_of_the_command_line(package: str) -> None:
    done = run_without(package)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"the command line needs {package}")
    assert line.endswith("pip install 'knapformer[cli]'")


def test_another_missing_package_is_not_blamed_on_the_command_line() -> None:
    done = run_without("numpy")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'numpy'"
    assert run_without("a_package_nobody_needs").returncode == 0
