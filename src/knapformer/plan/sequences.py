"""The sequences of one step, as the length gather found them: structure of arrays in (home rank, position) order.

A sequence's id is its index in these arrays, so it is the same on every rank and increases with the home rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from knapformer.errors import PlanError
from knapformer.plan.arrays import Int64Array, column, starts_within

MAX_LENGTH = 2**31 - 1
"""Longest sequence accepted [tokens]; attention offsets on devices are 32-bit."""

COLUMNS = ("length", "home", "text_length", "context_length")
"""What sequences are made of; the rest is derived."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Lengths and home ranks of all sequences of a step.

    Attributes:
        length: (S,) tokens of each sequence, text included where text is part of the sequence [tokens].
        home: (S,) rank whose data loader produced it; never decreasing.
        text_length: (S,) leading tokens of the sequence that are text [tokens]; zeros where text is not part of it.
        context_length: (S,) rows beside the sequence that its tokens cross-attend to, such as text; default none.
        home_start: (S,) first token of the sequence among its home rank's packed tokens (derived).
    """

    length: Int64Array
    home: Int64Array
    text_length: Int64Array
    context_length: Int64Array = None  # type: ignore[assignment]  # zeros from here on
    home_start: Int64Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.context_length is None:
            object.__setattr__(self, "context_length", np.zeros(len(self.length), dtype=np.int64))
        for name in COLUMNS:
            object.__setattr__(self, name, column(getattr(self, name), name))
        if not len(self.length) == len(self.home) == len(self.text_length):
            raise PlanError(
                f"length, home and text_length must be equally long, got {len(self.length)}, {len(self.home)} "
                f"and {len(self.text_length)}"
            )
        if len(self.context_length) != len(self.length):
            raise PlanError(
                f"context_length must be as long as length, got {len(self.context_length)} and {len(self.length)}"
            )
        self._check("length", (self.length < 1) | (self.length > MAX_LENGTH), f"from 1 to {MAX_LENGTH} tokens")
        self._check("text_length", (self.text_length < 0) | (self.text_length > self.length), "from 0 to its length")
        bad = (self.context_length < 0) | (self.context_length > MAX_LENGTH)
        self._check("context_length", bad, f"from 0 to {MAX_LENGTH} rows")
        self._check("home", self.home < 0, "a rank of 0 or more")
        if np.any(np.diff(self.home) < 0):
            raise PlanError("sequences must be ordered by home rank; sort them by (home, position) first")
        object.__setattr__(self, "home_start", column(starts_within(self.home, self.length), "home_start"))

    def _check(self, name: str, bad: np.ndarray, allowed: str) -> None:
        if bad.any():
            at = int(np.argmax(bad))
            raise PlanError(
                f"sequence {at} (home rank {int(self.home[at])}) has {name} {int(getattr(self, name)[at])}; "
                f"allowed is {allowed}"
            )

    @classmethod
    def from_ranks(
        cls,
        seq_lens: Sequence[Sequence[int] | Int64Array],
        text_lens: Sequence[Sequence[int] | Int64Array] | None = None,
        context_lens: Sequence[Sequence[int] | Int64Array] | None = None,
    ) -> Self:
        """Build from one list of lengths per rank (and, if given, one list of text or context lengths per rank)."""
        counts = [len(lens) for lens in seq_lens]
        for name, given in (("text_lens", text_lens), ("context_lens", context_lens)):
            if given is not None and [len(lens) for lens in given] != counts:
                raise PlanError(f"{name} must match seq_lens rank by rank; seq_lens has {counts} sequences per rank")
        length = column(_flat(seq_lens), "length")
        home = column(np.repeat(np.arange(len(counts)), counts), "home")
        text = np.zeros_like(length) if text_lens is None else column(_flat(text_lens), "text_length")
        context = np.zeros_like(length) if context_lens is None else column(_flat(context_lens), "context_length")
        return cls(length, home, text, context)

    def __len__(self) -> int:
        return len(self.length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequences):
            return NotImplemented
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in COLUMNS)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, n).tobytes() for n in COLUMNS))

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return int(self.length.sum())

    def of_rank(self, rank: int) -> Int64Array:
        """Ids of the sequences whose home is `rank`."""
        first, last = np.searchsorted(self.home, [rank, rank + 1])
        return np.arange(first, last, dtype=np.int64)

    def tokens_at_home(self, world_size: int) -> Int64Array:
        """(world_size,) tokens each rank's data loader produced."""
        tokens = np.zeros(world_size, dtype=np.int64)
        np.add.at(tokens, self.home, self.length)
        return tokens

    def check_world(self, world_size: int) -> None:
        """Raise `PlanError` if a home rank lies outside `range(world_size)`."""
        if len(self.home) and int(self.home[-1]) >= world_size:
            raise PlanError(
                f"a sequence has home rank {int(self.home[-1])}, but the cluster has ranks 0 to {world_size - 1}; "
                "plan with the world size that gathered the lengths"
            )


def _flat(per_rank: Sequence[Sequence[int] | Int64Array]) -> list[int] | np.ndarray:
    """Lengths of all ranks in one list; arrays stay arrays, so that `column` sees their type."""
    if per_rank and all(isinstance(lens, np.ndarray) for lens in per_rank):
        return np.concatenate([np.asarray(lens) for lens in per_rank])
    return [x for lens in per_rank for x in lens]
