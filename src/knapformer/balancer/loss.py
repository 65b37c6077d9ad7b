"""What each token counts in the loss: weights that add up to 1 over the batch of all ranks, however it is cut.

    token     every token with a loss counts the same         1 / (such tokens of the batch)
    sample    every sample counts the same                    1 / (samples * such tokens of the sample)
    pixel     every pixel (of every frame) counts the same    pixels of the token / (pixels of the batch)

A token stands for `pixels`; text, padding and conditioning frames stand for 0 and carry no loss. Weights are made on
the home rank, where samples are whole, from one sum over all ranks; then they travel with their tokens. So a rank's
loss is the sum of weight * error of the tokens it was given, and nobody divides by anything.

`PackedBatch.weighted` is what one calls; it also knows of gradients that are averaged over ranks.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.errors import SpecError

LossMode = Literal["token", "sample", "pixel"]


def loss_weights(
    seq_lens: Sequence[int], pixels: Tensor, mode: LossMode = "token", *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """(T,) fp32 weight of each of this rank's tokens, on their home rank. Collective over `group`.

    Args:
        seq_lens: tokens of each of this rank's sequences, T in all.
        pixels: (T,) whole numbers: pixels of all frames that each token stands for; 0 where it carries no loss. Only
            whether it is 0 matters for "token" and "sample", so a mask will do.
        mode: what counts the same. The same on every rank.
        group: ranks that hold the batch; default all.

    Raises:
        SpecError: for an unknown mode.
    """
    if mode not in get_args(LossMode):
        raise SpecError(f"unknown loss mode {mode!r}; known modes are {', '.join(map(repr, get_args(LossMode)))}")
    counts = (pixels > 0).to(torch.int64)
    if mode == "token":
        share, total = counts.double(), counts.sum()
    elif mode == "pixel":
        share, total = pixels.double(), pixels.sum(dtype=torch.int64)
    else:
        lens = torch.tensor(seq_lens, dtype=torch.int64, device=pixels.device)
        sample = torch.repeat_interleave(torch.arange(len(lens), device=pixels.device), lens, output_size=len(pixels))
        of_sample = torch.zeros_like(lens).index_add(0, sample, counts)
        share = counts / of_sample.clamp_min(1).index_select(0, sample).double()
        total = (of_sample > 0).sum()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)  # of integers: exact, and the same however samples are dealt to ranks
    return (share / total.clamp_min(1)).float()


def visual_tokens(seq_lens: Sequence[int], text_lens: Sequence[int], device: torch.device) -> Tensor:
    """(T,) which tokens are no text."""
    lens = [number for length, text in zip(seq_lens, text_lens, strict=True) for number in (text, length - text)]
    return torch.tensor([False, True] * len(seq_lens), device=device).repeat_interleave(
        torch.tensor(lens, dtype=torch.int64, device=device), output_size=sum(seq_lens)
    )
