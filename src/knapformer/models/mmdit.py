"""MMDiT in the FLUX layout, packed: double-stream blocks, then single-stream blocks, over [text, image] sequences.

    img (T_img, C) -> img_in -+                                 +- index image rows -> final_layer -> (T_img, C_out)
                              +- double blocks -> merge -> single blocks
    txt (T_txt, C) -> txt_in -+   (own weights per stream,      (one set of weights,
                                   joint attention)              fused linears)

A double block works on the two streams apart, which are plain row subsets of the packed tokens, and brings queries,
keys and values into packed order only for attention. So a rank may hold text and visual tokens in any proportion, only
one kind, or none: every module still runs, on zero rows, and its parameters get zero gradients.

This file knows nothing of ranks, bags or exchanges; `layout.attend` is the only call that may communicate.

Legend: T tokens on this rank (T_txt text, T_img visual), S sequences that have tokens here, D width, H heads,
K head dim, M MLP width, C channels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knapformer.attention.rotation import Rotation, rotate
from knapformer.attention.rows import add_gated, merge_streams, modulate, split_streams
from knapformer.errors import SpecError
from knapformer.models.compiled import piece
from knapformer.models.conditioning import Conditioner, Modulation
from knapformer.models.config import BackboneConfig, check_at_least
from knapformer.models.init import deferred_init
from knapformer.models.layers import AdaLNLayer, FinalLayer, PackedModel, QKNorm, layer_norm, split_heads
from knapformer.models.packed import PackedLayout, TokenIndex, check_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MMDiTConfig(BackboneConfig):
    """Shape of an `MMDiT`; the other fields are `BackboneConfig`'s.

    Attributes:
        text_channels: Channels of a text input token.
        num_double: Blocks with separate weights for text and image.
        num_single: Blocks with one set of weights for both.
        guidance: Embed a guidance strength beside the timestep (guidance-distilled models).
    """

    text_channels: int
    num_double: int
    num_single: int
    guidance: bool = False

    TINY: ClassVar[dict[str, Any]] = {**BackboneConfig.TINY, "text_channels": 12, "num_double": 1, "num_single": 1}

    def __post_init__(self) -> None:
        BackboneConfig.__post_init__(self)  # no super(): slots make the decorator replace the class it would find
        check_at_least(self, 1, "text_channels")
        check_at_least(self, 0, "num_double", "num_single")
        if self.num_layers == 0:
            raise SpecError("num_double and num_single are both 0; expected at least one block in total")

    @property
    def num_layers(self) -> int:
        return self.num_double + self.num_single

    @classmethod
    def flux(cls, *, guidance: bool = True, zero_init: bool = False) -> Self:
        """FLUX.1, 12 B parameters; `guidance=True` is the dev variant, False the schnell variant."""
        return cls(
            in_channels=64,
            text_channels=4096,
            pooled_channels=768,
            width=3072,
            num_heads=24,
            num_double=19,
            num_single=38,
            guidance=guidance,
            zero_init=zero_init,
        )


class DoubleStreamBlock(nn.Module):
    """Text and image each with their own weights, attending jointly."""

    def __init__(self, config: MMDiTConfig):
        super().__init__()
        self.txt = AdaLNLayer(config)
        self.img = AdaLNLayer(config)

    def forward(
        self, img_TD: Tensor, txt_TD: Tensor, vec_SD: Tensor, rotation: Rotation, layout: PackedLayout
    ) -> tuple[Tensor, Tensor]:
        """(img, txt) to (img, txt), rows in the order of `layout.image_index` and `layout.text_index`."""
        index = TokenIndex.of(layout)
        txt_mod, img_mod, *qkv = self.before_attention(img_TD, txt_TD, vec_SD, rotation, index)
        return self.after_attention(img_TD, txt_TD, layout.attend(*qkv), txt_mod, img_mod, index)

    @piece
    def before_attention(
        self, img_TD: Tensor, txt_TD: Tensor, vec_SD: Tensor, rotation: Rotation, index: TokenIndex
    ) -> tuple[Tensor, ...]:
        """Modulation of text and image, and joint queries, keys and values in packed order."""
        txt_index, img_index = split_streams(index.sequence_index, index)
        txt_mod, txt_qkv = self.txt.start(txt_TD, vec_SD, txt_index)
        img_mod, img_qkv = self.img.start(img_TD, vec_SD, img_index)
        q_THK, k_THK, v_THK = (merge_streams(txt, img, index) for txt, img in zip(txt_qkv, img_qkv, strict=True))
        return txt_mod, img_mod, rotate(q_THK, rotation), rotate(k_THK, rotation), v_THK

    @piece
    def after_attention(
        self,
        img_TD: Tensor,
        txt_TD: Tensor,
        attended_THK: Tensor,
        txt_mod: Tensor,
        img_mod: Tensor,
        index: TokenIndex,
    ) -> tuple[Tensor, Tensor]:
        """What follows attention in each stream."""
        txt_index, img_index = split_streams(index.sequence_index, index)
        txt_out, img_out = split_streams(attended_THK, index)
        img_TD = self.img.finish(img_TD, img_out, img_mod, img_index)
        return img_TD, self.txt.finish(txt_TD, txt_out, txt_mod, txt_index)


class SingleStreamBlock(nn.Module):
    """Attention and MLP side by side on all tokens: one linear layer in, one out."""

    def __init__(self, config: MMDiTConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.widths = [3 * config.width, config.mlp_width]
        self.mod = Modulation(config.width, 3)
        # Always with bias, as published: the layer serves the MLP too.
        self.fc_in = nn.Linear(config.width, sum(self.widths))
        self.norm = QKNorm(config)
        self.fc_out = nn.Linear(config.width + config.mlp_width, config.width)

    def forward(self, x_TD: Tensor, vec_SD: Tensor, rotation: Rotation, layout: PackedLayout) -> Tensor:
        """Packed tokens (T, D) to packed tokens."""
        index_T = layout.sequence_index
        mod_S3D, mlp_TM, *qkv = self.before_attention(x_TD, vec_SD, rotation, index_T)
        return self.after_attention(x_TD, layout.attend(*qkv), mlp_TM, mod_S3D, index_T)

    @piece
    def before_attention(self, x_TD: Tensor, vec_SD: Tensor, rotation: Rotation, index_T: Tensor) -> tuple[Tensor, ...]:
        """Modulation, the activation of the MLP, and queries, keys and values."""
        mod_S3D = self.mod(vec_SD)
        shift_SD, scale_SD = mod_S3D[:, :2].unbind(1)
        hidden = self.fc_in(modulate(layer_norm(x_TD), shift_SD, scale_SD, index_T))
        qkv, mlp_TM = hidden.split(self.widths, dim=-1)
        q_THK, k_THK, v_THK = split_heads(qkv, self.num_heads, self.head_dim)
        q_THK, k_THK = self.norm(q_THK, k_THK)
        return mod_S3D, F.gelu(mlp_TM, approximate="tanh"), rotate(q_THK, rotation), rotate(k_THK, rotation), v_THK

    @piece
    def after_attention(
        self, x_TD: Tensor, attended_THK: Tensor, mlp_TM: Tensor, mod_S3D: Tensor, index_T: Tensor
    ) -> Tensor:
        """The output projection of attention and MLP, gated into the residual stream."""
        branch_TD = self.fc_out(torch.cat((attended_THK.flatten(1), mlp_TM), dim=-1))
        return add_gated(x_TD, branch_TD, mod_S3D[:, 2], index_T)


class MMDiT(PackedModel):
    """Packed multimodal diffusion transformer.

    Built on the current default device with weights of seed 0; call `init_weights` for others. Under
    `torch.device("meta")` it has no storage until `to_empty` and `init_weights`.
    """

    def __init__(self, config: MMDiTConfig):
        super().__init__(config)
        self.config = config
        with deferred_init(self):
            self.img_in = nn.Linear(config.in_channels, config.width)
            self.txt_in = nn.Linear(config.text_channels, config.width)
            self.conditioner = Conditioner(config.pooled_channels, config.width, guidance=config.guidance)
            self.double_blocks = nn.ModuleList(DoubleStreamBlock(config) for _ in range(config.num_double))
            self.single_blocks = nn.ModuleList(SingleStreamBlock(config) for _ in range(config.num_single))
            self.final_layer = FinalLayer(config)

    def blocks(self) -> list[nn.Module]:
        return [*self.double_blocks, *self.single_blocks]

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        timestep: Tensor,
        pooled: Tensor,
        ids: Tensor,
        layout: PackedLayout,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Predict visual tokens.

        Inputs may have any floating-point dtype; they are cast to that of the weights where precision allows.

        Args:
            img: (T_img, in_channels), in the order of `layout.image_index`.
            txt: (T_txt, text_channels), in the order of `layout.text_index`.
            timestep: (S,), in [0, 1].
            pooled: (S, pooled_channels).
            ids: (T, 3) positions in packed order; text tokens have (0, 0, 0).
            layout: Where each token belongs, and attention.
            guidance: (S,), for models with `guidance=True` only.

        Returns:
            (T_img, C_out), in the order of `layout.image_index`.

        Raises:
            SpecError: an input does not fit the layout or the configuration.
        """
        config, dtype = self.config, self.img_in.weight.dtype
        check_rows("img", img, (layout.image_index.shape[0], config.in_channels), "visual token")
        check_rows("txt", txt, (layout.text_index.shape[0], config.text_channels), "text token")
        vec_SD, rotation = self.condition(timestep, pooled, guidance, ids, layout)

        img_TD, txt_TD = self.img_in(img.to(dtype)), self.txt_in(txt.to(dtype))
        for block in self.double_blocks:
            img_TD, txt_TD = block(img_TD, txt_TD, vec_SD, rotation, layout)
        # Merged even if no single block follows: it keeps the last text stream in the graph.
        x_TD = merge_streams(txt_TD, img_TD, layout)
        for block in self.single_blocks:
            x_TD = block(x_TD, vec_SD, rotation, layout)
        img_index = layout.sequence_index.index_select(0, layout.image_index)
        return self.final_layer(x_TD.index_select(0, layout.image_index), vec_SD, img_index)
