"""Manifests to histograms: the same rows in every format, limits, units, and rows that cannot be used."""

import gzip
import json
from pathlib import Path

import duckdb
import numpy as np
import pytest

from knapformer.errors import DataError, SpecError
from knapformer.tools.advise.columns import parse_overrides
from knapformer.tools.advise.histogram import Histogram
from knapformer.tools.advise.query import ScanOptions
from knapformer.tools.advise.scan import Scan, scan_manifest
from knapformer.tools.simulate.presets import model_preset

IMAGES = model_preset("flux1")
CLIPS = model_preset("hunyuanvideo")


def csv(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def parquet(path: Path, select: str) -> Path:
    duckdb.sql(f"COPY ({select}) TO '{path}' (FORMAT parquet)")
    return path


def scan(*files: Path, model=CLIPS, **options) -> Scan:
    return scan_manifest(files, model, ScanOptions(**options))


def lengths(found: Scan) -> list[int]:
    return np.repeat(found.histogram.length, found.histogram.count).tolist()


def random_rows(count: int) -> list[tuple[int, int, int, int]]:
    rng = np.random.default_rng(7)
    sides = rng.integers(1, 1300, (count, 2))
    texts = rng.integers(0, 400, count)
    frames = np.where(rng.random(count) < 0.5, 1, rng.integers(1, 200, count))
    return [(int(w), int(h), int(f), int(t)) for (w, h), f, t in zip(sides, frames, texts, strict=True)]


def test_every_format_gives_the_tokens_of_the_model(tmp_path):
    rows = random_rows(300)
    table = csv(tmp_path / "a.csv", "width,height,num_frames,caption_tokens", *(",".join(map(str, r)) for r in rows))
    keys = ("W", "Height", "frames", "text_len")
    lines = "\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines + "\n\n")
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write(table.read_text())
    parquet(tmp_path / "a.parquet", f"SELECT * FROM read_csv('{table}')")
    want = sorted(CLIPS.visual_tokens(w, h, f) + min(t, CLIPS.text_length) for w, h, f, t in rows)
    for name in ("a.csv", "a.jsonl", "a.csv.gz", "a.parquet"):
        found = scan(tmp_path / name)
        assert (found.rows, found.bad_rows, found.problems) == (300, 0, ())
        assert found.clips == sum(f > 1 for _, _, f, _ in rows)
        assert found.histogram.num_tokens == sum(want) and found.histogram.longest == max(
            want
        )  # exact, though rounded:
        np.testing.assert_allclose(sorted(lengths(found)), want, rtol=2**-10)
        assert max(lengths(found)) > 1024 and lengths(found) != want
        row = found.longest["row"] - 1
        assert CLIPS.visual_tokens(*rows[row][:3]) + min(rows[row][3], CLIPS.text_length) == max(want)
    assert scan(tmp_path / "a.csv", model=IMAGES).histogram.num_tokens != sum(want)  # the model matters


def test_crossed_text_is_no_part_of_the_length(tmp_path):
    file = csv(tmp_path / "a.csv", "width,height,text_tokens", "320,320,77")
    assert lengths(scan(file, model=model_preset("wan21-1.3b"))) == [400]
    assert lengths(scan(file)) == [477]
    assert lengths(scan(file, text_tokens=100)) == [500]


def test_captions_are_estimated_and_counts_are_samples(tmp_path):
    file = csv(tmp_path / "a.csv", "caption,width,height,count", '"a fox, running",160,160,3', ",160,160,2")
    found = scan(file)
    assert lengths(found) == [100, 100] + [104] * 3
    assert any("estimated" in note for note in found.notes)
    assert found.rows == 2


def test_limits_on_pixels_frames_and_rate(tmp_path):
    file = csv(tmp_path / "a.csv", "width,height,duration,fps", "1920,1080,10,30", "64,64,,", "640,360,4.0,24000/1001")
    by_hand = [
        CLIPS.sequence_length(1920, 1080, 300),
        CLIPS.sequence_length(64, 64, 1),
        CLIPS.sequence_length(640, 360, 96),
    ]
    assert scan(file).histogram.num_tokens == sum(by_hand)
    limited = scan(file, max_pixels=960 * 540, max_frames=49, sample_fps=8)
    # Rounded, 960 x 540 is 960 x 544, which is over the limit, so the height gives; 4 s hold 32 frames at 8 a second.
    want = [CLIPS.sequence_length(960, 528, 49), CLIPS.sequence_length(64, 64), CLIPS.sequence_length(640, 360, 32)]
    assert limited.histogram.num_tokens == sum(want)


def test_durations_need_a_rate(tmp_path):
    file = csv(tmp_path / "a.csv", "width,height,duration", "64,64,2")
    with pytest.raises(DataError, match=r"a\.csv: column 'duration' gives durations.*--sample-fps"):
        scan(file)
    assert lengths(scan(file, sample_fps=16)) == [CLIPS.sequence_length(64, 64, 32)]


def test_bad_rows_are_named_and_the_rest_is_used(tmp_path):
    rows = "64,64,2,24 -5,64,2,24 64,nope,2,24 64,,2,24 64,64,2,NaN 64,64,-1,24 64,64,inf,24 64.5,64,2,24 64,64,, "
    rows += "64,64,,24 64,64,2,99999 -7,64,1,1 -8,64,1,1 -9,64,1,1 64,64"
    found = scan(csv(tmp_path / "bad.csv", "width,height,duration,fps", *rows.split()))
    assert (found.rows, found.bad_rows, found.histogram.num_samples) == (15, 12, 3)
    told = {(p.column, p.cause.split(";")[0]): (p.count, p.rows) for p in found.problems}
    assert told == {
        ("width", "is out of range"): (4, ((2, "'-5'"), (12, "'-7'"), (13, "'-8'"))),
        ("width", "is not a whole number"): (1, ((8, "'64.5'"),)),
        ("height", "is not a number"): (1, ((3, "'nope'"),)),
        ("height", "is missing"): (1, ((4, "no value"),)),
        ("duration", "is out of range"): (1, ((6, "'-1'"),)),
        ("duration", "is not finite"): (1, ((7, "'inf'"),)),
        ("duration", "is missing"): (1, ((10, "no value"),)),
        ("fps", "is no frame rate, which this clip needs"): (1, ((5, "'NaN'"),)),
        ("fps", "is out of range"): (1, ((11, "'99999'"),)),
    }
    first = found.problems[0].message()
    assert first.startswith(str(tmp_path / "bad.csv")) and "column 'width'" in first and "and 1 more" in first


def test_not_a_number_in_parquet(tmp_path):
    rows = "(64, 64, '2', '24'), (64, 64, '2', 'NaN'), (64, 64, 'NaN', 'NaN'), (NULL, 64, '1', '1')"
    types = "width::INT AS width, height::INT AS height, duration::DOUBLE AS duration, fps::DOUBLE AS fps"
    file = parquet(tmp_path / "a.parquet", f"SELECT {types} FROM (VALUES {rows}) t(width, height, duration, fps)")
    found = scan(file)
    assert {p.column: p.rows for p in found.problems} == {"width": ((4, "no value"),), "fps": ((2, "'nan'"),)}
    assert lengths(found) == sorted([CLIPS.sequence_length(64, 64, 48), CLIPS.sequence_length(64, 64)])


def test_broken_lines_of_json(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"width": 64, "height": 64}\nnot json\n[1]\n{"width": 64, "height": {}}\n\n{"width": 64, "hei')
    found = scan(file)
    told = {p.column: (p.count, [row for row, _ in p.rows]) for p in found.problems}
    assert told == {"line": (3, [2, 3, 6]), "height": (1, [4])}
    assert found.histogram.num_samples == 1


@pytest.mark.parametrize(("scale", "odd", "note"), [(1, 2500, False), (1000, 2.5, True)])
def test_durations_in_another_unit_than_the_rest(tmp_path, scale, odd, note):
    rows = [f"64,64,{d * scale},10" for d in (2, 3, 2.5, 4)] + [f"64,64,{odd},10"]
    file = csv(tmp_path / "a.csv", "width,height,duration,fps", *rows)
    found = scan(file)
    assert [(p.column, [row for row, _ in p.rows]) for p in found.problems] == [("duration", [5])]
    assert "another unit" in found.problems[0].cause
    assert sorted(lengths(found)) == sorted(CLIPS.sequence_length(64, 64, f) for f in (20, 30, 25, 40))
    assert any("milliseconds" in n for n in found.notes) == note
    assert scan(file, duration_unit="s").bad_rows == 0  # the user's word is not doubted


def test_a_name_with_a_unit_is_believed(tmp_path):
    file = csv(tmp_path / "a.csv", "width,height,duration_ms,fps", "64,64,2000,10", "64,64,5,10")
    assert sorted(lengths(scan(file))) == sorted(CLIPS.sequence_length(64, 64, f) for f in (20, 1))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.csv", b"", "the file is empty"),
        ("empty.parquet", b"", "the file is empty"),
        ("head.csv", b"width,height\n", "no rows"),
        ("cut.parquet", b"PAR1 and no more", "cannot be read"),
        ("text.parquet", b"width,height\n1,2\n", "does not begin with 'PAR1'"),
        ("binary.csv", b"\x89PNG\0\0\0", "some other binary format"),
        ("columns.csv", b"breadth,height\n1,2\n", r"no column for width; it has columns 'breadth', 'height'"),
        ("bad.csv", b"width,height\n0,5\n-1,5\n", r"none of the 2 rows can be used:\n.*'width'.*row 1 \('0'\), 2"),
        ("long.csv", b"width,height,frames\n1000000,1000000,99999\n", "over 2.31 tokens"),
        ("broken.csv.gz", b"\x1f\x8bnot gzip", "cannot be read"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){name}: .*{message}"):
        scan(tmp_path / name)


def test_formats_are_told_by_content(tmp_path):
    file = parquet(tmp_path / "a.csv", "SELECT 64 AS width, 64 AS height")
    odd = csv(tmp_path / "manifest", "width\theight", "64\t64")
    assert lengths(scan(file)) == lengths(scan(odd)) == [CLIPS.sequence_length(64, 64)]


def test_columns_by_name_over_several_files(tmp_path):
    images = csv(tmp_path / "images.csv", "width,height,long", "64,64,9")
    clips = csv(tmp_path / "clips.csv", "frames,width,height,line,found,tokens", "5,64,64,x,y,z")
    found = scan(images, clips, columns=parse_overrides(["text=long"]))
    assert sorted(lengths(found)) == [16 + 9, CLIPS.sequence_length(64, 64, 5)]
    with pytest.raises(DataError, match="no column 'wide', given for width"):
        scan(images, clips, columns={"width": "wide"})
    for text in ("width", "breadth=x", "width="):
        with pytest.raises(SpecError, match="ROLE=NAME"):
            parse_overrides([text])


def test_histogram_of_counts():
    histogram = Histogram.of(np.array([10, 30, 10]), np.array([1, 2, 1]), np.array([2, 1, 1]))
    assert histogram.length.tolist() == [10, 30] and histogram.count.tolist() == [3, 1]
    assert (histogram.num_tokens, histogram.longest, histogram.num_samples) == (60, 30, 4)
    assert histogram.quantiles(np.array([0.0, 0.5, 0.75, 0.76, 1.0])).tolist() == [10, 10, 10, 30, 30]
    assert histogram.share_of_longest(0.25, histogram.length.astype(float)) == 0.5
    assert histogram.share_of_longest(0.5, histogram.length.astype(float)) == pytest.approx(40 / 60)
    fraction = (np.arange(1000) + 0.5) / 1000
    assert np.bincount(histogram.entries(fraction)).tolist() == [750, 250]
    assert np.bincount(histogram.entries(fraction, 2, 2)).tolist() == [500, 500]
