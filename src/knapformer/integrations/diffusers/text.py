"""Text padding is part of a model's contract: what a model saw in training, it should see in fine-tuning.

keep        what the model's own forward does with the text and mask it is given: models that attend to padding
            (FLUX, SD3, Wan, CogVideoX) keep every row; of models that mask it (HunyuanVideo, Qwen-Image, LTX-Video)
            the rows that nothing can see are left out, which changes no output
strip       only the rows that the mask calls valid
pad_to(k)   valid rows, then rows of padding up to k
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from knapformer.errors import DataError, SpecError


@dataclass(frozen=True, slots=True)
class TextPadding:
    """How text is padded; use `TextPadding.parse`.

    Attributes:
        kind: "keep", "strip" or "pad".
        length: rows that "pad" pads to.
    """

    kind: str
    length: int = 0

    @classmethod
    def parse(cls, spec: "str | TextPadding") -> "TextPadding":
        """From "keep", "strip" or "pad_to(512)"."""
        if isinstance(spec, TextPadding):
            return spec
        if spec in ("keep", "strip"):
            return cls(spec)
        number = spec.removeprefix("pad_to(").removesuffix(")") if isinstance(spec, str) else ""
        if f"pad_to({number})" != spec or not number.isdecimal() or int(number) < 1:
            raise SpecError(f"text padding {spec!r} is unknown; use 'keep', 'strip' or 'pad_to(k)' with a number k")
        return cls("pad", int(number))

    def kept(self, text: Tensor, mask: Tensor | None, *, masks: bool) -> tuple[Tensor, Tensor]:
        """Rows that become tokens, and the position each had.

        Args:
            text: (L, C) features.
            mask: (L,) which rows are valid; None for all.
            masks: whether the model hides invalid rows from attention.

        Raises:
            DataError: for a text or mask that does not fit.
        """
        if text.ndim != 2 or (mask is not None and mask.shape != text.shape[:1]):
            shapes = tuple(text.shape), None if mask is None else tuple(mask.shape)
            raise DataError(
                f"text has shape {shapes[0]} and its mask {shapes[1]}; expected (rows, channels) and (rows,)"
            )
        position = torch.arange(len(text), device=text.device)
        if self.kind != "keep" or masks:
            if mask is None and self.kind == "strip":
                raise DataError("text padding 'strip' needs text_mask, which says which rows of the text are valid")
            if mask is not None:
                position = position[mask.bool()]
        if self.kind != "pad":
            return text.index_select(0, position), position
        missing = self.length - len(position)
        if missing < 0:
            raise DataError(f"a text has {len(position)} rows, more than 'pad_to({self.length})' allows; truncate it")
        padding = text.new_zeros(missing, text.shape[1])
        return torch.cat((text.index_select(0, position), padding)), torch.arange(self.length, device=text.device)
