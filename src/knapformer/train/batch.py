"""From samples to the packed tensors of one rank: one row per token, [text, image] within each sequence.

What a token needs travels with it, so the loss is computed where the token is and nothing has to return:

    row of a text token     noisy 0       target 0       text: its token id     pixels 0
    row of a visual token   noisy patch   target patch   text: 0                pixels: those it stands for

Where text is cross-attended to, the sequences are the visual tokens alone, and the token ids are their context. Places
do not travel: they follow from each sequence's grid, one row per sequence, and a token's offset in the sequence.
"""

from collections.abc import Sequence

import torch

from knapformer.balancer import PackedBatch
from knapformer.data import Grid, MediaOptions, pooled_features, tokenize
from knapformer.data.grid import token_pixels
from knapformer.data.media import Sample
from knapformer.train.flow import draw_noise, interpolate


def collate(
    samples: Sequence[Sample],
    *,
    step: int,
    seed: int,
    channels: int,
    pooled_channels: int,
    max_text: int = 392,
    joint: bool = True,
    options: MediaOptions | None = None,
    clean_frames: int = 0,
) -> PackedBatch:
    """Pack samples (any number, also none) and draw their noise.

    Args:
        samples: what this rank loaded for the step.
        step, seed: key of the noise, with each sample's id.
        channels: channels of a patch, needed where there is no sample.
        pooled_channels: width of the pooled caption vector.
        max_text: longest caption [tokens].
        joint: whether text is part of the sequences; else it is their context.
        options: those the samples were cut with, for the pixels of a token.
        clean_frames: leading (latent) frames of each clip that has more which the model is given without noise, to go
            on from. They carry no loss.

    Returns:
        Tokens `noisy` (T, channels) and `target`, fp32; `pixels` (T,) int64, for `loss_weights`; joint, `text` (T,)
        int32. Vectors `timestep` (S,), `pooled` (S, P), `grids` (S, 3) int32. Else `text` is context.
    """

    def pack(sample: Sample) -> PackedBatch:
        text = torch.from_numpy(tokenize(sample.caption, max_text))
        pixels = torch.from_numpy(token_pixels(sample.grid, options or MediaOptions()))
        noise, time = draw_noise(tuple(sample.patches.shape), seed=seed, step=step, sample=sample.id)
        noisy, velocity = interpolate(sample.patches, noise, time)
        if sample.grid.frames > clean_frames:
            clean = clean_frames * sample.grid.height * sample.grid.width
            noisy[:clean], pixels[:clean] = sample.patches[:clean], 0
        num_text = len(text) if joint else 0
        tokens = {"noisy": noisy, "target": velocity, "pixels": pixels}
        tokens = {n: torch.cat([x.new_zeros(num_text, *x.shape[1:]), x]) for n, x in tokens.items()}
        if joint:
            tokens["text"] = torch.cat([text, text.new_zeros(len(noisy))])
        vectors = {
            "timestep": torch.tensor([time], dtype=torch.float32),
            "pooled": torch.from_numpy(pooled_features(text.numpy(), pooled_channels))[None],
            "grids": torch.tensor([sample.grid], dtype=torch.int32),
        }
        return PackedBatch(tokens, vectors, {} if joint else {"text": text}, text_lens=[num_text])

    like = pack(Sample(0, torch.zeros(1, channels), Grid(1, 1, 1), ""))
    return PackedBatch.join([pack(sample) for sample in samples], like=like)
