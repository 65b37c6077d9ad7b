"""Where the segments of a packed batch begin, and the ones that have anything to compute.

Kernels differ in what they make of segments without queries or without keys: zeros, NaN, wrong shapes. So these are
taken out once per plan, on the host, and a kernel wrapped in `on_filled_segments` never sees one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from knapformer.plan.arrays import ranges


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Where the segments of a packed batch begin, on the device and on the host.

    Attributes:
        cu_q, cu_k: (N + 1,) int32 offsets of queries and keys.
        num_q: rows of all queries.
        max_q, max_k: longest segment [rows].
        runs: (first query, first key, number, queries each, keys each) of neighbouring segments of equal size.
        filled: the segments that have both queries and keys; None if all have.
    """

    cu_q: Tensor
    cu_k: Tensor
    num_q: int
    max_q: int
    max_k: int
    runs: tuple[tuple[int, int, int, int, int], ...]
    filled: "FilledSegments | None" = None

    @classmethod
    def of(cls, q_lens: Sequence[int] | np.ndarray, k_lens: Sequence[int] | np.ndarray, device: torch.device) -> Self:
        """From the lengths of each segment."""
        q, k = np.asarray(q_lens, dtype=np.int64), np.asarray(k_lens, dtype=np.int64)
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(lens)]) for lens in (q, k))
        opens = np.flatnonzero((np.diff(q, prepend=-1) != 0) | (np.diff(k, prepend=-1) != 0))
        number = np.diff(np.append(opens, len(q)))
        runs = np.stack([cu_q[opens], cu_k[opens], number, q[opens], k[opens]], axis=1)
        filled = (q > 0) & (k > 0)
        return cls(
            torch.from_numpy(cu_q.astype(np.int32)).to(device),
            torch.from_numpy(cu_k.astype(np.int32)).to(device),
            int(q.sum()),
            int(q.max(initial=0)),
            int(k.max(initial=0)),
            tuple(map(tuple, runs.tolist())),
            None
            if filled.all()
            else FilledSegments(
                cls.of(q[filled], k[filled], device),
                torch.from_numpy(ranges(cu_q[:-1][filled], q[filled])).to(device),
                torch.from_numpy(ranges(cu_k[:-1][filled], k[filled])).to(device),
            ),
        )

    def __len__(self) -> int:
        return len(self.cu_q) - 1

    @property
    def q_lens(self) -> np.ndarray:
        """(N,) queries of each segment, on the host."""
        return np.repeat([run[3] for run in self.runs], [run[2] for run in self.runs]).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class FilledSegments:
    """The segments of others that have both queries and keys.

    Attributes:
        segments: where they begin once the rows of the other segments are left out.
        q_index, k_index: the rows of queries and keys that are kept.
    """

    segments: Segments
    q_index: Tensor
    k_index: Tensor


class Kernel(Protocol):
    """Attention over packed rows; see the docstring of `knapformer.attention.kernels`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, /) -> Tensor: ...


def on_filled_segments(kernel: Callable[[Tensor, Tensor, Tensor, Segments, float | None], Tensor]) -> Kernel:
    """A kernel for all segments from one that knows only those with queries and keys, and at least one of them.

    Queries without keys give zeros, and so do the gradients of keys without queries. Where every segment has both,
    nothing is copied.
    """

    @wraps(kernel)
    def run(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, scale: float | None = None, /) -> Tensor:
        filled = segments.filled
        if filled is not None:
            k, v = k_THK.index_select(0, filled.k_index), v_THK.index_select(0, filled.k_index)
            o = run(q_THK.index_select(0, filled.q_index), k, v, filled.segments, scale)
            return o.new_zeros(segments.num_q, *o.shape[1:]).index_copy(0, filled.q_index, o)
        if not len(segments):
            return q_THK[:0] + k_THK[:0] + v_THK[:0]
        return kernel(q_THK, k_THK, v_THK, segments, scale)

    return run
