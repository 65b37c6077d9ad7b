"""`knapformer simulate` and `knapformer replay` as their users run them."""

import json
from pathlib import Path
from typing import Any

import pytest

from knapformer.cli.app import run
from knapformer.report import read_records

SMALL = "g2b2i256f1s0,g1b1i512f5s1,g1b1i256f1s0"
LARGE = "g2b2i256f1s0,g1b1i2048f17s1,g1b1i256f1s0"


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_simulate_prints_one_object_and_writes_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    result = _json(capsys, "simulate", LARGE, "--cluster", "h100x4-node2", "--steps", "2", "--trace", str(file))
    assert (result["planner"], result["model"], result["ranks"], result["steps"]) == ("balanced", "flux1", 4, 2)
    parts = result["speedup"]
    assert parts["total"] == pytest.approx(parts["balance"] * parts["traffic"] * parts["overlap"])
    assert result["local_step_seconds"] > result["step_seconds"]
    assert json.loads(file.read_text())["traceEvents"]
    bags = _json(capsys, "simulate", LARGE, "--cluster", "h100x4", "--topology", "g2n2", "--steps", "2")
    assert (bags["planner"], bags["topology"]) == ("bags", "g2n2")


def test_simulate_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "mix-v35-10s", "--cluster", "b200x4", "--steps", "1", "--planner", "local"]) == 0
    out = capsys.readouterr().out
    assert "HFU, MFU" in out
    assert "model wan21-1.3b" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "x100x4"], "unknown device 'x100'"),
        (["--cluster", "h100x4", "--model", "flux"], "unknown model 'flux'"),
        (["--cluster", "h100x5"], "multiple of 4"),
        (["--cluster", "h100x4", "--profile", "none.json"], "none.json"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(["simulate", SMALL, *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_replay_measures_every_rank_at_home_and_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl"
    small = ["--device", "cpu", "--width", "32", "--heads", "2", "--scale", "8", "--repeats", "1"]
    result = _json(capsys, "replay", SMALL, *small, "--record", str(record))
    assert result["planned"]["modelled_imbalance"] < result["local"]["modelled_imbalance"]
    for side in ("local", "planned"):
        (seconds,) = result[side]["rank_seconds"]
        assert len(seconds) == 4
        assert result[side]["step_seconds"] == max(seconds)
        assert result[side]["imbalance"] >= 1
    assert result["speedup"] > 0
    (run_record,) = read_records(record).values()
    assert run_record.column("speedup") == [result["speedup"]]
