"""What an experiment runs: the grid workloads x models x seeds x planners, from a TOML file or `GRID` in a Python file.

    name = "mine"                                engine = "simulate"
    workloads = ["flux-lowres", "flux-joint"]    cluster = "h100x32"
    planners = ["local", "g8n4", "balanced"]     steps = 5
    seeds = [0, 1, 2]

A planner is its name, or a bag spec for the planner `bags`. Planners come last in the order of cells, so those that are
compared run one after the other. Grids of the library are named without an ending: `flux-paper`, `tiny`.
"""

import runpy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from knapformer.errors import SpecError
from knapformer.files import convert, read_toml
from knapformer.plan import Planner, make_planner
from knapformer.tools.simulate.presets import cluster_preset

GRIDS = Path(__file__).parent / "grids"
"""Grids of the library."""
EngineName = Literal["simulate", "replay", "torchrun", "slurm"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a grid.

    Attributes:
        workload, model, planner: as the grid names them; no model is the workload's own.
        seed: of everything that is drawn. Cells that differ in the planner only have the same batches.
    """

    workload: str
    model: str | None
    planner: str
    seed: int

    @property
    def name(self) -> str:
        """Tells cells of a grid apart."""
        return " ".join(filter(None, (self.workload, self.model, self.planner, f"seed {self.seed}")))

    @property
    def topology(self) -> str | None:
        """Bag spec, where the planner is one."""
        return self.planner if self.planner[:1] == "g" and self.planner[1:2].isdigit() else None

    @property
    def planner_name(self) -> str:
        """As `make_planner` knows it."""
        return self.planner if self.topology is None else "bags"

    def make_planner(self) -> Planner:
        """Raises `SpecError` for one that does not exist."""
        return make_planner(self.planner_name, self.topology)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A grid of cells and how it is run, checked.

    Attributes:
        name: of the experiment.
        workloads: to simulate or replay, presets, data codes or trace files; to train, training files (docs/train.md)
            beside the grid, or "demo".
        planners: names or bag specs; the first is what speed-ups are over.
        seeds: each gives its own batches.
        models: to simulate, presets; to train, keys of `shapes`. Empty: the workload's own.
        shapes: name -> values that replace those of [model] in training files, or give the shape to replay.
        steps: of a cell.
        warmup: first steps of a cell that tables of times leave out.
        engine: that runs it unless another is asked for.
        cluster: to simulate on; also says how many ranks there are, and on how many nodes.
        nodes, ranks_per_node: where there is no cluster.
        slurm: options of `sbatch`, such as `partition` and `time` [minutes]; see `launch.slurm_script`.
        folder: that paths are relative to.
    """

    name: str
    workloads: tuple[str, ...]
    planners: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    models: tuple[str, ...] = ()
    shapes: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 5
    warmup: int = 0
    engine: EngineName = "simulate"
    cluster: str | None = None
    nodes: int = 1
    ranks_per_node: int | None = None
    slurm: dict[str, Any] = field(default_factory=dict)
    folder: str = "."

    def __post_init__(self) -> None:
        for what in ("workloads", "planners", "seeds", "models"):
            values = getattr(self, what)
            if len(set(values)) != len(values) or not (values or what == "models"):
                raise SpecError(f"grid {self.name!r}: {what} are {list(values)}; give at least one, each once")
        if not 0 <= self.warmup < self.steps:
            raise SpecError(
                f"grid {self.name!r}: {self.steps} steps and {self.warmup} of warm-up; some must be left to measure"
            )
        for cell in self.cells():
            cell.make_planner()
        if (self.cluster is None) == (self.ranks_per_node is None):
            raise SpecError(
                f"grid {self.name!r}: say on how many ranks, either with cluster, e.g. 'h100x32', or with nodes and "
                "ranks_per_node"
            )
        if min(self.nodes, self.ranks_in_node) < 1:
            raise SpecError(f"grid {self.name!r}: {self.nodes} nodes of {self.ranks_in_node} ranks; both start at 1")

    def cells(self) -> Iterator[Cell]:
        """All cells in the order in which they run."""
        for workload, model, seed, planner in product(
            self.workloads, self.models or (None,), self.seeds, self.planners
        ):
            yield Cell(workload, model, planner, seed)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_in_node if self.cluster is None else cluster_preset(self.cluster).world_size

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_in_node)

    @property
    def ranks_in_node(self) -> int:
        if self.cluster is None:
            return self.ranks_per_node or 0
        return min(cluster_preset(self.cluster).ranks_per_node, cluster_preset(self.cluster).world_size)


def grid_names() -> tuple[str, ...]:
    """Grids of the library."""
    return tuple(sorted(path.stem for path in GRIDS.glob("*.toml")))


def read_grid(text: str) -> Experiment:
    """An experiment by the library's name for its grid, or from a `.toml` or `.py` file.

    Raises:
        SpecError: naming the file and what is wrong in it.
    """
    if text in grid_names():
        return _read_toml(GRIDS / f"{text}.toml", folder=".")
    path = Path(text)
    if path.suffix not in (".toml", ".py") or not path.is_file():
        raise SpecError(f"no grid {text!r}; give a .toml or .py file, or one of {', '.join(grid_names())}")
    if path.suffix == ".toml":
        return _read_toml(path, folder=str(path.parent))
    grid = runpy.run_path(text).get("GRID")
    if not isinstance(grid, Experiment):
        raise SpecError(f"{text}: GRID must be a knapformer.tools.experiment.grid.Experiment, got {grid!r:.60}")
    return grid


def _read_toml(path: Path, *, folder: str) -> Experiment:
    content = read_toml(path, dict[str, Any], error=SpecError)
    known = {*Experiment.__slots__} - {"folder"}
    if unknown := sorted(content.keys() - known):
        raise SpecError(f"{path}: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return convert(content | {"folder": folder}, Experiment, str(path), error=SpecError)
