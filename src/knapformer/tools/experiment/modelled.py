"""Engine `simulate`: a cell on a virtual cluster, step by step.

Each step's figures are of the planner alone; what it gains over no balancing is found in the report, from the cell of
the same batches under the first planner.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from knapformer.data import Trace
from knapformer.errors import SpecError
from knapformer.plan import measure
from knapformer.tools.experiment.grid import Cell, Experiment
from knapformer.tools.experiment.loop import Started, placement_figures
from knapformer.tools.simulate.presets import named_workload
from knapformer.tools.simulate.scenario import Scenario, model_of


class SimulateEngine:
    """Runs cells of a grid in the simulator."""

    def __init__(self, grid: Experiment) -> None:
        if grid.cluster is None:
            raise SpecError(f"grid {grid.name!r} names no cluster to simulate; give one, e.g. cluster = 'h100x32'")
        self.grid, self.cluster = grid, grid.cluster
        self.workload = lru_cache(maxsize=1)(self._workload)  # cells of the same batches run in a row

    def __call__(self, cell: Cell) -> Started:
        trace = self.workload(cell.workload, cell.seed)
        scenario = Scenario.of(cell.model or model_of(trace), self.cluster)
        config = {"model": scenario.model.name, "peak_flops": scenario.peak_flops, "prices": "assumed rates"}
        return Started(config, f"simulated {self.cluster}", self._steps(cell, trace, scenario))

    def _workload(self, workload: str, seed: int) -> Trace:
        trace = named_workload(workload, world_size=self.grid.num_ranks, num_steps=self.grid.steps, seed=seed)
        if trace.num_steps < self.grid.steps:
            raise SpecError(f"workload {workload!r} has {trace.num_steps} steps, the grid asks for {self.grid.steps}")
        return trace

    def _steps(self, cell: Cell, trace: Trace, scenario: Scenario) -> Iterator[dict[str, Any]]:
        planner, cost = cell.make_planner(), scenario.cost_model()
        for index in range(trace.num_steps):
            sequences = trace.sequences(index)
            placement = planner(sequences, scenario.cluster, cost)
            work = scenario.work(placement)
            timeline = scenario.time(work)
            yield {
                "seconds": float(timeline.end.max()),
                "busy_seconds": [float(f"{seconds:.6g}") for seconds in timeline.busy],
                "waiting_seconds": _total(timeline.waiting),
                "exposed_seconds": _total(timeline.exposed),
                "measured_imbalance": float(timeline.busy.max() / timeline.busy.mean()),
                **placement_figures(placement, measure(placement, scenario.cluster, cost)),
                "flop": scenario.flop(sequences, recompute=True),
                "peak_memory_bytes": float(scenario.memory(work).max()),
            }


def _total(kinds: dict[str, np.ndarray]) -> float:
    """Mean over ranks of a time, all kinds together [s]."""
    return float(sum(seconds.mean() for seconds in kinds.values()))
