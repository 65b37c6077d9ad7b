"""FlashAttention over packed rows: torch's own, and the packages flash-attn 2 and 3. CUDA, fp16 and bf16.

All three want rows of 16-byte aligned heads of at most 256 values, as these kernels read 16 bytes at a time; rows that
are not so (a head dim that is no multiple of 8, odd views) are copied, others are used where they lie. None uses
dropout. `torch.use_deterministic_algorithms` holds: torch's own kernel obeys it, the packages are asked for it.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer.attention.kernels.segments import Segments, on_filled_segments
from knapformer.errors import BackendUnavailableError, KnapFormerWarning

MAX_HEAD_DIM = 256
_ALIGNED = 8  # half-precision values in 16 bytes
# Since 2.14, torch's varlen attention takes cuDNN on some devices, unless there is a window.
_MAY_USE_CUDNN = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)

_loaded: dict[str, Callable[..., Any]] = {}  # no functools.cache: torch.compile warns of it


@on_filled_segments
def varlen(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """`torch.nn.attention.varlen` (FlashAttention 2, or what `activate_flash_attention_impl` has chosen)."""
    function, options = load_varlen(), {}
    if _MAY_USE_CUDNN:
        # Any window keeps cuDNN out, whose backward is not to be trusted (see sdpa.py); this one hides no key.
        options["window_size"] = (max(segments.max_q, segments.max_k),) * 2
    return _flash("varlen", function, (q_THK, k_THK, v_THK), segments, "scale", scale, options)


@on_filled_segments
def flash_attn(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """`flash_attn_varlen_func` of the package flash-attn 2."""
    function = load_flash_attn()
    options = _determinism("flash_attn", function)
    return _flash("flash_attn", function, (q_THK, k_THK, v_THK), segments, "softmax_scale", scale, options)


@on_filled_segments
def flash_attn_3(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """`flash_attn_varlen_func` of the package flash-attn 3, for compute capability 9.0 (H100, H200)."""
    function = load_flash_attn_3()
    options = _determinism("flash_attn_3", function)
    return _flash("flash_attn_3", function, (q_THK, k_THK, v_THK), segments, "softmax_scale", scale, options)


def load_varlen() -> Callable[..., Any]:
    """The function, or `BackendUnavailableError`."""
    return _load("varlen", "torch.nn.attention.varlen", "varlen_attn", "torch 2.11 or newer")


def load_flash_attn() -> Callable[..., Any]:
    """The function, or `BackendUnavailableError`."""
    return _load(
        "flash_attn", "flash_attn", "flash_attn_varlen_func", "the package flash-attn 2 (pip install flash-attn)"
    )


def load_flash_attn_3() -> Callable[..., Any]:
    """The function, or `BackendUnavailableError`."""
    need = "the package flash-attn 3 (built from the folder hopper/ of flash-attention)"
    return _load("flash_attn_3", "flash_attn_interface", "flash_attn_varlen_func", need)


def _load(kernel: str, module: str, function: str, need: str) -> Callable[..., Any]:
    if kernel in _loaded:
        return _loaded[kernel]
    try:
        _loaded[kernel] = getattr(importlib.import_module(module), function)
        return _loaded[kernel]
    except (ImportError, OSError, AttributeError) as error:  # OSError: a library built for other versions
        raise BackendUnavailableError(
            f"attention kernel {kernel!r} needs {module}.{function} of {need}, which cannot be loaded here "
            f"({type(error).__name__}: {error}); install it, or use kernel='sdpa_loop' or None"
        ) from error


def _flash(
    name: str,
    function: Callable[..., Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    segments: Segments,
    scale_name: str,
    scale: float | None,
    options: dict[str, Any],
) -> Tensor:
    head_dim = qkv[0].shape[2]
    if head_dim > MAX_HEAD_DIM:
        raise BackendUnavailableError(
            f"attention kernel {name!r} takes head dims up to {MAX_HEAD_DIM}, got {head_dim}; "
            "use kernel='sdpa_loop' or None"
        )
    scale = head_dim**-0.5 if scale is None else scale
    q, k, v = (_aligned(x) for x in qkv)
    ends = (segments.cu_q, segments.cu_k, segments.max_q, segments.max_k)
    output = function(q, k, v, *ends, **{scale_name: scale}, **options)
    # Some releases of flash-attn 3 return the softmax's log-sum too.
    output = output[0] if isinstance(output, tuple) else output
    return output if output.shape[2] == head_dim else output[..., :head_dim]


def _aligned(x_THK: Tensor) -> Tensor:
    if x_THK.shape[2] % _ALIGNED:
        return F.pad(x_THK, (0, -x_THK.shape[2] % _ALIGNED))
    offsets = (x_THK.storage_offset(), *x_THK.stride()[:2])
    return x_THK if x_THK.stride(2) == 1 and not any(n % _ALIGNED for n in offsets) else x_THK.contiguous()


def _determinism(name: str, function: Callable[..., Any]) -> dict[str, bool]:
    if not torch.are_deterministic_algorithms_enabled():
        return {}
    if "deterministic" in inspect.signature(function).parameters:
        return {"deterministic": True}
    message = f"attention kernel {name!r}: the installed version has no deterministic backward"
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise BackendUnavailableError(
            f"{message}, and torch.use_deterministic_algorithms is on; install a newer version or use kernel='varlen'"
        )
    warnings.warn(f"{message}; gradients will differ between runs", KnapFormerWarning, stacklevel=4)
    return {}
