"""What an epoch of bucketed batches loses: samples that fit no bucket, and what is left over in each.

A sampler over Open-Sora buckets puts every sample into at most one bucket (the largest resolution it fills, with that
bucket's probability, and the most frames it has), cuts each bucket into full batches, drops the remainder, and drops
batches until all ranks have equally many. Small data sets, many shapes and many ranks lose most, up to everything:

    16 pictures, batch 45       0 batches         `EpochSampler(16, 45)`: one step of all 16
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from knapformer.data import Item
from knapformer.data.draws import fractions
from knapformer.tools.advise.buckets import read_config


@dataclass(frozen=True, slots=True)
class BucketEpoch:
    """An epoch of a data set in buckets.

    Attributes:
        samples: in the data set.
        in_buckets: of them, those that fit a bucket.
        in_batches: of them, those in full batches.
        used: of them, those that are trained on; the mean, as it is drawn which batches ranks have in excess.
        steps: of the epoch.
        buckets: that hold any sample.
    """

    samples: int
    in_buckets: int
    in_batches: int
    used: float
    steps: int
    buckets: int

    @property
    def lost(self) -> float:
        """Share of the samples that the epoch leaves out."""
        return 1 - self.used / self.samples if self.samples else 0.0


def bucket_epoch(config: Path, items: Iterable[Item], ranks: int, *, seed: int = 0) -> BucketEpoch:
    """The epoch of a data set (a manifest, or `TarShards.items`) in the buckets of an Open-Sora config.

    Raises:
        DataError: naming file and bucket, for what cannot be read.
    """
    resolutions = read_config(config)
    held: Counter[tuple[int, int]] = Counter()  # (resolution, frames) -> samples
    samples = 0
    for item in items:
        draws = fractions(len(resolutions), seed=seed, stream="buckets", index=samples)
        samples += 1
        for index, (width, height, table) in enumerate(resolutions):
            # Pictures go to buckets of one frame and clips to the longest that they fill.
            fits = [n for n in table if (n == 1 if item.kind == "image" else 1 < n <= item.num_frames)]
            if not fits or item.width * item.height < width * height:
                continue
            frames = max(fits)
            if draws[index] < table[frames][0]:
                held[index, frames] += 1
                break
    batch = {(index, frames): resolutions[index].buckets[frames][1] for index, frames in held}
    batches = {key: count // batch[key] for key, count in held.items()}
    full = sum(number * batch[key] for key, number in batches.items())
    total = sum(batches.values())
    steps = total // ranks
    used = full * steps * ranks / total if total else 0.0
    return BucketEpoch(samples, sum(held.values()), full, used, steps, len(held))
