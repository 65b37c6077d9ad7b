"""Reference for packed models: plain attention per sequence on one device, and wrong layouts that must be noticed.

A batch is a list of `Sample`s. `run_packed` packs it, in any token order, and runs it in one call; `run_alone` runs one
sample at a time and adds up the parameter gradients. Both return the same `Result`, per sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig

Lengths = Sequence[tuple[int, int]]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Every row of (T, H, K) tensors attends to every row."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class LoopLayout:
    """Attention sequence by sequence. `members` are the packed positions of each sequence."""

    num_tokens: int
    num_sequences: int
    sequence_index: Tensor
    text_index: Tensor
    image_index: Tensor
    members: tuple[Tensor, ...]

    @classmethod
    def build(cls, lengths: Lengths, permutation: Tensor | None = None) -> Self:
        """Layout of (text, image) lengths; packed position p holds token permutation[p] of the joint order."""
        total = sum(text + image for text, image in lengths)
        sequence, is_text = [], []
        for index, (text, image) in enumerate(lengths):
            sequence += [index] * (text + image)
            is_text += [True] * text + [False] * image
        permutation = torch.arange(total) if permutation is None else permutation
        sequence_index = torch.tensor(sequence, dtype=torch.int64)[permutation]
        text_mask = torch.tensor(is_text, dtype=torch.bool)[permutation]
        return cls(
            num_tokens=total,
            num_sequences=len(lengths),
            sequence_index=sequence_index,
            text_index=text_mask.nonzero().flatten(),
            image_index=(~text_mask).nonzero().flatten(),
            members=tuple((sequence_index == index).nonzero().flatten() for index in range(len(lengths))),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        # The empty group keeps q, k and v in the graph when there is no sequence.
        groups = [*self.members, torch.empty(0, dtype=torch.int64)]
        parts = [dense_attention(q[group], k[group], v[group], scale) for group in groups]
        return torch.cat(parts)[torch.cat(groups).argsort()]


@dataclass(frozen=True, kw_only=True)
class LeakyLayout(LoopLayout):
    """Wrong: tokens attend to those of all sequences."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        return dense_attention(q, k, v, scale)


@dataclass(frozen=True, kw_only=True)
class ShiftedIndexLayout(LoopLayout):
    """Wrong: tokens get the vectors of the next sequence, attention is right."""

    @classmethod
    def build(cls, lengths: Lengths, permutation: Tensor | None = None) -> Self:
        right = LoopLayout.build(lengths, permutation)
        return cls(**{**vars(right), "sequence_index": (right.sequence_index + 1) % max(len(lengths), 1)})


@dataclass(frozen=True, kw_only=True)
class LateStreamLayout(LoopLayout):
    """Wrong: visual positions are off by one among themselves, so rows meet the wrong angles and neighbours."""

    @classmethod
    def build(cls, lengths: Lengths, permutation: Tensor | None = None) -> Self:
        right = LoopLayout.build(lengths, permutation)
        return cls(**{**vars(right), "image_index": right.image_index.roll(1)})


@dataclass(frozen=True)
class Sample:
    """Inputs of one sequence, leaves that collect gradients, and the weights of its outputs in the loss."""

    img: Tensor
    txt: Tensor
    timestep: Tensor
    pooled: Tensor
    guidance: Tensor
    ids: Tensor
    loss_weight: Tensor

    @property
    def lengths(self) -> tuple[int, int]:
        return self.txt.shape[0], self.img.shape[0]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.img, self.txt, self.timestep, self.pooled, self.guidance


@dataclass(frozen=True)
class Result:
    """Outputs and input gradients per sample, and parameter gradients by name."""

    outputs: list[Tensor]
    input_grads: list[list[Tensor | None]]
    param_grads: dict[str, Tensor | None]


def make_samples(
    config: MMDiTConfig | DiTConfig, lengths: Lengths, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Sample]:
    """Random samples of (text, image) lengths; positions grow without pattern, text sits at 0."""
    g = torch.Generator().manual_seed(seed)
    text_channels = config.text_channels if isinstance(config, MMDiTConfig) else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    samples = []
    for text, image in lengths:
        ids = torch.cat((torch.zeros(text, 3, dtype=torch.int64), torch.randint(0, 50, (image, 3), generator=g)))
        leaves = (
            normal(image, config.in_channels),
            normal(text, text_channels),
            torch.rand(1, generator=g, dtype=torch.float64).to(dtype),
            normal(1, config.pooled_channels),
            torch.rand(1, generator=g, dtype=torch.float64).to(dtype),
        )
        # Sums of sums stay of order one, so absolute tolerances mean the same for all lengths.
        loss_weight = normal(image, config.num_out_channels) / max(image, 1) ** 0.5
        samples.append(Sample(*(leaf.requires_grad_() for leaf in leaves), ids=ids, loss_weight=loss_weight))
    return samples


def empty_like(config: MMDiTConfig | DiTConfig, dtype: torch.dtype) -> Sample:
    """A sample cut to no rows at all: gives `torch.cat` shapes when a rank has no sequence."""
    (sample,) = make_samples(config, [(0, 0)], dtype=dtype)
    return Sample(*(leaf.detach()[:0] for leaf in sample.leaves), ids=sample.ids, loss_weight=sample.loss_weight)


def call(model: MMDiT | DiT, img: Tensor, txt: Tensor, per_sequence: list[Tensor], ids: Tensor, layout) -> Tensor:
    timestep, pooled, guidance = per_sequence
    if isinstance(model, DiT):
        return model(img, timestep, pooled, ids, layout)
    return model(img, txt, timestep, pooled, ids, layout, guidance if model.config.guidance else None)


def forward_packed(
    model: MMDiT | DiT,
    samples: list[Sample],
    permutation: Tensor | None = None,
    layout_type: type[LoopLayout] = LoopLayout,
) -> list[Tensor]:
    """Outputs per sample of one packed call."""
    lengths = [sample.lengths for sample in samples]
    layout = layout_type.build(lengths, permutation)
    right = LoopLayout.build(lengths, permutation)
    joint = LoopLayout.build(lengths)
    order = torch.arange(joint.num_tokens) if permutation is None else permutation
    # Row of every joint token among the tokens of its kind, in sample order.
    row = torch.empty(joint.num_tokens, dtype=torch.int64)
    row[joint.text_index] = torch.arange(joint.text_index.numel())
    row[joint.image_index] = torch.arange(joint.image_index.numel())
    img_rows, txt_rows = row[order[right.image_index]], row[order[right.text_index]]

    dtype = next(model.parameters()).dtype
    parts = [*samples, empty_like(model.config, dtype)]
    img, txt, *per_sequence = (torch.cat(leaves) for leaves in zip(*(part.leaves for part in parts), strict=True))
    ids = torch.cat([part.ids for part in parts])[order]
    out = call(model, img[img_rows], txt[txt_rows], per_sequence, ids, layout)
    return list(out[img_rows.argsort()].split([sample.img.shape[0] for sample in samples])) if samples else [out]


def collect(model: MMDiT | DiT, samples: list[Sample], outputs: list[Tensor]) -> Result:
    """Back-propagate the sum-type loss, and read and reset all gradients."""
    weights = [sample.loss_weight for sample in samples] or outputs
    loss = sum(((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)), start=torch.zeros(()))
    loss.backward()
    result = Result(
        [out.detach() for out in outputs],
        [[leaf.grad for leaf in sample.leaves] for sample in samples],
        {name: param.grad for name, param in model.named_parameters()},
    )
    model.zero_grad(set_to_none=True)
    for sample in samples:
        for leaf in sample.leaves:
            leaf.grad = None
    return result


def run_packed(
    model: MMDiT | DiT,
    samples: list[Sample],
    permutation: Tensor | None = None,
    layout_type: type[LoopLayout] = LoopLayout,
) -> Result:
    return collect(model, samples, forward_packed(model, samples, permutation, layout_type))


def run_alone(model: MMDiT | DiT, samples: list[Sample]) -> Result:
    return collect(model, samples, [forward_packed(model, [sample])[0] for sample in samples])


def error(got: Tensor | None, expected: Tensor | None) -> float:
    """Largest deviation, relative to the largest expected value; a missing gradient matches only a missing one."""
    if got is None or expected is None:
        return 0.0 if got is expected else float("inf")
    if got.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = expected.double().abs().max().clamp_min(1e-3)
    return float(((got.double() - expected.double()).abs().max() / scale).nan_to_num(float("inf")))


def errors(got: Result, expected: Result) -> dict[str, float]:
    """Largest error of outputs, of input gradients and of parameter gradients."""
    return {
        "outputs": max(map(error, got.outputs, expected.outputs), default=0.0),
        "input_grads": max(
            (
                error(a, b)
                for grads in zip(got.input_grads, expected.input_grads, strict=True)
                for a, b in zip(*grads, strict=True)
            ),
            default=0.0,
        ),
        "param_grads": max(error(got.param_grads[name], grad) for name, grad in expected.param_grads.items()),
    }
