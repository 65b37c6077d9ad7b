"""From samples to the packed tensors of one rank: one row per token, [text, image] within each sequence.

What a token needs travels with it, so the loss is computed where the token is and nothing has to return:

    row of a text token     noisy 0       target 0       text: its token id
    row of a visual token   noisy patch   target patch   text: 0

Where text is cross-attended to, the sequences are the visual tokens alone, and the token ids are their context. Places
do not travel: they follow from each sequence's grid, one row per sequence, and a token's offset in the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from knapformer.data import pooled_features, tokenize
from knapformer.data.media import Sample
from knapformer.train.flow import draw_noise, interpolate


@dataclass(frozen=True, slots=True, eq=False)
class HomeBatch:
    """What a rank's data loader produced for one step. T tokens, S sequences, C patch channels, P pooled channels.

    Attributes:
        seq_lens, text_lens: tokens of each sequence, and how many of them are text.
        context_lens: text tokens beside each sequence.
        noisy, target: (T, C) fp32.
        text: (T,) int32 token ids, or of the context's rows.
        grids: (S, 3) int32 frames, rows and columns.
        timestep: (S,) fp32.
        pooled: (S, P) fp32.
        sample_ids: (S,) int64.
    """

    seq_lens: list[int]
    text_lens: list[int]
    context_lens: list[int]
    noisy: Tensor
    target: Tensor
    text: Tensor
    grids: Tensor
    timestep: Tensor
    pooled: Tensor
    sample_ids: Tensor

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        moved = {n: getattr(self, n).to(device, non_blocking=True) for n in self.__slots__ if not n.endswith("_lens")}
        return type(self)(self.seq_lens, self.text_lens, self.context_lens, **moved)


def collate(
    samples: Sequence[Sample],
    *,
    step: int,
    seed: int,
    channels: int,
    pooled_channels: int,
    max_text: int = 392,
    joint: bool = True,
) -> HomeBatch:
    """Pack samples (any number, also none) and draw their noise.

    Args:
        samples: what this rank loaded for the step.
        step, seed: key of the noise, with each sample's id.
        channels: channels of a patch, needed where there is no sample.
        pooled_channels: width of the pooled caption vector.
        max_text: longest caption [tokens].
        joint: whether text is part of the sequences; else it is their context.
    """
    noisy, target, text, grids, times, pooled, lens, captions = [], [], [], [], [], [], [], []
    for sample in samples:
        tokens = torch.from_numpy(tokenize(sample.caption, max_text))
        noise, time = draw_noise(tuple(sample.patches.shape), seed=seed, step=step, sample=sample.id)
        x_t, velocity = interpolate(sample.patches, noise, time)
        no_patch = x_t.new_zeros(len(tokens) if joint else 0, channels)
        noisy += [no_patch, x_t]
        target += [no_patch, velocity]
        text += [tokens, torch.zeros(len(x_t) if joint else 0, dtype=torch.int32)]
        grids.append(sample.grid)
        times.append(time)
        pooled.append(torch.from_numpy(pooled_features(tokens.numpy(), pooled_channels)))
        lens.append(len(no_patch) + len(x_t))
        captions.append(len(tokens))
    no_text = [0] * len(samples)
    return HomeBatch(
        lens,
        captions if joint else no_text,
        no_text if joint else captions,
        torch.cat([torch.zeros(0, channels), *noisy]),
        torch.cat([torch.zeros(0, channels), *target]),
        torch.cat([torch.zeros(0, dtype=torch.int32), *text]),
        torch.tensor(grids, dtype=torch.int32).reshape(len(samples), 3),
        torch.tensor(times, dtype=torch.float32),
        torch.stack(pooled) if pooled else torch.zeros(0, pooled_channels),
        torch.tensor([sample.id for sample in samples], dtype=torch.int64),
    )
