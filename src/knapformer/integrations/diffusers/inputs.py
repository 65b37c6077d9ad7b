"""What goes into an adapted model: a sample as a user has it, and packed inputs as the model takes them.

Legend: T tokens on a rank, S its sequences, N rows of their texts, A columns of a position.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knapformer.attention import Layout
from knapformer.errors import DataError
from knapformer.integrations.diffusers.patches import Grid


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
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
    grid: Grid | None = None
    text_mask: Tensor | None = None
    pooled: Tensor | None = None
    guidance: float | Tensor | None = None
    positions: Tensor | None = None
    target: Tensor | None = None
    clean: Tensor | None = None
    loss_mask: Tensor | None = None


class PackedInputs:
    """What an adapted model takes in place of its usual arguments.

    A plain class on purpose: FSDP2 would round timesteps and positions of a dataclass to its compute dtype.

    Args:
        layout: where each token belongs, and attention.
        image: (T_img, C) visual rows, in the order of `layout.image_index`.
        text: (N, C) whole texts of the local sequences, the rows of `layout.context`.
        positions: (T, A) in packed order.
        timestep, guidance: (S,).
        pooled: (S, C).
        clean: (T_img,) visual tokens at time 0; default none.
        target: (T_img, C_out) rows to compare the output with; the model does not read it.
        loss_mask: (T_img,) visual tokens that carry loss; the model does not read it.
    """

    def __init__(
        self,
        layout: Layout,
        image: Tensor,
        text: Tensor,
        positions: Tensor,
        timestep: Tensor,
        *,
        guidance: Tensor | None = None,
        pooled: Tensor | None = None,
        clean: Tensor | None = None,
        target: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.image = image
        self.text = text
        self.positions = positions
        self.timestep = timestep
        self.guidance = guidance
        self._pooled = pooled
        none = torch.zeros(len(image), dtype=torch.bool, device=image.device)
        self.clean = none if clean is None else clean
        self.target = target
        self.loss_mask = ~none if loss_mask is None else loss_mask

    @property
    def pooled(self) -> Tensor:
        """Pooled text vectors. Raises `DataError` if there are none: only models that need them ask."""
        if self._pooled is None:
            raise DataError("the model takes pooled text, but its inputs have none; give each sample its own")
        return self._pooled

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
