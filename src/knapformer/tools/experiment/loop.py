"""Runs cells one after the other, records every step as it is taken, and goes on after a cell that failed.

An engine is a function that runs one cell: it returns the cell's configuration, what it runs on, and its steps, each
with what it measured. Where several ranks run the loop together, the first one writes, and errors are the same on all.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from knapformer.errors import KnapFormerError
from knapformer.plan import Metrics, Placement
from knapformer.report.records import RecordWriter
from knapformer.tools.experiment.grid import Cell
from knapformer.tools.experiment.store import Store

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A cell under way.

    Attributes:
        config: as plain data, for the record.
        device: what it runs on, in words.
        steps: what each step measured; an item is a step taken.
    """

    config: dict[str, Any]
    device: str
    steps: Iterator[dict[str, Any]]


Engine = Callable[[Cell], Started]
"""Starts a cell."""


def placement_figures(placement: Placement, metrics: Metrics) -> dict[str, Any]:
    """What a step records of how it was planned."""
    return {
        "modelled_imbalance": metrics.time_imbalance,
        "tokens": placement.sequences.num_tokens,
        "rank_tokens": placement.tokens().tolist(),
        "split_traffic": metrics.split_traffic,
        "routed_fraction": metrics.routed_fraction,
    }


def run_cells(
    store: Store,
    cells: Iterable[Cell],
    engine: Engine,
    *,
    writes: bool = True,
    alone: bool = True,
    on_step: Callable[[Cell, int], None] = lambda cell, step: None,
) -> None:
    """Run cells in order.

    An error of this library is the same on all ranks and ends its cell. Any other may be one rank's, and the others
    then wait for it: where ranks work together it is recorded and raised, so that the launcher restarts them all.

    Args:
        store: where records go.
        cells: to run.
        engine: runs one.
        writes: whether this process writes records.
        alone: whether no other rank waits for this process.
        on_step: told of each cell and of the steps taken of it.
    """
    for cell in cells:
        on_step(cell, 0)
        with ExitStack() as files:
            writer: RecordWriter | None = None
            try:
                started = engine(cell)
                if writes:
                    writer = files.enter_context(_writer(store, cell, started.config, started.device))
                for step, values in enumerate(started.steps):
                    if writer:
                        writer.step(step, **values)
                    on_step(cell, step + 1)
            except Exception as error:
                _LOG.debug("cell %r failed", cell.name, exc_info=True)
                if writes:
                    writer = writer or files.enter_context(_writer(store, cell, {}, ""))
                    writer.failure(f"{type(error).__name__}: {error}")
                if not (alone or isinstance(error, KnapFormerError)):
                    raise
        started = None
        gc.collect()  # a model and its optimiser are in cycles, and the next cell needs their memory


def _writer(store: Store, cell: Cell, config: dict[str, Any], device: str) -> RecordWriter:
    return RecordWriter(store.records, cell.name, {"cell": store.labels(cell), **config}, device)
