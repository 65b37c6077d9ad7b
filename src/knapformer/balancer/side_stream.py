"""Index tensors made by a thread while the training thread runs kernels on the same device.

On the device's main stream the thread's copies would queue behind the step's kernels, and the next step would wait for
them. They get a CUDA stream of their own and are complete before a step is handed over. A tensor belongs to the stream
it was made on, and its memory would be reused there as soon as Python drops it, though kernels of the training thread
may still be waiting to read it; so the stream of the thread that takes a step is recorded on all of its tensors.

On other devices there is nothing to do.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A thread's stream on `device`; made by the training thread, whose current device it takes over."""

    def __init__(self, device: torch.device) -> None:
        self._device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._device = torch.device("cuda", index)

    def enter_thread(self) -> None:
        """Call once, in the thread: every thread starts on device 0."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is made inside is complete at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def hand_over(self, made: Any) -> None:
        """Call in the thread that uses `made` from now on."""
        if self._device is not None:
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors_of(made):
                if tensor.is_cuda:
                    tensor.record_stream(stream)


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors that an object of this library holds, in its attributes and in tuples, lists and mappings."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (tuple, list)):
        parts = list(value)
    elif type(value).__module__.startswith("knapformer."):
        slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        parts = [*vars(value).values()] if hasattr(value, "__dict__") else []
        parts += [getattr(value, name) for name in slots if hasattr(value, name)]
    else:
        return
    for part in parts:
        yield from tensors_of(part, seen)
