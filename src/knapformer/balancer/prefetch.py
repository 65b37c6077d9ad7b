"""Planning ahead: while step t runs, a thread loads and plans the batches after it.

    thread     load t+2 | ..wait.. | plan t+2, index tensors | load t+3 | ..wait.. | plan t+3 ...
                        |   ^                                           |   ^
    training   ..... take t: start round t+2 | step t ............... take t+1: start round t+3 | step t+1 ...

The thread loads and plans; the training thread starts what is collective, one *round* for each batch it takes, and does
not wait for it. A round gathers what every rank says of one batch (lengths, an error, that it has no more, that it
takes no more) together with its verdict on the plan before. So a batch is delivered when all ranks have made the same
plan of it, and by then the round that says so has travelled behind the step before. Rounds have a process group of
their own, on the CPU: they are the same ones in the same order on every rank, and all iterators end after the same one:

    a rank's loader or `lengths` failed     it gets its own exception, the others `RankMismatchError`
    lengths cannot be used or planned       the same error on every rank
    a rank has closed its iterator          nothing, for it; `RankMismatchError` for ranks that want the batch
    loaders have ended                      all of them, or without `empty` any of them: the iterators end

Batches before that one are delivered first. A rank that closes early says so in one last round, which its thread starts
once the rounds under way have ended, as its training thread may never come back.
"""

import atexit
import itertools
import logging
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, cast

import numpy as np
import torch

from knapformer.balancer.batches import BatchT, RankBatches, Source
from knapformer.balancer.outcome import Outcome
from knapformer.balancer.side_stream import SideStream
from knapformer.balancer.step import RoutingStep
from knapformer.comm.gather import (
    Contribution,
    Gathered,
    IntegerGather,
    LengthGather,
    Status,
    agree,
    name_ranks,
    stable_digest,
)
from knapformer.comm.groups import RankGroup, num_memberships, side_group
from knapformer.errors import KnapFormerWarning, RankMismatchError, SpecError
from knapformer.plan import Sequences

LOADER_GRACE_S = 10.0
"""How long closing waits for a loader that is making a batch."""
OTHERS_GRACE_S = 1.0
"""How long closing waits for the other ranks to close too."""

logger = logging.getLogger(__name__)


class Prefetch(Iterator[tuple[BatchT, RoutingStep]]):
    """What `SequenceBalancer.prefetch` returns: an iterator of (batch, step), and a context manager that closes it.

    Attributes:
        wait_seconds: how long the training thread waited for the batch it took last [s].
    """

    def __init__(self, worker: "_Worker[BatchT]", deliver: Callable[[RoutingStep], None]) -> None:
        self._worker, self._deliver = worker, deliver
        self._close = weakref.finalize(self, worker.close)  # also when the iterator is dropped, and at exit
        self.wait_seconds = 0.0

    def __next__(self) -> tuple[BatchT, RoutingStep]:
        if not self._close.alive:
            raise StopIteration
        start = time.perf_counter()
        item = self._worker.take()
        if isinstance(item, _End):
            self.close()
            if item.warning:
                warnings.warn(item.warning, KnapFormerWarning, stacklevel=2)
            try:
                raise item.error or StopIteration
            finally:
                del item  # else the exception and this frame keep each other alive
        batch, step = item
        self.wait_seconds = time.perf_counter() - start
        self._deliver(step)
        return batch, step

    def close(self) -> None:
        """Take no further batches, and stop the thread. Happens by itself where the iterator is dropped.

        Ranks may close after different batches and in any order. A rank that still wants a batch after another has
        closed gets those that all ranks have gathered, then `RankMismatchError`.

        Waits until the thread is done with the loader (10 s at most, in case it hangs), and a second for the other
        ranks to close too. Where they do not, as when only this rank failed, the thread is left to tell them: it keeps
        neither `destroy_process_group` nor the exit of the process waiting, and ends once they close, ask for another
        batch, or exit.
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PrefetchChannel:
    """A balancer's process group for prefetching, made on first use, and the one iterator that may be open."""

    def __init__(self, base: RankGroup) -> None:
        self._base = base
        self._group: RankGroup | None = None
        self._latest: _Worker[Any] | None = None

    def open(
        self,
        source: Source[BatchT],
        *,
        settings: dict[str, object],
        members: slice,
        plan: Callable[[Sequences], RoutingStep],
        deliver: Callable[[RoutingStep], None],
        device: torch.device,
    ) -> Prefetch[BatchT]:
        """Start a thread. Collective over the base group.

        Args:
            source: this rank's batches.
            settings: name -> what must be equal on all ranks.
            members: this rank's balancing group among the ranks of the base group.
            plan: makes the step of gathered sequences, with its index tensors.
            deliver: is told of each step when the training thread takes it.
            device: where index tensors live.
        """
        before = self._latest
        is_open = before is not None and before.is_open
        settings = {
            **settings,
            "whether `empty` is given": source.empty is not None,
            "whether an iterator is open": is_open,
        }
        if self._group is None and self._base.ranks != RankGroup.of().ranks:  # see `side_group`
            settings["the number of process groups they are members of"] = num_memberships()
        digests = [stable_digest(value) for value in settings.values()]
        agree(
            self._base, digests, list(settings), "call prefetch with the same arguments at the same place on every rank"
        )
        if is_open:
            raise SpecError(
                "an earlier prefetch iterator of this balancer is still open; close it first (leave its loop, or call "
                "its close()), or use another balancer"
            )
        if self._group is None:
            self._group = side_group(self._base)
        self._latest = _Worker(source, self._group, members, plan, SideStream(device), before)
        return Prefetch(self._latest, deliver)


@dataclass(frozen=True, slots=True)
class _End:
    """What comes after the last batch."""

    error: BaseException | None = None
    warning: str | None = None


class _Worker(Generic[BatchT]):
    """The thread, and what it shares with the training thread. Must not refer to the iterator, which closes it."""

    def __init__(
        self,
        source: Source[BatchT],
        group: RankGroup,
        members: slice,
        plan: Callable[[Sequences], RoutingStep],
        stream: SideStream,
        before: "_Worker[Any] | None",
    ) -> None:
        self._group, self._stream = group, stream
        self._changed = threading.Condition()
        self._ready: deque[tuple[BatchT, RoutingStep] | _End] = deque()
        self._number = 0  # of the round that the thread is at
        self._message: np.ndarray | None = None  # of that round, for the training thread to start it
        self._round: IntegerGather | None = None  # started, for the thread to wait for
        self._num_started = self._num_taken = 0
        self._closing = self._at_loader = self._ended = False
        self._before = before  # whose last round must come before our first, on every rank
        args = (source, members, plan)  # the thread's alone, and gone with it
        self._thread = threading.Thread(target=self._run, args=args, name="knapformer-prefetch", daemon=True)
        self._thread.start()

    # -- the training thread's side -----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return not self._closing

    def take(self) -> tuple[BatchT, RoutingStep] | _End:
        """The next batch, or the end. Leaves the round after it under way, to travel while the batch is worked on."""
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        with self._changed:
            # Three rounds make two batches, and one more is under way. Counted, so that every rank starts equally many.
            while self._num_started < self._num_taken + 3 and not self._ended:
                self._changed.wait_for(lambda: self._message is not None or self._ended)
                if self._message is not None:
                    self._round, self._message = IntegerGather(self._group, self._message), None
                    self._num_started = self._number + 1
                    self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready)
            item = self._ready.popleft()
            self._num_taken += 1
        if not isinstance(item, _End):
            self._stream.hand_over(item[1])
        return item

    def close(self) -> None:
        """See `Prefetch.close`."""
        with self._changed:
            self._closing = True
            self._ready.clear()
            self._changed.notify_all()
            if threading.current_thread() is self._thread:  # the garbage collector runs in any thread
                return
            left = self._changed.wait_for(lambda: not self._at_loader, LOADER_GRACE_S)
        if left:
            self._thread.join(OTHERS_GRACE_S)
            if self._thread.is_alive():
                # It sees the end of the main thread at once, but a thread that comes back from torch while the
                # interpreter shuts down aborts the process.
                atexit.register(self._thread.join, OTHERS_GRACE_S)
        else:
            logger.warning("the loader is still making a batch %g s after prefetching was closed", LOADER_GRACE_S)

    # -- the thread's side --------------------------------------------------------------------------------------

    def _run(self, source: Source[BatchT], members: slice, plan: Callable[[Sequences], RoutingStep]) -> None:
        end: _End | None = _End()
        try:
            self._stream.enter_thread()
            end = self._plan_all(source, members, plan)
        except BaseException as error:
            end = _End(error)
        finally:
            if end is not None:
                self._put(end)

    def _plan_all(
        self, source: Source[BatchT], members: slice, plan: Callable[[Sequences], RoutingStep]
    ) -> _End | None:
        """Load and plan batch after batch; returns how it ends, None if the process exits meanwhile."""
        rank, gather = RankBatches(source), LengthGather(self._group)
        group_size = members.stop - members.start
        batch: BatchT | None = None
        planned: Outcome | None = None
        for number in itertools.count():
            self._number = number
            mine, next_batch, error = self._make(rank)
            mine = replace(mine, verdict=(0, 0) if planned is None else planned.verdict)
            gathered = self._gather(gather, mine)
            if gathered is None:
                return None
            mine = gathered.rows[self._group.rank]  # "closed", where this rank has closed meanwhile
            if planned is not None:
                step = planned.settle(gathered.verdicts, gathered.ranks, group_size)
                self._put((cast(BatchT, batch), step))
            end = _find_end(gathered, number, mine, error, can_go_on=source.empty is not None)
            if end is not None:
                return end
            gathered.check_lengths()
            with self._stream.work():
                planned = Outcome.of(partial(plan, gathered.sequences(members)))
            batch = next_batch
        return None

    def _make(self, rank: "RankBatches[BatchT]") -> tuple[Contribution, BatchT | None, BaseException | None]:
        """Make this rank's next batch, unless the iterator is closed before that is done."""
        with self._changed:
            self._at_loader = not self._closing
        made = rank.make() if self._at_loader else None
        with self._changed:
            self._at_loader = False
            self._changed.notify_all()
            return (Contribution(Status.CLOSED), None, None) if self._closing or made is None else made

    def _gather(self, gather: LengthGather, mine: Contribution) -> Gathered | None:
        """One round, again if it had too little room; None if the process exits before the other ranks come."""
        while True:
            with self._changed:
                self._message = gather.message(mine)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._round is not None or self._closing)
                under_way, self._round, self._message = self._round, None, None
            if under_way is None:  # the training thread has left, so this thread speaks for it
                mine = Contribution(Status.CLOSED, verdict=mine.verdict)
                if self._before is not None:
                    self._before._thread.join()
                under_way = IntegerGather(self._group, gather.message(mine))
            if not under_way.wait_while(threading.main_thread().is_alive):
                return None
            gathered = gather.read(under_way.table())
            if gathered is not None:
                return gathered

    def _put(self, item: tuple[BatchT, RoutingStep] | _End) -> None:
        with self._changed:
            if not self._closing or isinstance(item, _End):
                self._ready.append(item)
                self._ended = isinstance(item, _End)
                self._changed.notify_all()


def _find_end(
    gathered: Gathered, number: int, mine: Contribution, error: BaseException | None, *, can_go_on: bool
) -> _End | None:
    """Whether batch `number` ends the iterators of all ranks, and what this rank's then does; None to plan it.

    Args:
        gathered: of all ranks.
        number: of the batch, from 0.
        mine, error: what this rank contributed, and why it failed if it did.
        can_go_on: whether ranks that have ended can make empty batches.
    """
    failed, closed, ended = (gathered.ranks_with(s) for s in (Status.FAILED, Status.CLOSED, Status.ENDED))
    if failed:
        if error is not None:
            return _End(error)
        return _End(
            RankMismatchError(
                f"rank {failed[0]}: its loader or `lengths` failed at batch {number}: {gathered.note(failed[0])}; "
                "all batches before it were delivered; that rank's own error has the traceback"
            )
        )
    if mine.status == Status.CLOSED:
        return _End()
    has_ended = mine.status == Status.ENDED
    others = len(gathered.ranks) - len(closed) - len(ended)
    if has_ended and others == 0:
        return _End()
    if closed and not (has_ended and not can_go_on):
        return _End(
            RankMismatchError(
                f"{name_ranks(closed)} closed the prefetch iterator and will not take batch {number}; let every rank "
                "leave the loop after the same batch; if a rank raised, its own error says why"
            )
        )
    if ended and not can_go_on:
        return _End(
            warning=f"prefetch stopped before batch {number}: the loaders of {len(ended)} of {len(gathered.ranks)} "
            f"ranks ended, {others} still had batches, which were not used; to lose nothing pass empty=, a function "
            "that makes a batch without sequences"
        )
    return None
