"""Cells one after the other: what is done stays, what is cut or failed is run again, and nothing stops the rest."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from knapformer.errors import PlanError, SpecError
from knapformer.report import write_records
from knapformer.tools.experiment.grid import Cell, Experiment
from knapformer.tools.experiment.loop import Started, run_cells
from knapformer.tools.experiment.store import DIED, Store

GRID = Experiment(
    name="g", workloads=("w",), planners=("local", "g2n1", "balanced"), seeds=(0, 1), steps=3, ranks_per_node=2
)


class Engine:
    """Counts the cells it runs; raises in the cells and at the step it is told."""

    def __init__(self, *bad: str, error: type[Exception] = PlanError) -> None:
        self.bad, self.error, self.ran = bad, error, []

    def __call__(self, cell: Cell) -> Started:
        self.ran.append(cell.name)
        return Started({"x": 1}, "paper", self.steps(cell))

    def steps(self, cell: Cell) -> Any:
        for step in range(GRID.steps):
            if cell.name in self.bad and step == 1:
                raise self.error("no room")
            yield {"seconds": step + cell.seed + 0.5}


def run(folder: Path, engine: Engine, grid: Experiment = GRID, **options: Any) -> Store:
    store = Store(folder, grid, "simulate")
    with store.locked():
        run_cells(store, store.prepare(), engine, **options)
    return store


def content(store: Store) -> list[Any]:
    return [(run.name, run.header["config"], run.steps, run.failures) for run in store.read().values()]


def test_a_killed_grid_goes_on_with_the_same_records(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", Engine())
    store = run(tmp_path / "cut", Engine())
    lines = store.records.read_text().splitlines(keepends=True)
    store.records.write_text(
        "".join(lines[:9]) + lines[9][:20]
    )  # two cells are whole, the third has a header: 4 + 4 + 1
    engine = Engine()
    assert content(run(tmp_path / "cut", engine)) == content(whole)
    assert engine.ran == [cell.name for cell in GRID.cells()][2:]
    assert store.records.read_text().count('"kind": "run"') == 6
    last = list(store.read().values())
    write_records(store.records, last[3:] + last[:3])
    store.tidy()
    assert content(store) == content(whole)
    engine = Engine()
    run(tmp_path / "cut", engine)
    assert engine.ran == []


def test_a_changed_grid_runs_its_cells_again(tmp_path: Path) -> None:
    run(tmp_path, Engine())
    engine = Engine()
    run(tmp_path, engine, replace(GRID, nodes=2))
    assert len(engine.ran) == 6


def test_a_failure_is_recorded_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    bad = "w g2n1 seed 0"
    for error in (PlanError, ZeroDivisionError):
        store = run(tmp_path, Engine(bad, error=error), on_step=lambda cell, step: seen.append((cell.name, step)))
        assert {name: run.failures for name, run in store.read().items() if run.failures} == {
            bad: [f"{error.__name__}: no room"]
        }
        assert not store.done(store.read()[bad], Cell("w", None, "g2n1", 0))
        assert len(store.read()) == 6 and len(store.read()[bad].steps) == 1
    assert seen.count((bad, 1)) == 2 and (bad, 2) not in seen  # the failed cell, and no other, was run again
    assert seen.count(("w local seed 0", 3)) == 1


def test_an_error_of_one_rank_is_recorded_and_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, Engine("w g2n1 seed 0", error=ZeroDivisionError), alone=False)
    store = run(tmp_path, Engine("w local seed 1"), alone=False)  # an error of all ranks is not raised
    assert [name for name, run in store.read().items() if run.failures] == ["w local seed 1"]


def test_restarted_ranks_leave_the_cell_that_brought_them_down(tmp_path: Path) -> None:
    store = run(tmp_path, Engine("w local seed 1"))
    lines = store.records.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if "balanced seed 1" in line)
    store.records.write_text("".join(lines[: at + 2]))  # died in the last cell, after one step
    (tmp_path / ".launch").write_text("one")
    assert store.prepare("one") == []
    failed = {name: run.failures for name, run in store.read().items() if run.failures}
    assert failed == {"w local seed 1": ["PlanError: no room"], "w balanced seed 1": [DIED]}
    assert [cell.name for cell in store.prepare("another")] == list(failed)
    assert store.read().keys().isdisjoint(failed)


def test_two_processes_do_not_share_a_directory(tmp_path: Path) -> None:
    first, second = (Store(tmp_path, GRID, "simulate") for _ in range(2))
    with first.locked(), pytest.raises(SpecError, match="another run of a grid"), second.locked():
        pass
    with second.locked():
        pass


def test_a_header_says_what_the_cell_is(tmp_path: Path) -> None:
    store = run(tmp_path, Engine())
    header = json.loads(store.records.read_text().splitlines()[0])
    assert header["config"]["x"] == 1 and header["environment"]["device"] == "paper"
    assert (
        header["config"]["cell"] | {"planner": "local", "seed": 0, "baseline": "local", "ranks": 2}
        == header["config"]["cell"]
    )
