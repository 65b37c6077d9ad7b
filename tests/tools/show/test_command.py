"""`knapformer show`: each ending gives its kind of file, and a placement comes back from its own file."""

import json

import pytest

from knapformer.cli.app import run
from knapformer.plan import Placement


def show(*arguments):
    return run(["show", *map(str, arguments)])


def test_each_ending(tmp_path, capsys):
    outputs = [tmp_path / f"plan{ending}" for ending in (".png", ".html", ".perfetto.json", ".json")]
    flags = [part for path in outputs for part in ("-o", path)]
    assert show("real-mix-8", "--step", 1, "--planner", "bags", "--topology", "g4n2", *flags) == 0
    assert all(path.stat().st_size > 1000 for path in outputs)
    written = capsys.readouterr()
    assert written.out == "" and written.err.count("wrote ") == 4
    assert json.loads(outputs[2].read_text())["traceEvents"]
    placement = Placement.from_json(json.loads(outputs[3].read_text()))
    assert (placement.world_size, placement.planner) == (8, "bags")
    assert show(outputs[3], "-o", tmp_path / "again.json") == 0
    assert json.loads((tmp_path / "again.json").read_text()) == placement.to_json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["real-mix-8", "-o", "plan.txt"], "cannot tell what 'plan.txt' should become"),
        (["real-mix-8", "--step", 9999, "-o", "plan.png"], "has steps 0 to"),
        (["real-mix-8", "--cluster", "h100x4", "-o", "plan.perfetto.json"], "has 4 ranks, the step 8"),
        (["no-such-workload", "-o", "plan.png"], "no-such-workload"),
    ],
)
def test_bad_input_is_named(arguments, message, capsys):
    assert show(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_broken_placement_is_named(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert show("real-mix-8", "-o", path) == 0
    data = json.loads(path.read_text())
    data["token_shards"][0][3] -= 1
    path.write_text(json.dumps(data))
    assert show(path, "-o", tmp_path / "plan.png") == 2
    assert "plan.json" in capsys.readouterr().err
