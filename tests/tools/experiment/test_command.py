"""`knapformer experiment` and `knapformer report` as their users run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from knapformer.cli.app import run
from knapformer.report import read_records

SIMULATED = """
name = "small"
cluster = "h100x4-node2"
workloads = ["g2b2i256f1s0,g1b1i512f5s1,g1b1i256f1s0"]
planners = ["local", "g2n2", "g3n1", "balanced"]
seeds = [0, 1]
steps = 2
"""
TRAINED = """
name = "real"
engine = "torchrun"
ranks_per_node = 2
workloads = ["train.toml"]
planners = ["local", "g3n1", "balanced"]
steps = 2
"""
TRAINING = """
[data]
manifest = "pictures"
max_text = 30
[[data.loaders]]
source = "images"
num_loaders = 2
batch = 2
[model]
width = 32
num_heads = 2
num_double = 1
num_single = 1
axes_dims = [4, 6, 6]
"""


def status(*arguments: str) -> int:
    try:
        return run(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def values(folder: Path, *names: str) -> dict[str, list[Any]]:
    """Of the runs that did not fail."""
    runs = read_records(folder / "records.jsonl").values()
    return {run.name: [[step[n] for n in names] for step in run.steps] for run in runs if not run.failures}


def test_a_simulated_grid_from_dry_run_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.toml").write_text(SIMULATED)
    command = ["experiment", str(tmp_path / "grid.toml"), "--out", str(tmp_path / "out")]
    assert status(*command, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and not (tmp_path / "out").exists()
    assert "--topology g2n2" in lines[1] and "--seed 1" in lines[-1] and lines[0].startswith("to run")

    assert status(*command) == 1  # bags of 3 do not fit 4 ranks: that cell fails, the others do not
    out = capsys.readouterr().out
    assert "failed: " in out and "g3n1 seed 1: SpecError: bag spec 'g3n1'" in out
    whole = values(tmp_path / "out", "seconds", "tokens")
    assert len(whole) == 6

    records = tmp_path / "out" / "records.jsonl"
    records.write_text(records.read_text()[: len(records.read_text()) // 2])  # as a killed run leaves it
    assert status(*command, "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert values(tmp_path / "out", "seconds", "tokens") == whole
    assert [row["planner"] for row in data["groups"][0]["rows"]] == ["local", "g2n2", "balanced"]
    assert len(data["failures"]) == 2
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 3 and (tmp_path / "out" / "report.md").is_file()

    html = tmp_path / "again.html"
    assert status("report", str(tmp_path / "out"), "-o", str(html), "--json") == 0
    assert json.loads(capsys.readouterr().out) | {"title": ""} == data | {"title": ""}
    assert html.read_text().count("<svg") == 3
    summary = tmp_path / "summary.jsonl"
    assert status("report", str(tmp_path / "out"), "-o", str(summary)) == 0
    (group,) = read_records(summary).values()
    assert [step["planner"] for step in group.steps] == ["local", "g2n2", "balanced"]
    assert group.steps[2]["speedup"] == pytest.approx(data["groups"][0]["rows"][2]["speedup"], rel=1e-5)
    assert group.steps[0]["seeds"] == [0, 1] and "versions" in group.header["environment"]
    assert status("report", str(summary), "--against", str(summary), "-o", str(summary)) == 2
    other = tmp_path / "other"
    assert status("report", str(tmp_path / "out"), "--against", str(tmp_path / "out"), "-o", f"{other}.md") == 0
    assert Path(f"{other}.md").read_text().count("1.000 ± 0.000") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment", "flux-papers"], "no grid 'flux-papers'"),
        (["experiment", "flux-paper", "--engine", "torchrun", "--dry-run"], "needs 32 ranks on 4 nodes"),
        (["experiment", "tiny", "--engine", "simulate"], "names no cluster"),
        (["report"], "no runs to report on"),
        (["report", "nowhere.jsonl"], "cannot read 'nowhere.jsonl'"),
        (["report", "x.jsonl", "-o", "x.pdf"], "a name ends in .html, .md or .jsonl"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.strip().count("\n") == 0


def test_a_slurm_job_is_printed_written_and_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tools = tmp_path / "out", tmp_path / "tools"
    command = ("experiment", "flux-paper", "--engine", "slurm", "--out", str(out))
    assert status(*command, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash") and "--nnodes 4" in printed and "--nproc-per-node 8" in printed
    assert not out.exists()

    monkeypatch.setenv("PATH", str(tools))
    assert status(*command) == 0
    job = out / "slurm" / "job.sh"
    assert job.read_text() == printed
    assert capsys.readouterr().out == f"no sbatch on this machine; where there is one: sbatch {job}\n"

    tools.mkdir()
    (tools / "sbatch").write_text(f'#!/bin/sh\n[ "$2" = {job} ] && echo 41\n')
    (tools / "sbatch").chmod(0o755)
    assert status(*command) == 0
    assert "submitted job 41; " in capsys.readouterr().out


@pytest.mark.slow  # its parts are under test alone: going on in test_loop, cells in test_engines, torchrun in tests/cli
def test_a_grid_trains_on_two_ranks_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for i, size in enumerate([(64, 48), (16, 16), (32, 80), (48, 48)]):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / "pictures" / f"{i}.png")
    (tmp_path / "grid.toml").write_text(TRAINED)
    (tmp_path / "train.toml").write_text(TRAINING)
    out = tmp_path / "out"
    first = _experiment(tmp_path / "grid.toml", out)
    assert first.returncode == 1, first.stderr[-3000:]
    assert "train.toml g3n1 seed 0: SpecError" in first.stdout
    whole = values(out, "loss", "tokens", "rank_tokens")
    assert [list(column) for column in zip(*whole["train.toml local seed 0"], strict=True)][1][0] > 0
    losses = {name: [loss for loss, *_ in steps] for name, steps in whole.items()}
    np.testing.assert_allclose(losses["train.toml local seed 0"], losses["train.toml balanced seed 0"], rtol=1e-5)

    records = (out / "records.jsonl").read_text()
    (out / "records.jsonl").write_text(records[: records.rindex('{"schema"') + 30])  # killed in its last step
    (tmp_path / "grid.toml").write_text(TRAINED.replace('"g3n1", ', ""))
    again = _experiment(tmp_path / "grid.toml", out)
    assert again.returncode == 0, again.stderr[-3000:]
    assert values(out, "loss", "tokens", "rank_tokens") == whole
    table = re.search(r"^balanced .*", again.stdout, re.MULTILINE)
    assert table and "2 cells, 0 of them not done" in again.stdout


def _experiment(grid: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "knapformer", "experiment", str(grid), "--out", str(out)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
