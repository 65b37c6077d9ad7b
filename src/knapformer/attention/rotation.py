"""Rotation of queries and keys by tables of angles, whatever positions the angles were made from.

The adjacent channel pair (2j, 2j+1) of a head turns by its token's j-th angle a:

    (x0, x1) -> (x0 cos a - x1 sin a,  x0 sin a + x1 cos a)

The tables are a `Rotation` object of a plain class: FSDP2's mixed precision casts every floating-point tensor among
the arguments of a wrapped block to bf16, also inside tuples, dicts and dataclasses, but no other objects.

Legend: T tokens on this rank, H heads, K head dim, P = K/2 channel pairs.
"""

from typing import Self

import torch
from torch import Tensor

from knapformer.attention.rows import compute_dtype


class Rotation:
    """Cosine and sine of every token's angles: (T, P) each, or (T, H, P) where angles differ from head to head.

    Immutable by convention. Not a dataclass on purpose, see the module docstring.
    """

    __slots__ = ("cos_TP", "sin_TP")

    def __init__(self, cos_TP: Tensor, sin_TP: Tensor):
        self.cos_TP = cos_TP
        self.sin_TP = sin_TP

    @classmethod
    def of_channels(cls, cos: Tensor, sin: Tensor) -> Self:
        """From tables (..., K) that hold each angle's value twice, once for either channel of its pair."""
        return cls(cos[..., ::2].contiguous(), sin[..., ::2].contiguous())

    def take(self, index: Tensor) -> "Rotation":
        """The rotation of some tokens only."""
        return Rotation(self.cos_TP.index_select(0, index), self.sin_TP.index_select(0, index))

    def still(self, index: Tensor) -> "Rotation":
        """The same rotation, but tokens at `index` do not turn."""
        return Rotation(self.cos_TP.index_fill(0, index, 1), self.sin_TP.index_fill(0, index, 0))


def rotate(x_THK: Tensor, rotation: Rotation) -> Tensor:
    """Turn each channel pair of queries or keys by its token's angle; same shape and dtype as the input."""
    cos, sin = rotation.cos_TP, rotation.sin_TP
    if cos.ndim == 2:
        cos, sin = cos[:, None], sin[:, None]
    x = x_THK.to(torch.promote_types(compute_dtype(x_THK.dtype), cos.dtype))
    # Sizes are explicit: -1 is ambiguous in a tensor of zero rows.
    even, odd = x.unflatten(-1, (x.shape[-1] // 2, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x_THK.dtype)
