"""Engines: a simulated cell is what the simulator says, and all planners of a seed have the same batches."""

from dataclasses import replace
from pathlib import Path

import pytest

from knapformer.errors import SpecError
from knapformer.plan import make_planner
from knapformer.tools.experiment.grid import Cell, Experiment, read_grid
from knapformer.tools.experiment.modelled import SimulateEngine
from knapformer.tools.simulate.presets import named_workload
from knapformer.tools.simulate.scenario import Scenario, simulate

CODES = "g2b2i256f1s0,g1b1i2048f17s1,g1b1i256f1s0"
GRID = Experiment(
    name="g", workloads=(CODES,), planners=("local", "g2n2", "balanced"), seeds=(0, 1), steps=2, cluster="h100x4-node2"
)


@pytest.mark.parametrize("planner", ["local", "g2n2", "balanced"])
def test_a_simulated_cell_is_what_the_simulator_says(planner: str) -> None:
    cell = Cell(CODES, None, planner, 1)
    started = SimulateEngine(GRID)(cell)
    steps = list(started.steps)
    trace = named_workload(CODES, world_size=4, num_steps=2, seed=1)
    expected = simulate(trace, Scenario.of("flux1", "h100x4-node2"), make_planner(cell.planner_name, cell.topology))
    seconds = sum(step["seconds"] for step in steps)
    assert seconds / 2 == pytest.approx(expected.step_seconds)
    assert sum(step["flop"] for step in steps) / seconds / 4 / started.config["peak_flops"] == pytest.approx(
        expected.hfu
    )
    assert sum(step["tokens"] for step in steps) / seconds == pytest.approx(expected.tokens_per_second)
    assert sum(step["measured_imbalance"] for step in steps) / 2 == pytest.approx(expected.imbalance)
    assert sum(step["exposed_seconds"] for step in steps) / 2 == pytest.approx(sum(expected.exposed_seconds.values()))
    assert all(sum(step["rank_tokens"]) == step["tokens"] for step in steps)


def test_planners_of_a_seed_have_the_same_batches_and_seeds_have_others() -> None:
    engine = SimulateEngine(GRID)
    tokens = {cell: [(step["tokens"], step["flop"]) for step in engine(cell).steps] for cell in GRID.cells()}
    by_seed = [{tuple(t) for cell, t in tokens.items() if cell.seed == seed} for seed in (0, 1)]
    assert [len(found) for found in by_seed] == [1, 1] and by_seed[0] != by_seed[1]


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(SpecError, match="names no cluster"):
        SimulateEngine(read_grid("tiny"))
    short = replace(GRID, workloads=("real-mix-8",), cluster="h100x8", steps=10_000)
    with pytest.warns(match="recorded steps"), pytest.raises(SpecError, match="the grid asks for 10000"):
        SimulateEngine(short)(Cell("real-mix-8", None, "local", 0))


def test_a_replayed_cell_measures_every_rank() -> None:
    pytest.importorskip("torch")
    from knapformer.tools.experiment.measured import ReplayEngine

    shape = {"width": 32, "num_heads": 2, "num_double": 1, "num_single": 0, "scale": 64.0}
    grid = replace(GRID, steps=1, models=("small",), shapes={"small": shape})
    for planner in ("local", "balanced"):
        started = ReplayEngine(grid)(Cell(CODES, "small", planner, 0))
        (step,) = started.steps
        assert len(step["busy_seconds"]) == 4 and step["seconds"] == max(step["busy_seconds"])
        assert sum(step["rank_tokens"]) == step["tokens"]
    with pytest.raises(SpecError, match=r"needs \[shapes\.big\]"):
        ReplayEngine(replace(grid, models=("big",)))


def test_a_training_cell_changes_planner_seed_and_steps_only() -> None:
    pytest.importorskip("torch")
    import msgspec

    from knapformer.tools.experiment.trained import cell_config

    grid = replace(read_grid("tiny"), shapes={"wide": {"width": 96}}, models=("wide",))
    a, b = (
        msgspec.to_builtins(cell_config(grid, Cell("demo", "wide", planner, 5), Path("run")))
        for planner in ("local", "g2n1")
    )
    assert a["train"]["seed"] == 5 and a["train"]["steps"] == grid.steps and a["model"]["width"] == 96
    assert (a["balancer"].pop("planner"), b["balancer"].pop("planner")) == ("local", "bags")
    assert (a["balancer"].pop("topology"), b["balancer"].pop("topology")) == (None, "g2n1")
    assert a == b
    for models, shapes, message in (
        (("x",), {}, r"needs a table \[shapes\.x\]"),
        (("x",), {"x": {"widht": 1}}, "widht"),
    ):
        with pytest.raises(SpecError, match=message):
            cell_config(replace(grid, models=models, shapes=shapes), Cell("demo", "x", "local", 0), Path("run"))
