"""Variable-length attention kernels behind one signature.

    kernel(q_THK, k_THK, v_THK, segments, scale) -> o_THK        T rows, H heads, K head dim

Segment i attends queries [cu_q[i], cu_q[i+1]) to keys [cu_k[i], cu_k[i+1]), fully. No kernel ever builds an L x L mask.
Queries of a segment without keys give zeros. A kernel must keep q, k and v in the autograd graph also when it has no
segment: a rank without work still takes part in every collective of the backward pass.

    segments.py   where the segments of a packed batch begin
    sdpa.py       scaled_dot_product_attention per run of equal segments: any device, the reference
    flash.py      torch's varlen attention, flash-attn 2 and 3
    registry.py   kernels by name, what each needs, and which one is taken

`knapformer.attention.conformance` checks any kernel against this contract.
"""

from knapformer.attention.kernels.flash import flash_attn, flash_attn_3, varlen
from knapformer.attention.kernels.registry import KERNELS, RegisteredKernel, choose_kernel, register_kernel
from knapformer.attention.kernels.sdpa import sdpa_loop
from knapformer.attention.kernels.segments import FilledSegments, Kernel, Segments, on_filled_segments

__all__ = [
    "KERNELS",
    "FilledSegments",
    "Kernel",
    "RegisteredKernel",
    "Segments",
    "choose_kernel",
    "flash_attn",
    "flash_attn_3",
    "on_filled_segments",
    "register_kernel",
    "sdpa_loop",
    "varlen",
]
