"""A timeline of a real step: torch's profiler for the second step of a run, one file per rank for ui.perfetto.dev.

In it, `exchange: send` and `exchange: receive`, and the same of gradients, are what the balancer adds to the main
thread; the collective itself runs beside it under the backend's name. Everything else there is computing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from knapformer.files import read_json, write_json

_NAMES = {
    "_Send": "exchange: send",
    "_Receive": "exchange: receive",
    "_ReceiveBackward": "exchange: send gradients",
    "_SendBackward": "exchange: receive gradients",
}
"""The exchange's autograd functions (`knapformer.comm.exchange`), by which the profiler knows it."""


@contextmanager
def timeline(folder: str | None, rank: int) -> Iterator[Callable[[], None]]:
    """Record the second step taken inside; gives the function to call after each step.

    Args:
        folder: gets `rank0.json`, `rank1.json`, ...; None records nothing.
        rank: of this process.
    """
    if folder is None:
        yield lambda: None
        return
    path = Path(folder) / f"rank{rank}.json"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    once = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=activities, schedule=once, on_trace_ready=lambda found: _write(found, path)) as profiler:
        yield profiler.step


def _write(profiler: Any, path: Path) -> None:
    with TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace = read_json(raw, dict[str, Any])
    for event in trace["traceEvents"]:
        event["name"] = _NAMES.get(event["name"], event["name"])
    write_json(path, trace)
