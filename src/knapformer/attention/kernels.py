"""Variable-length attention kernels behind one signature.

    kernel(q_THK, k_THK, v_THK, segments, scale) -> o_THK        T rows, H heads, K head dim

Segment i attends queries [cu_q[i], cu_q[i+1]) to keys [cu_k[i], cu_k[i+1]), fully. No kernel ever builds an L x L mask.
A kernel must keep q, k and v in the autograd graph also when it has no segment: a rank without work still takes part
in every collective of the backward pass.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer.errors import BackendUnavailableError, SpecError


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Where the segments of a packed batch begin, on the device and on the host.

    Attributes:
        cu_q, cu_k: (N + 1,) int32 offsets of queries and keys.
        num_q: rows of all queries.
        max_q, max_k: longest segment [rows].
        runs: (first query, first key, number, queries each, keys each) of neighbouring segments of equal size.
    """

    cu_q: Tensor
    cu_k: Tensor
    num_q: int
    max_q: int
    max_k: int
    runs: tuple[tuple[int, int, int, int, int], ...]

    @classmethod
    def of(cls, q_lens: Sequence[int] | np.ndarray, k_lens: Sequence[int] | np.ndarray, device: torch.device) -> Self:
        """From the lengths of each segment."""
        q, k = np.asarray(q_lens, dtype=np.int64), np.asarray(k_lens, dtype=np.int64)
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(lens)]) for lens in (q, k))
        opens = np.flatnonzero((np.diff(q, prepend=-1) != 0) | (np.diff(k, prepend=-1) != 0))
        number = np.diff(np.append(opens, len(q)))
        runs = np.stack([cu_q[opens], cu_k[opens], number, q[opens], k[opens]], axis=1)
        return cls(
            torch.from_numpy(cu_q.astype(np.int32)).to(device),
            torch.from_numpy(cu_k.astype(np.int32)).to(device),
            int(q.sum()),
            int(q.max(initial=0)),
            int(k.max(initial=0)),
            tuple(map(tuple, runs.tolist())),
        )

    def __len__(self) -> int:
        return len(self.cu_q) - 1


class Kernel(Protocol):
    """Attention over packed rows; see the module's docstring."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, /) -> Tensor: ...


def sdpa_loop(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, scale: float | None = None, /) -> Tensor:
    """`scaled_dot_product_attention` per run of equal segments; any device and dtype, the reference for the others."""
    outputs = []
    with _sdpa_backends(q_THK.device.type):
        for first_q, first_k, n, lq, lk in segments.runs:
            q = q_THK[first_q : first_q + n * lq].unflatten(0, (n, lq)).transpose(1, 2)
            k = k_THK[first_k : first_k + n * lk].unflatten(0, (n, lk)).transpose(1, 2)
            v = v_THK[first_k : first_k + n * lk].unflatten(0, (n, lk)).transpose(1, 2)
            outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
    if not outputs:
        return q_THK[:0] + k_THK[:0] + v_THK[:0]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def varlen(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, scale: float | None = None, /) -> Tensor:
    """`torch.nn.attention.varlen` (FlashAttention); CUDA, fp16 and bf16."""
    if not len(segments):
        return q_THK[:0] + k_THK[:0] + v_THK[:0]
    return _varlen_attn()(
        q_THK.contiguous(),
        k_THK.contiguous(),
        v_THK.contiguous(),
        segments.cu_q,
        segments.cu_k,
        segments.max_q,
        segments.max_k,
        scale=scale,
    )


@cache
def _varlen_attn() -> Callable[..., Any]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BackendUnavailableError(
            "attention kernel 'varlen' needs torch.nn.attention.varlen of torch 2.11 or newer; use kernel='sdpa_loop'"
        ) from error
    return varlen_attn


def _sdpa_backends(device_type: str) -> Any:
    """On CUDA, all backends but cuDNN, whose backward can give NaN for lengths of 64 modulo 128."""
    if device_type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


KERNELS: dict[str, Kernel] = {"sdpa_loop": sdpa_loop, "varlen": varlen}
"""Name -> kernel. `register_kernel` adds one."""


def register_kernel(name: str, kernel: Kernel) -> None:
    """Make a kernel known by name. Raises `SpecError` if the name is taken."""
    if name in KERNELS:
        raise SpecError(f"attention kernel {name!r} is already registered; choose another name")
    KERNELS[name] = kernel


def choose_kernel(name: str | None, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel asked for, or the default: `varlen` for half precision on CUDA, else `sdpa_loop`.

    Raises:
        SpecError: for an unknown name.
        BackendUnavailableError: if the kernel asked for cannot run here. An explicit choice is never replaced silently.
    """
    half_on_cuda = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    if name is None:
        return varlen if half_on_cuda else sdpa_loop
    if name not in KERNELS:
        raise SpecError(f"unknown attention kernel {name!r}; known kernels are {', '.join(sorted(KERNELS))}")
    if name == "varlen" and not half_on_cuda:
        raise BackendUnavailableError(
            f"attention kernel 'varlen' needs fp16 or bf16 on CUDA, got {dtype} on {device.type}; "
            "use kernel='sdpa_loop' or None"
        )
    return KERNELS[name]
