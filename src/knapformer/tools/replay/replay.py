"""Replay: every rank's share of a step, one rank after the other, on the one device at hand.

A cluster is needed to train on one, not to see how level a plan is. Each rank's share is computed exactly as placed:
its tokens through all layers, attention of its whole sequences, attention of the rows it has of split ones, forward and
backward. What would arrive from other ranks is copied from rows that are here, so exchanges cost a copy but no link.
The slowest rank dictates the step:

    imbalance = max / mean of the measured times,    step = max

It does not measure links, waiting inside a layer, or collectives of parameters; `tools.simulate` models these.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knapformer.attention import Layout, Segments, choose_kernel
from knapformer.errors import SpecError
from knapformer.models import MMDiT, MMDiTConfig
from knapformer.plan import Placement, attention_exchange

CPU_SHAPE = (256, 4, 1, 1, 16.0)
FLUX_SHAPE = (3072, 24, 1, 1, 1.0)
"""Width, heads, double and single blocks, and what lengths are divided by, where the user does not say."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay measured.

    Attributes:
        seconds: per rank, forward and backward of its share: median over the repetitions [s].
    """

    seconds: list[float]

    @property
    def imbalance(self) -> float:
        """max / mean over ranks."""
        return max(self.seconds) * len(self.seconds) / sum(self.seconds)

    @property
    def step_seconds(self) -> float:
        """Time of the slowest rank [s]."""
        return max(self.seconds)


def replay(
    placement: Placement,
    model: MMDiT,
    device: torch.device,
    *,
    repeats: int = 3,
    kernel: str | None = None,
    autocast: torch.dtype | None = None,
) -> Replayed:
    """Measure every rank's share of a placement.

    Args:
        placement: of one step.
        model: on `device`; row cuts are scaled to its number of heads.
        device: where to run.
        repeats: measurements of each rank, after one for warm-up.
        kernel: attention kernel by name; None for the device's default.
        autocast: run in this lower precision; None for that of the weights.
    """
    if repeats < 1:
        raise SpecError(f"repeats is {repeats}; measure each rank at least once")
    placement = placement.with_num_heads(model.config.num_heads)
    seconds = []
    for rank in range(placement.world_size):
        layout = ReplayedLayout(placement, rank, device, kernel)
        inputs = _inputs(model, layout, device)
        times = [_timed(model, inputs, device, autocast) for _ in range(repeats + 1)]
        seconds.append(median(times[1:]))
    return Replayed(seconds)


def replay_model(width: int, num_heads: int, num_double: int, num_single: int, device: torch.device) -> MMDiT:
    """An MMDiT of this shape to replay with. On a CPU torch is set to one thread."""
    head_dim = width // num_heads
    frames = max(2, head_dim // 8 // 2 * 2)  # an eighth of the rotated channels as in FLUX, the rest even
    rows = (head_dim - frames) // 4 * 2
    config = MMDiTConfig(
        in_channels=64,
        text_channels=64,
        pooled_channels=64,
        width=width,
        num_heads=num_heads,
        num_double=num_double,
        num_single=num_single,
        axes_dims=(head_dim - 2 * rows, rows, rows),
    )
    if device.type == "cpu":
        torch.set_num_threads(1)  # its own time then leaves out what other programs take
    with device:
        return MMDiT(config)


def scaled(lengths: Sequence[np.ndarray], texts: Sequence[np.ndarray], scale: float) -> tuple[list[Any], list[Any]]:
    """Lengths and text lengths of all ranks over `scale`, none without a visual token; for small devices."""
    if not scale > 0:
        raise SpecError(f"scale is {scale}; lengths can be divided by a number above 0")
    text = [np.floor(row / scale).astype(np.int64) for row in texts]
    visual = [
        np.maximum(1, np.floor((row - t) / scale)).astype(np.int64) for row, t in zip(lengths, texts, strict=True)
    ]
    return [v + t for v, t in zip(visual, text, strict=True)], text


class ReplayedLayout:
    """A rank's layout without the other ranks: rows that would arrive are copied from those that are here.

    Everything but `attend` is the layout's own.

    Args:
        placement: for the model's number of heads.
        rank: whose view.
        device: where to run.
        kernel: attention kernel by name; None for the device's default.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device, kernel: str | None) -> None:
        self._layout, self._kernel = Layout.of(placement, rank, device, kernel=kernel), kernel
        shards = placement.token_shards
        whole = shards.count[(shards.rank == rank) & ~placement.split[shards.seq]]
        self._whole = Segments.of(whole, whole, device)
        table = attention_exchange(placement, rank)
        self._split = Segments.of(table.q_lens, table.k_lens, device)
        self._head_group, self._rows = table.head_group, table.out.num_target_rows
        self._queries = table.out.num_source_rows
        self._keys = (table.qkv.num_target_rows - self._queries) // 2
        self._any_split = bool(placement.split.any())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def attend(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, *, scale: float | None = None) -> Tensor:
        """Attention of the whole sequences and of the rows this rank has of split ones."""
        kernel = choose_kernel(self._kernel, q_THK.device, q_THK.dtype, head_dim=q_THK.shape[2])
        if not self._any_split:
            return kernel(q_THK, k_THK, v_THK, self._whole, scale)
        num_whole = self._whole.num_q
        (q_1, q), (k_1, k), (v_1, v) = (x.split((num_whole, len(x) - num_whole)) for x in (q_THK, k_THK, v_THK))
        o_whole = kernel(q_1, k_1, v_1, self._whole, scale)
        counts = ((q, self._queries), (k, self._keys), (v, self._keys))
        q, k, v = (_filled(x.reshape(-1, self._head_group, x.shape[2]), count) for x, count in counts)
        o_split = _filled(kernel(q, k, v, self._split, scale), self._rows)
        return torch.cat([o_whole, o_split.reshape(-1, *q_THK.shape[1:])])


def _filled(rows: Tensor, count: int) -> Tensor:
    """`count` rows, those that are there over and over; zeros, still in the graph, where there are none."""
    if not len(rows):
        return rows.new_zeros(count, *rows.shape[1:]) + rows.sum()
    return rows.index_select(0, torch.arange(count, device=rows.device) % len(rows))


def _inputs(model: MMDiT, layout: ReplayedLayout, device: torch.device) -> tuple[Any, ...]:
    config, generator = model.config, torch.Generator().manual_seed(0)
    shapes = (
        (len(layout.image_index), config.in_channels),
        (len(layout.text_index), config.text_channels),
        (layout.num_sequences,),
        (layout.num_sequences, config.pooled_channels),
    )
    drawn = [torch.rand(shape, generator=generator).to(device) for shape in shapes]
    positions = torch.zeros(layout.num_tokens, 3, dtype=torch.int32, device=device)
    guidance = (torch.ones(layout.num_sequences, device=device),) if config.guidance else ()
    return (*drawn, positions, layout, *guidance)


def _timed(model: MMDiT, inputs: tuple[Any, ...], device: torch.device, autocast: torch.dtype | None) -> float:
    """Forward and backward of one rank's share [s]: wall time, or the thread's CPU time where torch has one thread."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    _synchronize(device)
    start = clock()
    with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        out = model(*inputs)
    out.float().square().sum().backward()
    _synchronize(device)
    elapsed = clock() - start
    model.zero_grad(set_to_none=True)
    return elapsed


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
