"""Quality of plans on the recorded traces: no step on the timeline, and no share of routed tokens, above the record."""

from pathlib import Path

import numpy as np
import pytest

from knapformer.data.workloads import load_workload
from knapformer.plan import Cluster, CostModel, make_planner, measure
from knapformer.report import read_records

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "planners.jsonl"
TRACES = (
    "flux-lowres-32",
    "flux-mixed-32",
    "flux-joint-32",
    "real-mix-32",
    "real-mix-8",
    "video-v35-16",
    "video-v50-32",
)
SLACK = 2e-4
"""What a figure may exceed its record by; a plan that is better needs no new record."""


def recorded(trace: str) -> dict:
    """Steps, and mean and largest value of each figure."""
    lines = [step for run in read_records(RECORD).values() for step in run.steps]
    return [line for line in lines if (line["trace"], line["planner"]) == (trace, "balanced")][-1]


@pytest.mark.parametrize("name", TRACES)
def test_plans_are_as_good_as_recorded(name: str) -> None:
    record, trace = recorded(name), load_workload(name)
    mean, largest = record["figures"]["step_over_ideal_overlap"]
    cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node"))
    cost = CostModel.from_shapes(trace.meta["d_model"], trace.meta["heads"])
    plan = make_planner("balanced")
    steps = [trace.sequences(step) for step in range(record["steps"])]
    got = [measure(plan(sequences, cluster, cost), cluster, cost) for sequences in steps]
    step = [metrics.step_over_ideal_overlap for metrics in got]
    assert np.mean(step) <= mean + SLACK
    assert np.max(step) <= largest + SLACK
    assert np.mean([m.routed_fraction for m in got]) <= record["figures"]["routed_fraction"][0] + 0.01


def test_a_worse_planner_would_be_noticed() -> None:
    """Bags of 8, the best ones a user could set by hand, exceed the ceiling."""
    trace = load_workload("flux-joint-32")
    cluster, cost = Cluster(32, 8), CostModel.from_shapes(trace.meta["d_model"], trace.meta["heads"])
    sequences = trace.sequences(0)
    bags = measure(make_planner("bags", "g8n4")(sequences, cluster, cost), cluster, cost)
    ceiling = recorded("flux-joint-32")["figures"]["step_over_ideal_overlap"][1] + SLACK
    assert bags.step_over_ideal_overlap > ceiling
