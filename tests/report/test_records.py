"""Run records: what is written is read back, a killed run's record too, and bad lines are named."""

import json
import math
import platform
from pathlib import Path

import numpy as np
import pytest

from knapformer.errors import DataError
from knapformer.report import RecordWriter, RunRecord, environment, read_records

CONFIG = {"data": {"patch": 16}, "balancer": {"planner": "bags", "topology": "g2n1"}}
STEPS = [
    {"loss": 1.25, "seconds": 0.5, "busy_seconds": [0.5, 0.25], "text": "Ω\nline"},
    {"loss": 0.1 + 0.2, "seconds": 1e-9, "busy_seconds": [], "text": ""},
    {"loss": float("inf"), "seconds": 3, "busy_seconds": [0.0], "text": "\u2028"},
]


def write(path: Path, name: str, steps: list[dict] = STEPS, config: dict = CONFIG) -> None:
    with RecordWriter(path, name, config, device="cpu x 2") as writer:
        for number, values in enumerate(steps):
            writer.step(number, **values)


def test_round_trip(tmp_path: Path) -> None:
    write(tmp_path / "new" / "folder" / "record.jsonl", "one")
    runs = read_records(tmp_path / "new" / "folder" / "record.jsonl")
    assert list(runs) == ["one"]
    run = runs["one"]
    assert run.name == "one"
    assert run.header["config"] == CONFIG
    assert run.header["environment"]["device"] == "cpu x 2"
    assert isinstance(run.header["command"], list) and run.header["command"]
    assert run.steps == [{"step": number, **values} for number, values in enumerate(STEPS)]
    assert run.column("loss") == [1.25, 0.30000000000000004, float("inf")]
    assert run.column("step") == [0, 1, 2]


def test_one_json_object_a_line_with_schema_kind_and_name(tmp_path: Path) -> None:
    write(tmp_path / "record.jsonl", "one")
    text = (tmp_path / "record.jsonl").read_bytes()
    assert text.endswith(b"\n") and b"\r" not in text
    lines = [json.loads(line) for line in text.decode().splitlines()]
    assert [(line["schema"], line["kind"], line["name"]) for line in lines] == [
        (1, "run", "one"),
        (1, "step", "one"),
        (1, "step", "one"),
        (1, "step", "one"),
    ]


def test_lines_are_there_before_the_run_ends(tmp_path: Path) -> None:
    """A killed run leaves what it has done."""
    writer = RecordWriter(tmp_path / "record.jsonl", "one", {})
    assert len(read_records(tmp_path / "record.jsonl")["one"].steps) == 0
    writer.step(0, loss=1.0)
    assert read_records(tmp_path / "record.jsonl")["one"].column("loss") == [1.0]
    with writer:
        writer.step(1, loss=2.0)
    assert read_records(tmp_path / "record.jsonl")["one"].column("loss") == [1.0, 2.0]
    with pytest.raises(ValueError, match="closed file"):
        writer.step(2, loss=3.0)


def test_two_runs_in_a_file(tmp_path: Path) -> None:
    """As the demo writes them: step by step in turns."""
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, "a", {"of": "a"}) as a, RecordWriter(path, "b", {"of": "b"}) as b:
        for step in range(3):
            a.step(step, loss=step)
            b.step(step, loss=-step)
    runs = read_records(path)
    assert list(runs) == ["a", "b"]
    assert (runs["a"].column("loss"), runs["b"].column("loss")) == ([0, 1, 2], [0, -1, -2])
    assert (runs["a"].header["config"], runs["b"].header["config"]) == ({"of": "a"}, {"of": "b"})


def test_lines_of_earlier_runs_are_kept_and_a_later_one_of_the_same_name_counts(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write(path, "a", [{"loss": 1}, {"loss": 2}])
    write(path, "b", [{"loss": 3}])
    write(path, "a", [{"loss": 4}])
    assert len(path.read_text().splitlines()) == 3 + 2 + 2
    runs = read_records(path)
    assert {name: run.column("loss") for name, run in runs.items()} == {"a": [4], "b": [3]}


def test_an_empty_file_has_no_runs(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("")
    assert read_records(tmp_path / "record.jsonl") == {}


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    """Wherever the write was cut: between lines, or anywhere inside the last one."""
    path = tmp_path / "record.jsonl"
    write(path, "one", STEPS[:2])
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for stop in range(last, len(whole)):
        path.write_bytes(whole[:stop])
        complete = stop == len(whole) - 1  # only the line feed is missing
        assert len(read_records(path)["one"].steps) == (2 if complete else 1)
    path.write_bytes(whole)
    assert len(read_records(path)["one"].steps) == 2


def test_a_run_after_a_killed_one(tmp_path: Path) -> None:
    """The file stays readable: a new run begins on a line of its own, and the cut line before it is left out."""
    path = tmp_path / "record.jsonl"
    write(path, "one", STEPS[:2])
    path.write_bytes(path.read_bytes()[:-20])
    write(path, "two", STEPS[:1])
    runs = read_records(path)
    assert {name: len(run.steps) for name, run in runs.items()} == {"one": 1, "two": 1}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON .*a run record has one JSON object per line"),
        ("step 3: loss 0.5", "not JSON"),
        ("", "not JSON"),
        ("[1]", "not a run record of schema 1"),
        ("7", "not a run record of schema 1"),
        ('{"schema": 2, "kind": "step", "name": "one"}', "not a run record of schema 1"),
        ('{"kind": "step", "name": "one"}', "not a run record of schema 1"),
        ('{"schema": 1, "kind": "plan", "name": "one"}', "not a run record of schema 1"),
        ('{"schema": 1, "kind": "step", "name": "two"}', "a step of run 'two' before its header"),
        ('{"schema": 1, "kind": "step"}', "a run record lacks name"),
        ('{"schema": 1, "kind": "run", "name": "two"}', "a run record lacks command, config, environment"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "record.jsonl"
    write(path, "one", [{"loss": 1}, {"loss": 2}])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(DataError, match=f"record.jsonl, line 3: {problem}"):
        read_records(path)
    path.write_text("\n".join(lines) + "\n")
    assert len(read_records(path)["one"].steps) == 2  # without that line the file is fine


def test_a_value_that_a_step_lacks() -> None:
    run = RunRecord("one", {}, [{"step": 0, "loss": 1.0}, {"step": 1}])
    with pytest.raises(DataError, match=r"run 'one': a step has no value 'seconds'; it has \['loss', 'step'\]"):
        run.column("seconds")
    with pytest.raises(DataError, match="a step has no value 'loss'"):
        run.column("loss")
    assert RunRecord("none", {}).column("anything") == []


def test_environment_says_what_ran_where() -> None:
    seen = environment("cpu x 2, 1 thread each")
    assert seen["device"] == "cpu x 2, 1 thread each"
    assert environment()["device"] == "cpu"
    assert set(seen) == {"time", "python", "versions", "commit", "device", "processor", "cores"}
    assert seen["python"] == platform.python_version()
    assert seen["versions"]["numpy"] == np.__version__
    assert set(seen["versions"]) == {"knapformer", "numpy", "torch"}
    assert seen["cores"] >= 1 and seen["processor"]
    assert seen["commit"] is None or (len(seen["commit"]) == 12 and int(seen["commit"], 16) >= 0)
    assert len(seen["time"]) == len("2025-01-01T00:00:00Z") and seen["time"].endswith("Z")
    json.dumps(seen)


def test_not_a_number_survives(tmp_path: Path) -> None:
    """A diverged run must still be readable."""
    write(tmp_path / "record.jsonl", "one", [{"loss": float("nan")}])
    assert math.isnan(read_records(tmp_path / "record.jsonl")["one"].column("loss")[0])


def test_a_failure_is_part_of_its_run(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordWriter(path, "a", {}) as writer:
        writer.step(0, seconds=1.0)
        writer.failure("no room")
    run = read_records(path)["a"]
    assert (run.failures, len(run.steps)) == (["no room"], 1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(run.lines())
    path.write_text(path.read_text() + '{"schema": 1, "kind": "failure", "name": "a"}\n')
    with pytest.raises(DataError, match="line 4: a run record lacks cause"):
        read_records(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none\.jsonl': No such file"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"name": "\xff"}\n')
    with pytest.raises(DataError, match=r"bytes\.jsonl: not a run record"):
        read_records(tmp_path / "bytes.jsonl")
