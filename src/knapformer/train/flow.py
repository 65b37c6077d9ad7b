"""Rectified flow: learn the velocity that carries data to noise along a straight line.

    x_t = (1 - t) * data + t * noise,     target = noise - data,     loss = |model(x_t, t) - target|^2

Noise and time are keyed by (seed, step, sample id) and drawn before routing, by a counter-based generator: any number
of ranks and any planner sees the same noise for the same sample. Times are logit-normal, as in SD3 and FLUX training.
"""

import numpy as np
import torch
from torch import Tensor

_STREAM = 0x6B6E6170  # keeps these draws apart from the sampler's


def draw_noise(shape: tuple[int, ...], *, seed: int, step: int, sample: int) -> tuple[Tensor, float]:
    """Unit normal noise of `shape` in fp32, and a time in (0, 1), for one sample of one step."""
    key = np.array([seed & (2**64 - 1), _STREAM], dtype=np.uint64)
    counter = np.array([0, 0, step, sample], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    time = 1 / (1 + np.exp(-generator.standard_normal()))
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)), float(time)


def interpolate(data: Tensor, noise: Tensor, time: float) -> tuple[Tensor, Tensor]:
    """(x_t, target) of one sample."""
    return (1 - time) * data + time * noise, noise - data
