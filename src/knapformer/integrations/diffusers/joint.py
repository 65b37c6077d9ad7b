"""Blocks with joint attention over text and visual tokens, in the two shapes that most families share.

    double stream   own weights for text and image, joint attention          FLUX.1, FLUX.2, SD3, Qwen, HunyuanVideo
    single stream   one set of weights; attention and MLP side by side       FLUX.1, HunyuanVideo

A double block takes and gives text rows and visual rows apart, a single block packed rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from knapformer.attention.rows import add_gated, merge_streams, modulate, split_streams
from knapformer.integrations.diffusers.family import PackedBlock
from knapformer.integrations.diffusers.ops import (
    BlockContext,
    adaptive,
    clip_half,
    project_out,
    project_qkv,
    run_block,
)


class Stream(NamedTuple):
    """One modality's modules in a double-stream block, and its modulation.

    Attributes:
        norm1, norm2, mlp: modules.
        out: output projection of attention; None if the stream ends with this block.
        mod: shift, scale, gate of attention, then shift, scale, gate of the MLP, each (S, D).
    """

    norm1: Any
    norm2: Any
    mlp: Any
    out: Any
    mod: Sequence[Tensor]

    def before(self, x_TD: Tensor, index_T: Tensor) -> Tensor:
        """What attention sees."""
        return modulate(self.norm1(x_TD), self.mod[0], self.mod[1], index_T)

    def after(self, x_TD: Tensor, attended_THK: Tensor, index_T: Tensor) -> Tensor:
        """Attention's output and the MLP, each gated into the residual stream."""
        _, _, gate, *mlp = self.mod
        return self.feed(add_gated(x_TD, project_out(self.out, attended_THK), gate, index_T), mlp, index_T)

    def feed(self, x_TD: Tensor, mod: Sequence[Tensor], index_T: Tensor) -> Tensor:
        """The gated MLP."""
        shift, scale, gate = mod
        return add_gated(x_TD, self.mlp(modulate(self.norm2(x_TD), shift, scale, index_T)), gate, index_T)


def joint_attention(attn: Any, img_TD: Tensor, txt_TD: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor]:
    """(visual rows, text rows) of joint attention, (T, H, K) before the output projections."""
    layout = ctx.layout
    pairs = zip(project_qkv(attn, txt_TD, added=True), project_qkv(attn, img_TD), strict=True)
    q, k, v = (merge_streams(txt, img, layout) for txt, img in pairs)
    attended = ctx.attend(q, k, v)
    txt, img = split_streams(attended, layout)
    return img, txt


def double_stream(
    attn: Any, img: Stream, txt: Stream, img_TD: Tensor, txt_TD: Tensor, ctx: BlockContext
) -> tuple[Tensor, Tensor]:
    """A double-stream block: (visual rows, text rows) to the same."""
    at_img, at_txt = ctx.image_vector, ctx.text_vector
    img_out, txt_out = joint_attention(attn, img.before(img_TD, at_img), txt.before(txt_TD, at_txt), ctx)
    return img.after(img_TD, img_out, at_img), clip_half(txt.after(txt_TD, txt_out, at_txt))


def double_block(
    block: Any, ctx: BlockContext, img_TD: Tensor, txt_TD: Tensor, vec_SD: Tensor
) -> tuple[Tensor, Tensor]:
    """The double-stream block of FLUX.1 and HunyuanVideo, whose modules have the same names."""
    attn = block.attn
    img = Stream(block.norm1.norm, block.norm2, block.ff, attn.to_out, adaptive(block.norm1, vec_SD, 6))
    txt = Stream(
        block.norm1_context.norm,
        block.norm2_context,
        block.ff_context,
        attn.to_add_out,
        adaptive(block.norm1_context, vec_SD, 6),
    )
    return double_stream(attn, img, txt, img_TD, txt_TD, ctx)


def single_block(block: Any, ctx: BlockContext, x_TD: Tensor, vec_SD: Tensor) -> Tensor:
    """The single-stream block of FLUX.1 and HunyuanVideo, on packed rows."""
    shift, scale, gate = adaptive(block.norm, vec_SD, 3)
    hidden = modulate(block.norm.norm(x_TD), shift, scale, ctx.vector)
    mlp = block.act_mlp(block.proj_mlp(hidden))
    q, k, v = project_qkv(block.attn, hidden)
    attended = ctx.attend(q, k, v)
    branch = block.proj_out(torch.cat((attended.flatten(1), mlp), dim=-1))
    return clip_half(add_gated(x_TD, branch, gate, ctx.vector))


def run_joint(
    model: Any, ctx: BlockContext, img_TD: Tensor, txt_TD: Tensor, double: Sequence[Tensor], single: Sequence[Tensor]
) -> Tensor:
    """Visual rows after all double-stream and then all single-stream blocks, each with its modulation."""
    for block in model.transformer_blocks:
        img_TD, txt_TD = run_block(model, block, ctx, img_TD, txt_TD, *double)
    x_TD = merge_streams(txt_TD, img_TD, ctx.layout)
    for block in model.single_transformer_blocks:
        x_TD = run_block(model, block, ctx, x_TD, *single)
    return x_TD.index_select(0, ctx.layout.image_index)


def blocks_of(model: Any, double: PackedBlock, single: PackedBlock) -> list[tuple[nn.Module, PackedBlock]]:
    """The blocks that `run_joint` runs, with their packed forwards."""
    doubles = [(block, double) for block in model.transformer_blocks]
    return [*doubles, *((block, single) for block in model.single_transformer_blocks)]
