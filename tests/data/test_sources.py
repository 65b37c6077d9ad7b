"""WebDataset shards and Parquet manifests: the same items, sizes and bytes as the files they were made from."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from knapformer.data import BalancedSampler, MediaOptions, TarShards, read_manifest, sample_grid
from knapformer.errors import DataError
from knapformer.plan import Cluster, CostModel

Image = pytest.importorskip("PIL.Image")
SIZES = [(48, 32), (20, 64), (33, 17)]


def picture(width: int, height: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def test_shards_have_sizes_and_random_access(tmp_path: Path) -> None:
    first = {"a/0.png": picture(*SIZES[0]), "a/0.txt": b"A wall.\n", "a/1.PNG": picture(*SIZES[1])}
    told = {"width": 64, "height": 16, "num_frames": 9, "duration": 1.5, "caption": "A clip."}
    second = {"b.0.json": b"{}", "c.png": picture(*SIZES[2]), "v.mp4": b"clip", "v.json": json.dumps(told).encode()}
    del second["b.0.json"]
    data = TarShards([write_tar(tmp_path / "0.tar", first), write_tar(tmp_path / "1.tar", second)])
    assert [(i.width, i.height, i.kind) for i in data.items] == [
        *((w, h, "image") for w, h in SIZES),
        (64, 16, "video"),
    ]
    assert [i.caption for i in data.items] == ["A wall.", "", "", "A clip."]
    assert [i.id for i in data.items] == list(range(len(data)))
    assert data[0] == {"png": first["a/0.png"], "txt": b"A wall.\n"}
    assert data[1]["png"] == first["a/1.PNG"] and data[3]["mp4"] == b"clip"
    assert [sample_grid(i, MediaOptions(patch=16)).num_tokens for i in data.items] == [6, 4, 2, 36]


def test_shards_feed_the_balanced_sampler(tmp_path: Path) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    files = {f"{i}.png": picture(16 * (i + 1), 16) for i in range(7)}
    data = TarShards([write_tar(tmp_path / "0.tar", files)])
    lengths = [sample_grid(item, MediaOptions(patch=16)).num_tokens for item in data.items]
    seen = []
    for rank in range(2):
        sampler = BalancedSampler(lengths, 4, cost=CostModel.from_shapes(64, 4), cluster=Cluster(2), rank=rank)
        for batch in torch_data.DataLoader(data, batch_sampler=sampler, collate_fn=list):
            seen += [sample["png"] for sample in batch]
    assert sorted(seen) == sorted(files.values())


def test_shards_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    png = picture(8, 8)
    for name, files, mode, message in (
        ("gz.tar", {"a.png": png}, "w:gz", "uncompressed tar"),
        ("two.tar", {"a.png": png, "a.jpg": png}, "w", "one picture or clip"),
        ("none.tar", {"a.txt": b"x"}, "w", "one picture or clip"),
        ("bad.tar", {"a.png": b"x"}, "w", "sample 'a': cannot be opened as an image"),
        ("json.tar", {"a.png": png, "a.json": b"{"}, "w", "sample 'a', json is not JSON"),
        ("clip.tar", {"a.mp4": b"x", "a.json": b'{"width": 4, "height": 4}'}, "w", "num_frames is not given"),
        ("zero.tar", {"a.png": png, "a.json": b'{"width": 0, "height": 4}'}, "w", "width is 0"),
        ("list.tar", {"a.png": png, "a.json": b'{"caption": ["a"]}'}, "w", r"got `array` - at `\$.caption`"),
        ("many.tar", {"a.png": png, "a.json": b'{"width": 1%s}' % (b"0" * 400)}, "w", "width is 1000.*must be above 0"),
        ("inf.tar", {"a.png": png, "a.json": b'{"width": Infinity, "height": 4}'}, "w", "json is not JSON"),
        ("half.tar", {"a.png": png, "a.json": b'{"caption": "\\ud800"}'}, "w", "json is not JSON"),
        ("deep.tar", {"a.png": png, "a.json": b'{"caption": ' + b"[" * 100_000}, "w", "json is not JSON"),
        ("txt.tar", {"a.png": png, "a.txt": b"\xff"}, "w", "txt cannot be read as UTF-8"),
        ("empty.tar", {}, "w", "no samples"),
    ):
        with pytest.raises(DataError, match=message):
            TarShards([write_tar(tmp_path / name, files, mode)])
    with pytest.raises(DataError, match=r"missing\.tar"):
        TarShards([tmp_path / "missing.tar"])


def test_parquet_and_jsonl_manifests_give_the_same_items(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    (tmp_path / "a.png").write_bytes(picture(40, 24))
    (tmp_path / "b.mp4").write_bytes(b"not opened: its sizes are given")
    rows = [
        {"path": "a.png", "caption": "A wall."},
        {"path": "b.mp4", "width": 64, "height": 32, "num_frames": 24, "duration": 1.0, "start": 0.5, "fps": 8},
    ]
    lines = tmp_path / "m.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tmp_path / "m.parquet"
    with duckdb.connect() as engine:
        # Missing numbers as tables have them: empty, or NaN in a column of floats.
        engine.execute(
            "COPY (SELECT path, caption, width, height, coalesce(num_frames::DOUBLE, 'nan'::DOUBLE) AS num_frames,"
            f" duration, start, fps FROM read_json('{lines}')) TO '{table}' (FORMAT parquet)"
        )
    assert list(read_manifest(table)) == list(read_manifest(lines))
    assert len(read_manifest(table)) == 2
    table.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"m\.parquet: cannot be read"):
        read_manifest(table)
