"""Sharing what every rank must know: lengths, digests, signatures. Fixed-width integers, one small collective each.

Nothing is raised on local knowledge. A rank whose input is bad still takes part and sends a status code with two
numbers of detail; every rank then builds the same message from what it received and raises the same error.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum

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


_MESSAGES = {
    Status.NOT_INTEGERS: "seq_lens is not a flat list of whole numbers; pass one integer per sequence",
    Status.LENGTH_RANGE: f"sequence {{0}} has length {{1}}; allowed is 1 to {MAX_LENGTH} tokens",
    Status.TEXT_NOT_INTEGERS: "text_lens is not a flat list of whole numbers; pass one integer per sequence",
    Status.TEXT_COUNT: "text_lens has {0} entries for {1} sequences; pass one text length per sequence",
    Status.TEXT_RANGE: "sequence {0} has text length {1}; allowed is 0 to the sequence's length",
}
_HEADER = 5  # status, two details, number of sequences, call number


def gather_integers(group: RankGroup, values: Int64Array) -> np.ndarray:
    """(N,) integers of this rank -> (group size, N), row r from rank r. N must be equal on all ranks."""
    if group.handle is None:
        return values[None].copy()
    device = group.device
    mine = torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
    everyone = torch.empty(group.size * len(values), dtype=torch.int64, device=device)
    _all_gather(everyone, mine, group=group.handle)
    return everyone.cpu().numpy().reshape(group.size, len(values))


def agree(group: RankGroup, values: Sequence[int], names: Sequence[str], advice: str) -> None:
    """Raise the same `RankMismatchError` on every rank unless all ranks pass equal `values`, named by `names`."""
    table = gather_integers(group, np.array(values, dtype=np.int64))
    check_equal(group, table, names, advice)


def check_equal(group: RankGroup, table: np.ndarray, names: Sequence[str], advice: str) -> None:
    """Raise `RankMismatchError` if the rows of a gathered table differ; names the columns and the minority ranks."""
    differs = [name for column, name in enumerate(names) if np.any(table[:, column] != table[0, column])]
    if not differs:
        return
    rows = [tuple(row) for row in table[:, : len(names)].tolist()]
    usual = Counter(rows).most_common(1)[0][0]  # of equally common ones, the lowest rank's
    odd = [rank for rank, row in zip(group.ranks, rows, strict=True) if row != usual]
    raise RankMismatchError(
        f"ranks disagree on {' and '.join(differs)}: not as the others: {_name_ranks(odd)}; {advice}"
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
        settings: name -> anything whose text must be equal on all ranks (planner, cluster, prices, limits).
    """

    def __init__(self, group: RankGroup, settings: dict[str, object]) -> None:
        self._group = group
        self._names = list(settings)
        self._settings = [stable_digest(value) for value in settings.values()]
        self._room = 32
        self._calls = 0

    def __call__(
        self,
        seq_lens: Iterable[int] | torch.Tensor,
        text_lens: Iterable[int] | torch.Tensor | None = None,
        extra_settings: dict[str, object] | None = None,
    ) -> Sequences:
        """Collective. Lengths [tokens] of this rank's sequences, in order.

        Raises:
            PlanError: on every rank, if one rank's lengths are not usable.
            RankMismatchError: on every rank, if settings or the number of calls differ between ranks.
        """
        status, lens, text = _read(seq_lens, text_lens)
        extra = extra_settings or {}
        header = [*status, len(lens), self._calls, *self._settings, *(stable_digest(v) for v in extra.values())]
        self._calls += 1
        while True:
            message = np.zeros(len(header) + 2 * self._room, dtype=np.int64)
            message[: len(header)] = header
            body = message[len(header) :].reshape(2, self._room)
            kept = min(len(lens), self._room)
            body[0, :kept], body[1, :kept] = lens[:kept], text[:kept]
            table = gather_integers(self._group, message)
            most = int(table[:, 3].max())
            if most <= self._room:
                break
            self._room = 1 << (most - 1).bit_length()
        self._check(table, [*self._names, *extra])
        bodies = table[:, len(header) :].reshape(self._group.size, 2, self._room)
        counts = table[:, 3].tolist()
        return Sequences.from_ranks(
            [bodies[r, 0, :n] for r, n in enumerate(counts)], [bodies[r, 1, :n] for r, n in enumerate(counts)]
        )

    def _check(self, table: np.ndarray, names: list[str]) -> None:
        for rank, row in zip(self._group.ranks, table.tolist(), strict=True):
            if row[0] != Status.OK:
                raise PlanError(f"rank {rank}: {_MESSAGES[Status(row[0])].format(row[1], row[2])}")
        check_equal(
            self._group,
            table[:, 4:],
            ["the number of plan_routing calls", *names],
            "construct the balancer with the same arguments and call plan_routing equally often on every rank",
        )


def _read(
    seq_lens: Iterable[int] | torch.Tensor, text_lens: Iterable[int] | torch.Tensor | None
) -> tuple[tuple[int, int, int], Int64Array, Int64Array]:
    """Status with two numbers of detail, and the lengths; empty lengths where they cannot be used."""
    none = np.zeros(0, dtype=np.int64)
    lens = _integers(seq_lens)
    if lens is None:
        return (Status.NOT_INTEGERS, 0, 0), none, none
    bad = np.flatnonzero((lens < 1) | (lens > MAX_LENGTH))
    if len(bad):
        return (Status.LENGTH_RANGE, int(bad[0]), int(lens[bad[0]])), none, none
    text = np.zeros_like(lens) if text_lens is None else _integers(text_lens)
    if text is None:
        return (Status.TEXT_NOT_INTEGERS, 0, 0), none, none
    if len(text) != len(lens):
        return (Status.TEXT_COUNT, len(text), len(lens)), none, none
    bad = np.flatnonzero((text < 0) | (text > lens))
    if len(bad):
        return (Status.TEXT_RANGE, int(bad[0]), int(text[bad[0]])), none, none
    return (Status.OK, 0, 0), lens, text


def _integers(values: Iterable[int] | torch.Tensor) -> Int64Array | None:
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


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
