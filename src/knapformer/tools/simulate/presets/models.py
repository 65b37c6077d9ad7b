"""Shapes of published models: what decides tokens, FLOP, parameters and traffic. Numbers and sources: `models.toml`.

Token-wise forward work of one block, per visual token of a sequence whose text has X tokens [FLOP]:

    joint text     linear_coeff * d^2
    crossed text   linear_coeff * d^2 + 4 * X * d      (its queries against X keys and values)

and, where text is crossed, 4 * X * d^2 per sequence for the text's keys and values. Modulation is a large part of the
parameters and costs per sequence, not per token; it is left out of the work.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from knapformer.data.grid import MediaOptions, token_grid
from knapformer.plan import CostModel
from knapformer.tools.simulate.presets.clusters import DevicePreset, device_preset
from knapformer.tools.simulate.presets.shipped import find_preset, read_presets


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a diffusion transformer.

    Attributes:
        name: its key among the presets.
        title: its name in words.
        d_model: width of a token.
        num_heads: query heads.
        ffn_width: hidden width of the MLP.
        double, single: blocks with two sets of weights (text and visual), blocks with one.
        linear_coeff: token-wise forward FLOP per token and block over `d_model**2`.
        double_params, single_params: parameters of one block over `d_model**2`.
        parameters: of the whole model.
        text: "joint" where text tokens are in the sequence, "cross" where they are cross-attended.
        text_length: text tokens the model is trained with.
        vae, patch: strides along (time, height, width) of the encoder and of the patches.
        source: where the numbers are published.
        unsure: which of them are estimates; empty for none.
    """

    name: str
    title: str
    d_model: int
    num_heads: int
    ffn_width: int
    double: int
    single: int
    linear_coeff: float
    double_params: float
    single_params: float
    parameters: float
    text: str
    text_length: int
    vae: tuple[int, int, int]
    patch: tuple[int, int, int]
    source: str
    unsure: str = ""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_layers(self) -> int:
        """Blocks that attend."""
        return self.double + self.single

    @property
    def linear_flop_per_token(self) -> float:
        """Token-wise forward work of one block [FLOP per token], with the text the model is trained with."""
        crossed = 4 * self.text_length * self.d_model if self.text == "cross" else 0
        return self.linear_coeff * self.d_model**2 + crossed

    @property
    def flop_per_sequence(self) -> float:
        """Forward work of one block per sequence, whatever its length: keys and values of crossed text [FLOP]."""
        return 4.0 * self.text_length * self.d_model**2 if self.text == "cross" else 0.0

    @property
    def attention_flop_per_row_key(self) -> float:
        """Forward work of one attention row against one key [FLOP]."""
        return 4.0 * self.head_dim

    def forward_flop(self, length: Any) -> Any:
        """Forward work of one block over whole sequences of `length` tokens [FLOP]; takes arrays."""
        attention = 4.0 * self.d_model * np.square(length, dtype=np.float64)
        return self.flop_per_sequence + self.linear_flop_per_token * length + attention

    def layer_parameters(self) -> np.ndarray:
        """(num_layers,) parameters of each block, in the order they run."""
        coeffs = np.repeat([self.double_params, self.single_params], [self.double, self.single])
        return coeffs * float(self.d_model) ** 2

    def media(self, *, max_pixels: int | None = None, max_frames: int | None = None) -> MediaOptions:
        """How pictures and clips become its tokens. Patches are square."""
        return MediaOptions(
            patch=self.patch[1],
            temporal_patch=self.patch[0],
            vae_spatial=self.vae[1],
            vae_temporal=self.vae[0],
            max_pixels=max_pixels,
            max_frames=max_frames,
        )

    def visual_tokens(self, width: int, height: int, frames: int = 1) -> int:
        """Visual tokens of an image or clip, as the loader makes them [tokens]."""
        return math.prod(map(int, token_grid(width, height, frames, self.media())))

    def sequence_length(self, width: int, height: int, frames: int = 1, text_length: int | None = None) -> int:
        """Tokens of the balanced sequence: visual, and text where it is joint. Default text: the model's."""
        text = self.text_length if text_length is None else text_length
        return self.visual_tokens(width, height, frames) + (text if self.text == "joint" else 0)

    def cost_model(self, device: DevicePreset | str = "h100") -> CostModel:
        """Prices on a device at the rates assumed for it; a measured profile is better."""
        device = device_preset(device) if isinstance(device, str) else device
        return CostModel.from_shapes(
            self.d_model,
            self.num_heads,
            linear_coeff=self.linear_flop_per_token / self.d_model**2,
            gamma=device.token_flops / device.attention_flops,
            sequence_flop=self.flop_per_sequence,
            token_flops=device.token_flops,
        )


@cache
def _table() -> dict[str, ModelShape]:
    return read_presets("models.toml", ModelShape)


def model_names() -> tuple[str, ...]:
    """Names of all model presets."""
    return tuple(_table())


def model_preset(name: str) -> ModelShape:
    """A model by name. Raises `SpecError` that lists the names."""
    return find_preset(_table(), name, "model")
