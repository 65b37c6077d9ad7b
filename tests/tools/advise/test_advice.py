"""The advice as a whole: verdicts that go either way, the same every time, and lines that run."""

import json

import numpy as np
import pytest

from knapformer.data import Trace, TraceStep, write_trace
from knapformer.errors import DataError, PlanError, SpecError
from knapformer.tools.advise.advice import AdviseOptions, advise
from knapformer.tools.advise.query import ScanOptions
from knapformer.tools.simulate.scenario import Scenario

SMALL = {"model": "cogvideox-2b", "cluster": "h100x4", "num_steps": 4}


def manifest(path, rows):
    path.write_text("width,height,frames,text_tokens\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return str(path)


def mixed_rows():
    rng = np.random.default_rng(1)
    images = [(int(w), int(h), 1, 40) for w, h in rng.integers(256, 1280, (300, 2))]
    return images + [(832, 480, int(f), 60) for f in rng.integers(17, 121, 60)]


def test_mixed_data_is_worth_it_and_uniform_data_is_not(tmp_path):
    mixed = advise([manifest(tmp_path / "mixed.csv", mixed_rows())], AdviseOptions(**SMALL, batch=4))
    assert mixed["verdict"]["worth"] in ("yes", "depends") and mixed["verdict"]["speedup"] > 1.2
    alike = advise([manifest(tmp_path / "alike.csv", [(832, 480, 81, 60)] * 50)], AdviseOptions(**SMALL))
    assert alike["verdict"]["worth"] == "no" and "Not worth it" in alike["verdict"]["reasons"][0]
    assert alike["verdict"]["speedup"] < 1.03
    assert alike["distribution"]["longest_1_percent"]["work"] == pytest.approx(0.01, rel=0.05)
    assert mixed["distribution"]["longest_1_percent"]["work"] > 0.02
    for found in (mixed, alike):
        json.dumps(found, allow_nan=False)
        for share in ("samples", "tokens", "work"):
            assert sum(b[share] for b in found["distribution"]["bins"]) == pytest.approx(1)
        for policy in found["policies"]:
            assert policy["computing"] + policy["waiting"] + policy["traffic"] == pytest.approx(1)
    by_name = {p["name"]: p for p in mixed["policies"]}
    assert set(by_name) >= {"random", "same-bucket", "bucket-by-rank", "fixed-degree", "balanced"}
    ratio = by_name["random"]["step_seconds"]["mean"] / by_name["balanced"]["step_seconds"]["mean"]
    assert ratio == pytest.approx(mixed["verdict"]["speedup"])  # of the same steps
    assert by_name["balanced"]["most_tokens_of_a_rank"] < by_name["random"]["most_tokens_of_a_rank"]


def test_advice_is_the_same_for_a_seed_and_another_for_another(tmp_path):
    source = manifest(tmp_path / "mixed.csv", mixed_rows())
    first, again, other = (
        advise([source], AdviseOptions(**SMALL | {"cluster": "h100x2"}, seed=seed, batch=2)) for seed in (5, 5, 6)
    )
    assert first == again
    assert first["policies"][0]["seconds"] != other["policies"][0]["seconds"]


def test_samples_too_long_for_a_rank_are_foreseen(tmp_path):
    rows = [(832, 480, 49, 60)] * 99 + [(1920, 1080, 481, 60)]
    found = advise([manifest(tmp_path / "long.csv", rows)], AdviseOptions(**SMALL))
    chance = found["policies"][0]["heaviest_step"]["chance_a_step_too_large"]
    assert chance == pytest.approx(1 - 0.99**4)  # on any of four ranks
    assert found["memory"]["samples_too_long_for_a_rank"] == pytest.approx(0.01)
    assert found["source"]["longest"] == {
        **{"file": str(tmp_path / "long.csv"), "row": 100, "width": 1920, "height": 1080, "frames": 481}
    }
    assert any("does not fit memory" in reason for reason in found["verdict"]["reasons"])


def test_more_than_the_cluster_holds_is_refused(tmp_path):
    source = manifest(tmp_path / "big.csv", [(1920, 1080, 241, 60)] * 5)
    with pytest.raises(PlanError, match="no step of these fits the cluster, even balanced"):
        advise([source], AdviseOptions(**SMALL, batch=40))


def test_recorded_steps_are_taken_as_they_were(tmp_path):
    steps = tuple(TraceStep(([9000], [300, 200]), ([0], [0, 0])) for _ in range(3))
    write_trace(Trace("two", 2, steps, {"d_model": 1920, "heads": 30}), tmp_path / "two.json")
    found = advise([str(tmp_path / "two.json")], AdviseOptions(cluster="h100x2", num_steps=5))
    recorded = found["policies"][0]
    assert (recorded["name"], recorded["steps"], recorded["rank_tokens"]) == ("recorded", 3, [9000] * 3)
    assert recorded["heaviest_step"]["tokens_of_a_rank"] == 9000
    assert found["model"]["name"] == "cogvideox-2b"
    elsewhere = advise([str(tmp_path / "two.json")], AdviseOptions(cluster="h100x4", num_steps=3))
    assert elsewhere["policies"][0]["name"] == "random" and any("2 ranks" in n for n in elsewhere["source"]["notes"])


def test_folders_and_things_that_are_not_there(tmp_path):
    manifest(tmp_path / "a.csv", [(640, 480, 1, 9)] * 3)
    manifest(tmp_path / "b.csv", [(640, 480, 9, 9)] * 3)
    assert advise([str(tmp_path)], AdviseOptions(**SMALL))["source"]["rows"] == 6
    (tmp_path / "none").mkdir()
    (tmp_path / "list.json").write_text('[{"width": 1}]')
    for source, message in (
        ("none", "holds no manifest"),
        ("x.csv", "no such file"),
        ("list.json", "one object a line"),
    ):
        with pytest.raises(DataError, match=message):
            advise([str(tmp_path / source)], AdviseOptions(**SMALL))
    with pytest.raises(SpecError, match="unknown workload"):
        advise(["no-workload"], AdviseOptions(**SMALL))
    for bad in ({"batch": 0}, {"num_steps": 0}):
        with pytest.raises(SpecError, match="must be at least 1"):
            AdviseOptions(**bad)
    for bad in ({"max_pixels": 0}, {"sample_fps": float("nan")}, {"duration_unit": "h"}):
        with pytest.raises(SpecError):
            ScanOptions(**bad)


def test_the_lines_to_add_run(tmp_path):
    torch = pytest.importorskip("torch")
    source = manifest(tmp_path / "a.csv", [(640, 480, 1, 9)] * 3)
    found = advise([source], AdviseOptions(model="cogvideox-2b", cluster="h100x1", num_steps=2))
    place = {"seq_lens": [3, 4], "x": torch.randn(7, 2)}
    exec("\n".join(found["lines"]), place)
    assert place["x"].shape == (7, 2) and place["step"].placement.tokens().tolist() == [7]
    want = Scenario.of("cogvideox-2b", "h100x1")
    assert repr(want.cost_model()) in "\n".join(found["lines"])
