"""Attention kernels by name, with what each needs; and the choice of one for a device and dtype."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from knapformer.attention.kernels import flash, sdpa
from knapformer.attention.kernels.segments import Kernel
from knapformer.errors import BackendUnavailableError, SpecError


@dataclass(frozen=True, slots=True)
class RegisteredKernel:
    """A kernel and where it runs.

    Attributes:
        kernel: the function.
        device_types: such as "cuda"; None for all.
        dtypes: of q, k and v; None for all.
        max_head_dim: the largest head dim; None for any.
        capabilities: least and greatest CUDA compute capability, either of them None for no limit.
        load: imports what the kernel needs, or raises `BackendUnavailableError`.
    """

    kernel: Kernel
    device_types: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    max_head_dim: int | None = None
    capabilities: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)
    load: Callable[[], object] | None = None

    def obstacle(self, device: torch.device, dtype: torch.dtype, head_dim: int | None = None) -> str | None:
        """Why it cannot run there, in words that follow "the kernel"; None if it can, given what `load` imports."""
        elsewhere = self.device_types is not None and device.type not in self.device_types
        if elsewhere or (self.dtypes is not None and dtype not in self.dtypes):
            return f"needs {self._place()}, got {dtype} on {device.type}"
        if self.max_head_dim is not None and head_dim is not None and head_dim > self.max_head_dim:
            return f"takes head dims up to {self.max_head_dim}, got {head_dim}"
        least, greatest = self.capabilities
        capability = _capability(device.index) if device.type == "cuda" else None
        if capability is not None and least is not None and capability < least:
            return f"needs compute capability {least[0]}.{least[1]} or more, got {capability[0]}.{capability[1]}"
        if capability is not None and greatest is not None and capability > greatest:
            return f"needs compute capability up to {greatest[0]}.{greatest[1]}, got {capability[0]}.{capability[1]}"
        return None

    def _place(self) -> str:
        names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
        dtypes = " or ".join(names.get(dtype, str(dtype)) for dtype in self.dtypes or ())
        devices = " or ".join({"cuda": "CUDA"}.get(kind, kind) for kind in self.device_types or ())
        return " on ".join(part for part in (dtypes, devices) if part)


_HALF = (torch.float16, torch.bfloat16)
_AMPERE = ((8, 0), None)
_HOPPER = ((9, 0), (9, 9))

KERNELS: dict[str, RegisteredKernel] = {
    "sdpa_loop": RegisteredKernel(sdpa.sdpa_loop),
    "varlen": RegisteredKernel(flash.varlen, ("cuda",), _HALF, flash.MAX_HEAD_DIM, _AMPERE, flash.load_varlen),
    "flash_attn": RegisteredKernel(
        flash.flash_attn, ("cuda",), _HALF, flash.MAX_HEAD_DIM, _AMPERE, flash.load_flash_attn
    ),
    "flash_attn_3": RegisteredKernel(
        flash.flash_attn_3, ("cuda",), _HALF, flash.MAX_HEAD_DIM, _HOPPER, flash.load_flash_attn_3
    ),
}
"""Name -> kernel. `register_kernel` adds one."""

DEFAULTS = ("varlen", "sdpa_loop")
"""Where no kernel is asked for, the first of these that runs there. They need no package but torch."""


def register_kernel(
    name: str,
    kernel: Kernel,
    *,
    device_types: tuple[str, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    max_head_dim: int | None = None,
    load: Callable[[], object] | None = None,
) -> None:
    """Make a kernel known by name, with where it runs (default: everywhere); see `RegisteredKernel`.

    Raises:
        SpecError: if the name is taken.
    """
    if name in KERNELS:
        raise SpecError(f"attention kernel {name!r} is already registered; choose another name")
    KERNELS[name] = RegisteredKernel(kernel, device_types, dtypes, max_head_dim, load=load)


def choose_kernel(name: str | None, device: torch.device, dtype: torch.dtype, *, head_dim: int | None = None) -> Kernel:
    """The kernel asked for, or the default: `varlen` for half precision on CUDA, else `sdpa_loop`.

    Args:
        name: of `KERNELS`; None for the default.
        device, dtype, head_dim: of q, k and v. Without a head dim, the kernel itself refuses one it cannot take.

    Raises:
        SpecError: for an unknown name.
        BackendUnavailableError: if the kernel asked for cannot load or run here. An explicit choice is never replaced
            silently.
    """
    if name is None:
        return next(KERNELS[d].kernel for d in DEFAULTS if KERNELS[d].obstacle(device, dtype, head_dim) is None)
    if name not in KERNELS:
        raise SpecError(f"unknown attention kernel {name!r}; known kernels are {', '.join(sorted(KERNELS))}")
    chosen = KERNELS[name]
    obstacle = chosen.obstacle(device, dtype, head_dim)
    if obstacle is not None:
        raise BackendUnavailableError(f"attention kernel {name!r} {obstacle}; use kernel='sdpa_loop' or None")
    if chosen.load is not None:
        chosen.load()
    return chosen.kernel


def _capability(index: int | None) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None where there is none, as when only the choice is asked for."""
    if index not in _capabilities:
        _capabilities[index] = torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None
    return _capabilities[index]


_capabilities: dict[int | None, tuple[int, int] | None] = {}  # no functools.cache: torch.compile warns of it
