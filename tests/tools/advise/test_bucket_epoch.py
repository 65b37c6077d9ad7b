"""The reported losses of buckets, and that the epoch sampler has none of them."""

import json
from pathlib import Path

import pytest

from knapformer.data import EpochSampler, Item
from knapformer.errors import DataError
from knapformer.tools.advise.bucket_epoch import BucketEpoch, bucket_epoch


def pictures(*sizes: tuple[int, int, int]) -> list[Item]:
    return [
        Item(id=0, path=Path("x.png"), kind="image", caption="", width=w, height=h, source="s")
        for w, h, count in sizes
        for _ in range(count)
    ]


def clip(frames: int) -> Item:
    return Item(
        id=0,
        path=Path("x.mp4"),
        kind="video",
        caption="",
        width=640,
        height=360,
        num_frames=frames,
        duration=frames / 24,
        source="s",
    )


def write(folder: Path, config: object) -> Path:
    path = folder / "buckets.json"
    path.write_text(json.dumps(config))
    return path


def test_sixteen_samples_are_no_batch_at_all(tmp_path: Path) -> None:
    config = write(tmp_path, {"256px": {"1": [1.0, 45], "33": [1.0, 12]}})
    found = bucket_epoch(config, pictures((256, 256, 16)), ranks=8)
    assert found == BucketEpoch(16, 16, 0, 0.0, 0, 1) and found.lost == 1.0
    ours = [EpochSampler(16, 45, rank=rank, world_size=8) for rank in range(8)]
    assert [len(one) for one in ours] == [1] * 8
    assert sorted(sample for one in ours for step in one for sample in step) == list(range(16))


def test_remainders_and_uneven_ranks_are_lost(tmp_path: Path) -> None:
    config = write(tmp_path, {"360p": {"1": [1.0, 4], "16": [1.0, 2], "32": [1.0, 1]}, "720p": {"1": [1.0, 2]}})
    data = [*pictures((1280, 720, 5), (640, 360, 9), (100, 100, 3)), clip(20), clip(31), clip(40), clip(8), clip(32)]
    found = bucket_epoch(config, data, ranks=4)
    # 720p: 5 pictures, 2 batches of 2; 360p: 9 pictures, 2 of 4; 16 frames: 2 clips, 1 batch; 32 frames: 2 clips, 2.
    assert (found.samples, found.in_buckets, found.in_batches, found.buckets) == (22, 18, 16, 4)
    assert found.steps == 1 and found.used == pytest.approx(16 * 4 / 7)
    assert bucket_epoch(config, data, ranks=1).used == 16


def test_probabilities_thin_out(tmp_path: Path) -> None:
    config = write(tmp_path, {"720p": {"1": [0.25, 1]}, "360p": {"1": [1.0, 1]}, "480p": {"1": [0.0, 7]}})
    found = bucket_epoch(config, pictures((1280, 720, 400)), ranks=1)
    assert found.in_buckets == found.used == 400 and found.buckets == 2
    thin = bucket_epoch(write(tmp_path, {"720p": {"1": [0.25, 1]}}), pictures((1280, 720, 400)), ranks=1)
    assert 60 < thin.used < 140


def test_bad_configs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown resolution 'huge'"):
        bucket_epoch(write(tmp_path, {"huge": {"1": [1.0, 1]}}), pictures((8, 8, 1)), ranks=1)
