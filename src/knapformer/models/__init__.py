"""Packed diffusion transformers: `MMDiT` (FLUX layout), `DiT` and `CrossDiT` (Wan-like), unaware of batches and ranks.

Reading order: `packed` (what a model asks of a layout), `dit` (the shortest complete model), `mmdit` (two streams),
`cross_dit` (text beside the sequences), then `conditioning`, `rope`, `layers`, `init` as needed.
"""

from knapformer.attention.rotation import Rotation, rotate
from knapformer.attention.rows import merge_streams, split_streams
from knapformer.models.compiled import compile_blocks, piece
from knapformer.models.config import BackboneConfig, CostShape
from knapformer.models.cross_dit import CrossDiT, CrossDiTBlock, CrossDiTConfig, CrossLayout
from knapformer.models.dit import DiT, DiTBlock, DiTConfig
from knapformer.models.layers import PackedModel
from knapformer.models.mmdit import DoubleStreamBlock, MMDiT, MMDiTConfig, SingleStreamBlock
from knapformer.models.packed import PackedLayout, TokenIndex
from knapformer.models.rope import rotation_from_ids

__all__ = [
    "BackboneConfig",
    "CostShape",
    "CrossDiT",
    "CrossDiTBlock",
    "CrossDiTConfig",
    "CrossLayout",
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
    "TokenIndex",
    "compile_blocks",
    "merge_streams",
    "piece",
    "rotate",
    "rotation_from_ids",
    "split_streams",
]
