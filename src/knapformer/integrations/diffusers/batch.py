"""From samples to packed inputs.

samples --pack--> PackedInputs at home --route(step)--> PackedInputs here --model--> rows --unpack--> latents
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer.errors import DataError
from knapformer.integrations.diffusers.adapter import bare, family_of
from knapformer.integrations.diffusers.family import Family
from knapformer.integrations.diffusers.inputs import ModelSample, PackedInputs
from knapformer.integrations.diffusers.text import TextPadding


def pack(
    model: Any,
    samples: Sequence[ModelSample],
    *,
    text_padding: str | TextPadding = "keep",
    targets: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedInputs:
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
    family, inner, padding = family_of(model), bare(model), TextPadding.parse(text_padding)
    # diffusers' own notion of a model's dtype passes over the modules that stay in fp32.
    kind = dtype or (inner.dtype if inner.dtype.is_floating_point else torch.float32)
    like = _no_samples(family, inner, kind, targets=targets).to(device or next(inner.parameters()).device)
    return PackedInputs.join([_pack_one(family, inner, sample, padding, like) for sample in samples], like=like)


def _no_samples(family: Family, model: Any, dtype: torch.dtype, *, targets: bool) -> PackedInputs:
    """A batch without samples, which has the tensors and the channels of any other."""
    widths = family.widths(model)
    precise = torch.promote_types(dtype, torch.float32)  # times are not rounded to half precision

    def no_rows(dtype: torch.dtype, *width: int) -> Tensor:
        return torch.zeros(0, *width, dtype=dtype)

    tokens = {
        "image": no_rows(dtype, widths.image),
        "positions": no_rows(family.position_dtype, widths.axes),
        "clean": no_rows(torch.bool),
        "loss_mask": no_rows(torch.bool),
    }
    if targets:
        tokens["target"] = no_rows(dtype, widths.out)
    vectors = {"grids": no_rows(torch.int32, 3), "timestep": no_rows(precise)}
    if widths.guidance:
        vectors["guidance"] = no_rows(precise)
    if widths.pooled is not None:
        vectors["pooled"] = no_rows(dtype, widths.pooled)
    return PackedInputs(tokens, vectors, {"text": no_rows(dtype, widths.text)}, seq_lens=[])


def _pack_one(
    family: Family, model: Any, sample: ModelSample, padding: TextPadding, like: PackedInputs
) -> PackedInputs:
    """One sequence, with tensors as in `like`. Rows of text come first, and are zeros, in all but `text` itself."""
    kept, text_at = padding.kept(sample.text, sample.text_mask, masks=family.masks_text)
    text, grid = family.mark(kept), family.grid(model, sample)
    visual = {"image": family.mark(family.rows(model, sample.latent)), **_masks(family, model, sample, math.prod(grid))}
    num_text, num_visual = len(text) if family.joint else 0, len(visual["image"])
    if "target" in like.tokens:
        if sample.target is None:
            raise DataError("pack was called with targets=True, but a sample has no target")
        visual["target"] = family.pad(family.rows(model, sample.target, output=True))
    if sample.positions is not None and not family.own_positions:
        raise DataError(f"{family.model_class} counts positions itself; a sample must bring none")
    positions = family.positions(model, grid, text_at.cpu()) if sample.positions is None else sample.positions

    def fit(name: str, rows: Tensor, of_like: Tensor, num_rows: int) -> Tensor:
        expected = (num_rows, *of_like.shape[1:])
        if tuple(rows.shape) != expected:
            raise DataError(
                f"the {'latent' if name == 'image' else name} of a sample becomes rows of shape {tuple(rows.shape)}; "
                f"{family.model_class} expects {expected}"
            )
        return rows.to(of_like)

    text = fit("text", text, like.context["text"], len(text))
    tokens = {"positions": fit("positions", positions, like.tokens["positions"], num_text + num_visual)}
    for name, rows in visual.items():
        rows = fit(name, rows, like.tokens[name], num_visual)
        tokens[name] = torch.cat((rows.new_zeros(num_text, *rows.shape[1:]), rows))
    vectors = {"grids": like.vectors["grids"].new_tensor([grid])}
    for name in like.vectors.keys() - {"grids"}:
        value = getattr(sample, name)
        if value is None:
            raise DataError(f"the model takes {name}, but a sample has none")
        row = like.vectors[name]
        vectors[name] = torch.as_tensor(value, dtype=row.dtype, device=row.device).reshape(1, *row.shape[1:])
    return PackedInputs(tokens, vectors, {"text": text}, text_lens=[num_text])


def _masks(family: Family, model: Any, sample: ModelSample, count: int) -> dict[str, Tensor]:
    """Which visual tokens are clean, and which carry loss; tokens that the family appends are neither."""
    if sample.clean is not None and not family.takes_clean(model):
        raise DataError(f"this {family.model_class} modulates all tokens alike; a sample must have no clean ones")
    clean = torch.zeros(count, dtype=torch.bool) if sample.clean is None else sample.clean.bool().cpu()
    loss = ~clean if sample.loss_mask is None else sample.loss_mask.bool().cpu()
    if clean.shape != (count,) or loss.shape != (count,):
        raise DataError(
            f"clean and loss_mask of a sample have shapes {tuple(clean.shape)} and {tuple(loss.shape)}; expected one "
            f"entry for each of its {count} visual tokens"
        )
    return {name: family.pad(mask[:, None])[:, 0] for name, mask in (("clean", clean), ("loss_mask", loss))}
