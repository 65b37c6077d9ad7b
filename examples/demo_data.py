"""What the examples train on: the demo's pictures and clips, small, as a `torch.utils.data` data set.

A sample is a `PackedBatch` of one sequence, read at its own size and shape. `add_noise` makes the inputs of a rectified
flow: its noise is drawn by (epoch, sample), so it is the same on whichever rank a sample is read.
"""

from pathlib import Path

import torch
from torch.utils.data import Dataset

from knapformer import PackedBatch
from knapformer.balancer import LossMode
from knapformer.data import MediaOptions, build_demo, sample_grid
from knapformer.data.grid import token_pixels
from knapformer.data.media import load_item
from knapformer.train.flow import draw_noise, interpolate

OPTIONS = MediaOptions(patch=8, max_pixels=2304, fps=8, max_frames=12)
CHANNELS = 3 * OPTIONS.patch**2


class DemoData(Dataset):
    """30 pictures and clips of 6 to 432 tokens."""

    def __init__(self, folder: Path) -> None:
        self.manifest = build_demo(folder)
        self.lengths = [sample_grid(item, OPTIONS).num_tokens for item in self.manifest]  # nothing is read for this

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> PackedBatch:
        sample = load_item(self.manifest[index], OPTIONS)
        pixels = torch.from_numpy(token_pixels(sample.grid, OPTIONS))
        vectors = {"id": torch.tensor([index]), "grid": torch.tensor([sample.grid])}
        return PackedBatch({"x": sample.patches, "pixels": pixels}, vectors)


def add_noise(batch: PackedBatch, epoch: int, mode: LossMode = "token") -> PackedBatch:
    """Tokens `x` (noisy), `target` and `weight`, vectors `time` and `grid`. Collective, for the weights."""
    noisy, targets, times = [batch.tokens["x"][:0]], [batch.tokens["x"][:0]], []
    for x, sample in zip(batch.tokens["x"].split(batch.seq_lens), batch.vectors["id"].tolist(), strict=True):
        noise, time = draw_noise(tuple(x.shape), seed=0, step=epoch, sample=sample)
        x_t, target = interpolate(x, noise.to(x), time)
        noisy.append(x_t)
        targets.append(target)
        times.append(time)
    tokens = {"x": torch.cat(noisy), "target": torch.cat(targets), "pixels": batch.tokens["pixels"]}
    vectors = {"time": torch.tensor(times, dtype=torch.float32), "grid": batch.vectors["grid"]}
    noised = PackedBatch(tokens, vectors, seq_lens=batch.seq_lens).to(tokens["x"].device)
    return noised.weighted(mode).replace(pixels=None)
