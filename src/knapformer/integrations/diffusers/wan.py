"""Wan 2.1 and 2.2: self-attention over video, cross-attention to text; norms of queries and keys span all heads.

All text rows are attended to: the released models see 512, zeros after the caption, so give the padded text, or
`text_padding="pad_to(512)"`. Image to video by more input channels works as it is; clean conditioning frames at time 0
(TI2V, 2.2) are `ModelSample.clean`. CLIP tokens of an image (2.1 image to video) are refused.
"""

from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.attention.rows import add_gated, compute_dtype, modulate
from knapformer.errors import DataError
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.ops import (
    BlockContext,
    by_axis,
    cross_attention,
    project_out,
    project_qkv,
    run_block,
)
from knapformer.integrations.diffusers.patches import Extent


class Wan(Family):
    """`WanTransformer3DModel`."""

    model_class = "WanTransformer3DModel"
    modules = "patch_embedding condition_embedder.time_embedder condition_embedder.text_embedder rope proj_out"
    processors = ("WanAttnProcessor",)
    channels_last = True
    joint = False

    def widths(self, model: Any) -> Widths:
        config, (pt, ph, pw) = model.config, self.patch(model)
        return Widths(config.in_channels * pt * ph * pw, config.text_dim, model.proj_out.out_features)

    def patch(self, model: Any) -> Extent:
        pt, ph, pw = model.config.patch_size
        return pt, ph, pw

    def takes_clean(self, model: Any) -> bool:
        return True

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        largest = model.rope.max_seq_len
        if max(grid) > largest:
            raise DataError(f"a video has {grid} tokens along its axes; this model's positions end at {largest}")
        return super().positions(model, grid, text)

    def check_config(self, model: Any) -> None:
        if model.condition_embedder.image_embedder is not None or model.config.added_kv_proj_dim is not None:
            self.refuse("CLIP image tokens (image_dim, added_kv_proj_dim: Wan 2.1 image to video)")

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return [(block, _block) for block in model.blocks]

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        dtype, table = model.patch_embedding.weight.dtype, model.scale_shift_table
        ctx = BlockContext(inputs.layout, _rotation(model.rope, inputs.positions), clean=inputs.clean)
        x = model.patch_embedding(inputs.image.to(dtype).unflatten(1, (-1, *self.patch(model)))).flatten(1)
        times = torch.cat((inputs.timestep, inputs.timestep * 0))
        vec, mod, text, _ = model.condition_embedder(times, inputs.text.to(dtype), None)
        for block in model.blocks:
            x = run_block(model, block, ctx, x, text, mod)
        shift, scale = (table + vec.unsqueeze(1)).unbind(1)
        wide = compute_dtype(x.dtype)
        x = modulate(model.norm_out(x.to(wide)), shift, scale, ctx.vector).to(x.dtype)
        return model.proj_out(x)


def _rotation(embed: Any, positions: Tensor) -> Rotation:
    dims = embed.t_dim, embed.h_dim, embed.w_dim
    cos, sin = (by_axis(table.split(dims, dim=1), positions) for table in (embed.freqs_cos, embed.freqs_sin))
    return Rotation.of_channels(cos, sin)


def _block(block: Any, ctx: BlockContext, x_TD: Tensor, text_ND: Tensor, mod_SD: Tensor) -> Tensor:
    """Norms and residuals in fp32 at least, projections in the model's dtype."""
    dtype, wide, index = x_TD.dtype, compute_dtype(x_TD.dtype), ctx.vector
    mod = (block.scale_shift_table + mod_SD.unflatten(-1, (6, -1)).to(wide)).unbind(1)
    hidden = modulate(block.norm1(x_TD.to(wide)), mod[0], mod[1], index).to(dtype)
    attended = project_out(block.attn1.to_out, ctx.attend(*project_qkv(block.attn1, hidden, norm_heads=False)))
    x_TD = add_gated(x_TD.to(wide), attended, mod[2], index).to(dtype)
    x_TD = x_TD + cross_attention(block.attn2, block.norm2(x_TD.to(wide)).to(dtype), text_ND, ctx)
    hidden = modulate(block.norm3(x_TD.to(wide)), mod[3], mod[4], index).to(dtype)
    return add_gated(x_TD.to(wide), block.ffn(hidden).to(wide), mod[5], index).to(dtype)
