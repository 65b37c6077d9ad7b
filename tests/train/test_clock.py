"""A clock counts what this thread computes where torch has one thread, and time on the wall where it has several."""

import time

import pytest
import torch

from knapformer.train.clock import Clock


@pytest.mark.parametrize(("threads", "source"), [(1, "thread_time"), (2, "perf_counter")])
def test_what_a_mark_reads(threads: int, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1.5, 4.0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(time, source, lambda: next(readings))
    clock = Clock(torch.device("cpu"))
    start, stop = clock.mark(), clock.mark()
    clock.settle()
    assert clock.seconds(start, stop) == 2.5
