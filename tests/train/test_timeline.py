"""A timeline of real steps: the second step alone, and what the balancer adds to it under readable names."""

import json

import pytest
import torch
from torch.profiler import record_function

from knapformer import PackedBatch, SequenceBalancer
from knapformer.train import timeline as module
from knapformer.train.timeline import timeline
from tests.ranks import run_ranks

EXCHANGES = set(module._NAMES.values())


def run_steps(rank, world_size, folder):
    """Three steps in which every sequence is split."""
    balancer = SequenceBalancer(f"g{world_size}n1")
    with timeline(folder, rank) as next_step:
        for number in range(3):
            with record_function(f"step {number}"):
                batch = PackedBatch({"x": torch.ones(6, 2, 4, requires_grad=True)})
                here = batch.route(balancer.plan_routing(**batch.lengths))
                q = here.tokens["x"]
                here.layout.attend(q, q, q).sum().backward()
            next_step()


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Rank -> events of its file."""
    folder = tmp_path_factory.mktemp("timeline") / "made" / "when needed"
    run_ranks(2, run_steps, str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json"]
    return [json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"] for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_second_step_alone(events, rank):
    names = {event["name"] for event in events[rank]}
    assert {name for name in names if name.startswith("step ")} == {"step 1"}


@pytest.mark.parametrize("rank", [0, 1])
def test_exchanges_have_readable_names_and_lie_within_the_step(events, rank):
    timed = [event for event in events[rank] if event.get("ph") == "X"]
    (step,) = (event for event in timed if event["name"] == "step 1" and event["cat"] == "user_annotation")
    exchanges = [event for event in timed if event["name"] in EXCHANGES]
    assert {event["name"] for event in exchanges} == EXCHANGES  # a renamed function would show under its own name
    for event in exchanges:
        assert step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]
    assert not set(module._NAMES) & {event["name"] for event in timed}  # none by the name of a class


def test_no_folder_no_timeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with timeline(None, 0) as next_step:
        next_step()
    assert list(tmp_path.iterdir()) == []
