"""Packed forwards for models of diffusers: train them on samples of every size, balanced, without buckets.

    model = adapt(FluxTransformer2DModel.from_pretrained(...))     before FSDP2, DDP or accelerate wrap it
    batch = pack(model, samples)                                   whatever this rank loaded, also nothing
    step = balancer.plan_routing(**batch.lengths)                  collective
    inputs = batch.route(step)
    rows = model(inputs)                                           (visual tokens here, channels)

A page per family is in docs/integrations. Needs `pip install knapformer[diffusers]`.
"""

from knapformer.integrations.diffusers.adapter import FAMILIES, adapt, family_of
from knapformer.integrations.diffusers.batch import pack
from knapformer.integrations.diffusers.inputs import ModelSample, PackedInputs
from knapformer.integrations.diffusers.text import TextPadding

__all__ = ["FAMILIES", "ModelSample", "PackedInputs", "TextPadding", "adapt", "family_of", "pack"]
