"""Rotary position embedding over three axes (frame, row, column), as in FLUX.

The K channels of a head are cut into three groups of `axes_dims` channels, one per axis. Inside the group of an axis
with d channels, the adjacent pair (2j, 2j+1) of a token at position p turns by the angle p * theta^(-2j/d):

    (x0, x1) -> (x0 cos a - x1 sin a,  x0 sin a + x1 cos a)

so q.k depends on differences of positions only. Text tokens sit at position 0 on all axes and are not turned.

Angles are computed in fp32, in fp64 if the model is fp64, never in bf16: position 257 has no bf16 value. For the same
reason the result is a `Rotation` object of a plain class: FSDP2's mixed precision casts every floating-point tensor
among the arguments of a wrapped block to bf16, also inside tuples, dicts and dataclasses, but no other objects.

Legend: T tokens on this rank, H heads, K head dim, P = K/2 channel pairs.
"""

import torch
from torch import Tensor

from knapformer.errors import SpecError
from knapformer.models.packed import check_rows

NUM_AXES = 3


class Rotation:
    """Cosine and sine of every token's angles, (T, P) each.

    Immutable by convention. Not a dataclass on purpose, see the module docstring.
    """

    __slots__ = ("cos_TP", "sin_TP")

    def __init__(self, cos_TP: Tensor, sin_TP: Tensor):
        self.cos_TP = cos_TP
        self.sin_TP = sin_TP


def check_axes(axes_dims: tuple[int, ...], head_dim: int, theta: float) -> None:
    """Check that three even channel groups fill a head.

    Raises:
        SpecError: not three axes, an odd or negative group, groups that do not sum to `head_dim`, or theta <= 1.
    """
    if len(axes_dims) != NUM_AXES:
        raise SpecError(f"axes_dims {axes_dims} has {len(axes_dims)} entries; expected 3 (frame, row, column)")
    if any(dim < 0 or dim % 2 for dim in axes_dims):
        raise SpecError(f"axes_dims {axes_dims} must be even and not negative: channels turn in pairs; use e.g. 16, 56")
    if sum(axes_dims) != head_dim:
        raise SpecError(
            f"axes_dims {axes_dims} sum to {sum(axes_dims)}; expected the head dim {head_dim} = width / num_heads"
        )
    if not theta > 1:
        raise SpecError(f"theta is {theta}; expected a number above 1, e.g. 10000")


def rotation_from_ids(ids_T3: Tensor, axes_dims: tuple[int, ...], theta: float, dtype: torch.dtype) -> Rotation:
    """Angles of every token from its positions.

    Args:
        ids_T3: Positions (T, 3), integer or floating point; fractions are allowed. Under bf16 mixed precision pass
            integers, or switch off FSDP2's `cast_forward_inputs` on the root: it would round positions above 256.
        axes_dims: Channels per axis, even, summing to the head dim.
        theta: Base of the wavelengths.
        dtype: fp32 or fp64, the precision of the angles.

    Raises:
        SpecError: `ids_T3` is not (T, 3).
    """
    check_rows("ids", ids_T3, (ids_T3.shape[0], NUM_AXES), "packed token, one column per axis")
    ids_T3 = ids_T3.to(dtype)
    angles = []
    for axis, dim in enumerate(axes_dims):
        exponent = torch.arange(0, dim, 2, dtype=dtype, device=ids_T3.device) / max(dim, 1)
        angles.append(ids_T3[:, axis, None] * theta**-exponent)
    angle_TP = torch.cat(angles, dim=1)
    return Rotation(angle_TP.cos(), angle_TP.sin())


def rotate(x_THK: Tensor, rotation: Rotation) -> Tensor:
    """Turn each channel pair of queries or keys by its token's angle; same shape and dtype as the input."""
    cos, sin = rotation.cos_TP[:, None], rotation.sin_TP[:, None]
    # Sizes are explicit: -1 is ambiguous in a tensor of zero rows.
    pairs = x_THK.to(cos.dtype).unflatten(-1, (x_THK.shape[-1] // 2, 2))
    even, odd = pairs.unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x_THK.dtype)
