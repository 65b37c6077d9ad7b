"""Qwen-Image: double-stream blocks over [text, image].

Rows and columns are counted from the middle of the image, so positions are negative too; text is counted along all
three axes from half the longer side. Text that its mask hides is left out and keeps the others' positions. Text of the
last block ends nowhere. Models with `zero_cond_t` (edit) modulate reference images, `ModelSample.clean`, at time 0.
"""

from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.errors import DataError
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.joint import Stream, double_stream
from knapformer.integrations.diffusers.ops import (
    BlockContext,
    by_axis,
    clip_half,
    continuous_norm,
    keep_in_graph,
    run_block,
)
from knapformer.integrations.diffusers.patches import Extent, grid_positions

LARGEST = 4096  # positions, of diffusers' tables


class QwenImage(Family):
    """`QwenImageTransformer2DModel`."""

    model_class = "QwenImageTransformer2DModel"
    modules = "img_in txt_norm txt_in time_text_embed pos_embed norm_out.linear proj_out"
    processors = ("QwenDoubleStreamAttnProcessor2_0",)
    masks_text = True

    def widths(self, model: Any) -> Widths:
        config = model.config
        return Widths(config.in_channels, config.joint_attention_dim, model.proj_out.out_features)

    def takes_clean(self, model: Any) -> bool:
        return bool(model.zero_cond_t)

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        frames, rows, columns = grid
        first = max(rows // 2, columns // 2)
        last = first + int(text[-1]) + 1 if len(text) else 0
        if max(frames, rows, columns, last) > LARGEST:
            raise DataError(f"an image of {grid} tokens with {len(text)} text rows exceeds {LARGEST} positions")
        written = (first + text).to(torch.int32)[:, None].expand(-1, 3)
        return torch.cat((written, grid_positions(grid, (0, rows // 2 - rows, columns // 2 - columns))))

    def check_config(self, model: Any) -> None:
        if type(model.pos_embed).__name__ != "QwenEmbedRope" or not model.pos_embed.scale_rope:
            self.refuse(f"positions by {type(model.pos_embed).__name__} (use_layer3d_rope); known is QwenEmbedRope")
        if getattr(model.time_text_embed, "use_additional_t_cond", False):
            self.refuse("an additional time condition (use_additional_t_cond)")

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return [(block, _block) for block in model.transformer_blocks]

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        layout, dtype = inputs.layout, model.img_in.weight.dtype
        img = model.img_in(inputs.image.to(dtype))
        txt = model.txt_in(model.txt_norm(inputs.own_text.to(dtype)))
        time = inputs.timestep.to(dtype)
        clean = inputs.clean if model.zero_cond_t else None
        vec = model.time_text_embed(time if clean is None else torch.cat((time, time * 0)), img)
        ctx = BlockContext(layout, _rotation(model.pos_embed, inputs.positions), clean=clean)
        for block in model.transformer_blocks:
            img, txt = run_block(model, block, ctx, img, txt, vec)
        # The end knows no clean tokens.
        index = layout.sequence_index.index_select(0, layout.image_index)
        out = continuous_norm(model.norm_out, img, vec[: layout.num_sequences], index)
        return keep_in_graph(model.proj_out(out), txt)


def _rotation(embed: Any, positions: Tensor) -> Rotation:
    """From diffusers' tables of positions -4096 to 4095."""
    table = torch.cat((embed.neg_freqs, embed.pos_freqs)).to(positions.device)
    angles = by_axis(table.split([dim // 2 for dim in embed.axes_dim], dim=1), positions + LARGEST)
    return Rotation(angles.real, angles.imag)


def _block(block: Any, ctx: BlockContext, img_TD: Tensor, txt_TD: Tensor, vec_SD: Tensor) -> tuple[Tensor, Tensor]:
    attn = block.attn
    img_mod = block.img_mod(vec_SD).chunk(6, dim=-1)
    txt_mod = block.txt_mod(vec_SD[: ctx.layout.num_sequences]).chunk(6, dim=-1)
    img = Stream(block.img_norm1, block.img_norm2, block.img_mlp, attn.to_out, img_mod)
    txt = Stream(block.txt_norm1, block.txt_norm2, block.txt_mlp, attn.to_add_out, txt_mod)
    img_TD, txt_TD = double_stream(attn, img, txt, img_TD, txt_TD, ctx)
    return clip_half(img_TD), txt_TD
