"""CogVideoX: text and video share all weights but the modulation: each block modulates video and text differently.

So a block works on packed rows, and text takes a second row of vectors per sequence. Video tokens are rotated (5B) or
get a table of sinusoids (2B), text neither. All text rows are attended to, 226 in the released models.

Positions of version 1.0 are the grid, stretched over the size the model was trained at; of 1.5 the grid itself. Image
to video models have more input channels; those with a learned table know one size only and are refused.
"""

from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention.rows import add_gated, merge_streams, modulate
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.ops import BlockContext, project_out, project_qkv, rope, run_block
from knapformer.integrations.diffusers.patches import Extent, after_text, grid_positions


class CogVideoX(Family):
    """`CogVideoXTransformer3DModel`."""

    model_class = "CogVideoXTransformer3DModel"
    modules = "patch_embed.proj patch_embed.text_proj time_embedding norm_final norm_out.linear proj_out"
    processors = ("CogVideoXAttnProcessor2_0",)
    position_dtype = torch.float32

    def widths(self, model: Any) -> Widths:
        config, (pt, ph, pw) = model.config, self.patch(model)
        return Widths(config.in_channels * pt * ph * pw, config.text_embed_dim, model.proj_out.out_features)

    def patch(self, model: Any) -> Extent:
        return model.config.patch_size_t or 1, model.config.patch_size, model.config.patch_size

    def video(self, latent: Tensor) -> Tensor:
        return latent.transpose(0, 1)

    def latent(self, video: Tensor) -> Tensor:
        return video.transpose(0, 1)

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        config, at = model.config, grid_positions(grid).float()
        if config.use_rotary_positional_embeddings and not config.patch_size_t:
            size = config.sample_height // config.patch_size, config.sample_width // config.patch_size
            at = _stretched(at, grid[1:], size)
        return after_text(len(text), at)

    def check_config(self, model: Any) -> None:
        if model.config.use_learned_positional_embeddings:
            self.refuse("learned positions (use_learned_positional_embeddings), which are of one size only")
        if model.ofs_embedding is not None:
            self.refuse("the offset embedding of CogVideoX 1.5 image to video (ofs_embed_dim)")

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return [(model.patch_embed, _embed), *((block, _block) for block in model.transformer_blocks)]

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        layout, config, dtype = inputs.layout, model.config, model.proj_out.weight.dtype
        rotation = None
        if config.use_rotary_positional_embeddings:
            eighth = config.attention_head_dim // 8
            rotation = rope(inputs.positions, (2 * eighth, 3 * eighth, 3 * eighth), 10000.0).still(layout.text_index)
        ctx = BlockContext(layout, rotation)
        vec = model.time_embedding(model.time_proj(inputs.timestep).to(dtype))
        visual = inputs.positions.index_select(0, layout.image_index)
        x = model.patch_embed(ctx, inputs.image.to(dtype), inputs.own_text.to(dtype), visual)
        x = model.embedding_dropout(x)
        for block in model.transformer_blocks:
            x = run_block(model, block, ctx, x, vec)
        img = model.norm_final(x.index_select(0, layout.image_index))
        norm = model.norm_out  # its linear layer gives shift first, unlike other families' last norm
        shift, scale = norm.linear(norm.silu(vec)).chunk(2, dim=-1)
        return model.proj_out(modulate(norm.norm(img), shift, scale, ctx.image_vector))


def _embed(embed: Any, ctx: BlockContext, rows: Tensor, text: Tensor, positions: Tensor) -> Tensor:
    """Packed rows. Each patch is a convolution's whole input (1.0), or a linear layer's (1.5)."""
    if embed.patch_size_t is None:
        rows = rows.unflatten(1, (-1, embed.patch_size, embed.patch_size))
    img = embed.proj(rows).flatten(1)
    if embed.use_positional_embeddings:
        img = img + _sinusoids(embed, positions).to(img.dtype)
    return merge_streams(embed.text_proj(text), img, ctx.layout)


def _sinusoids(embed: Any, positions: Tensor) -> Tensor:
    """diffusers' table at (frame, row, column): a quarter of the channels for the frame, then column, then row."""
    from diffusers.models.embeddings import get_1d_sincos_pos_embed_from_grid

    width, space = embed.embed_dim, embed.spatial_interpolation_scale
    frame, row, column = positions.unbind(1)
    of_frame = get_1d_sincos_pos_embed_from_grid(width // 4, frame / embed.temporal_interpolation_scale)
    of_column, of_row = (get_1d_sincos_pos_embed_from_grid(3 * width // 8, at / space) for at in (column, row))
    return torch.cat((of_frame, of_column, of_row), dim=1)


def _block(block: Any, ctx: BlockContext, x_TD: Tensor, vec_SD: Tensor) -> Tensor:
    index, attn = _vectors(ctx), block.attn1
    shift, scale, gate = _both(block.norm1, vec_SD)
    attended = ctx.attend(*project_qkv(attn, modulate(block.norm1.norm(x_TD), shift, scale, index)))
    x_TD = add_gated(x_TD, project_out(attn.to_out, attended), gate, index)
    shift, scale, gate = _both(block.norm2, vec_SD)
    return add_gated(x_TD, block.ff(modulate(block.norm2.norm(x_TD), shift, scale, index)), gate, index)


def _vectors(ctx: BlockContext) -> Tensor:
    """(T,) rows of vectors: those of video, S of them, then those of text."""
    rows = ctx.text_vector + ctx.layout.num_sequences
    return ctx.vector.index_copy(0, ctx.layout.text_index, rows)


def _both(norm: Any, vec_SD: Tensor) -> list[Tensor]:
    """Shift, scale and gate, each (2 S, D): for video, then for text."""
    video, text = norm.linear(norm.silu(vec_SD)).chunk(2, dim=-1)
    return [torch.cat(pair) for pair in zip(video.chunk(3, dim=-1), text.chunk(3, dim=-1), strict=True)]


def _stretched(at: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Rows and columns stretched over the largest middle part of the training size that has the grid's shape."""
    (rows, columns), (height, width) = grid, size
    if rows * width > columns * height:
        inner = height, round(height * columns / rows)
    else:
        inner = round(width * rows / columns), width
    out = at.clone()
    for axis, (count, full, middle) in enumerate(zip(grid, size, inner, strict=True), 1):
        start = round((full - middle) / 2)
        places = torch.linspace(start, (start + middle) * (count - 1) / count, count, dtype=torch.float32)
        out[:, axis] = places[at[:, axis].long()]
    return out
