"""The lengths of a whole data set as one table: (tokens, text tokens) -> number of samples.

A hundred million samples become at most a few million entries, as lengths from 1,024 tokens are kept to 10 significant
bits (0.05 % off on average, 0.1 % at most) and text lengths from 128 to 7. Totals and the longest length stay exact.
Everything the advisor says of a data set is said of this table.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knapformer.errors import DataError
from knapformer.plan import CostModel
from knapformer.plan.arrays import Int64Array

LENGTH_BITS, TEXT_BITS = 10, 7
"""Significant bits that are kept of lengths and of text lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Samples by length.

    Attributes:
        length: (E,) tokens of a sequence, joint text included; rising, one entry per (length, text) [tokens].
        text: (E,) text tokens among them; zeros where text is not in the sequence [tokens].
        count: (E,) samples.
        num_tokens: tokens of all samples, exact where the source was [tokens].
        longest: longest sequence, exact [tokens].
        cumulative: (E,) samples up to each entry (derived).
    """

    length: Int64Array
    text: Int64Array
    count: Int64Array
    num_tokens: int
    longest: int
    cumulative: Int64Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.length) or self.count.min() < 1:
            raise DataError("a histogram of lengths needs at least one entry, each of at least one sample")
        object.__setattr__(self, "cumulative", np.cumsum(self.count))

    @classmethod
    def of(cls, length: Int64Array, text: Int64Array, count: Int64Array | None = None) -> "Histogram":
        """Of single samples, or of entries with counts; equal ones are merged, nothing is rounded."""
        count = np.ones_like(length) if count is None else count
        keys, entry = np.unique(np.stack([length, text]), axis=1, return_inverse=True)
        merged = np.zeros(keys.shape[1], dtype=np.int64)
        np.add.at(merged, entry.reshape(-1), count)
        used = merged > 0
        return cls(
            keys[0][used],
            keys[1][used],
            merged[used],
            int(np.dot(length, count)),
            int(length[count > 0].max(initial=0)),
        )

    @property
    def num_samples(self) -> int:
        return int(self.cumulative[-1])

    @property
    def mean_length(self) -> float:
        return self.num_tokens / self.num_samples

    def quantiles(self, shares: NDArray[np.float64]) -> Int64Array:
        """Length that a share of the samples does not exceed [tokens]."""
        at = np.searchsorted(self.cumulative, np.ceil(np.asarray(shares) * self.num_samples), side="left")
        return self.length[np.minimum(at, len(self.length) - 1)]

    def work(self, cost: CostModel) -> NDArray[np.float64]:
        """(E,) modelled work of one sample of each entry, one layer's forward pass [tick]."""
        return modelled_work(self.length.astype(np.float64), cost)

    def share_of_longest(self, share: float, amount: NDArray[np.float64]) -> float:
        """Share of an amount (per sample: tokens, work) that the longest `share` of all samples hold."""
        taken = np.clip(self.cumulative - (1 - share) * self.num_samples, 0, self.count)
        return float(np.dot(taken, amount) / np.dot(self.count, amount))

    def entries(self, fraction: NDArray[np.float64], first: Any = 0, count: Any = None) -> Int64Array:
        """Entries of samples drawn by `fraction` in [0, 1), with replacement: of all, or of `count` after `first`."""
        pick = np.floor(fraction * (self.num_samples if count is None else count)).astype(np.int64) + first
        return np.searchsorted(self.cumulative, pick, side="right").astype(np.int64)


def modelled_work(length: NDArray[np.float64], cost: CostModel) -> NDArray[np.float64]:
    """Work of whole sequences as the cost model has it, in floating point: sums of it may pass 64 bits [tick]."""
    return cost.sequence + cost.token * length + float(cost.per_qk_pair * cost.num_heads) * np.square(length)


def rounded(value: str, bits: int) -> str:
    """SQL that keeps `bits` significant bits of a positive whole number, to the nearest."""
    step = f"(1 << greatest(0, CAST(floor(log2(greatest({value}, 1))) AS BIGINT) - {bits - 1}))"
    return f"({value} + {step} // 2) // {step} * {step}"
