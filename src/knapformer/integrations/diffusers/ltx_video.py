"""LTX-Video: self-attention over video, cross-attention to text; rotations differ from head to head.

Positions are coordinates in pixels and seconds, as `video_coords` of the model's forward; by default those of the
released pipeline at 25 frames a second: `coordinates(grid, frame_rate=...)` gives others. Text that its mask hides is
left out. Clean conditioning frames at time 0 are `ModelSample.clean`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.attention.rows import add_gated, modulate
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.ops import (
    BlockContext,
    cross_attention,
    project_out,
    project_qkv,
    run_block,
    split_heads,
)
from knapformer.integrations.diffusers.patches import Extent, grid_positions


def coordinates(grid: Extent, *, frame_rate: float = 25.0, compression: tuple[int, int] = (8, 32)) -> Tensor:
    """(tokens, 3) coordinates: frame * 8 / rate [s], row * 32, column * 32 [pixels], for `ModelSample.positions`.

    Args:
        grid: latent frames, rows and columns.
        frame_rate: of the video [1/s].
        compression: frames and pixels per latent, of the VAE.
    """
    time, space = compression
    return grid_positions(grid).float() * torch.tensor([time / frame_rate, space, space], dtype=torch.float32)


class LTXVideo(Family):
    """`LTXVideoTransformer3DModel`."""

    model_class = "LTXVideoTransformer3DModel"
    modules = "proj_in time_embed caption_projection rope norm_out proj_out"
    processors = ("LTXVideoAttnProcessor",)
    masks_text = True
    joint = False
    position_dtype = torch.float32

    def widths(self, model: Any) -> Widths:
        config = model.config
        return Widths(config.in_channels, config.caption_channels, model.proj_out.out_features)

    def takes_clean(self, model: Any) -> bool:
        return True

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        return coordinates(grid)

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return [(block, _block) for block in model.transformer_blocks]

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        dtype, table = model.proj_in.weight.dtype, model.scale_shift_table
        x = model.proj_in(inputs.image.to(dtype))
        tables = model.rope(x[None], video_coords=inputs.positions.t()[None])
        rotation = Rotation.of_channels(*(split_heads(table[0], model.config.num_attention_heads) for table in tables))
        ctx = BlockContext(inputs.layout, rotation, clean=inputs.clean)
        times = torch.cat((inputs.timestep, inputs.timestep * 0))
        mod, vec = model.time_embed(times, batch_size=len(times), hidden_dtype=x.dtype)
        text = model.caption_projection(inputs.text.to(dtype))
        for block in model.transformer_blocks:
            x = run_block(model, block, ctx, x, text, mod)
        shift, scale = (table + vec.unsqueeze(1)).unbind(1)
        return model.proj_out(modulate(model.norm_out(x), shift, scale, ctx.vector))


def _block(block: Any, ctx: BlockContext, x_TD: Tensor, text_ND: Tensor, mod_SD: Tensor) -> Tensor:
    index, table = ctx.vector, block.scale_shift_table
    mod = (table + mod_SD.unflatten(-1, table.shape)).unbind(1)
    hidden = modulate(block.norm1(x_TD), mod[0], mod[1], index)
    attended = project_out(block.attn1.to_out, ctx.attend(*project_qkv(block.attn1, hidden, norm_heads=False)))
    x_TD = add_gated(x_TD, attended, mod[2], index)
    x_TD = x_TD + cross_attention(block.attn2, x_TD, text_ND, ctx)
    return add_gated(x_TD, block.ff(modulate(block.norm2(x_TD), mod[3], mod[4], index)), mod[5], index)
