"""From samples to packed inputs: `pack` at home, `route` to where the plan wants the tokens, `unpack` at home again.

    samples --pack--> HomeBatch --route(step)--> PackedInputs --model--> rows --unpack--> latents

Visual rows and positions travel with their tokens. Text travels as context, whole, to every rank that has tokens of its
sequence, once; where text is part of the sequence, a rank takes the rows it holds from there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knapformer.attention import Layout
from knapformer.balancer import RoutingStep
from knapformer.errors import DataError
from knapformer.integrations.diffusers.adapter import bare, family_of
from knapformer.integrations.diffusers.family import Family, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs, Sample
from knapformer.integrations.diffusers.patches import Grid
from knapformer.integrations.diffusers.text import TextPadding

LOSS, CLEAN = 1, 2  # bits of a token's flags


@dataclass(frozen=True, slots=True, eq=False)
class HomeBatch:
    """What a rank's samples are packed to. `plan_routing(**batch.lengths)` plans it.

    Attributes:
        seq_lens, text_lens, context_lens: tokens of each sequence, its text tokens, rows of its text.
        tokens: image, positions, flags and perhaps target: one row per token at home; zeros for text.
        text: (N, C) texts one after another.
        vectors: timestep and perhaps guidance, pooled: one row per sequence, by name.
        grids: visual tokens of each sample.
    """

    seq_lens: list[int]
    text_lens: list[int]
    context_lens: list[int]
    tokens: dict[str, Tensor]
    text: Tensor
    vectors: dict[str, Tensor]
    grids: list[Grid]

    @property
    def lengths(self) -> dict[str, list[int]]:
        """Arguments of `plan_routing`."""
        return {"seq_lens": self.seq_lens, "text_lens": self.text_lens, "context_lens": self.context_lens}

    def route(self, step: RoutingStep) -> PackedInputs:
        """Move everything to where the step's plan wants it. Collective."""
        first, *others = self.tokens.values()
        _, image, features = step.route(first, others)
        (text,) = step.deliver_context(self.text)
        return self._inputs(step.layout, [image, *(features or [])], text, step.deliver(*self.vectors.values()))

    def local(self, *, kernel: str | None = None) -> PackedInputs:
        """Inputs of one process, without a balancer."""
        lens = self.seq_lens, self.text_lens, self.context_lens
        layout = Layout.local(*lens, device=self.text.device, kernel=kernel)
        return self._inputs(layout, list(self.tokens.values()), self.text, list(self.vectors.values()))

    def _inputs(self, layout: Layout, tokens: list[Tensor], text: Tensor, vectors: Sequence[Tensor]) -> PackedInputs:
        rows = dict(zip(self.tokens, tokens, strict=True))
        positions = rows.pop("positions")
        visual = {name: row.index_select(0, layout.image_index) for name, row in rows.items()}
        flags = visual.pop("flags")
        loss_mask, clean = (flags & LOSS).bool(), (flags & CLEAN).bool()
        per_sequence = dict(zip(self.vectors, vectors, strict=True))
        return PackedInputs(
            layout, text=text, positions=positions, clean=clean, loss_mask=loss_mask, **visual, **per_sequence
        )

    def unpack(self, model: Any, rows: Tensor, inputs: PackedInputs, step: RoutingStep | None = None) -> list[Tensor]:
        """Outputs of this rank's samples, shaped as the model's own forward gives them. Collective with a step.

        Without gradients: to train, compare `rows` with `inputs.target` where they are.

        Args:
            model: the adapted model.
            rows: what it returned for `inputs`.
            inputs: what it was given.
            step: the step of `route`; None after `local`.
        """
        layout = inputs.layout
        packed = rows.new_zeros(layout.num_tokens, rows.shape[1])
        packed = packed.index_copy(0, layout.image_index, rows.detach())
        if step is not None:
            _, packed, _ = step.reverse_route(packed)
        family, inner, outputs = family_of(model), bare(model), []
        for tokens, text, grid in zip(packed.split(self.seq_lens), self.text_lens, self.grids, strict=True):
            outputs.append(family.unpack(inner, tokens[text : text + math.prod(grid)], grid))
        return outputs


def pack(
    model: Any,
    samples: Sequence[Sample],
    *,
    text_padding: str | TextPadding = "keep",
    targets: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> HomeBatch:
    """Pack this rank's samples, any number of them and also none.

    Args:
        model: an adapted model, wrapped or not.
        samples: what the rank's loader produced.
        text_padding: "keep", "strip" or "pad_to(k)"; see `knapformer.integrations.diffusers.text`.
        targets: pack the samples' targets too. The same on every rank.
        dtype: of latents, texts and targets as they travel; default that of the model's parameters.
        device: default that of the model's parameters.

    Raises:
        DataError: for a sample that does not fit the model.
    """
    family, inner = family_of(model), bare(model)
    widths, padding = family.widths(inner), TextPadding.parse(text_padding)
    # diffusers' own notion of a model's dtype passes over the parts that stay in fp32.
    kind = dtype or (inner.dtype if inner.dtype.is_floating_point else torch.float32)
    where = torch.device(device or next(inner.parameters()).device)
    parts = [_pack_one(family, inner, widths, sample, padding, targets=targets) for sample in samples]

    def joined(name: str, width: int | None, of: torch.dtype) -> Tensor:
        empty = torch.zeros((0,) if width is None else (0, width), dtype=of, device=where)
        return torch.cat([empty, *(part.tensors[name].to(empty) for part in parts)])

    precise = torch.promote_types(kind, torch.float32)  # times are not rounded to half precision
    vectors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"timestep": ((), precise)}
    if widths.guidance:
        vectors["guidance"] = (), precise
    if widths.pooled is not None:
        vectors["pooled"] = (widths.pooled,), kind
    tokens = {
        "image": joined("image", widths.image, kind),
        "positions": joined("positions", widths.axes, family.position_dtype),
        "flags": joined("flags", None, torch.uint8),
    }
    if targets:
        tokens["target"] = joined("target", widths.out, kind)
    return HomeBatch(
        [part.num_tokens for part in parts],
        [part.num_text for part in parts],
        [len(part.tensors["text"]) for part in parts],
        tokens,
        joined("text", widths.text, kind),
        {name: _vector(name, samples, *of, where) for name, of in vectors.items()},
        [part.grid for part in parts],
    )


class _Packed(NamedTuple):
    """One sample's rows. Those of text come first, and are zeros, in all but `text` itself."""

    tensors: dict[str, Tensor]
    num_tokens: int
    num_text: int
    grid: Grid


def _pack_one(
    family: Family, model: Any, widths: Widths, sample: Sample, padding: TextPadding, *, targets: bool
) -> _Packed:
    kept, text_at = padding.kept(sample.text, sample.text_mask, masks=family.masks_text)
    text, grid = family.mark(kept), family.grid(model, sample)
    image = family.mark(family.rows(model, sample.latent))
    num_text = len(text) if family.joint else 0
    num_tokens = num_text + len(image)
    if sample.positions is not None and not family.own_positions:
        raise DataError(f"{family.model_class} counts positions itself; a sample must bring none")
    positions = family.positions(model, grid, text_at.cpu()) if sample.positions is None else sample.positions
    found = {"text": text, "latent": image, "positions": positions}
    wanted = {"text": (len(text), widths.text), "latent": (len(image), widths.image)}
    wanted["positions"] = num_tokens, widths.axes
    rows = {"image": image, "flags": family.pad(_flags(family, model, sample, math.prod(grid))[:, None])[:, 0]}
    if targets:
        if sample.target is None:
            raise DataError("pack was called with targets=True, but a sample has no target")
        rows["target"] = found["target"] = family.pad(family.rows(model, sample.target, output=True))
        wanted["target"] = len(image), widths.out
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise DataError(
                f"the {name} of a sample becomes rows of shape {tuple(found[name].shape)}; {family.model_class} "
                f"expects {shape}"
            )
    shifted = {name: torch.cat((row.new_zeros(num_text, *row.shape[1:]), row)) for name, row in rows.items()}
    return _Packed({**shifted, "text": text, "positions": positions}, num_tokens, num_text, grid)


def _flags(family: Family, model: Any, sample: Sample, count: int) -> Tensor:
    """(tokens,) bits of each visual token."""
    if sample.clean is not None and not family.takes_clean(model):
        raise DataError(f"this {family.model_class} modulates all tokens alike; a sample must have no clean ones")
    clean = torch.zeros(count, dtype=torch.bool) if sample.clean is None else sample.clean.bool().cpu()
    loss = ~clean if sample.loss_mask is None else sample.loss_mask.bool().cpu()
    if clean.shape != (count,) or loss.shape != (count,):
        raise DataError(
            f"clean and loss_mask of a sample have shapes {tuple(clean.shape)} and {tuple(loss.shape)}; expected one "
            f"entry for each of its {count} visual tokens"
        )
    return loss * LOSS + clean.to(torch.uint8) * CLEAN


def _vector(
    name: str, samples: Sequence[Sample], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(S, ...) one row per sample."""
    rows = [torch.zeros(0, *shape, dtype=dtype, device=device)]
    for sample in samples:
        value = getattr(sample, name)
        if value is None:
            raise DataError(f"the model takes {name}, but a sample has none")
        rows.append(torch.as_tensor(value, dtype=dtype, device=device).reshape(1, *shape))
    return torch.cat(rows)
