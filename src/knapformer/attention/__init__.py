"""Attention for any placement: kernels behind one signature, the exchange of split sequences, what models see."""

from knapformer.attention.cross import Context
from knapformer.attention.current import attend, cross_attend
from knapformer.attention.keep import keep_attention
from knapformer.attention.kernels import KERNELS, Kernel, RegisteredKernel, Segments, choose_kernel, register_kernel
from knapformer.attention.layout import Layout
from knapformer.attention.split import SplitAttention

__all__ = [
    "KERNELS",
    "Context",
    "Kernel",
    "Layout",
    "RegisteredKernel",
    "Segments",
    "SplitAttention",
    "attend",
    "choose_kernel",
    "cross_attend",
    "keep_attention",
    "register_kernel",
]
