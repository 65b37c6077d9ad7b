"""What fits a rank's memory, and how long it takes until a step comes that does not.

The token limit is where the simulator's estimate of peak memory reaches `USABLE` of the device's. It is lower for split
sequences, so for balancing, than for whole ones. The chance that a rank's samples of one step pass it is that of a sum
of independent draws, found by convolving the distribution of lengths with itself:

    P(l1 + ... + ln > limit),  lengths in units of limit / BINS, each divided between two bins so that means stay exact

A sum of n lengths is therefore spread by at most sqrt(n) / 2 bins.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knapformer.errors import PlanError
from knapformer.plan import Limits, Sequences, make_planner
from knapformer.plan.arrays import Int64Array
from knapformer.tools.simulate.memory import split_row_bytes
from knapformer.tools.simulate.scenario import Scenario

USABLE = 0.9
"""Share of device memory that the estimate may use: the rest is for fragmentation, communication buffers, encoders."""

BINS = 4096
NEGLIGIBLE = 1e-9
"""Chance a step that counts as never: below one in thirty years of seconds."""

_GRANULE = 64


@dataclass(frozen=True, slots=True)
class TokenMemory:
    """Estimated peak memory of a rank, linear in the tokens it holds [byte].

    Attributes:
        fixed: without any token.
        per_token: for each one of a whole sequence.
        per_split_token: for each one of a split sequence, whose q, k, v and o are held for other ranks as well.
        usable: what the estimate may reach.
    """

    fixed: float
    per_token: float
    per_split_token: float
    usable: float

    @classmethod
    def of(cls, scenario: Scenario) -> "TokenMemory":
        """Raises `PlanError` if not even the model fits."""
        fixed, one = (_unbalanced_peak(scenario, tokens) for tokens in (0, 1))
        split = 4 * scenario.model.num_heads * split_row_bytes(scenario.model)  # q, k, v and o of every head
        found = cls(fixed, one - fixed, one - fixed + split, USABLE * scenario.memory_bytes)
        if found.limit(split=True) < _GRANULE:
            raise PlanError(
                f"{scenario.model.title} does not fit: it needs about {fixed / 1e9:.0f} GB on each rank before any "
                f"token, of {scenario.memory_bytes / 1e9:.0f} GB; shard it over more ranks or choose larger devices"
            )
        return found

    def limit(self, *, split: bool) -> int:
        """Most tokens that fit a rank, all of split or all of whole sequences [tokens]."""
        per_token = self.per_split_token if split else self.per_token
        return int((self.usable - self.fixed) / per_token) // _GRANULE * _GRANULE

    def at(self, tokens: int, *, split: bool) -> float:
        """Estimate for a rank that holds so many [byte]."""
        return self.fixed + tokens * (self.per_split_token if split else self.per_token)


def _unbalanced_peak(scenario: Scenario, tokens: int) -> float:
    """Estimate where every rank has one whole sequence of so many tokens [byte]."""
    sequences = Sequences.from_ranks([[tokens] if tokens else []] * scenario.cluster.world_size)
    placement = make_planner("local")(sequences, scenario.cluster, scenario.cost_model(), Limits())
    return float(scenario.memory(placement).max())


def chance_above(limit: float, draws: int, length: Int64Array, count: Int64Array) -> float:
    """Chance that `draws` lengths, drawn by their counts, add up to more than `limit`."""
    if draws * int(length.max()) <= limit:
        return 0.0
    one = _binned(length / limit * BINS, count / count.sum())
    total, power = None, draws
    while True:
        if power & 1:
            total = one if total is None else _add(total, one)
        power >>= 1
        if not power:
            return float(total[-1]) if total is not None else 0.0
        one = _add(one, one)


def _binned(position: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares in bins 0 to BINS, and in the last what lies above."""
    bins = np.zeros(BINS + 2)
    above = position > BINS
    low = np.floor(position).astype(np.int64)
    upper = position - low
    np.add.at(bins, low[~above], (share * (1 - upper))[~above])
    np.add.at(bins, np.minimum(low + 1, BINS)[~above], (share * upper)[~above])
    bins[-1] = share[above].sum()
    return bins


def _add(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distribution of a sum; the last bin takes what passes the limit (directly, so that tiny chances stay exact)."""
    inside = np.convolve(a[:-1], b[:-1])
    above = inside[BINS + 1 :].sum() + a[-1] * b.sum() + a[:-1].sum() * b[-1]
    return np.append(inside[: BINS + 1], above)
