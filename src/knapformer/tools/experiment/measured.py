"""Engine `replay`: every rank's share of a step measured on the one device at hand (`tools.replay`)."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from knapformer.errors import SpecError
from knapformer.plan import Cluster, CostModel, measure
from knapformer.tools.experiment.grid import Cell, Experiment
from knapformer.tools.experiment.loop import Started, placement_figures
from knapformer.tools.replay.replay import Replay, ReplayShape, replay_model, scaled
from knapformer.tools.simulate.presets import named_workload
from knapformer.train.launch import choose_device, device_words


class ReplayEngine:
    """Replays cells of a grid.

    A model is one of the grid's shapes, with the keys of `ReplayShape`; what it leaves out, and the shape of a cell
    without a model, are the device's defaults.
    """

    def __init__(self, grid: Experiment) -> None:
        self.grid, self.device = grid, choose_device()
        keys = ReplayShape.__slots__
        for name in grid.models:
            if name not in grid.shapes or not grid.shapes[name].keys() <= {*keys}:
                raise SpecError(
                    f"grid {grid.name!r}: model {name!r} needs [shapes.{name}] with keys of {', '.join(keys)}, not "
                    f"{grid.shapes.get(name)}"
                )

    def __call__(self, cell: Cell) -> Started:
        shape = ReplayShape.of(self.device, self.grid.shapes.get(cell.model or "", {}))
        return Started({"shape": asdict(shape)}, f"replay on {device_words(self.device)}", self._steps(cell, shape))

    def _steps(self, cell: Cell, shape: ReplayShape) -> Iterator[dict[str, Any]]:
        grid, planner = self.grid, cell.make_planner()
        trace = named_workload(cell.workload, world_size=grid.num_ranks, num_steps=grid.steps, seed=cell.seed)
        cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node"))
        cost = CostModel.from_shapes(shape.width, shape.num_heads)
        replay = Replay(replay_model(shape, self.device), self.device)
        for index in range(trace.num_steps):
            placement = planner(scaled(trace, index, shape.scale), cluster, cost)
            measured = replay(placement)
            yield {
                "seconds": measured.step_seconds,
                "busy_seconds": measured.seconds,
                "measured_imbalance": measured.imbalance,
                **placement_figures(placement, measure(placement, cluster, cost)),
            }
