"""`knapformer plan` as its users run it: one JSON object, one-line errors, and no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from knapformer.cli.app import run
from knapformer.data import generate_trace, load_workload

FIGURES = {
    "time_imbalance",
    "token_imbalance",
    "attention_imbalance",
    "gap",
    "split_traffic",
    "cross_node_traffic",
    "routed_fraction",
    "split_sequences",
    "step_over_ideal",
    "step_over_ideal_overlap",
}
SMALL = "g2b2i256f1s0,g2b1i512f1s0"


def knapformer(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    command = [sys.executable, "-m", "knapformer", *arguments]
    env |= {"COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def plan(*arguments: str) -> dict[str, Any]:
    done = knapformer("plan", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1  # one line, so that `tail -1`, jq and a JSONL file can take it
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def check_contract(result: dict[str, Any]) -> None:
    assert set(result) == {"workload", "ranks", "planner", "topology", "steps", "before", "after", "plan_seconds"}
    for side in ("before", "after"):
        assert set(result[side]) == FIGURES
        for figure in result[side].values():
            assert set(figure) == {"mean", "max"}
            assert all(type(value) in (int, float) for value in figure.values())
            assert figure["mean"] <= figure["max"] * (1 + 1e-12)
    assert set(result["plan_seconds"]) == {"median", "p99"}
    assert 0 < result["plan_seconds"]["median"] <= result["plan_seconds"]["p99"]


def test_the_published_figures() -> None:
    result = plan("flux-joint-32", "--planner", "bags", "--topology", "g4n8", "--gamma", "0.49", "--steps", "20")
    check_contract(result)
    named = {key: result[key] for key in ("workload", "ranks", "planner", "topology", "steps")}
    assert named == {"workload": "flux-joint-32", "ranks": 32, "planner": "bags", "topology": "g4n8", "steps": 20}
    assert f"{result['before']['time_imbalance']['mean']:.3f}" == "2.900"
    assert f"{result['after']['time_imbalance']['mean']:.4f}" == "1.0018"
    assert result["before"]["split_traffic"] == {"mean": 0, "max": 0}
    assert result["after"]["split_traffic"]["mean"] == pytest.approx(0.75, abs=1e-3)
    assert result["after"]["cross_node_traffic"] == {"mean": 0, "max": 0}  # bags of 4 in nodes of 8


@pytest.mark.parametrize(
    "change", ["workload", "ranks", "before", "plan_seconds", "an extra key", "a figure", "a mean"]
)
def test_the_check_of_the_contract_can_fail(change: str) -> None:
    side = {name: {"mean": 1.0, "max": 1.0} for name in FIGURES}
    result: dict[str, Any] = {"workload": "", "ranks": 1, "planner": "", "topology": None, "steps": 1}
    result |= {"before": side, "after": dict(side), "plan_seconds": {"median": 1.0, "p99": 1.0}}
    check_contract(result)
    if change == "an extra key":
        result["more"] = 1
    elif change == "a figure":
        del result["after"]["gap"]
    elif change == "a mean":
        result["after"]["gap"] = {"max": 1.0}
    else:
        del result[change]
    with pytest.raises(AssertionError):
        check_contract(result)


def test_a_trace_file_by_hand(tmp_path: Path) -> None:
    """Two steps of 4 ranks in 2 nodes, lengths that a bag of 4 divides."""
    steps = [[[64], [16], [8, 8], []], [[32], [32], [32], [32]]]
    content = {
        "meta": {"name": "own", "world": 4, "ranks_per_node": 2, "d_model": 64, "heads": 8},
        "steps": [{"seq_lens": step, "text_lens": [[0] * len(rank) for rank in step]} for step in steps],
    }
    (tmp_path / "own-file.json").write_text(json.dumps(content))
    result = plan(str(tmp_path / "own-file.json"), "--topology", "g4n1", "--gamma", "1")
    check_contract(result)
    assert (result["workload"], result["ranks"], result["steps"]) == ("own", 4, 2)
    assert (result["planner"], result["topology"]) == ("bags", "g4n1")  # a topology means bags

    def work(length: int) -> int:
        return 24 * 64**2 * length + 4 * 64 * length**2

    before, after = result["before"], result["after"]
    time = work(64) * 4 / (work(64) + work(16) + 2 * work(8))
    tokens, area = 64 * 4 / 96, 64**2 * 4 / (64**2 + 16**2 + 2 * 8**2)
    assert before["time_imbalance"] == {"mean": pytest.approx((time + 1) / 2), "max": pytest.approx(time)}
    assert before["token_imbalance"] == {"mean": pytest.approx((tokens + 1) / 2), "max": pytest.approx(tokens)}
    assert before["attention_imbalance"] == {"mean": pytest.approx((area + 1) / 2), "max": pytest.approx(area)}
    assert before["gap"]["max"] == pytest.approx(time - 1)
    assert before["routed_fraction"] == before["split_sequences"] == {"mean": 0, "max": 0}
    for name in ("time_imbalance", "token_imbalance", "attention_imbalance"):
        assert after[name] == {"mean": 1, "max": 1}
    assert after["gap"] == {"mean": 0, "max": 0}
    assert after["split_traffic"] == after["routed_fraction"] == {"mean": 0.75, "max": 0.75}
    assert after["cross_node_traffic"] == {"mean": 0.5, "max": 0.5}
    assert after["split_sequences"] == {"mean": 4, "max": 4}

    one_node = plan(str(tmp_path / "own-file.json"), "--topology", "g4n1", "--ranks-per-node", "4", "--steps", "1")
    assert one_node["after"]["cross_node_traffic"] == {"mean": 0, "max": 0}
    assert one_node["steps"] == 1
    assert one_node["before"]["token_imbalance"] == {"mean": pytest.approx(tokens), "max": pytest.approx(tokens)}


def test_text_that_is_cross_attended(tmp_path: Path) -> None:
    """Then it is no part of the sequence and may be longer than it."""
    content = {"meta": {"world": 2, "text": "cross"}, "steps": [{"seq_lens": [[4], [2]], "text_lens": [[512], [9]]}]}
    (tmp_path / "wan.json").write_text(json.dumps(content))
    result = plan(str(tmp_path / "wan.json"), "--planner", "local")
    assert result["before"]["token_imbalance"]["mean"] == pytest.approx(4 / 3)
    assert result["after"] == result["before"]
    assert (result["workload"], result["topology"]) == ("wan", None)


def test_data_codes() -> None:
    result = plan(SMALL, "--topology", "g2n4", "--ranks", "8", "--steps", "3")
    check_contract(result)
    assert (result["workload"], result["ranks"], result["steps"]) == (SMALL, 8, 3)
    imbalances = []
    for step in generate_trace(SMALL, world_size=8, num_steps=3).steps:
        tokens = [int(rank.sum()) for rank in step.seq_lens]
        imbalances.append(max(tokens) * len(tokens) / sum(tokens))
    expected = {"mean": pytest.approx(sum(imbalances) / 3), "max": pytest.approx(max(imbalances))}
    assert result["before"]["token_imbalance"] == expected
    assert result["after"]["time_imbalance"]["mean"] < result["before"]["time_imbalance"]["mean"]

    again, other = (plan(SMALL, "--topology", "g2n4", "--ranks", "8", "--steps", "3", "--seed", s) for s in "01")
    assert {**again, "plan_seconds": 0} == {**result, "plan_seconds": 0}
    assert other["before"] != result["before"]


def test_long_data_codes() -> None:
    trace = load_workload(",".join(["g1b1i256f1s0"] * 21), num_steps=1)
    assert trace.world_size == 21


def test_the_default_planner_is_the_balanced_one() -> None:
    result = plan(SMALL, "--steps", "2")
    check_contract(result)
    assert (result["planner"], result["topology"]) == ("balanced", None)
    assert result["after"]["time_imbalance"]["mean"] < result["before"]["time_imbalance"]["mean"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("flux-join-32", "unknown workload 'flux-join-32'; did you mean 'flux-joint-32'"),
        ("nothing.json", "cannot read 'nothing.json': No such file"),
        ("g8b4i256", "data code 'g8b4i256': cannot read the end at column 9"),
        ("flux-lowres-32 --planner knapsack", "unknown planner 'knapsack'; known planners are"),
        ("flux-lowres-32 --planner bags", "planner 'bags' needs a topology such as 'g4n8'"),
        ("flux-lowres-32 --planner local --topology g4n8", "planner 'local' takes no topology, got 'g4n8'"),
        ("flux-lowres-32 --topology g4n8junk", "bag spec 'g4n8junk': cannot read 'junk' at column 5"),
        ("flux-lowres-32 --topology g3n3", "bag spec 'g3n3' covers 9 ranks, which does not divide the world size 32"),
        ("flux-lowres-32 --planner local --gamma -1", "gamma=-1.0"),
        ("flux-lowres-32 --planner local --ranks 7", "workload 'flux-lowres-32' is for 32 ranks but 7 were asked for"),
        ("flux-lowres-32 --planner local --steps 0", "ask for 1 to"),
        ("flux-lowres-32 --topology g1n32 --max-tokens-per-rank 10", "above max_tokens_per_rank 10"),
        ("flux-lowres-32 --planner local --max-tokens-per-rank 0", "max_tokens_per_rank is 0; it must be at least 1"),
        ("flux-lowres-32 --planner local --ranks-per-node 0", ""),
        ("flux-lowres-32 --planner local --gamma nan", "gamma"),
        ("flux-lowres-32 --planner local --steps 1 --figure loads.xyz", "loads.xyz"),
    ],
)
def test_input_that_cannot_be_used(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments.split(), "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    "arguments", ["flux-join-32", "flux-lowres-32 --planner knapsack", "flux-lowres-32 --topology g3"]
)
def test_bad_input_ends_the_process_with_status_2(arguments: str) -> None:
    done = knapformer("plan", *arguments.split(), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan", "requires an argument"),
        ("plan flux-lowres-32 --steps many", "unable to convert"),
        ("plan flux-lowres-32 --planer local", "--planer"),
        ("plan flux-lowres-32 extra", "extra"),
    ],
)
def test_arguments_that_cannot_be_read(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments.split(), "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


def test_the_table_for_people() -> None:
    done = knapformer("plan", SMALL, "--topology", "g4n1", "--steps", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{SMALL}: 4 ranks, planner bags g4n1" in done.stdout
    assert all(name.replace("_", " ") in done.stdout for name in FIGURES)
    assert "ms a step" in done.stdout
    with pytest.raises(json.JSONDecodeError):
        json.loads(done.stdout)


def test_a_figure_of_the_loads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "loads.png"
    plan(SMALL, "--topology", "g4n1", "--steps", "1", "--figure", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


# Runs the command and prints which of the packages named first it has loaded.
LOADED = """
import runpy, sys

names, sys.argv = sys.argv[1].split(","), ["knapformer", *sys.argv[2:]]
try:
    runpy.run_module("knapformer.cli.main", run_name="__main__")
except SystemExit as end:
    status = end.code or 0
print(status, *[name for name in names if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (f"plan {SMALL} --topology g4n1 --steps 1 --json", "0"),
        ("plan --help", "0"),
        ("--help", "0"),
        (f"plan {SMALL} --topology junk", "2"),
        ("train --help", "0 torch"),  # so the check can fail
    ],
)
def test_plan_needs_no_torch(arguments: str, loaded: str) -> None:
    command = [sys.executable, "-c", LOADED, "torch,matplotlib", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == loaded
