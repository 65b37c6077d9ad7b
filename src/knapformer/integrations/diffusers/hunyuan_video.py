"""HunyuanVideo: double-stream, then single-stream blocks over video and text; text is refined by itself first.

The refiner attends among the text rows of one sample, so every rank that has tokens of a sequence refines its whole
text, and takes the rows it holds. Text that its mask hides can reach nothing and is left out. Text is not rotated.
`image_condition_type="token_replace"` (image to video) modulates the first frame's tokens at time 0, without guidance;
"latent_concat" only has more input channels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention.rows import add_gated, mean_by_sequence
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.joint import blocks_of, double_block, run_joint, single_block
from knapformer.integrations.diffusers.ops import (
    BlockContext,
    continuous_norm,
    project_out,
    project_qkv,
    rope,
)
from knapformer.integrations.diffusers.patches import Extent


class HunyuanVideo(Family):
    """`HunyuanVideoTransformer3DModel`."""

    model_class = "HunyuanVideoTransformer3DModel"
    modules = (
        "x_embedder.proj context_embedder.token_refiner.refiner_blocks context_embedder.time_text_embed "
        "time_text_embed rope norm_out.linear proj_out"
    )
    processors = ("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0", "AttnProcessor")
    masks_text = True

    def widths(self, model: Any) -> Widths:
        config, (pt, ph, pw) = model.config, self.patch(model)
        return Widths(
            image=config.in_channels * pt * ph * pw,
            text=config.text_embed_dim,
            out=model.proj_out.out_features,
            pooled=config.pooled_projection_dim,
            guidance=bool(config.guidance_embeds),
        )

    def patch(self, model: Any) -> Extent:
        config = model.config
        return config.patch_size_t, config.patch_size, config.patch_size

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return [
            (model.context_embedder, _refine),
            *((block, _refiner_block) for block in model.context_embedder.token_refiner.refiner_blocks),
            *blocks_of(model, double_block, single_block),
        ]

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        layout, dtype, pooled = inputs.layout, model.x_embedder.proj.weight.dtype, inputs.pooled
        patch = self.patch(model)
        img = model.x_embedder(inputs.image.to(dtype).unflatten(1, (-1, *patch))).flatten(1)
        texts = BlockContext.texts(layout)
        txt = model.context_embedder(texts, inputs.text.to(dtype), inputs.timestep).index_select(0, inputs.text_rows)
        vec, first = model.time_text_embed(inputs.timestep, pooled.to(dtype), inputs.guidance)
        positions, clean = inputs.positions, None
        if first is not None:
            vec = torch.cat((vec, first))
            clean = positions[:, 0].index_select(0, layout.image_index) == 0
        rotation = rope(positions, model.rope.rope_dim, model.rope.theta).still(layout.text_index)
        ctx = BlockContext(layout, rotation, clean=clean)
        img = run_joint(model, ctx, img, txt, [vec], [vec])
        index = layout.sequence_index.index_select(0, layout.image_index)  # the end knows no clean tokens
        return model.proj_out(continuous_norm(model.norm_out, img, vec[: layout.num_sequences], index))


def _refine(refiner: Any, texts: BlockContext, text_NC: Tensor, timestep: Tensor) -> Tensor:
    """Whole texts (N, C) to (N, D). Their mean, with the time, modulates the refiner."""
    vec = refiner.time_text_embed(timestep, mean_by_sequence(text_NC, texts.vector, len(timestep)))
    x = refiner.proj_in(text_NC)
    for block in refiner.token_refiner.refiner_blocks:
        x = block(texts, x, vec)
    return x


def _refiner_block(block: Any, texts: BlockContext, x_ND: Tensor, vec_SD: Tensor) -> Tensor:
    gate, gate_mlp = block.norm_out.linear(block.norm_out.nonlinearity(vec_SD)).chunk(2, dim=-1)
    attended = texts.attend(*project_qkv(block.attn, block.norm1(x_ND)))
    x_ND = add_gated(x_ND, project_out(block.attn.to_out, attended), gate, texts.vector)
    return add_gated(x_ND, block.ff(block.norm2(x_ND)), gate_mlp, texts.vector)
