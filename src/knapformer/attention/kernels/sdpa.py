"""`scaled_dot_product_attention` per run of equal segments: any device and dtype, the reference for other kernels."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knapformer.attention.kernels.segments import Segments, on_filled_segments


@on_filled_segments
def sdpa_loop(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """One call per run of neighbouring segments of equal size."""
    # One split each: slices would fill and add up whole-size gradients.
    q_rows = [n * lq for _, _, n, lq, _ in segments.runs]
    k_rows = [n * lk for _, _, n, _, lk in segments.runs]
    parts = zip(segments.runs, q_THK.split(q_rows), k_THK.split(k_rows), v_THK.split(k_rows), strict=True)
    outputs = []
    with _without_cudnn(q_THK.device.type):
        for (_, _, n, lq, lk), q, k, v in parts:
            q_NHQK = q.unflatten(0, (n, lq)).transpose(1, 2)
            k_NHSK, v_NHSK = (x.unflatten(0, (n, lk)).transpose(1, 2) for x in (k, v))
            o_NHQK = F.scaled_dot_product_attention(q_NHQK, k_NHSK, v_NHSK, scale=scale)
            outputs.append(o_NHQK.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _without_cudnn(device_type: str) -> Any:
    """On CUDA, the backends the user left enabled but cuDNN, whose backward can give NaN for lengths of 64 modulo 128.

    See https://github.com/pytorch/pytorch/issues/196678.
    """
    if device_type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    enabled = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    return sdpa_kernel([backend for backend, on in enabled.items() if on] or list(enabled))
