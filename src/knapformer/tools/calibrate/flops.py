"""FLOP of a layer, counted by torch on the meta device: no constant of ours, no work, no memory.

A layer's FLOP are  sequences * a + tokens * b + query-key pairs * c  exactly, so three packs tell the three. On other
devices torch does not see the FLOP of every attention kernel, so layers are copied to the meta device for counting.
"""

from copy import copy, deepcopy

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from knapformer.data.profile import PHASES, Flops
from knapformer.tools.calibrate.layers import Layers

_LENGTHS = (64, 128, 256)


def count_flops(layers: Layers) -> dict[str, Flops]:
    """FLOP of one layer by phase, wherever the layers are."""
    counted = copy(layers)
    counted.module = deepcopy(layers.module).to("meta")
    counts = np.array([_count(counted, length) for length in _LENGTHS])
    columns = np.array([(1, length, layers.shape.num_heads * length**2) for length in _LENGTHS], dtype=np.float64)
    # Counts are whole numbers of FLOP, and so are the prices, but for layers counted together.
    prices = np.linalg.solve(columns, counts).round(3).T.tolist()
    return {
        phase: Flops(token=token, per_qk_pair=per_qk_pair, sequence=sequence)
        for phase, (sequence, token, per_qk_pair) in zip(PHASES, prices, strict=True)
    }


def _count(layers: Layers, length: int) -> list[float]:
    """FLOP per layer by phase."""
    layout = layers.layout((length,), "sdpa_loop")
    inputs = layers.inputs(layout)
    with FlopCounterMode(display=False) as forward:
        output = layers.run(layout, *inputs)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(output, layers.leaves(inputs), torch.empty_like(output), allow_unused=True)
    totals = [forward.get_total_flops(), forward.get_total_flops(), backward.get_total_flops()]
    return [total / layers.shape.num_layers for total in totals]
