"""A simulated step: against formulas where there is one, against the published figures, and its parts."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from benchmarks.simulator import PUBLISHED, published_scenario

from knapformer.data import Trace, TraceStep
from knapformer.errors import DataError, SpecError
from knapformer.plan import Cluster, Sequences, make_planner
from knapformer.tools.simulate.chrome import LANES, chrome_trace, write_chrome_trace
from knapformer.tools.simulate.presets import device_preset, model_preset, named_workload
from knapformer.tools.simulate.scenario import Scenario, model_of, simulate
from knapformer.tools.simulate.step import Sharding, StepOptions
from knapformer.tools.simulate.work import device_prices, step_work


def _trace(*ranks: list[int], text: str = "joint") -> Trace:
    rows = tuple(np.array(row, dtype=np.int64) for row in ranks)
    return Trace("t", len(ranks), (TraceStep(rows, tuple(np.zeros_like(row) for row in rows)),), {"text": text})


def test_one_rank_takes_the_work_over_the_rates() -> None:
    trace, scenario = _trace([4096, 512]), Scenario.of("flux1", "h100x1", update_seconds=0.0)
    result = simulate(trace, scenario, make_planner("local"))
    token, attention = 24 * 3072**2 * 4608 / 500e12, 4 * 3072 * (4096**2 + 512**2) / 400e12
    expected = 57 * (4 * token + 4.5 * attention)
    assert result.step_seconds == pytest.approx(expected, rel=1e-3)
    flop = 57 * 4 * float(model_preset("flux1").forward_flop(np.array([4096, 512])).sum())
    assert result.hfu == pytest.approx(flop / result.step_seconds / 989.4e12)
    assert result.mfu == pytest.approx(result.hfu * 3 / 4)
    assert result.tokens_per_second == pytest.approx(4608 / result.step_seconds)
    assert simulate(trace, replace(scenario, options=replace(scenario.options, checkpointing=False)),
                    make_planner("local")).mfu > result.mfu  # fmt: skip


@pytest.mark.parametrize(("planner", "topology"), [("local", None), ("bags", "g4n2"), ("balanced", None)])
def test_the_speed_up_is_the_product_of_its_sources(planner: str, topology: str | None) -> None:
    trace = named_workload("flux-joint", world_size=32, num_steps=1)
    trace = Trace("eight", 8, tuple(TraceStep(s.seq_lens[::4], s.text_lens[::4]) for s in trace.steps), trace.meta)
    result = simulate(trace, Scenario.of("flux1", "h100x8"), make_planner(planner, topology))
    parts = result.speedup
    assert parts.total == pytest.approx(parts.balance * parts.traffic * parts.overlap)
    assert parts.total == pytest.approx(result.local_step_seconds / result.step_seconds)
    if planner == "local":
        assert (parts.total, parts.balance) == (1.0, 1.0)
    else:
        assert parts.balance > 1.5
        assert parts.traffic < 1.0
        assert result.imbalance < 1.02


def test_slower_links_cost_more_and_free_traffic_is_the_least() -> None:
    trace, planner = named_workload("flux-joint", world_size=32, num_steps=1), make_planner("bags", "g8n4")
    fast, slow = (simulate(trace, Scenario.of("flux1", c), planner) for c in ("h100x32", "h100x32-pcie"))
    assert slow.exposed_seconds["exchange"] > 3 * fast.exposed_seconds["exchange"]
    assert slow.step_seconds > fast.step_seconds
    assert slow.speedup.traffic < fast.speedup.traffic < 1


def test_flop_and_steps_of_the_published_row() -> None:
    """HFU needs no price, so it checks the count of FLOP alone; step times check one set of parameters."""
    trace, scenario = named_workload("flux-joint-32", num_steps=5), published_scenario()
    flop = sum(
        scenario.flop(Sequences.from_ranks(step.seq_lens, step.text_lens), recompute=True) for step in trace.steps
    ) / trace.num_steps  # fmt: skip
    for row in PUBLISHED:
        assert flop / (row.step_seconds * 32 * scenario.peak_flops) == pytest.approx(row.hfu, rel=0.01)
        result = simulate(trace, scenario, make_planner(row.planner, row.topology))
        assert result.step_seconds == pytest.approx(row.step_seconds, rel=0.10)
        assert result.hfu == pytest.approx(row.hfu, rel=0.10)


def test_rings_use_the_links_they_cross() -> None:
    cluster = Cluster(8, 4)
    whole, node, pairs = (Sharding.of(cluster, size) for size in (None, 4, 2))
    assert whole.gather == pytest.approx(7 / 8 / min(300e9, 4 * 40e9))
    assert (node.gather, node.links) == (pytest.approx(3 / 4 / 300e9), ("intra",))
    assert (node.average, node.average_links) == (pytest.approx(2 / 4 / 2 / 40e9), ("inter",))
    assert pairs.average == pytest.approx(2 / 2 * 3 / 4 / min(300e9, 2 * 40e9))
    assert Sharding.of(Cluster(1), None).gather == 0
    with pytest.raises(SpecError, match="shard_size is 3; it must divide the world size 8"):
        Sharding.of(cluster, 3)


def test_work_is_that_of_the_placement_and_slow_ranks_take_longer() -> None:
    model = model_preset("flux1")
    sequences = Sequences.from_ranks([[9000], [100], []])
    cluster = Cluster(3, speeds=(1000, 500, 1000))
    placement = make_planner("bags", "g3n1")(sequences, cluster, model.cost_model())
    prices = device_prices(model, device_preset("h100"))
    work = step_work(placement, cluster, prices, head_dim=model.head_dim)
    forward = work.phases["forward"]
    cost = model.cost_model()
    load = cost.load(placement.tokens(), placement.area()) / 1e15
    assert forward.total == pytest.approx(load * np.array([1, 2, 1]), rel=1e-6)
    assert not forward.whole.any()
    assert work.phases["backward"].split == pytest.approx(2.5 * forward.split)


def test_memory_grows_with_tokens_and_shrinks_with_shards() -> None:
    planner, cost = make_planner("local"), model_preset("flux1").cost_model()
    scenario = Scenario.of("flux1", "h100x4")
    placement = planner(Sequences.from_ranks([[1000], [4000], [], [10]]), scenario.cluster, cost)
    memory = scenario.memory(placement)
    assert memory[1] > memory[0] > memory[3] > memory[2] > 16 * 11.9e9 / 4
    whole = replace(scenario, options=StepOptions(shard_size=1)).memory(placement)
    assert (whole > memory).all()
    kept = replace(scenario, options=StepOptions(checkpointing=False)).memory(placement)
    assert kept[1] > memory[1] + 4000 * 3072 * 57 * 30
    assert not simulate(_trace([400_000], [], [], []), scenario, planner).fits


def test_the_trace_has_a_process_per_rank_and_no_work_at_once(tmp_path: Path) -> None:
    trace, scenario = named_workload("flux-joint", world_size=32, num_steps=1), Scenario.of("flux1", "h100x32-shard8")
    sequences = Sequences.from_ranks(trace.steps[0].seq_lens)
    placement = make_planner("balanced")(sequences, scenario.cluster, scenario.cost_model())
    timeline = scenario.time(placement, record=True)
    events = json.loads(write_chrome_trace(timeline, tmp_path / "a" / "t.json", most_ranks=3).read_text())[
        "traceEvents"
    ]
    spans = [e for e in events if e["ph"] == "X"]
    assert len({e["pid"] for e in spans}) == 3
    assert int(np.argmax(timeline.busy)) in {e["pid"] for e in spans}
    assert {LANES[e["tid"]] for e in spans} == set(LANES)
    for lane in range(len(LANES)):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == lane and e["pid"] == spans[0]["pid"])
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(mine))
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.end.max() * 1e6, rel=1e-3)
    assert chrome_trace(scenario.time(placement))["traceEvents"][0]["ph"] == "M"
    with pytest.raises(DataError, match="cannot write"):
        write_chrome_trace(timeline, tmp_path)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="is for 2 ranks, the cluster has 4"):
        simulate(_trace([1], [2]), Scenario.of("flux1", "h100x4"), make_planner("local"))
    assert model_of(named_workload("mix-v35-10s", world_size=2, num_steps=1)).name == "wan21-1.3b"
    assert model_of(_trace([1])).name == "flux1"
