"""What every rank does in a step, in order: one list of operations for all ranks, with arrays over ranks.

Three kinds are enough. A rank computes, or launches a transfer that travels on its own, or waits for one:

    Compute(seconds)     Launch(key, meeting, seconds)     Wait(key)

A transfer begins on a rank when the rank has launched it, the stream it travels in is free, what it must follow has
ended, and all ranks it *meets* there are as far: that is where ranks come to wait for each other. Two executors run the
same program: `clock` with a processor for every rank, `cores` with ranks that share few processor cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knapformer.plan.arrays import Int64Array

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """Which ranks a transfer brings together: every rank meets the members of one segment.

    Attributes:
        members: ranks, segment after segment.
        starts: where each segment begins among the members.
        segment: (R,) the segment of each rank.
    """

    members: Int64Array
    starts: Int64Array
    segment: Int64Array

    @classmethod
    def groups(cls, group: Int64Array) -> "Meeting":
        """Ranks of a group all meet: all-gather, reduce-scatter. `group` (R,) says which each rank is in."""
        segment = np.unique(group, return_inverse=True)[1].reshape(-1)
        members = np.argsort(segment, kind="stable")
        return cls(members, np.searchsorted(segment[members], np.arange(segment.max() + 1)), segment)

    @classmethod
    def pairs(cls, a: Int64Array, b: Int64Array, world_size: int) -> "Meeting":
        """A rank meets those it sends to or receives from: an all-to-all in which most pairs exchange nothing.

        Args:
            a, b: (N,) ranks of each pair that exchanges something, in any order and direction.
            world_size: number of ranks R.
        """
        ranks = np.arange(world_size)
        edges = np.unique(np.concatenate([a, b, ranks]) * world_size + np.concatenate([b, a, ranks]))
        rank, partner = np.divmod(edges, world_size)
        return cls(partner, np.searchsorted(rank, ranks), ranks)

    def latest(self, times: Floats) -> Floats:
        """(R,) for each rank the latest time among the ranks it meets, itself included."""
        return np.maximum.reduceat(times[self.members], self.starts)[self.segment]

    def partners(self) -> list[list[int]]:
        """For each rank the ranks that it meets, itself included."""
        segments = [part.tolist() for part in np.split(self.members, self.starts[1:])]
        return [segments[segment] for segment in self.segment.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Work on the rank itself, `seconds` (R,)."""

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
