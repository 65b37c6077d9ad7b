"""Rotary position embedding over three axes (frame, row, column), as in FLUX.

The K channels of a head are cut into three groups of `axes_dims` channels, one per axis. Inside the group of an axis
with d channels, the adjacent pair (2j, 2j+1) of a token at position p turns by the angle p * theta^(-2j/d), so q.k
depends on differences of positions only. Text tokens sit at position 0 on all axes and are not turned.

Angles are computed in fp32, in fp64 if the model is fp64, never in bf16: position 257 has no bf16 value.

Legend: T tokens on this rank, K head dim, P = K/2 channel pairs.
"""

import torch
from torch import Tensor

from knapformer.attention.rotation import Rotation
from knapformer.errors import SpecError
from knapformer.models.packed import check_rows

NUM_AXES = 3


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
