"""`import knapformer`, planning and reports need no torch, and importing them does nothing else either.

A fresh interpreter in which torch cannot be imported imports every module, one by one, and reports what went wrong or
what changed. The same check runs on small packages written to misbehave, so that we know it can fail.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import knapformer

# Packages that must work without torch. Those that do not exist yet are left out; `plan` must exist.
TORCH_FREE = ["knapformer", "knapformer.errors", "knapformer.plan", "knapformer.report", "knapformer.tools.simulate"]

# Runs in the fresh interpreter. Arguments: the file for the report, then packages; "name.*": and all modules below it.
CHECKER = """
import importlib, importlib.util, json, logging, os, pkgutil, signal, sys, threading, warnings

sys.modules["torch"] = None  # from here on, `import torch` raises ModuleNotFoundError
report_path, *names = sys.argv[1:]
imported, problems = [], []


def state():
    handled = [number for number in signal.valid_signals() if signal.getsignal(number) not in (0, 1, None)]
    return {
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "threads": threading.active_count(),
        "log handlers": len(logging.getLogger().handlers),
        "signal handlers": sorted(handled),
    }


def check(name):
    try:
        importlib.import_module(name)
    except BaseException as error:
        problems.append(f"{name}: {type(error).__name__}: {error}")
    else:
        imported.append(name)


before = state()
for name in names:
    package = name.removesuffix(".*")
    check(package)
    if name.endswith(".*") and package in sys.modules:
        for module in pkgutil.walk_packages(sys.modules[package].__path__, package + ".", onerror=lambda name: None):
            check(module.name)
after = state()
problems += [f"import changes the {what}" for what in before if before[what] != after[what]]
with open(report_path, "w") as file:
    json.dump({"imported": imported, "problems": problems}, file)
"""


def check_imports(names: list[str], report_path: Path, extra_path: Path | None = None) -> tuple[list[str], list[str]]:
    """Imports `names` without torch in a new process; returns the modules imported and the problems found."""
    env = dict(os.environ)
    if extra_path is not None:
        env["PYTHONPATH"] = str(extra_path)
    command = [sys.executable, "-W", "error", "-c", CHECKER, str(report_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True)
    report = json.loads(report_path.read_text())
    problems = report["problems"]
    for stream, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        if text:
            problems.append(f"import writes to {stream}: {text.strip()}")
    return report["imported"], problems


def write_package(root: Path, **modules: str) -> None:
    package = root / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, source in modules.items():
        (package / f"{name}.py").write_text(source)


def test_the_core_imports_without_torch_and_without_side_effects(tmp_path):
    root = Path(knapformer.__file__).parent
    present = [name for name in TORCH_FREE[2:] if root.joinpath(name.split(".")[1], "__init__.py").exists()]
    imported, problems = check_imports(TORCH_FREE[:2] + [f"{name}.*" for name in present], tmp_path / "report.json")
    assert problems == []
    plan_modules = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in (root / "plan").rglob("*.py")
    }
    assert plan_modules <= set(imported)  # the walk left none out


def test_a_well_behaved_package_passes_the_check(tmp_path):
    write_package(tmp_path, first="import json", second="from sample import first")
    imported, problems = check_imports(["sample.*"], tmp_path / "report.json", tmp_path)
    assert problems == []
    assert imported == ["sample", "sample.first", "sample.second"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import torch", "sample.bad: ModuleNotFoundError: import of torch halted"),
        ("from torch.nn import Linear", "sample.bad: ModuleNotFoundError"),
        ("raise SystemExit(1)", "sample.bad: SystemExit"),
        ("print('hello')", "import writes to stdout: hello"),
        ("import sys; sys.stderr.write('hello')", "import writes to stderr: hello"),
        ("import warnings; warnings.warn('old', DeprecationWarning)", "sample.bad: DeprecationWarning: old"),
        ("import os; os.environ['SAMPLE_FLAG'] = '1'", "import changes the environment"),
        ("import logging; logging.basicConfig()", "import changes the log handlers"),
        ("import signal; signal.signal(signal.SIGTERM, print)", "import changes the signal handlers"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "import changes the threads",
        ),
    ],
)
def test_the_check_can_fail(tmp_path, source, problem):
    write_package(tmp_path, bad=source)
    _, problems = check_imports(["sample.*"], tmp_path / "report.json", tmp_path)
    assert any(found.startswith(problem) for found in problems), problems
