"""Engine `torchrun`: cells are training runs, one after the other in the ranks that torchrun started.

A workload is a training file (docs/train.md) beside the grid, or "demo", the run of `knapformer demo`, whose data set
is built in the run directory. The grid replaces its steps, its seed and its planner, and nothing else, so that all
planners take the same batches from the same weights.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from knapformer.data import build_demo, read_manifest
from knapformer.errors import KnapFormerError, SpecError
from knapformer.files import convert
from knapformer.tools.experiment.grid import Cell, Experiment
from knapformer.tools.experiment.loop import Started, run_cells
from knapformer.tools.experiment.store import Store
from knapformer.train import TrainConfig, Trainer, read_config
from knapformer.train.config import ModelConfig
from knapformer.train.demo import demo_config
from knapformer.train.launch import device_words


def cell_config(grid: Experiment, cell: Cell, folder: Path) -> TrainConfig:
    """The training run of a cell.

    Args:
        grid, cell: what to run.
        folder: of the run; the demo's data set is in it.

    Raises:
        SpecError: naming the file and what is wrong in it.
    """
    if cell.workload == "demo":
        config = demo_config(folder / "demo" / "manifest.jsonl", grid.steps)
    else:
        config = read_config(Path(grid.folder) / cell.workload)
    model = config.model
    if cell.model is not None:
        if cell.model not in grid.shapes:
            raise SpecError(f"grid {grid.name!r}: model {cell.model!r} needs a table [shapes.{cell.model}]")
        values = msgspec.to_builtins(model) | grid.shapes[cell.model]
        model = convert(values, ModelConfig, f"grid {grid.name!r}: [shapes.{cell.model}]", error=SpecError)
    balancer = msgspec.structs.replace(config.balancer, planner=cell.planner_name, topology=cell.topology)
    run = msgspec.structs.replace(
        config.train, steps=grid.steps, seed=cell.seed, checkpoints=None, record="", ranks=grid.num_ranks
    )
    return msgspec.structs.replace(config, model=model, balancer=balancer, train=run)


def prepare_data(grid: Experiment, folder: Path) -> None:
    """Build what cells need that is not there yet, and check their configurations. On one process, before ranks start.

    Raises:
        SpecError: for a configuration that cannot be read.
    """
    if "demo" in grid.workloads:
        build_demo(folder / "demo")
    for cell in grid.cells():
        cell_config(grid, cell, folder).shape()


def train_cell(grid: Experiment, folder: Path, device: torch.device, cell: Cell) -> Started:
    """Train a cell of a grid on all ranks. Collective."""
    config = cell_config(grid, cell, folder)
    if (ranks := dist.get_world_size()) != grid.num_ranks:
        raise SpecError(f"grid {grid.name!r} is for {grid.num_ranks} ranks, {ranks} were started")
    trainer = Trainer(config, read_manifest(config.data.manifest), device)
    return Started(config.to_json(), device_words(device, ranks), (report.to_json() for _, report in trainer.fit()))


def train_cells(device: torch.device, store: Store, launch: str, on_step: Any) -> None:
    """Run the grid's missing cells on this rank. Collective.

    Args:
        device: of this rank.
        store: the run directory; only rank 0 uses it.
        launch: that started these ranks, see `Store.prepare`.
        on_step: see `run_cells`.

    Raises:
        SpecError: on all ranks, if the grid cannot be trained or another process has its directory.
    """
    first = dist.get_rank() == 0
    found: list[Any] = [None]
    with ExitStack() as held:
        if first:
            try:
                held.enter_context(store.locked())
                prepare_data(store.grid, store.folder)
                found = [store.prepare(launch)]
            except KnapFormerError as error:
                found = [error]
        dist.broadcast_object_list(found)
        if isinstance(found[0], KnapFormerError):
            raise found[0]
        engine = partial(train_cell, store.grid, store.folder, device)
        run_cells(store, found[0], engine, writes=first, alone=dist.get_world_size() == 1, on_step=on_step)
