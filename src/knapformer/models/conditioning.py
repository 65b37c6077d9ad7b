"""Conditioning: one vector per sequence, and how it reaches tokens.

    timestep, guidance (S,) -> sinusoid -> MLP \\
                                                 + -> vec (S, D) -> Modulation -> shift, scale, gate (S, 3, D)
                         pooled (S, C) -> MLP  /

Everything up to the modulation costs per *sequence*. Only `modulate` and `add_gated` meet tokens; they take rows per
sequence and each token's row number, so nothing of size (T, 6 D) ever exists. They are the seam for a fused kernel:
replace their bodies, and every model has it.

Legend: T tokens on this rank, S sequences that have tokens here, D width, C input channels, F sinusoid channels.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from knapformer.errors import SpecError
from knapformer.models.packed import check_rows, compute_dtype

SINUSOID_CHANNELS = 256
# Timesteps run over [0, 1] in rectified flow; the sinusoid was designed for 0..1000 diffusion steps.
TIME_FACTOR = 1000.0
MAX_PERIOD = 10_000.0
# Tokens modulated at a time: few enough for a processor's cache, enough to keep an accelerator busy.
BLOCK_ROWS = 256
LAUNCH_ROWS = 16_384


def modulate(x_TD: Tensor, shift_SD: Tensor, scale_SD: Tensor, index_T: Tensor) -> Tensor:
    """x * (1 + scale) + shift, with the shift and scale of each token's own sequence.

    Args:
        x_TD: Normalised tokens (T, D).
        shift_SD: One row per sequence (S, D).
        scale_SD: One row per sequence (S, D).
        index_T: Row of each token's sequence (T,), int64.
    """
    if torch.compiler.is_compiling():  # which fuses the gather
        return x_TD * (1 + scale_SD.index_select(0, index_T)) + shift_SD.index_select(0, index_T)
    return cast(Tensor, _Scale.apply(x_TD, 1 + scale_SD, shift_SD, index_T, index_T))


def add_gated(x_TD: Tensor, branch_TD: Tensor, gate_SD: Tensor, index_T: Tensor) -> Tensor:
    """x + gate * branch, with the gate of each token's own sequence; arguments as in `modulate`."""
    if torch.compiler.is_compiling():
        return x_TD + gate_SD.index_select(0, index_T) * branch_TD
    return cast(Tensor, _Scale.apply(branch_TD, gate_SD, x_TD, index_T, None))


class _Scale(Function):
    """x * scale + added: `scale` has a row per sequence, `added` too where it has an index, else one per token.

    A few tokens at a time, so that rows of sequences are never there once per token, neither now nor for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, scale_SD: Tensor, added: Tensor, index_T: Tensor, added_index_T: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x_TD, scale_SD, index_T)
        ctx.added_is_per_token, ctx.added_dtype = added_index_T is None, added.dtype
        dtype = torch.promote_types(torch.promote_types(x_TD.dtype, scale_SD.dtype), added.dtype)
        out_TD = torch.empty_like(x_TD, dtype=dtype)
        for rows in _row_blocks(x_TD):
            index = index_T[rows]
            more = added[rows] if added_index_T is None else added.index_select(0, index)
            torch.add(x_TD[rows] * scale_SD.index_select(0, index), more, out=out_TD[rows])
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_TD,) = grads
        x_TD, scale_SD, index_T = ctx.saved_tensors
        # Many tokens add up to one row: not in half precision.
        total_SD = torch.zeros_like(scale_SD, dtype=compute_dtype(scale_SD.dtype))
        added_SD = None if ctx.added_is_per_token else torch.zeros_like(total_SD)
        grad_x_TD = torch.empty_like(x_TD)
        for rows in _row_blocks(x_TD):
            index, grad = index_T[rows], grad_TD[rows]
            grad_x_TD[rows] = grad * scale_SD.index_select(0, index)
            total_SD.index_add_(0, index, (grad * x_TD[rows]).to(total_SD.dtype))
            if added_SD is not None:
                added_SD.index_add_(0, index, grad.to(added_SD.dtype))
        grad_added = grad_TD if added_SD is None else added_SD
        return grad_x_TD, total_SD.to(scale_SD.dtype), grad_added.to(ctx.added_dtype), None, None


def _row_blocks(x_TD: Tensor) -> list[slice]:
    size = BLOCK_ROWS if x_TD.device.type == "cpu" else LAUNCH_ROWS
    return [slice(start, start + size) for start in range(0, len(x_TD), size)]


def timestep_embedding(t_S: Tensor, dtype: torch.dtype, channels: int = SINUSOID_CHANNELS) -> Tensor:
    """Sinusoids of a per-sequence scalar: [cos(1000 t w_j), sin(1000 t w_j)], w_j = 10000^(-2j/channels).

    Args:
        t_S: Timestep in [0, 1], or guidance strength, (S,).
        dtype: fp32 or fp64, the precision of the arithmetic and of the result.
        channels: Even number of output channels.

    Returns:
        (S, channels), cosines first.
    """
    half = channels // 2
    frequency = torch.exp(torch.arange(half, dtype=dtype, device=t_S.device) * (-math.log(MAX_PERIOD) / half))
    angle_SF = TIME_FACTOR * t_S.to(dtype)[:, None] * frequency
    return torch.cat((angle_SF.cos(), angle_SF.sin()), dim=1)


class Embedder(nn.Module):
    """Two-layer SiLU MLP that lifts a conditioning input (S, C) to the model width (S, D)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.fc_in = nn.Linear(channels, width)
        self.fc_out = nn.Linear(width, width)

    def forward(self, x_SC: Tensor) -> Tensor:
        return self.fc_out(F.silu(self.fc_in(x_SC.to(self.fc_in.weight.dtype))))


class Conditioner(nn.Module):
    """Timestep, pooled vector and (for distilled models) guidance strength, summed to one vector per sequence."""

    def __init__(self, pooled_channels: int, width: int, *, guidance: bool = False):
        super().__init__()
        self.pooled_channels = pooled_channels
        self.time_in = Embedder(SINUSOID_CHANNELS, width)
        self.pooled_in = Embedder(pooled_channels, width)
        self.guidance_in = Embedder(SINUSOID_CHANNELS, width) if guidance else None

    def forward(self, timestep_S: Tensor, pooled_SC: Tensor, guidance_S: Tensor | None, num_sequences: int) -> Tensor:
        """Vectors (S, D).

        Raises:
            SpecError: an input has other than S rows, or guidance is given to a model without it or missing in one
                with it.
        """
        check_rows("timestep", timestep_S, (num_sequences,), "local sequence")
        check_rows("pooled", pooled_SC, (num_sequences, self.pooled_channels), "local sequence")
        dtype = compute_dtype(self.time_in.fc_in.weight.dtype)
        vec_SD = self.time_in(timestep_embedding(timestep_S, dtype)) + self.pooled_in(pooled_SC)
        if self.guidance_in is None:
            if guidance_S is not None:
                raise SpecError(
                    "guidance was given, but the model has no guidance embedding (guidance=False in its config); "
                    "pass guidance=None or build the model with guidance=True"
                )
            return vec_SD
        if guidance_S is None:
            raise SpecError(
                "guidance is None, but the model has a guidance embedding (guidance=True in its config); "
                "pass one strength per local sequence, shape (S,)"
            )
        check_rows("guidance", guidance_S, (num_sequences,), "local sequence")
        return vec_SD + self.guidance_in(timestep_embedding(guidance_S, dtype))


class Modulation(nn.Module):
    """adaLN: `num_vectors` rows of width D per sequence from its conditioning vector, in one linear layer."""

    def __init__(self, width: int, num_vectors: int):
        super().__init__()
        self.num_vectors = num_vectors
        self.linear = nn.Linear(width, num_vectors * width)

    def forward(self, vec_SD: Tensor) -> Tensor:
        """(S, num_vectors, D)."""
        return self.linear(F.silu(vec_SD)).unflatten(-1, (self.num_vectors, vec_SD.shape[-1]))
