"""Traces: the sequence lengths of a number of training steps, per rank, and nothing else of the data.

A trace file is JSON, plain or gzipped:

    {"meta": {"name": ..., "world": 32, ...},
     "steps": [{"seq_lens": [[...] per rank], "text_lens": [[...] per rank]}, ...]}

With `meta.text` = "joint" (the default) a sequence's length includes its text; with "cross" text is cross-attended
and lengths are visual tokens only. Files are checked completely when they are read, so that planners and simulators
need not.
"""

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from knapformer import files
from knapformer.errors import DataError, PlanError, SpecError
from knapformer.plan import Sequences
from knapformer.plan.sequences import MAX_LENGTH


@dataclass(frozen=True, slots=True, eq=False)
class TraceStep:
    """The sequences of one step.

    Attributes:
        seq_lens: per rank, the length of each of its sequences (int64, read-only) [tokens].
        text_lens: per rank, the text length of each of them [tokens].
    """

    seq_lens: tuple[NDArray[np.int64], ...]
    text_lens: tuple[NDArray[np.int64], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "seq_lens", _columns(self.seq_lens))
        object.__setattr__(self, "text_lens", _columns(self.text_lens))

    @property
    def num_sequences(self) -> int:
        """Sequences of all ranks."""
        return sum(len(row) for row in self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks' sequences."""
        return sum(int(row.sum()) for row in self.seq_lens)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Lengths of several steps on `world_size` ranks.

    Attributes:
        name: what to call it in reports.
        world_size: ranks in every step.
        steps: the steps, in order.
        meta: what else is known: `text` ("joint" or "cross"), `d_model`, `heads`, `ranks_per_node`, ... Never changed.

    Raises:
        DataError: naming step and rank, if a step has other than `world_size` ranks, a length out of range, or text
            that does not fit its sequence.
    """

    name: str
    world_size: int
    steps: tuple[TraceStep, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        meta = {key: value for key, value in self.meta.items() if key not in ("name", "world", "n_steps")}
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "meta", meta)
        if self.world_size < 1:
            raise DataError(f"trace {self.name!r}: world size is {self.world_size}; it must be at least 1")
        if self.text not in ("joint", "cross"):
            raise DataError(f"trace {self.name!r}: meta.text is {self.text!r}; it must be 'joint' or 'cross'")
        if not self.steps:
            raise DataError(f"trace {self.name!r} has no steps; it needs at least one")
        for number, step in enumerate(self.steps):
            self._check(number, step)

    def sequences(self, step: int) -> Sequences:
        """The sequences of one step, as the length gather would give them; cross-attended text is no part of them."""
        lens = self.steps[step]
        return Sequences.from_ranks(lens.seq_lens, lens.text_lens if self.text == "joint" else None)

    def _check(self, number: int, step: TraceStep) -> None:
        for key in ("seq_lens", "text_lens"):
            rows = getattr(step, key)
            if len(rows) != self.world_size:
                self._fail(number, f"{key} has {len(rows)} ranks; the world size is {self.world_size}")
        counts = np.array([len(row) for row in step.seq_lens])
        text_counts = np.array([len(row) for row in step.text_lens])
        if (counts != text_counts).any():
            rank = int(np.argmax(counts != text_counts))
            self._fail(number, f"rank {rank} has {counts[rank]} sequences but {text_counts[rank]} text lengths")
        text = "text_lens" if self.text == "joint" else "context_lens"
        try:
            Sequences.from_ranks(step.seq_lens, **{text: step.text_lens})
        except PlanError as error:
            self._fail(number, str(error))

    def _fail(self, number: int, problem: str) -> NoReturn:
        raise DataError(f"trace {self.name!r}, step {number}: {problem}")

    @property
    def text(self) -> str:
        """How text takes part: "joint" (lengths include it) or "cross" (lengths are visual tokens only)."""
        return self.meta.get("text", "joint")

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def head(self, num_steps: int) -> "Trace":
        """The first steps of this trace. Raises `SpecError` if it has fewer."""
        if not 1 <= num_steps <= len(self.steps):
            raise SpecError(
                f"trace {self.name!r} has {len(self.steps)} steps, so {num_steps} cannot be taken; "
                f"ask for 1 to {len(self.steps)}"
            )
        return Trace(self.name, self.world_size, self.steps[:num_steps], self.meta)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a `.json` or `.json.gz` trace file.

    Raises:
        DataError: if the file cannot be read or breaks the format; the message names the file, step and rank.
    """
    return decode_trace(files.read_bytes(path), origin=os.fspath(path))


@dataclass(frozen=True, slots=True)
class _Step:
    seq_lens: list[list[int]]
    text_lens: list[list[int]]

    def __post_init__(self) -> None:
        for key in ("seq_lens", "text_lens"):
            for rank, row in enumerate(getattr(self, key)):
                if row and (largest := max(row, key=abs)) and abs(largest) > MAX_LENGTH:
                    raise DataError(f"rank {rank}: {key} holds {largest!r:.60}; allowed are {MAX_LENGTH} tokens")


@dataclass(frozen=True, slots=True)
class _File:
    meta: dict[str, Any]
    steps: list[_Step]


@dataclass(frozen=True, slots=True)
class _Meta:
    """What is used of `meta`; anything else may be in it."""

    world: int
    name: str | None = None
    n_steps: int | None = None
    text: str = "joint"
    d_model: int | None = None
    heads: int | None = None
    ranks_per_node: int | None = None


def decode_trace(data: bytes, *, origin: str) -> Trace:
    """Trace from JSON. `origin` names the file in messages."""
    file = files.decode_json(data, _File, origin)
    meta = files.convert({"meta": file.meta}, dict[str, _Meta], origin)["meta"]
    if meta.n_steps not in (None, len(file.steps)):
        raise DataError(
            f"{origin}: meta.n_steps is {meta.n_steps} but there are {len(file.steps)} steps; was the file cut short?"
        )
    steps = tuple(TraceStep(_columns(step.seq_lens), _columns(step.text_lens)) for step in file.steps)
    try:
        return Trace(meta.name or Path(origin).name.split(".", 1)[0], meta.world, steps, file.meta)
    except DataError as error:
        raise DataError(f"{origin}: {error}") from error


def _columns(rows: Sequence[Sequence[int] | NDArray[np.int64]]) -> tuple[NDArray[np.int64], ...]:
    """A read-only array for each rank."""
    columns = tuple(np.array(row, dtype=np.int64) for row in rows)
    for column in columns:
        column.flags.writeable = False
    return columns


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; a name ending in `.gz` compresses it. The same trace gives the same bytes."""
    target = Path(path)
    if not target.name.endswith((".json", ".json.gz")):
        raise SpecError(f"trace file name {target.name!r} must end in '.json' or '.json.gz'")
    meta = {"name": trace.name, "world": trace.world_size, "n_steps": trace.num_steps, **trace.meta}
    steps = [
        {"seq_lens": [row.tolist() for row in step.seq_lens], "text_lens": [row.tolist() for row in step.text_lens]}
        for step in trace.steps
    ]
    data = json.dumps({"meta": meta, "steps": steps}, separators=(",", ":")).encode()
    files.write_bytes(target, gzip.compress(data, 9, mtime=0) if target.name.endswith(".gz") else data)
