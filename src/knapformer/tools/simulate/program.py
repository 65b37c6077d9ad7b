"""What every rank does in a step, in order: one list of operations for all ranks, with arrays over ranks.

Three kinds are enough. A rank computes, or launches a transfer that travels on its own, or waits for one:

    Compute(seconds)     Launch(key, meeting, seconds)     Wait(key)

A transfer begins on a rank when the rank has launched it, the stream it travels in is free, what it must follow has
ended, and all ranks it *meets* there are as far: that is where ranks come to wait for each other. Two executors run the
same program: `clock` with a processor for every rank, `cores` with ranks that share few processor cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from knapformer.plan.arrays import Int64Array

Floats = NDArray[np.float64]


class Meeting(Protocol):
    """Which ranks a transfer brings together."""

    def latest(self, times: Floats) -> Floats:
        """(R,) for each rank the latest time among the ranks it meets, itself included."""
        ...

    def partners(self, rank: int) -> Int64Array:
        """The ranks that `rank` meets, itself included."""
        ...


class Groups:
    """Ranks in groups that meet as a whole: all-gather, reduce-scatter.

    Args:
        group: (R,) group of each rank.
    """

    def __init__(self, group: Int64Array) -> None:
        self._order = np.argsort(group, kind="stable")
        ordered = group[self._order]
        self._starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        self._sizes = np.diff(self._starts, append=len(group))

    def latest(self, times: Floats) -> Floats:
        values = np.empty_like(times)
        values[self._order] = np.repeat(np.maximum.reduceat(times[self._order], self._starts), self._sizes)
        return values

    def partners(self, rank: int) -> Int64Array:
        at = int(np.flatnonzero(self._order == rank)[0])
        group = int(np.searchsorted(self._starts, at, side="right")) - 1
        return np.sort(self._order[self._starts[group] : self._starts[group] + self._sizes[group]])


class Pairs:
    """Ranks that meet those they send to or receive from: an all-to-all in which most pairs exchange nothing.

    Args:
        a, b: (N,) ranks of each pair that exchanges something, in any order and direction.
        world_size: number of ranks R.
    """

    def __init__(self, a: Int64Array, b: Int64Array, world_size: int) -> None:
        ranks = np.arange(world_size)
        edges = np.unique(np.concatenate([a, b, ranks]) * world_size + np.concatenate([b, a, ranks]))
        self._rank, self._partner = np.divmod(edges, world_size)
        self._starts = np.searchsorted(self._rank, ranks)

    def latest(self, times: Floats) -> Floats:
        return np.maximum.reduceat(times[self._partner], self._starts)

    def partners(self, rank: int) -> Int64Array:
        return self._partner[self._rank == rank]


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Work on the rank itself: `seconds` (R,)."""

    name: str
    seconds: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Start of a transfer.

    Attributes:
        key: names the transfer.
        kind: what it is: "parameters", "gradients", "exchange", "route".
        seconds: (R,) time its bytes take on each rank's links; ranks with 0 take no part in it.
        meeting: which ranks come together.
        stream: transfers of one stream follow each other.
        links: which links it uses, of "intra" and "inter"; transfers of several streams share them.
        after: key of a transfer that must have ended.
    """

    key: str
    kind: str
    seconds: Floats
    meeting: Meeting
    stream: str
    links: tuple[str, ...] = ("intra",)
    after: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Until the transfer `key` has ended on this rank."""

    key: str


Op = Compute | Launch | Wait
Program = Sequence[Op]
