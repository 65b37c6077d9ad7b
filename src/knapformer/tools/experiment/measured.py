"""Engine `replay`: every rank's share of a step measured on the one device at hand (`tools.replay`)."""

from collections.abc import Iterator
from typing import Any

import torch

from knapformer.data import Trace
from knapformer.errors import SpecError
from knapformer.models import MMDiT
from knapformer.plan import Cluster, CostModel, Sequences, measure
from knapformer.tools.experiment.grid import Cell, Experiment
from knapformer.tools.experiment.loop import Started
from knapformer.tools.replay.replay import CPU_SHAPE, FLUX_SHAPE, replay, replay_model, scaled
from knapformer.tools.simulate.presets import named_workload

_SHAPE = ("width", "num_heads", "num_double", "num_single", "scale")


class ReplayEngine:
    """Replays cells of a grid.

    A model is one of the grid's shapes, with keys width, num_heads, num_double, num_single and scale (lengths are
    divided by it). Without one: FLUX's blocks on CUDA, a small model and short lengths on a CPU.
    """

    def __init__(self, grid: Experiment) -> None:
        self.grid = grid
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        default: dict[str, Any] = dict(
            zip(_SHAPE, FLUX_SHAPE if self.device.type == "cuda" else CPU_SHAPE, strict=True)
        )
        self.shapes: dict[str | None, dict[str, Any]] = {None: default} | {
            name: default | shape for name, shape in grid.shapes.items()
        }
        for name in grid.models:
            if unknown := self.shapes.get(name, {"": None}).keys() - {*_SHAPE}:
                raise SpecError(
                    f"grid {grid.name!r}: model {name!r} needs [shapes.{name}] with {_SHAPE}, not {unknown}"
                )

    def __call__(self, cell: Cell) -> Started:
        shape = self.shapes[cell.model]
        trace = named_workload(cell.workload, world_size=self.grid.num_ranks, num_steps=self.grid.steps, seed=cell.seed)
        width, heads, double, single = (int(shape[key]) for key in _SHAPE[:4])
        model = replay_model(width, heads, double, single, self.device)
        words = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu, 1 thread"
        return Started({"shape": shape}, f"replay on {words}", self._steps(cell, trace, model, shape))

    def _steps(self, cell: Cell, trace: Trace, model: MMDiT, shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
        planner, cost = cell.make_planner(), CostModel.from_shapes(int(shape["width"]), int(shape["num_heads"]))
        cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node"))
        half = torch.bfloat16 if self.device.type == "cuda" else None
        for step in trace.steps:
            lens, texts = scaled(step.seq_lens, step.text_lens, shape["scale"])
            sequences = Sequences.from_ranks(lens, texts if trace.text == "joint" else None)
            placement = planner(sequences, cluster, cost)
            metrics = measure(placement, cluster, cost)
            measured = replay(placement, model, self.device, autocast=half)
            yield {
                "seconds": measured.step_seconds,
                "busy_seconds": measured.seconds,
                "measured_imbalance": measured.imbalance,
                "modelled_imbalance": metrics.time_imbalance,
                "tokens": sequences.num_tokens,
                "rank_tokens": placement.tokens().tolist(),
                "split_traffic": metrics.split_traffic,
                "routed_fraction": metrics.routed_fraction,
            }
