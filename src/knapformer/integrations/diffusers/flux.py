"""FLUX.1: double-stream, then single-stream blocks over [text, image], positions (0, row, column), text at 0.

Attends to all text rows, padding included: 512 rows of T5 for the released models. `guidance_embeds` (dev) needs a
guidance strength per sample; schnell takes none.
"""

from typing import Any

from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.joint import blocks_of, double_block, run_joint, single_block
from knapformer.integrations.diffusers.ops import BlockContext, continuous_norm


class Flux(Family):
    """`FluxTransformer2DModel`."""

    model_class = "FluxTransformer2DModel"
    modules = "x_embedder context_embedder time_text_embed pos_embed norm_out.linear proj_out"
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

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return blocks_of(model, double_block, single_block)

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        dtype = model.x_embedder.weight.dtype
        img = model.x_embedder(inputs.image.to(dtype))
        txt = model.context_embedder(inputs.own_text.to(dtype))
        times = [t.to(dtype) * 1000 for t in (inputs.timestep, inputs.guidance) if t is not None]
        vec = model.time_text_embed(*times, inputs.pooled.to(dtype))
        ctx = BlockContext(inputs.layout, Rotation.of_channels(*model.pos_embed(inputs.positions)))
        img = run_joint(model, ctx, img, txt, [vec], [vec])
        return model.proj_out(continuous_norm(model.norm_out, img, vec, ctx.image_vector))
