"""Stable Diffusion 3 and 3.5: double-stream blocks; in some of them the image also attends to itself (3.5 medium).

The image is patchified by a convolution and gets a learned-size table of positions, cropped to its middle: a token's
position is its place in the table. The last block gives no text. Text is 77 + 256 rows in the released models, padding
included, and all of it is attended to. The joint order is [image, text]; without rotation it makes no difference.
"""

from typing import Any

from torch import Tensor, nn

from knapformer.attention.rows import add_gated, modulate
from knapformer.errors import DataError
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.joint import Stream, joint_attention
from knapformer.integrations.diffusers.ops import (
    BlockContext,
    adaptive,
    attend_visual,
    continuous_norm,
    project_out,
    project_qkv,
    run_block,
)
from knapformer.integrations.diffusers.patches import Extent, after_text, grid_positions


class StableDiffusion3(Family):
    """`SD3Transformer2DModel`."""

    model_class = "SD3Transformer2DModel"
    modules = "pos_embed.proj time_text_embed context_embedder norm_out.linear proj_out"
    processors = ("JointAttnProcessor2_0",)
    channels_last = True

    def widths(self, model: Any) -> Widths:
        config = model.config
        return Widths(
            image=config.in_channels * config.patch_size**2,
            text=config.joint_attention_dim,
            out=model.proj_out.out_features,
            pooled=config.pooled_projection_dim,
        )

    def patch(self, model: Any) -> Extent:
        return 1, model.config.patch_size, model.config.patch_size

    def video(self, latent: Tensor) -> Tensor:
        return latent.unsqueeze(1)

    def latent(self, video: Tensor) -> Tensor:
        return video.squeeze(1)

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        largest = model.pos_embed.pos_embed_max_size
        if max(grid) > largest:
            raise DataError(f"an image has {grid[1]} x {grid[2]} patches; this model's table ends at {largest}")
        start = 0, (largest - grid[1]) // 2, (largest - grid[2]) // 2
        return after_text(len(text), grid_positions(grid, start))

    def check_config(self, model: Any) -> None:
        if not model.pos_embed.pos_embed_max_size:
            self.refuse("a position table that is interpolated for each size (pos_embed_max_size=None)")

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return [(model.pos_embed, _embed), *((block, _joint_block) for block in model.transformer_blocks)]

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        layout, dtype = inputs.layout, model.context_embedder.weight.dtype
        ctx = BlockContext(layout)
        img = model.pos_embed(ctx, inputs.image.to(dtype), inputs.positions.index_select(0, layout.image_index))
        txt = model.context_embedder(inputs.own_text.to(dtype))
        vec = model.time_text_embed(inputs.timestep, inputs.pooled.to(dtype))
        for block in model.transformer_blocks:
            img, txt = run_block(model, block, ctx, img, txt, vec)
        return model.proj_out(continuous_norm(model.norm_out, img, vec, ctx.image_vector))


def _embed(embed: Any, ctx: BlockContext, rows: Tensor, positions: Tensor) -> Tensor:
    """Each patch is a convolution's whole input; the table is flat, row by row."""
    x = embed.proj(rows.unflatten(1, (-1, embed.patch_size, embed.patch_size))).flatten(1)
    place = positions[:, 1].long() * embed.pos_embed_max_size + positions[:, 2]
    return (x + embed.pos_embed[0].index_select(0, place)).to(x.dtype)


def _joint_block(
    block: Any, ctx: BlockContext, img_TD: Tensor, txt_TD: Tensor, vec_SD: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The last block gives no text."""
    attn, at_img, at_txt = block.attn, ctx.image_vector, ctx.text_vector
    mod = adaptive(block.norm1, vec_SD, 9 if block.use_dual_attention else 6)
    img = Stream(block.norm1.norm, block.norm2, block.ff, attn.to_out, mod[:6])
    txt_out = None
    if block.context_pre_only:
        hidden = continuous_norm(block.norm1_context, txt_TD, vec_SD, at_txt)
        img_out, _ = joint_attention(attn, img.before(img_TD, at_img), hidden, ctx)
    else:
        norm = block.norm1_context
        txt = Stream(norm.norm, block.norm2_context, block.ff_context, attn.to_add_out, adaptive(norm, vec_SD, 6))
        img_out, txt_out = joint_attention(attn, img.before(img_TD, at_img), txt.before(txt_TD, at_txt), ctx)
        txt_out = txt.after(txt_TD, txt_out, at_txt)
    x_TD = add_gated(img_TD, project_out(img.out, img_out), mod[2], at_img)
    if block.use_dual_attention:
        hidden = modulate(img.norm1(img_TD), mod[6], mod[7], at_img)
        alone = attend_visual(ctx.layout, *project_qkv(block.attn2, hidden))
        x_TD = add_gated(x_TD, project_out(block.attn2.to_out, alone), mod[8], at_img)
    return img.feed(x_TD, mod[3:6], at_img), txt_out
