"""Conditioning: one vector per sequence, and how it reaches tokens.

    timestep, guidance (S,) -> sinusoid -> MLP \\
                                                 + -> vec (S, D) -> Modulation -> shift, scale, gate (S, 3, D)
                         pooled (S, C) -> MLP  /

Everything here costs per *sequence*. Tokens meet it in `modulate` and `add_gated` of `knapformer.attention.rows`.

Legend: S sequences that have tokens here, D width, C input channels, F sinusoid channels.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knapformer.attention.rows import compute_dtype
from knapformer.errors import SpecError
from knapformer.models.packed import check_rows

SINUSOID_CHANNELS = 256
# Timesteps run over [0, 1] in rectified flow; the sinusoid was designed for 0..1000 diffusion steps.
TIME_FACTOR = 1000.0
MAX_PERIOD = 10_000.0


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
