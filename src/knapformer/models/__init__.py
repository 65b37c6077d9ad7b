"""Packed diffusion transformers: `MMDiT` (FLUX layout) and `DiT`, with no batch axis and no knowledge of ranks.

Reading order: `packed` (what a model asks of a layout), `dit` (the shortest complete model), `mmdit` (two streams),
then `conditioning`, `rope`, `layers`, `init` as needed.
"""

from knapformer.models.config import BackboneConfig, CostShape
from knapformer.models.dit import DiT, DiTBlock, DiTConfig
from knapformer.models.layers import PackedModel
from knapformer.models.mmdit import DoubleStreamBlock, MMDiT, MMDiTConfig, SingleStreamBlock
from knapformer.models.packed import PackedLayout, merge_streams, split_streams
from knapformer.models.rope import Rotation, rotate, rotation_from_ids

__all__ = [
    "BackboneConfig",
    "CostShape",
    "DiT",
    "DiTBlock",
    "DiTConfig",
    "DoubleStreamBlock",
    "MMDiT",
    "MMDiTConfig",
    "PackedLayout",
    "PackedModel",
    "Rotation",
    "SingleStreamBlock",
    "merge_streams",
    "rotate",
    "rotation_from_ids",
    "split_streams",
]
