"""FLUX.2: all blocks of a kind share one modulation; single-stream blocks fuse attention and MLP in one linear layer.

Positions have four axes (time, row, column, index): text rows count along the last, visual tokens stay at 0 there.
Reference images take `ModelSample.positions`, with another time each. Their key-value cache is for inference only.
"""

from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.attention.rows import add_gated, modulate
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.joint import Stream, blocks_of, double_stream, run_joint
from knapformer.integrations.diffusers.ops import BlockContext, clip_half, continuous_norm, split_heads
from knapformer.integrations.diffusers.patches import Extent, grid_positions


class Flux2(Family):
    """`Flux2Transformer2DModel`."""

    model_class = "Flux2Transformer2DModel"
    modules = (
        "x_embedder context_embedder time_guidance_embed pos_embed double_stream_modulation_img "
        "double_stream_modulation_txt single_stream_modulation norm_out.linear proj_out"
    )
    processors = (
        "Flux2AttnProcessor",
        "Flux2ParallelSelfAttnProcessor",
        "Flux2KVAttnProcessor",
        "Flux2KVParallelSelfAttnProcessor",
    )

    def widths(self, model: Any) -> Widths:
        config = model.config
        return Widths(
            image=config.in_channels,
            text=config.joint_attention_dim,
            out=model.proj_out.out_features,
            guidance=model.time_guidance_embed.guidance_embedder is not None,
            axes=4,
        )

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        written = torch.zeros(len(text), 4, dtype=torch.int32)
        written[:, 3] = text
        return torch.cat((written, nn.functional.pad(grid_positions(grid), (0, 1))))

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return blocks_of(model, _double_block, _single_block)

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        dtype = model.x_embedder.weight.dtype
        guidance = None if inputs.guidance is None else inputs.guidance.to(dtype) * 1000
        vec = model.time_guidance_embed(inputs.timestep.to(dtype) * 1000, guidance)
        img_mod, txt_mod = model.double_stream_modulation_img(vec), model.double_stream_modulation_txt(vec)
        mod = model.single_stream_modulation(vec)
        img = model.x_embedder(inputs.image.to(dtype))
        txt = model.context_embedder(inputs.own_text.to(dtype))
        ctx = BlockContext(inputs.layout, Rotation.of_channels(*model.pos_embed(inputs.positions)))
        img = run_joint(model, ctx, img, txt, [img_mod, txt_mod], [mod])
        return model.proj_out(continuous_norm(model.norm_out, img, vec, ctx.image_vector))


def _double_block(
    block: Any, ctx: BlockContext, img_TD: Tensor, txt_TD: Tensor, img_mod: Tensor, txt_mod: Tensor
) -> tuple[Tensor, Tensor]:
    attn = block.attn
    img = Stream(block.norm1, block.norm2, block.ff, attn.to_out, img_mod.chunk(6, dim=-1))
    txt = Stream(block.norm1_context, block.norm2_context, block.ff_context, attn.to_add_out, txt_mod.chunk(6, dim=-1))
    return double_stream(attn, img, txt, img_TD, txt_TD, ctx)


def _single_block(block: Any, ctx: BlockContext, x_TD: Tensor, mod: Tensor) -> Tensor:
    attn, (shift, scale, gate) = block.attn, mod.chunk(3, dim=-1)
    hidden = attn.to_qkv_mlp_proj(modulate(block.norm(x_TD), shift, scale, ctx.vector))
    qkv, mlp = hidden.split((3 * attn.inner_dim, hidden.shape[-1] - 3 * attn.inner_dim), dim=-1)
    q, k, v = (split_heads(x, attn.heads) for x in qkv.chunk(3, dim=-1))
    attended = ctx.attend(attn.norm_q(q), attn.norm_k(k), v)
    branch = attn.to_out(torch.cat((attended.flatten(1), attn.mlp_act_fn(mlp)), dim=-1))
    return clip_half(add_gated(x_TD, branch, gate, ctx.vector))
