"""Estimated peak of device memory on each rank [byte]. An estimate to choose limits with, not a promise.

    states       16 byte per parameter over the ranks that share it: fp32 weight, gradient and two moments
    gathered     two layers in 16 bit, and one layer's gradients before they are reduced
    activations  checkpointed: the input of every layer, and one layer whole; else all layers whole
    split        q, k, v and o rows that a rank has for others, with their gradients

A layer whole keeps about 34 byte per token and channel in 16 bit (Korthikanti et al., arXiv 2205.05198, without the
attention scores, which flash kernels do not keep); gradients in flight are counted as half as much again.
Fragmentation, the communication library's buffers and the text encoder are not in it.
"""

import numpy as np

from knapformer.tools.simulate.presets import ModelShape
from knapformer.tools.simulate.program import Floats
from knapformer.tools.simulate.step import StepOptions
from knapformer.tools.simulate.work import StepWork

STATE_BYTES = 16
LAYER_BYTES = 34
GRADIENTS_IN_FLIGHT = 1.5
ELEMENT_BYTES = 2
"""Activations are in 16 bit."""


def peak_memory(work: StepWork, model: ModelShape, options: StepOptions, world_size: int) -> Floats:
    """(R,) estimated peak memory of each rank [byte]."""
    shard_size = world_size if options.shard_size is None else options.shard_size
    largest = float(model.layer_parameters().max())
    fixed = STATE_BYTES * model.parameters / shard_size
    fixed += largest * (2 * options.parameter_bytes + options.gradient_bytes)
    channel = work.tokens * model.d_model
    layer = channel * LAYER_BYTES
    if options.checkpointing:
        activations = ELEMENT_BYTES * channel * model.num_layers + GRADIENTS_IN_FLIGHT * layer
    else:
        activations = layer * (model.num_layers + GRADIENTS_IN_FLIGHT - 1)
    return np.asarray(fixed + activations + split_row_bytes(model) * work.split_rows)


def split_row_bytes(model: ModelShape) -> int:
    """One row of q, k, v or o that a rank has for others, and its gradient [byte]."""
    return 2 * ELEMENT_BYTES * model.head_dim
