"""What goes into an adapted model: a sample as a user has it, and the packed batch that the model takes.

Legend: T tokens on a rank (T_img visual, T_txt text), S its sequences, N rows of their texts, C channels, A columns of
a position.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knapformer.balancer import PackedBatch, RoutingStep
from knapformer.integrations.diffusers.patches import Extent


@dataclass(frozen=True, slots=True, eq=False)
class ModelSample:
    """One training sample, its tensors as the model's own forward takes them, without their batch axis.

    Attributes:
        latent: (tokens, channels) for models that read rows, (channels, frames, height, width) or what the model
            takes in its place otherwise. Noisy, as the model is to see it.
        text: (rows, channels) text features.
        timestep: as for the model's forward.
        grid: visual tokens (frames, rows, columns), for models that read rows.
        text_mask: (rows,) which rows of the text are valid; None for all.
        pooled: pooled text vector.
        guidance: guidance strength.
        positions: (text rows kept + tokens, A) in place of the family's own, for reference images, other scales, ...
        target: what the output is compared with, shaped like the output.
        clean: (tokens,) visual tokens that are conditioning, not noisy, and that the model modulates at time 0.
        loss_mask: (tokens,) visual tokens that carry loss; default those that are not clean.
    """

    latent: Tensor
    text: Tensor
    timestep: float | Tensor
    grid: Extent | None = None
    text_mask: Tensor | None = None
    pooled: Tensor | None = None
    guidance: float | Tensor | None = None
    positions: Tensor | None = None
    target: Tensor | None = None
    clean: Tensor | None = None
    loss_mask: Tensor | None = None


class PackedInputs(PackedBatch):
    """Packed samples; once they are routed, an adapted model takes them in place of its usual arguments.

    Tokens: `image` (T, C), `positions` (T, A), `clean` and `loss_mask` (T,) bool, perhaps `target` (T, C_out) and
    `weight`; those of text are zeros, except for positions. Vectors: `timestep`, `grids`, perhaps `guidance` and
    `pooled`. Context: `text` (N, C), whole texts. Visual rows and positions travel with their tokens; a text travels
    whole, once, to every rank that has tokens of its sequence.
    """

    @property
    def image(self) -> Tensor:
        """(T_img, C) visual rows, in the order of `layout.image_index`, as are those of the other visual tensors."""
        return self.visual("image")

    @property
    def clean(self) -> Tensor:
        """(T_img,) visual tokens at time 0."""
        return self.visual("clean")

    @property
    def loss_mask(self) -> Tensor:
        """(T_img,) visual tokens that carry loss; the model does not read it."""
        return self.visual("loss_mask")

    @property
    def target(self) -> Tensor:
        """(T_img, C_out) rows to compare the output with; the model does not read it."""
        return self.visual("target")

    @property
    def weight(self) -> Tensor:
        """(T_img,) what each row of the output counts in the loss, of a batch that is `weighted`."""
        return self.visual("weight")

    @property
    def positions(self) -> Tensor:
        """(T, A) in packed order."""
        return self.tokens["positions"]

    @property
    def timestep(self) -> Tensor:
        """(S,)"""
        return self.vectors["timestep"]

    @property
    def guidance(self) -> Tensor | None:
        """(S,), where the model takes it."""
        return self.vectors.get("guidance")

    @property
    def pooled(self) -> Tensor:
        """(S, C) pooled text, where the model takes it."""
        return self.vectors["pooled"]

    @property
    def text(self) -> Tensor:
        """(N, C) whole texts of the local sequences, the rows of `layout.context`."""
        return self.context["text"]

    @property
    def text_rows(self) -> Tensor:
        """(T_txt,) rows of `text` that are this rank's text tokens, in the order of `layout.text_index`."""
        layout, at = self.layout, self.layout.text_index
        starts = torch.from_numpy(np.cumsum(layout.context.lens) - layout.context.lens).to(at.device)
        sequence = layout.sequence_index.index_select(0, at)
        return starts.index_select(0, sequence) + layout.position.index_select(0, at)

    @property
    def own_text(self) -> Tensor:
        """(T_txt, C) features of this rank's text tokens."""
        return self.text.index_select(0, self.text_rows)

    def unpack(self, model: Any, rows: Tensor, inputs: "PackedInputs", step: RoutingStep | None = None) -> list[Tensor]:
        """Outputs of this rank's samples, shaped as the model's own forward gives them. Collective with a step.

        Without gradients: to train, compare `rows` with `inputs.target` where they are.

        Args:
            model: the adapted model.
            rows: what it returned for `inputs`.
            inputs: what `route` or `local` of this batch gave.
            step: the step of `route`; None after `local`.
        """
        from knapformer.integrations.diffusers.adapter import bare, family_of  # which know the families, which know us

        layout = inputs.layout
        packed = rows.new_zeros(layout.num_tokens, rows.shape[1]).index_copy(0, layout.image_index, rows.detach())
        if step is not None:
            _, packed, _ = step.reverse_route(packed)
        family, inner, outputs = family_of(model), bare(model), []
        grids = self.vectors["grids"].tolist()
        for tokens, num_text, grid in zip(packed.split(self.seq_lens), self.text_lens, grids, strict=True):
            outputs.append(family.unpack(inner, tokens[num_text : num_text + math.prod(grid)], tuple(grid)))
        return outputs
