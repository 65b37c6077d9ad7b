"""FLUX.1: double-stream, then single-stream blocks over [text, image], positions (0, row, column), text at 0.

Attends to all text rows, padding included: 512 rows of T5 for the released models. `guidance_embeds` (dev) needs a
guidance strength per sample; schnell takes none.
"""

from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.attention.rows import merge_streams
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.joint import double_block, single_block
from knapformer.integrations.diffusers.ops import BlockContext, continuous_norm, run_block
from knapformer.integrations.diffusers.patches import Extent, grid_positions


class Flux(Family):
    """`FluxTransformer2DModel`."""

    model_class = "FluxTransformer2DModel"
    parts = ("x_embedder", "context_embedder", "time_text_embed", "pos_embed", "norm_out.linear", "proj_out")
    processors = ("FluxAttnProcessor",)

    def widths(self, model: Any) -> Widths:
        config = model.config
        return Widths(
            image=config.in_channels,
            text=config.joint_attention_dim,
            out=model.proj_out.out_features,
            pooled=config.pooled_projection_dim,
            guidance=bool(config.guidance_embeds),
        )

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        return torch.cat((torch.zeros(len(text), 3, dtype=torch.int32), grid_positions(grid)))

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        doubles = [(block, double_block) for block in model.transformer_blocks]
        return [*doubles, *((block, single_block) for block in model.single_transformer_blocks)]

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        layout, dtype = inputs.layout, model.x_embedder.weight.dtype
        img = model.x_embedder(inputs.image.to(dtype))
        txt = model.context_embedder(inputs.own_text.to(dtype))
        times = [t.to(dtype) * 1000 for t in (inputs.timestep, inputs.guidance) if t is not None]
        vec = model.time_text_embed(*times, inputs.pooled.to(dtype))
        ctx = BlockContext(layout, Rotation.of_channels(*model.pos_embed(inputs.positions)))
        for block in model.transformer_blocks:
            img, txt = run_block(model, block, ctx, img, txt, vec)
        x = merge_streams(txt, img, layout)
        for block in model.single_transformer_blocks:
            x = run_block(model, block, ctx, x, vec)
        img = x.index_select(0, layout.image_index)
        return model.proj_out(continuous_norm(model.norm_out, img, vec, ctx.image_vector))
