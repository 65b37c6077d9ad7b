"""Sharing what every rank must know: lengths, digests, signatures. Fixed-width integers, one small collective each.

Nothing is raised on local knowledge. A rank whose input is bad still takes part and sends a status code with two
numbers of detail, or a short text; every rank then builds the same message from what it received and raises the same
error. What is no error travels the same way: that a rank has no further batch, or takes none.
"""

import ctypes
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from knapformer.comm.groups import RankGroup
from knapformer.errors import PlanError, RankMismatchError
from knapformer.plan import Sequences
from knapformer.plan.arrays import Int64Array
from knapformer.plan.sequences import MAX_LENGTH

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Status(IntEnum):
    """What a rank says of its own input."""

    OK = 0
    NOT_INTEGERS = 1
    LENGTH_RANGE = 2
    TEXT_NOT_INTEGERS = 3
    TEXT_COUNT = 4
    TEXT_RANGE = 5
    FAILED = 6
    """Its batch could not be made; the note says why."""
    CLOSED = 7
    """It takes no further batch."""
    ENDED = 8
    """It has no further batch of its own."""
    CONTEXT_NOT_INTEGERS = 9
    CONTEXT_COUNT = 10
    CONTEXT_RANGE = 11


_MESSAGES = {
    Status.NOT_INTEGERS: "seq_lens is not a flat list of whole numbers; pass one integer per sequence",
    Status.LENGTH_RANGE: f"sequence {{0}} has length {{1}}; allowed is 1 to {MAX_LENGTH} tokens",
    Status.TEXT_NOT_INTEGERS: "text_lens is not a flat list of whole numbers; pass one integer per sequence",
    Status.TEXT_COUNT: "text_lens has {0} entries for {1} sequences; pass one text length per sequence",
    Status.TEXT_RANGE: "sequence {0} has text length {1}; allowed is 0 to the sequence's length",
    Status.CONTEXT_NOT_INTEGERS: "context_lens is not a flat list of whole numbers; pass one integer per sequence",
    Status.CONTEXT_COUNT: "context_lens has {0} entries for {1} sequences; pass one context length per sequence",
    Status.CONTEXT_RANGE: f"sequence {{0}} has context length {{1}}; allowed is 0 to {MAX_LENGTH} rows",
}
_TEXT_FAULTS = Status.TEXT_NOT_INTEGERS, Status.TEXT_COUNT, Status.TEXT_RANGE
_CONTEXT_FAULTS = Status.CONTEXT_NOT_INTEGERS, Status.CONTEXT_COUNT, Status.CONTEXT_RANGE
_NOTE_BYTES = 200
_SLICE = timedelta(milliseconds=100)
"""How long a thread waits at a time."""

Lengths = Iterable[int] | torch.Tensor
"""Whole numbers, one per sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """What a rank brings to a gather: usable lengths [tokens], or a status and none."""

    status: Status
    details: tuple[int, int] = (0, 0)
    lens: Int64Array = field(default_factory=partial(np.zeros, 0, np.int64))
    text: Int64Array = field(default_factory=partial(np.zeros, 0, np.int64))
    context: Int64Array = field(default_factory=partial(np.zeros, 0, np.int64))
    note: str = ""
    verdict: tuple[int, int] = (0, 0)
    """Of the plan before, where plans are made ahead: whether making it failed, and its digest."""

    @classmethod
    def of(cls, seq_lens: Lengths, text_lens: Lengths | None = None, context_lens: Lengths | None = None) -> Self:
        """Lengths as a user gives them."""
        lens = _integers(seq_lens)
        if lens is None:
            return cls(Status.NOT_INTEGERS)
        bad = np.flatnonzero((lens < 1) | (lens > MAX_LENGTH))
        if len(bad):
            return cls(Status.LENGTH_RANGE, (int(bad[0]), int(lens[bad[0]])))
        sides = []
        for given, most, faults in ((text_lens, lens, _TEXT_FAULTS), (context_lens, MAX_LENGTH, _CONTEXT_FAULTS)):
            side = np.zeros_like(lens) if given is None else _integers(given)
            if side is None:
                return cls(faults[0])
            if len(side) != len(lens):
                return cls(faults[1], (len(side), len(lens)))
            bad = np.flatnonzero((side < 0) | (side > most))
            if len(bad):
                return cls(faults[2], (int(bad[0]), int(side[bad[0]])))
            sides.append(side)
        return cls(Status.OK, (0, 0), lens, *sides)

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """That making the batch raised `error`; the first 200 bytes of its text travel."""
        try:
            text = str(error)
        except Exception:  # whatever it is, it must not keep this rank from the gather
            text = "(no text)"
        return cls(Status.FAILED, note=f"{type(error).__name__}: {text}")


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """The contributions of all ranks, the same on every rank; row r is that of `ranks[r]`, a global rank."""

    ranks: tuple[int, ...]
    rows: list[Contribution]

    def ranks_with(self, status: Status) -> list[int]:
        """Global ranks of that status."""
        return [rank for rank, row in zip(self.ranks, self.rows, strict=True) if row.status == status]

    @property
    def verdicts(self) -> np.ndarray:
        """(ranks, 2) what all ranks say of the plan before."""
        return np.array([row.verdict for row in self.rows], dtype=np.int64)

    def note(self, rank: int) -> str:
        """The note of a global rank."""
        return self.rows[self.ranks.index(rank)].note

    def sequences(self, members: slice = slice(None)) -> Sequences:
        """The sequences of a range of rows, whose homes are counted from its start."""
        rows = self.rows[members]
        return Sequences.from_ranks(
            [row.lens for row in rows], [row.text for row in rows], [row.context for row in rows]
        )

    def check_lengths(self) -> None:
        """Raise `PlanError` if the lengths of a rank are not usable."""
        for rank, row in zip(self.ranks, self.rows, strict=True):
            if row.status in _MESSAGES:
                raise PlanError(f"rank {rank}: {_MESSAGES[row.status].format(*row.details)}")


def gather_integers(group: RankGroup, values: Int64Array) -> np.ndarray:
    """(N,) integers of this rank -> (group size, N), row r from rank r. N must be equal on all ranks. Collective."""
    gather = IntegerGather(group, values)
    gather.wait()
    return gather.table()


class IntegerGather:
    """`gather_integers` under way: making one starts it, in any thread that ranks take turns in alike."""

    def __init__(self, group: RankGroup, values: Int64Array) -> None:
        # The handle is held while integers travel: if torch freed the group then, it would wait for the other ranks.
        self._handle, self._size, self._work = group.handle, group.size, None
        mine = torch.from_numpy(np.array(values, dtype=np.int64))
        self._everyone = mine
        if self._handle is not None:
            device = group.device
            self._everyone = torch.empty(self._size * len(values), dtype=torch.int64, device=device)
            self._work = _all_gather(self._everyone, mine.to(device), group=self._handle, async_op=True)

    def wait(self) -> None:
        """Wait for the other ranks, as long as their group lets them take."""
        if self._work is not None:
            self._work.wait()

    def wait_while(self, wanted: Callable[[], bool]) -> bool:
        """Wait for the other ranks; False if it stopped because they were no longer `wanted`, which is asked often.

        For threads that must not be inside torch when the interpreter exits. A gather that is given up may never end,
        and torch would wait for it in freeing the group, so the group is then kept for ever.

        Raises:
            RankMismatchError: if another rank is gone.
        """
        while self._work is not None and not self._work.is_completed():
            if not wanted():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._handle))
                return False
            try:
                self._work.wait(_SLICE)
            except RuntimeError as error:  # the slice is over, or the gather has failed
                if self._work.is_completed():
                    raise RankMismatchError(
                        "lost contact with another rank while waiting for it; it may have exited, and its own error "
                        "says why"
                    ) from error
        return True

    def table(self) -> np.ndarray:
        """(group size, N) what all ranks sent, once the wait is over."""
        return self._everyone.cpu().numpy().reshape(self._size, -1)


def agree(group: RankGroup, values: Sequence[int], names: Sequence[str], advice: str) -> None:
    """Raise the same `RankMismatchError` on every rank unless all ranks pass equal `values`, named by `names`."""
    table = gather_integers(group, np.array(values, dtype=np.int64))
    check_equal(group.ranks, table, names, advice)


def check_equal(ranks: Sequence[int], table: np.ndarray, names: Sequence[str], advice: str) -> None:
    """Raise `RankMismatchError` if the rows of a gathered table differ; names the columns and the minority `ranks`."""
    differs = [name for column, name in enumerate(names) if np.any(table[:, column] != table[0, column])]
    if not differs:
        return
    rows = [tuple(row) for row in table[:, : len(names)].tolist()]
    usual = Counter(rows).most_common(1)[0][0]  # of equally common ones, the lowest rank's
    odd = [rank for rank, row in zip(ranks, rows, strict=True) if row != usual]
    raise RankMismatchError(
        f"ranks disagree on {' and '.join(differs)}: not as the others: {name_ranks(odd)}; {advice}"
    )


def stable_digest(*parts: object) -> int:
    """63-bit digest of the text of `parts`, equal across processes and machines (unlike `hash`)."""
    state = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8)
    return int.from_bytes(state.digest(), "little") >> 1


class LengthGather:
    """Gathers every rank's sequence lengths into `Sequences`, one collective a step.

    The message has room for a number of sequences that all ranks know from the steps before; when a rank has more, all
    ranks see it and gather once again with more room.

    Args:
        group: the balancing group.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._room = 32
        self._calls = 0

    def __call__(
        self,
        seq_lens: Lengths,
        text_lens: Lengths | None = None,
        context_lens: Lengths | None = None,
        settings: dict[str, object] | None = None,
    ) -> Sequences:
        """Collective. Lengths [tokens] of this rank's sequences, in order.

        Args:
            seq_lens, text_lens, context_lens: one number per sequence.
            settings: name -> anything whose text must be equal on all ranks.

        Raises:
            PlanError: on every rank, if one rank's lengths are not usable.
            RankMismatchError: on every rank, if settings or the number of calls differ between ranks.
        """
        mine = Contribution.of(seq_lens, text_lens, context_lens)
        while (gathered := self.read(gather_integers(self._group, self.message(mine, settings)), settings)) is None:
            pass
        gathered.check_lengths()
        return gathered.sequences()

    def message(self, mine: Contribution, settings: dict[str, object] | None = None) -> Int64Array:
        """The integers to gather."""
        digests = [stable_digest(value) for value in (settings or {}).values()]
        header = [mine.status, *mine.details, len(mine.lens), *mine.verdict, self._calls, *digests]
        message = np.zeros(len(header) + 3 * self._room, dtype=np.int64)
        message[: len(header)] = header
        _write_body(message[len(header) :], mine)
        return message

    def read(self, table: np.ndarray, settings: dict[str, object] | None = None) -> Gathered | None:
        """What all ranks brought; None, with more room made, if a rank has more sequences than there was room for.

        Raises as `__call__` does, but not for lengths: see `Gathered.check_lengths`.
        """
        most = int(table[:, 3].max())
        if most > self._room:
            self._room = 1 << (most - 1).bit_length()
            return None
        self._calls += 1
        names = ["the number of plan_routing calls", *(settings or {})]
        check_equal(
            self._group.ranks,
            table[:, _CALLS : _CALLS + len(names)],
            names,
            "construct the balancer with the same arguments and call plan_routing equally often on every rank",
        )
        return Gathered(self._group.ranks, [_read_row(row, _CALLS + len(names)) for row in table])


_CALLS = 6
"""Column of the number of calls: behind status, details, count and verdict."""


def _write_body(body: Int64Array, mine: Contribution) -> None:
    """Lengths, text and context lengths, a third each, as far as there is room; or the note, which always fits."""
    if mine.note:
        words = np.frombuffer(
            mine.note.encode(errors="backslashreplace")[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0"), dtype=np.int64
        )
        body[: len(words)] = words
        return
    thirds = body.reshape(3, -1)
    kept = min(len(mine.lens), thirds.shape[1])
    for third, values in zip(thirds, (mine.lens, mine.text, mine.context), strict=True):
        third[:kept] = values[:kept]


def _read_row(row: Int64Array, header: int) -> Contribution:
    status, details, count, body = Status(int(row[0])), (int(row[1]), int(row[2])), int(row[3]), row[header:]
    verdict = int(row[4]), int(row[5])
    if status == Status.FAILED:
        text = body[: _NOTE_BYTES // 8].tobytes().rstrip(b"\0").decode(errors="ignore")  # may be cut inside a character
        return Contribution(status, details, note=text, verdict=verdict)
    return Contribution(status, details, *body.reshape(3, -1)[:, :count], verdict=verdict)


def _integers(values: Lengths) -> Int64Array | None:
    try:
        if isinstance(values, torch.Tensor):
            array = values.detach().cpu().numpy()
        else:
            array = np.asarray([int_or_fail(value) for value in values], dtype=np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            return None
        return array.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        return None


def int_or_fail(value: object) -> int:
    """An integer without rounding: 7.5 or '7' is an error, a NumPy or 0-d torch integer is not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{value!r} is not an integer")
    return value.__index__()  # type: ignore[attr-defined]


def name_ranks(ranks: list[int]) -> str:
    """'rank 3', or 'ranks 3, 5': the first eight."""
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
