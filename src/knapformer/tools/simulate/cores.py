"""Runs a program on ranks that share few processor cores: several ranks of a test run on one machine.

With more ranks than cores balance alone gains nothing, as the cores are busy anyway. So this executor shares them out:
of n jobs under way, computing ranks and transfers alike (a transfer between processes of one machine is copying), each
runs at min(1, cores / n) of full speed. A job is one operation of one rank and begins when those it needs have ended:

    Compute, Wait    the rank's operation before; a wait needs its transfer, too
    Launch           is a job of its own, the transfer. It needs, of every rank that meets there, the operation before,
                     the transfer before in the stream, and the transfer it must follow

In plain Python, for tens of ranks. Links are not shared, cores are.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from knapformer.errors import SpecError
from knapformer.tools.simulate.clock import SimulatedStep
from knapformer.tools.simulate.program import Compute, Floats, Launch, Program

_EPSILON = 1e-12


class _Job:
    """One operation of one rank; `left` is its time at full speed [s]."""

    def __init__(self, seconds: float, needs: Iterable["_Job | None"]) -> None:
        self.left, self.begin, self.end = seconds, 0.0, 0.0
        self.followers: list[_Job] = []
        distinct = {job for job in needs if job is not None}
        self.missing = len(distinct)
        for job in distinct:
            job.followers.append(self)

    def finish(self, now: float) -> list["_Job"]:
        """End; gives the jobs that can begin now."""
        self.end = now
        for job in self.followers:
            job.missing -= 1
        return [job for job in self.followers if not job.missing]


def run_on_cores(program: Program, world_size: int, cores: float) -> SimulatedStep:
    """Run a program on `world_size` ranks that share `cores` processor cores."""
    if not cores > 0:
        raise SpecError(f"cores is {cores}; ranks need at least a part of one")
    start = _Job(0.0, ())
    last, busy = [start] * world_size, np.zeros(world_size)
    transfers: dict[str, dict[int, _Job]] = {}
    streams: dict[tuple[str, int], _Job] = {}
    waits: list[tuple[str, int, _Job, _Job, _Job]] = []  # kind, rank, operation before, transfer, the wait itself
    kinds: dict[str, str] = {}
    for op in program:
        if isinstance(op, Compute):
            busy += op.seconds
            last = [_Job(seconds, [before]) for seconds, before in zip(op.seconds.tolist(), last, strict=True)]
            continue
        needed = op.after if isinstance(op, Launch) else op.key
        if needed and needed not in transfers:
            raise SpecError(f"a program never ends: it waits for {needed!r}, which is not launched before")
        if isinstance(op, Launch):
            launched = transfers[op.key] = _transfers(op, last, transfers.get(op.after, {}), streams)
            streams |= {(op.stream, rank): job for rank, job in launched.items()}
            kinds[op.key] = op.kind
        else:
            for rank, transfer in transfers[op.key].items():
                wait = _Job(0.0, [last[rank], transfer])
                waits.append((kinds[op.key], rank, last[rank], transfer, wait))
                last[rank] = wait
    _share(start, cores)
    waiting, exposed = _idle(waits, world_size)
    return SimulatedStep(np.array([job.end for job in last]), busy, waiting, exposed)


def _transfers(
    op: Launch, last: list[_Job], after: dict[int, _Job], streams: dict[tuple[str, int], _Job]
) -> dict[int, _Job]:
    """The jobs of a transfer by rank; ranks without bytes have none."""
    seconds, partners = op.seconds.tolist(), op.meeting.partners()
    taking_part = [rank for rank, needed in enumerate(seconds) if needed > 0]
    needs = {rank: (last[rank], streams.get((op.stream, rank)), after.get(rank)) for rank in taking_part}
    return {
        rank: _Job(seconds[rank], (job for other in partners[rank] for job in needs.get(other, ())))
        for rank in taking_part
    }


def _share(start: _Job, cores: float) -> None:
    """Let time pass until every job has ended."""
    now, ready, running = 0.0, [start], list[_Job]()
    while ready or running:
        while ready:
            job = ready.pop()
            job.begin = now
            if job.left > 0:
                running.append(job)
            else:
                ready += job.finish(now)
        if not running:
            break
        step = min(job.left for job in running)
        now += step / min(1.0, cores / len(running))
        for job in running:
            job.left -= step
        ended = [job for job in running if job.left <= _EPSILON]
        running = [job for job in running if job.left > _EPSILON]
        for job in ended:
            ready += job.finish(now)


def _idle(
    waits: list[tuple[str, int, _Job, _Job, _Job]], world_size: int
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Time waited for other ranks until each transfer began, and after that for bytes; by kind of transfer."""
    waiting: dict[str, Floats] = defaultdict(lambda: np.zeros(world_size))
    exposed: dict[str, Floats] = defaultdict(lambda: np.zeros(world_size))
    for kind, rank, before, transfer, wait in waits:
        idle = wait.end - before.end
        for_others = min(max(transfer.begin - before.end, 0.0), idle)
        waiting[kind][rank] += for_others
        exposed[kind][rank] += idle - for_others
    return dict(waiting), dict(exposed)
