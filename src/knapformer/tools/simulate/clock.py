"""Runs a program with a processor for every rank, all ranks at once: a recursion over operations on arrays of ranks.

    compute     now += seconds
    launch      begin = latest over the ranks that meet of max(now, stream free);  end = begin + seconds + shared
    wait        now = max(now, end)

`shared` is the time during which a transfer of another stream uses the same links: two transfers at half the bandwidth
each take as long as one after the other, and the one launched later bears it. The idle time of a wait is divided: until
the transfer begins, a rank waits for *others*; after that for *bytes*.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from knapformer.tools.simulate.program import Compute, Floats, Launch, Program


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One operation on all ranks, for pictures: name, lane ("compute" or a stream), begin and end (R,) [s]."""

    name: str
    lane: str
    begin: Floats
    end: Floats


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedStep:
    """What happened when.

    Attributes:
        end: (R,) when each rank has finished [s].
        busy: (R,) time it computed [s].
        waiting: kind of transfer -> (R,) time it waited for other ranks there [s].
        exposed: kind of transfer -> (R,) time it waited for bytes there [s].
        spans: all operations, if they were recorded.
    """

    end: Floats
    busy: Floats
    waiting: dict[str, Floats]
    exposed: dict[str, Floats]
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Until the last rank has finished [s]."""
        return float(self.end.max())


@dataclass(slots=True, eq=False)
class _Transfer:
    kind: str
    ready: Floats  # when this rank was ready for it
    begin: Floats
    end: Floats


def run(program: Program, world_size: int, *, record: bool = False) -> SimulatedStep:
    """Run a program on `world_size` ranks.

    Args:
        program: what all ranks do.
        world_size: number of ranks R.
        record: keep every operation's times, for pictures.
    """
    now, busy = np.zeros(world_size), np.zeros(world_size)
    waiting: dict[str, Floats] = defaultdict(lambda: np.zeros(world_size))
    exposed: dict[str, Floats] = defaultdict(lambda: np.zeros(world_size))
    transfers: dict[str, _Transfer] = {}
    last: dict[str, tuple[Launch, _Transfer]] = {}  # of each stream
    spans: list[Span] = []
    for op in program:
        if isinstance(op, Compute):
            begin, now = now, now + op.seconds
            busy += op.seconds
            if record:
                spans.append(Span(op.name, "compute", begin, now))
        elif isinstance(op, Launch):
            transfer = transfers[op.key] = _launch(op, now, transfers, last)
            if record:
                spans.append(Span(op.key, op.stream, transfer.begin, transfer.end))
        else:
            transfer = transfers[op.key]
            idle = np.maximum(transfer.end - now, 0.0)
            for_others = np.clip(transfer.begin - np.maximum(transfer.ready, now), 0.0, idle)
            waiting[transfer.kind] += for_others
            exposed[transfer.kind] += idle - for_others
            now = np.maximum(now, transfer.end)
    return SimulatedStep(now, busy, dict(waiting), dict(exposed), spans)


def _launch(
    op: Launch, now: Floats, transfers: dict[str, _Transfer], last: dict[str, tuple[Launch, _Transfer]]
) -> _Transfer:
    takes_part = op.seconds > 0
    ready = now
    if op.after:
        ready = np.maximum(ready, transfers[op.after].end)
    if op.stream in last:
        ready = np.maximum(ready, last[op.stream][1].end)
    begin = np.where(takes_part, op.meeting.latest(ready), ready)
    end = begin + op.seconds
    for stream, (other, transfer) in last.items():
        if stream != op.stream and set(other.links) & set(op.links):
            shared = np.minimum(end, transfer.end) - np.maximum(begin, transfer.begin)
            end = end + np.where(takes_part & (other.seconds > 0), np.maximum(shared, 0.0), 0.0)
    transfer = _Transfer(op.kind, ready, begin, end)
    last[op.stream] = op, transfer  # on a rank that takes no part, the stream is as free as it was
    if takes_part.all():
        return transfer
    return _Transfer(op.kind, now, np.where(takes_part, begin, now), np.where(takes_part, end, now))
