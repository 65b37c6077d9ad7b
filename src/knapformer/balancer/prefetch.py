"""Planning ahead: a thread gathers the lengths of batch t + 1 and plans it on the CPU while step t runs.

    thread     wait for room - next(loader), lengths - gather - plan, index tensors - compare plans - hand over
    training   ..................... step t ..................................................| take t + 1 | step t + 1

The thread's collectives have a process group of their own. On every rank they are the same ones in the same order,
whatever happens to a rank, because whatever happens travels in the gather of lengths, and all threads end after the
same one: the first in which

    a rank's loader or `lengths` failed     it gets its own exception, the others `RankMismatchError`
    lengths cannot be used or planned       the same error on every rank
    a rank has closed its iterator          nothing, for it; `RankMismatchError` for ranks that want the batch
    loaders have ended                      all of them, or without `empty` any of them: the iterators end

Batches before that one are delivered first. A rank that closes early cannot take back what it has gathered, and cannot
end alone: its thread says so in its next gather, and ends when the other ranks get there.
"""

import atexit
import functools
import itertools
import logging
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, cast

import numpy as np
import torch

from knapformer.balancer.batches import BatchT, RankBatches, Source
from knapformer.balancer.side_stream import SideStream
from knapformer.balancer.step import RoutingStep
from knapformer.comm.gather import (
    Contribution,
    Gathered,
    LengthGather,
    Status,
    agree,
    gather_integers,
    name_ranks,
    stable_digest,
)
from knapformer.comm.groups import RankGroup, num_memberships, side_group
from knapformer.errors import KnapFormerWarning, RankMismatchError, SpecError
from knapformer.plan import Sequences
from knapformer.plan.arrays import Int64Array

Share = Callable[[Int64Array], np.ndarray]
"""Gathers integers of all ranks."""

LOADER_GRACE_S = 10.0
"""How long closing waits for a loader that is making a batch."""
OTHERS_GRACE_S = 1.0
"""How long closing waits for the other ranks to close too."""
PAUSE_S = 0.001
"""How often a thread looks whether the other ranks have come to its gather."""

logger = logging.getLogger(__name__)


class Prefetch(Iterator[tuple[BatchT, RoutingStep]]):
    """What `SequenceBalancer.prefetch` returns: an iterator of (batch, step), and a context manager that closes it."""

    def __init__(self, worker: "_Worker[BatchT]", deliver: Callable[[RoutingStep], None]) -> None:
        self._worker, self._deliver = worker, deliver
        self._close = weakref.finalize(self, worker.close)  # also when the iterator is dropped
        self._close.atexit = False  # see `_leave_all`

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
        object.__setattr__(step, "wait_seconds", time.perf_counter() - start)  # nobody else has seen the step yet
        self._deliver(step)
        return batch, step

    def close(self) -> None:
        """Take no further batches, and stop the thread. Happens by itself where the iterator is dropped.

        Ranks may close after different batches and in any order. A rank that still wants a batch after another has
        closed gets those that all ranks have gathered, then `RankMismatchError`.

        Waits until the thread is done with the loader (10 s at most, in case it hangs), and a second for the other
        ranks to close too. Where they do not, as when only this rank failed, the thread is left to wait for them: it
        does nothing but tell them, keeps neither `destroy_process_group` nor the exit of the process waiting, and ends
        once they close, ask for another batch, or exit.
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
        plan: Callable[[Sequences, Share], RoutingStep],
        deliver: Callable[[RoutingStep], None],
        device: torch.device,
    ) -> Prefetch[BatchT]:
        """Start a thread. Collective over the base group.

        Args:
            source: this rank's batches.
            settings: name -> what must be equal on all ranks.
            members: this rank's balancing group among the ranks of the base group.
            plan: makes the step of gathered sequences and compares plans.
            deliver: is told of each step when the training thread takes it.
            device: where index tensors live.
        """
        before = self._latest
        is_open = before is not None and before.is_open
        settings = {
            **settings,
            "the depth": source.depth,
            "whether `empty` is given": source.empty is not None,
            "whether an iterator is open": is_open,
        }
        if self._group is None and self._base.ranks != RankGroup.of().ranks:  # see `side_group`
            settings["the number of process groups they are members of"] = num_memberships()
        digests = [stable_digest(value) for value in settings.values()]
        agree(
            self._base, digests, list(settings), "call prefetch with the same arguments at the same place on every rank"
        )
        if isinstance(source.depth, bool) or not isinstance(source.depth, int) or source.depth < 1:
            raise SpecError(f"prefetch depth is {source.depth!r}; it must be a whole number of at least 1 [batches]")
        if is_open:
            raise SpecError(
                "an earlier prefetch iterator of this balancer is still open; close it first (leave its loop, or call "
                "its close()), or use another balancer"
            )
        if self._group is None:
            self._group = side_group(self._base)
        worker = _Worker(source, self._group, members, plan, SideStream(device))
        worker.start(before)
        self._latest = worker
        return Prefetch(worker, deliver)


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
        plan: Callable[[Sequences, Share], RoutingStep],
        stream: SideStream,
    ) -> None:
        self._depth, self._stream = source.depth, stream
        self._changed = threading.Condition()
        self._ready: deque[tuple[BatchT, RoutingStep] | _End] = deque()
        self._closing = self._at_loader = False
        args = (source, group, members, plan)  # the thread's alone, and gone with it
        self._thread = threading.Thread(target=self._run, args=args, name="knapformer-prefetch", daemon=True)
        self._before: threading.Thread | None = None
        self._exiting = False
        self._parked = threading.Event()

    # -- the training thread's side -----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return not self._closing

    def start(self, before: "_Worker[Any] | None") -> None:
        """Start, to begin once the thread `before` has ended."""
        self._before = None if before is None else before._thread
        _watch_exit()
        _running.add(self)
        self._thread.start()

    def take(self) -> tuple[BatchT, RoutingStep] | _End:
        """The next batch, or the end; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            item = self._ready.popleft()
            self._changed.notify_all()
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
        else:
            logger.warning("the loader is still making a batch %g s after prefetching was closed", LOADER_GRACE_S)

    def leave(self) -> None:
        """Close, and see to it that the thread never again runs more than Python's own code.

        A thread that comes back from torch while the interpreter shuts down aborts the process, and gloo's destructor
        waits for the other ranks. So a thread that waits for them in vain is parked for good, and the group with it.
        """
        if self.is_open:
            self.close()
        self._exiting = True
        give_up = time.monotonic() + OTHERS_GRACE_S
        while self._thread.is_alive() and not self._parked.wait(PAUSE_S) and time.monotonic() < give_up:
            pass

    # -- the thread's side --------------------------------------------------------------------------------------

    def _run(
        self,
        source: Source[BatchT],
        group: RankGroup,
        members: slice,
        plan: Callable[[Sequences, Share], RoutingStep],
    ) -> None:
        end = _End()
        try:
            if self._before is not None:
                self._before.join()  # its last gather must come before our first, on every rank
                self._before = None
            self._stream.enter_thread()
            gather = LengthGather(group, {}, pause=self._pause)
            share = functools.partial(gather_integers, group, pause=self._pause)
            rank = RankBatches(source)
            for number in itertools.count():
                mine, batch, error = self._make(rank)
                start = time.perf_counter()
                gathered = gather.collect(mine)
                found = _find_end(gathered, number, mine, error, can_go_on=source.empty is not None)
                if found is not None:
                    end = found
                    return
                with self._stream.work():
                    step = plan(gathered.sequences(members), share)
                object.__setattr__(step, "plan_seconds", time.perf_counter() - start)  # nobody has seen the step yet
                self._put((cast(BatchT, batch), step))
        except BaseException as error:
            end = _End(error)
        finally:
            self._put(end)
            _running.discard(self)

    def _pause(self) -> None:
        if not self._exiting:
            time.sleep(PAUSE_S)
            return
        self._parked.set()
        threading.Event().wait()

    def _put(self, item: tuple[BatchT, RoutingStep] | _End) -> None:
        with self._changed:
            if not self._closing or isinstance(item, _End):
                self._ready.append(item)
                self._changed.notify_all()

    def _make(self, rank: "RankBatches[BatchT]") -> tuple[Contribution, BatchT | None, BaseException | None]:
        """Wait for room and make this rank's next batch, unless the iterator is closed before that is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or len(self._ready) < self._depth)
            self._at_loader = not self._closing
        made = None
        if self._at_loader:
            made = rank.make()
        with self._changed:
            self._at_loader = False
            self._changed.notify_all()
            return (Contribution(Status.CLOSED), None, None) if self._closing or made is None else made


_running: set[_Worker[Any]] = set()


@functools.cache
def _watch_exit() -> None:
    """Once, and after torch's own exit handlers are registered, so that this one runs before them."""
    atexit.register(_leave_all)


def _leave_all() -> None:
    for worker in list(_running):
        worker.leave()


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
