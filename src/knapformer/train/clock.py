"""Times of work on a device: on CUDA by events of the stream, on a CPU by a clock.

Where torch has one thread its own CPU time counts, which leaves out what other programs take. The work of several
threads only wall time sees.
"""

import time
from typing import Any

import torch


class Clock:
    """Marks points in time, and says how far they lie apart."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def mark(self) -> Any:
        """A point in the work given to the device so far."""
        if not self._cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, stop: Any) -> float:
        """Time between two marks; call `settle` before."""
        return start.elapsed_time(stop) / 1e3 if self._cuda else stop - start
