"""Run a function on several ranks: real processes, real gloo collectives, a few ms a call.

    test process --job----> rank 0, rank 1, ...      persistent workers, one pool per world size,
    test process <--reply-- each rank                forked from a server that has torch imported

    def sum_of_ranks(rank, world_size, scale):
        x = torch.full((1,), float(rank)) * scale
        dist.all_reduce(x)
        return x.item()

    assert run_ranks(4, sum_of_ranks, 2.0) == [12.0] * 4

Functions travel by module and name, so they live at the top level of an importable module; arguments and results
travel as pickles, so tensors are copied. Workers obey the caller's warning filters: what is an error in the test is one
on the ranks. A call that fails costs its pool, because ranks that stopped at different collectives cannot be trusted
with the next test. Process groups that a call made stay until the pool ends; only where ranks are members of unequally
many, which code can tell (torch names groups by that number), the next call finds a new world.
Environment variables are those of the first call: later changes do not reach the ranks.
Not here: several hosts, devices other than the CPU. This module does not import torch in the test process.
"""

import atexit
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

MAX_POOLS = 8
# Each gloo group has threads that wake up a hundred times a second, whether it is used or not.
MAX_GROUPS = 4
START_TIMEOUT_S = 60.0
GROUP_TIMEOUT_S = 30.0
# After the first error, how long the other ranks may take to report theirs before they are taken to be stuck.
GRACE_S = 1.0
LOG_TAIL_CHARS = 4000

# What ranks import in their first calls; each pool would import it again on every rank.
_PRELOAD = [
    *("numpy", "PIL.Image", "hypothesis", "pytest"),
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.utils.checkpoint"),
    *("knapformer.models", "knapformer.train.trainer"),
]
_WORKER_ENV = {
    # One thread per library: several ranks share two cores, and the server must have no threads when it forks.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Turns mismatched collectives into an error on every rank instead of a hang, an abort or wrong data.
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
if sys.platform == "linux":
    _WORKER_ENV["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the host's name, which may not resolve


class RankError(Exception):
    """A rank raised, or its process ended. The message holds that rank's traceback and what became of the others."""


class RankTimeoutError(RankError):
    """Some ranks gave no answer in time. The message holds their stacks."""


class RemoteError(Exception):
    """Stands for an exception that cannot be pickled; its class bears the original's name, its text the message."""


@dataclass(frozen=True, slots=True)
class _Job:
    module: str
    qualname: str
    sys_path: list[str]
    args_and_filters: bytes  # unpickled only once `sys_path` holds, and where an error is reported


@dataclass(frozen=True, slots=True)
class _Reply:
    """What one rank sends back. `payload` pickles the value or the exception; None if the exception cannot travel."""

    ok: bool
    payload: bytes | None
    type_name: str = ""
    message: str = ""
    trace: str = ""
    time: float = 0.0  # [s] on the system-wide monotonic clock, to tell who failed first
    num_groups: int = 1  # process groups that this rank is a member of

    def error(self) -> BaseException:
        exc: BaseException | None = None
        if self.payload is not None:
            try:
                exc = pickle.loads(self.payload)
            except Exception:  # its class may not be importable here
                exc = None
        if exc is None:
            exc = type(self.type_name, (RemoteError,), {})(self.message)
        exc.add_note(self.trace)
        return exc


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, expect_errors: bool = False
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on `world_size` gloo ranks and returns their results in rank order.

    Args:
        world_size: number of ranks.
        fn: a function at the top level of an importable module.
        args: further arguments, pickled to every rank.
        timeout: [s] for the whole call. The process group itself gives up after 30 s.
        expect_errors: if true, a rank's exception takes the place of its result instead of being raised.

    Raises:
        RankError: a rank raised or died (chained to the exception of the rank that failed first).
        RankTimeoutError: some rank gave no answer in time; also with `expect_errors`.
    """
    __tracebackhide__ = True
    job = _make_job(fn, args)
    pool = _get_pool(world_size)
    try:
        replies = pool.run(job, timeout, wait_for_all=expect_errors)
        if all(reply is not None and reply.ok for reply in replies):
            return [pickle.loads(reply.payload) for reply in replies]
        missing = [rank for rank, reply in enumerate(replies) if reply is None]
        if missing and (expect_errors or all(reply is None or reply.ok for reply in replies)):
            raise RankTimeoutError(_describe_timeout(pool, replies, missing, timeout))
    except BaseException:
        _drop_pool(world_size)
        raise
    _drop_pool(world_size)
    if expect_errors:
        return [pickle.loads(reply.payload) if reply.ok else reply.error() for reply in replies]
    first = min((reply for reply in replies if reply is not None and not reply.ok), key=lambda reply: reply.time)
    rank = replies.index(first)
    raise RankError(_describe_error(rank, first, replies)) from first.error()


def close_pools() -> None:
    """Ends all workers. Called when the tests are over; safe to call again."""
    while _pools:
        _pools.popitem(last=False)[1].close()


# ---- the test process's side ----


class _Pool:
    """`world_size` worker processes that share one process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self.num_worlds = 0  # groups of all ranks so far, one after another
        self.needs_new_world = False  # whether ranks are members of unequally many groups
        try:
            self._start()
        except BaseException:
            self.close(kill=True)
            raise

    def _start(self) -> None:
        context = _context()
        store = self._new_store()
        with mock.patch.dict(os.environ, _WORKER_ENV):  # matters for the first process only: it starts the server
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(theirs, rank, self.world_size, store, str(self._log(rank))),
                    name=f"rank-{rank}-of-{self.world_size}",
                )
                process.start()
                theirs.close()
                self.connections.append(ours)
                self.processes.append(process)
        self._check_started(self._collect(START_TIMEOUT_S, wait_for_all=True))

    def _check_started(self, replies: Sequence[_Reply | None]) -> None:
        for rank, reply in enumerate(replies):
            if reply is None or not reply.ok:
                trace = "no answer" if reply is None else reply.trace
                raise RankError(f"rank {rank} of {self.world_size} did not start: {trace}\n{self.log_tail(rank)}")

    def run(self, job: _Job, timeout: float, *, wait_for_all: bool) -> list[_Reply | None]:
        if self.needs_new_world:
            self.needs_new_world = False
            renewed = self.run(_make_job(_join_new_world, (self._new_store(),)), START_TIMEOUT_S, wait_for_all=True)
            self._check_started(renewed)
        data = pickle.dumps(job)
        for connection in self.connections:
            connection.send_bytes(data)
        replies = self._collect(timeout, wait_for_all=wait_for_all)
        counts = {reply.num_groups for reply in replies if reply is not None}
        self.needs_new_world = len(counts) > 1 or max(counts, default=1) > MAX_GROUPS
        return replies

    def _new_store(self) -> str:
        self.num_worlds += 1
        return os.path.join(self.directory.name, f"store-{self.num_worlds}")

    def _collect(self, timeout: float, *, wait_for_all: bool) -> list[_Reply | None]:
        """One reply per rank; None where none came in time, or within the grace time after the first error."""
        replies: list[_Reply | None] = [None] * self.world_size
        open_ranks = {connection: rank for rank, connection in enumerate(self.connections)}
        deadline = time.monotonic() + timeout
        while open_ranks:
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = open_ranks.pop(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    replies[rank] = self._death_notice(rank)
                if not replies[rank].ok and not wait_for_all:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _death_notice(self, rank: int) -> _Reply:
        process = self.processes[rank]
        process.join(1.0)
        message = f"the process of rank {rank} ended with exit code {process.exitcode}"
        now = time.monotonic()
        return _Reply(False, None, "RankDied", message, f"{message}\n{self.log_tail(rank)}", now)

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def dump_stack(self, rank: int) -> str:
        """Makes a stuck rank write its Python stack to its log, and returns the log's tail."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.1)
        return self.log_tail(rank)

    def _log(self, rank: int) -> Path:
        return Path(self.directory.name) / f"rank-{rank}.log"

    def log_tail(self, rank: int) -> str:
        path = self._log(rank)
        return path.read_text(errors="replace")[-LOG_TAIL_CHARS:] if path.exists() else ""

    def close(self, *, kill: bool = False) -> None:
        if kill:
            for process in self.processes:
                process.kill()
        for connection in self.connections:
            connection.close()  # a worker that finds its pipe closed leaves
        for process in self.processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self.directory.cleanup()


_pools: "OrderedDict[int, _Pool]" = OrderedDict()  # least recently used first


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    atexit.register(close_pools)  # runs before multiprocessing's own exit handler, which would wait for the workers
    return context


def _get_pool(world_size: int) -> _Pool:
    if world_size in _pools and not _pools[world_size].is_alive():
        _drop_pool(world_size)
    if world_size not in _pools:
        while len(_pools) >= MAX_POOLS:
            _pools.popitem(last=False)[1].close()
        _pools[world_size] = _Pool(world_size)
    _pools.move_to_end(world_size)
    return _pools[world_size]


def _drop_pool(world_size: int) -> None:
    pool = _pools.pop(world_size, None)
    if pool is not None:
        pool.close(kill=True)


def _make_job(fn: Callable[..., Any], args: tuple) -> _Job:
    module, qualname = fn.__module__, fn.__qualname__
    if "<" in qualname or module == "__main__":
        raise TypeError(
            f"run_ranks cannot send {module}.{qualname}: define the function at the top level of an importable module"
        )
    filters = [_plain_filter(entry) for entry in warnings.filters]
    return _Job(module, qualname, sys.path, pickle.dumps((args, filters)))


def _plain_filter(entry: tuple) -> tuple:
    """A warning filter as the arguments of `warnings.filterwarnings`."""
    action, message, category, module, lineno = entry
    text = [pattern.pattern if hasattr(pattern, "pattern") else pattern or "" for pattern in (message, module)]
    return action, text[0], category, text[1], lineno


def _describe_error(rank: int, reply: _Reply, replies: Sequence[_Reply | None]) -> str:
    others = [f"  rank {other}: {_fate(replies[other])}" for other in range(len(replies)) if other != rank]
    head = f"rank {rank} of {len(replies)} failed first: {reply.type_name}: {reply.message}"
    return "\n".join([head, "", reply.trace.rstrip(), *(["", "other ranks:", *others] if others else [])])


def _describe_timeout(pool: _Pool, replies: Sequence[_Reply | None], missing: list[int], timeout: float) -> str:
    lines = [f"no answer within {timeout:g} s from rank(s) {', '.join(map(str, missing))} of {len(replies)}"]
    lines += [f"  rank {rank}: {_fate(reply)}" for rank, reply in enumerate(replies) if reply is not None]
    for rank in missing:
        lines += ["", f"rank {rank} is at:", pool.dump_stack(rank).rstrip()]
    return "\n".join(lines)


def _fate(reply: _Reply | None) -> str:
    if reply is None:
        return "was still running, and was ended"
    if reply.ok:
        return "returned"
    return f"{reply.type_name}: {reply.message.splitlines()[0] if reply.message else ''}"


# ---- the worker's side ----


def _serve(connection: Connection, rank: int, world_size: int, store_path: str, log_path: str) -> None:
    """The worker's main loop: joins the process group, then answers jobs until the pipe closes."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's business
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)

    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        _join_world(rank, world_size, store_path)
    except BaseException as exc:
        connection.send_bytes(pickle.dumps(_failure(exc)))
        raise
    gc.freeze()  # else each collection below walks all of torch: 60 ms instead of 1
    connection.send_bytes(pickle.dumps(_Reply(True, None)))
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        reply = replace(_answer(job, rank, world_size), num_groups=len(dist.distributed_c10d._world.pg_names))
        gc.collect()
        connection.send_bytes(pickle.dumps(reply))
    dist.destroy_process_group()


def _join_world(rank: int, world_size: int, store_path: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def _join_new_world(rank: int, world_size: int, store_path: str) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    _join_world(rank, world_size, store_path)


def _answer(job: _Job, rank: int, world_size: int) -> _Reply:
    import numpy as np
    import torch

    sys.path[:] = job.sys_path
    torch.manual_seed(0)  # every call starts from the same state, whatever ran before it
    np.random.seed(0)
    random.seed(0)
    dtype = torch.get_default_dtype()
    try:
        args, filters = pickle.loads(job.args_and_filters)
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.resetwarnings()
            for action, message, category, module, lineno in filters:
                warnings.filterwarnings(action, message, category, module, lineno, append=True)
            fn = functools.reduce(getattr, job.qualname.split("."), importlib.import_module(job.module))
            value = fn(rank, world_size, *args)
            return _Reply(True, pickle.dumps(value))
    except BaseException as exc:  # pytest's own outcomes are BaseExceptions
        return _failure(exc)
    finally:
        torch.set_default_dtype(dtype)


def _failure(exc: BaseException) -> _Reply:
    now = time.monotonic()
    trace = "".join(traceback.format_exception(exc))
    return _Reply(False, _pickle_exception(exc), type(exc).__name__, str(exc), trace, now)


def _pickle_exception(exc: BaseException) -> bytes | None:
    """The exception as a pickle, or None if it would come out as something else."""
    try:
        data = pickle.dumps(exc)
        copy = pickle.loads(data)
    except Exception:
        return None
    return data if type(copy) is type(exc) and str(copy) == str(exc) else None
