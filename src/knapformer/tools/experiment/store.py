"""The run directory of a grid: one file of records, which says by itself what is done.

    records.jsonl     a header and the steps of every cell, as they happen; why a cell failed

A cell is done if its header asks for what the grid asks for now and all its steps are there. Opening a directory drops
the lines of all other cells, also a half-written last line, so that a killed or changed grid goes on at the first cell
that is missing. A cell that failed is run again, except where a launcher restarts ranks that one cell brought down.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from knapformer.errors import SpecError
from knapformer.report.records import RunRecord, read_records, write_records
from knapformer.tools.experiment.grid import Cell, Experiment

DIED = "a rank ended while this cell ran; its output says why"


class Store:
    """A grid's run directory.

    Args:
        folder: made if missing.
        grid: what its cells must be.
        engine: that runs them.
    """

    def __init__(self, folder: str | os.PathLike[str], grid: Experiment, engine: str) -> None:
        self.folder, self.grid, self.engine = Path(folder), grid, engine
        self.records = self.folder / "records.jsonl"

    def labels(self, cell: Cell) -> dict[str, Any]:
        """What a cell's header says of it; a cell whose header says anything else is run again."""
        grid = self.grid
        shape = {"shape": grid.shapes[cell.model]} if cell.model in grid.shapes else {}
        where = {"cluster": grid.cluster, "ranks": grid.num_ranks, "nodes": grid.num_nodes}
        return {
            "grid": grid.name,
            "engine": self.engine,
            **cell.to_json(),
            **shape,
            **where,
            "steps": grid.steps,
            "warmup": grid.warmup,
            "baseline": grid.planners[0],
        }

    def read(self) -> dict[str, RunRecord]:
        """All runs in the directory."""
        return read_records(self.records) if self.records.is_file() else {}

    def done(self, run: RunRecord | None, cell: Cell) -> bool:
        """Whether a run is this cell, whole."""
        if run is None or run.failures or not self._is(run, cell):
            return False
        return [step.get("step") for step in run.steps] == list(range(self.grid.steps))

    def prepare(self, launch: str = "") -> list[Cell]:
        """Drop what is not done; returns the cells to run.

        Args:
            launch: identifies a launch of several ranks. If it is the one that opened this directory last, one of its
                ranks has died: cells that failed are then left, and the one that was under way counts as failed.
        """
        marker = self.folder / ".launch"
        retry = not launch or not marker.is_file() or marker.read_text() != launch
        marker.write_text(launch)
        runs, kept, missing = self.read(), [], []
        for cell in self.grid.cells():
            run = runs.get(cell.name)
            if run is not None and self.done(run, cell):
                kept.append(run)
            elif run is not None and not retry and self._is(run, cell):
                run.failures.extend([] if run.failures else [DIED])
                kept.append(run)
            else:
                missing.append(cell)
        write_records(self.records, kept)
        return missing

    def tidy(self) -> None:
        """Put the cells in the grid's order, in which they are not if some were run later."""
        runs = self.read()
        write_records(self.records, [runs[cell.name] for cell in self.grid.cells() if cell.name in runs])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory. Raises `SpecError` if another process does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SpecError(
                    f"another run of a grid writes into {str(self.folder)!r}; wait for it, or end it, or give --out"
                ) from None
            yield

    def _is(self, run: RunRecord, cell: Cell) -> bool:
        # Through JSON, as the header went, so that tuples are lists.
        return run.header["config"].get("cell") == json.loads(json.dumps(self.labels(cell)))
