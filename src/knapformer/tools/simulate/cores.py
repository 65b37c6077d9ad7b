"""Runs a program on ranks that share few processor cores: several ranks of a test run on one machine.

With more ranks than cores balance alone gains nothing, as the cores are busy anyway. So this executor shares them out:
of n jobs under way, computing ranks and transfers alike (a transfer between processes of one machine is copying), each
runs at min(1, cores / n) of full speed. An event loop in Python, for tens of ranks; links are not shared, cores are.
"""

from dataclasses import dataclass, field

import numpy as np

from knapformer.errors import SpecError
from knapformer.tools.simulate.clock import Timeline
from knapformer.tools.simulate.program import Compute, Launch, Program, Wait

_EPSILON = 1e-12


@dataclass(slots=True)
class _Rank:
    at: int = 0  # operation it is at
    left: float = 0.0  # of the computation under way [s at full speed]
    idle_since: float = 0.0
    end: float = 0.0
    queue: dict[str, list[str]] = field(default_factory=dict)  # stream -> transfers launched and not ended, in order


class _Machine:
    def __init__(self, program: Program, world_size: int, cores: float) -> None:
        self.program, self.cores, self.now = program, cores, 0.0
        self.ranks = [_Rank() for _ in range(world_size)]
        self.launches = {op.key: op for op in program if isinstance(op, Launch)}
        self.left: dict[tuple[int, str], float] = {}  # transfers under way
        self.done: set[tuple[int, str]] = set()
        self.begun: dict[tuple[int, str], float] = {}
        self.partners: dict[tuple[int, int], list[int]] = {}
        self.busy, self.waiting, self.exposed = np.zeros(world_size), {}, {}

    def run(self) -> Timeline:
        for rank in range(len(self.ranks)):
            self._proceed(rank)
        while True:
            self._begin_transfers()
            computing = [r for r, rank in enumerate(self.ranks) if rank.left > 0]
            jobs = len(computing) + len(self.left)
            if not jobs:
                break
            speed = min(1.0, self.cores / jobs)
            step = min([self.ranks[r].left for r in computing] + list(self.left.values()))
            self.now += step / speed
            for r in computing:
                self.ranks[r].left -= step
                self.busy[r] += step
            for key in self.left:
                self.left[key] -= step
            ended = [key for key, left in self.left.items() if left <= _EPSILON]
            for rank, key in ended:
                self._end_transfer(rank, key)
            for r in computing:
                rank = self.ranks[r]
                if rank.left <= _EPSILON:
                    rank.at, rank.left, rank.idle_since, rank.end = rank.at + 1, 0.0, self.now, self.now
                    self._proceed(r)
            for rank in range(len(self.ranks)):
                if self._waits(rank):
                    self._proceed(rank)
        stuck = [r for r, rank in enumerate(self.ranks) if rank.at < len(self.program)]
        if stuck:
            raise SpecError(f"a program never ends: ranks {stuck} wait for transfers that cannot begin")
        return Timeline(np.array([rank.end for rank in self.ranks]), self.busy, self.waiting, self.exposed)

    def _waits(self, rank: int) -> bool:
        state = self.ranks[rank]
        return state.at < len(self.program) and isinstance(self.program[state.at], Wait)

    def _proceed(self, rank: int) -> None:
        """Go on with a rank's operations up to the next that takes time."""
        state = self.ranks[rank]
        while state.at < len(self.program):
            op = self.program[state.at]
            if isinstance(op, Compute):
                if (seconds := float(op.seconds[rank])) > 0:
                    state.left = seconds
                    return
            elif isinstance(op, Launch):
                if op.seconds[rank] > 0:
                    state.queue.setdefault(op.stream, []).append(op.key)
                else:
                    self.done.add((rank, op.key))
            elif (rank, op.key) in self.done:
                self._account(rank, op.key)
            else:
                return
            state.at += 1
            state.idle_since = state.end = self.now

    def _account(self, rank: int, key: str) -> None:
        begun, since, kind = self.begun.get((rank, key), self.now), self.ranks[rank].idle_since, self.launches[key].kind
        for_others = min(max(begun - since, 0.0), self.now - since)
        zeros = np.zeros(len(self.ranks))
        self.waiting.setdefault(kind, zeros.copy())[rank] += for_others
        self.exposed.setdefault(kind, zeros)[rank] += self.now - since - for_others

    def _begin_transfers(self) -> None:
        """Begin every transfer that is first in its stream on all ranks that meet for it."""
        for rank, state in enumerate(self.ranks):
            for queue in state.queue.values():
                if not queue or (rank, queue[0]) in self.left:
                    continue
                key, op = queue[0], self.launches[queue[0]]
                if all(self._ready(other, op) for other in self._partners(op, rank)):
                    self.left[rank, key] = float(op.seconds[rank])
                    self.begun[rank, key] = self.now

    def _partners(self, op: Launch, rank: int) -> list[int]:
        at = id(op.meeting), rank
        if at not in self.partners:
            self.partners[at] = op.meeting.partners(rank).tolist()
        return [other for other in self.partners[at] if op.seconds[other] > 0]

    def _ready(self, rank: int, op: Launch) -> bool:
        """Whether a rank has come to a transfer: nothing is before it in its stream, and what it follows has ended."""
        if (rank, op.key) in self.done:
            return True
        return self.ranks[rank].queue.get(op.stream, [""])[:1] == [op.key] and (
            not op.after or (rank, op.after) in self.done
        )

    def _end_transfer(self, rank: int, key: str) -> None:
        del self.left[rank, key]
        self.done.add((rank, key))
        self.ranks[rank].queue[self.launches[key].stream].pop(0)


def run_on_cores(program: Program, world_size: int, cores: float) -> Timeline:
    """Run a program on `world_size` ranks that share `cores` processor cores."""
    if not cores > 0:
        raise SpecError(f"cores is {cores}; ranks need at least a part of one")
    return _Machine(program, world_size, cores).run()
