"""Replay: every rank's share of a step, one rank after the other, on the one device at hand.

A cluster is needed to train on one, not to see how level a plan is. Each rank's share is computed exactly as placed:
its tokens through all layers, attention of its whole sequences, attention of the rows it has of split ones, forward and
backward. What would arrive from other ranks is copied from rows that are here, so exchanges cost a copy but no link.
The slowest rank dictates the step:

    imbalance = max / mean of the measured times,    step = max

It does not measure links, waiting inside a layer, or collectives of parameters; `tools.simulate` models these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knapformer.attention import Layout, Segments, choose_kernel
from knapformer.data import Trace
from knapformer.errors import SpecError
from knapformer.models import MMDiT, MMDiTConfig
from knapformer.plan import Placement, Sequences, attention_exchange
from knapformer.train.clock import Clock


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """The MMDiT to replay with, and what lengths are divided by.

    Attributes:
        width, num_heads, num_double, num_single: of the model.
        scale: lengths are divided by it, for small devices.
    """

    width: int
    num_heads: int
    num_double: int
    num_single: int
    scale: float

    @classmethod
    def of(cls, device: torch.device, given: Mapping[str, Any]) -> "ReplayShape":
        """By default FLUX's blocks, one of each kind, on CUDA; a small model and short lengths on a CPU."""
        default = cls(3072, 24, 1, 1, 1.0) if device.type == "cuda" else cls(256, 4, 1, 1, 16.0)
        return replace(default, **{name: value for name, value in given.items() if value is not None})


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


class Replay:
    """Measures every rank's share of placements.

    Args:
        model: on `device`; row cuts are scaled to its number of heads.
        device: where to run, in bfloat16 on CUDA. On a CPU torch is set to one thread, whose own time leaves out what
            other programs take.
        repeats: measurements of each rank, after one for warm-up; the median counts.
        kernel: attention kernel by name; None for the device's default.
    """

    def __init__(self, model: MMDiT, device: torch.device, *, repeats: int = 3, kernel: str | None = None) -> None:
        if repeats < 1:
            raise SpecError(f"repeats is {repeats}; measure each rank at least once")
        if device.type == "cpu":
            torch.set_num_threads(1)
        self.model, self.device, self.repeats, self.kernel = model, device, repeats, kernel
        self._clock = Clock(device)

    def __call__(self, placement: Placement) -> Replayed:
        """Measure the placement of one step."""
        placement = placement.with_num_heads(self.model.config.num_heads)
        seconds = []
        for rank in range(placement.world_size):
            layout = ReplayedLayout(placement, rank, self.device, self.kernel)
            inputs = _inputs(self.model, layout, self.device)
            times = [self._timed(inputs) for _ in range(self.repeats + 1)]
            seconds.append(median(times[1:]))
        return Replayed(seconds)

    def _timed(self, inputs: tuple[Any, ...]) -> float:
        """Forward and backward of one rank's share [s]."""
        clock, device = self._clock, self.device.type
        clock.settle()
        start = clock.mark()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            out = self.model(*inputs)
        out.float().square().sum().backward()
        stop = clock.mark()
        clock.settle()
        self.model.zero_grad(set_to_none=True)
        return clock.seconds(start, stop)


def replay_model(shape: ReplayShape, device: torch.device) -> MMDiT:
    """An MMDiT of this shape to replay with."""
    head_dim = shape.width // max(shape.num_heads, 1)
    frames = max(2, head_dim // 8 // 2 * 2)  # an eighth of the rotated channels as in FLUX, the rest even
    rows = (head_dim - frames) // 4 * 2
    config = MMDiTConfig(
        in_channels=64,
        text_channels=64,
        pooled_channels=64,
        width=shape.width,
        num_heads=shape.num_heads,
        num_double=shape.num_double,
        num_single=shape.num_single,
        axes_dims=(head_dim - 2 * rows, rows, rows),
    )
    with device:
        return MMDiT(config)


def scaled(trace: Trace, index: int, scale: float) -> Sequences:
    """Sequences of a trace's step, their lengths over `scale`, none without a visual token."""
    if not scale > 0:
        raise SpecError(f"scale is {scale}; lengths can be divided by a number above 0")
    step = trace.steps[index]
    texts = [np.floor(row / scale).astype(np.int64) for row in step.text_lens]
    visuals = [
        np.maximum(1, np.floor((row - text) / scale)).astype(np.int64)
        for row, text in zip(step.seq_lens, step.text_lens, strict=True)
    ]
    lengths = [visual + text for visual, text in zip(visuals, texts, strict=True)]
    return Sequences.from_ranks(lengths, texts if trace.text == "joint" else None)


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
