"""A simulated step as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

A process per rank, a track per lane: computing, and each stream of transfers. Times are microseconds from the start of
the step. Large clusters are thinned to some ranks: the slowest, the fastest, and others evenly between.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from knapformer.files import write_json
from knapformer.tools.simulate.clock import SimulatedStep

LANES = ("compute", "gather", "exchange", "reduce", "average")


def chosen_ranks(step: SimulatedStep, most: int) -> list[int]:
    """At most `most` ranks: those that compute longest and shortest, and evenly spaced ones between."""
    order = np.argsort(step.busy, kind="stable")
    picked = np.unique(np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(np.int64))
    return sorted(order[picked].tolist())


def chrome_trace(step: SimulatedStep, *, most_ranks: int = 32) -> dict[str, Any]:
    """The trace as plain data. The step must have been recorded."""
    ranks = chosen_ranks(step, most_ranks)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        name = f"rank {rank} ({step.busy[rank]:.3f} s busy)"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": title}}
            for lane, title in enumerate(LANES)
        ]
    for span in step.spans:
        lane = LANES.index(span.lane)
        for rank in ranks:
            begin, duration = float(span.begin[rank]) * 1e6, float(span.end[rank] - span.begin[rank]) * 1e6
            if duration > 0:
                events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.lane,
                        "pid": rank,
                        "tid": lane,
                        "ts": round(begin, 3),
                        "dur": round(duration, 3),
                    }
                )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_chrome_trace(step: SimulatedStep, path: str | os.PathLike[str], *, most_ranks: int = 32) -> Path:
    """Write the trace; its folder is made. Raises `DataError` if it cannot be written."""
    return write_json(path, chrome_trace(step, most_ranks=most_ranks))
