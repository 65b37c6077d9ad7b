"""What benchmarks share: short numbers, and records without what a later run measured again."""

from pathlib import Path

from benchmarks.common import RESULTS, ShortRecord, keep_newest, make_parser, rounded

from knapformer.report import RunRecord, read_records, write_records

HEADER = {"environment": {}, "command": [], "config": {}}


def test_numbers_have_seven_digits() -> None:
    assert rounded({"a": [1.23456789, 2], "b": (1e-9 / 3,), "c": "x", "d": None, "e": True}) == {
        "a": [1.234568, 2],
        "b": [3.333333e-10],
        "c": "x",
        "d": None,
        "e": True,
    }


def test_a_short_record_is_written_short(tmp_path: Path) -> None:
    with ShortRecord(tmp_path / "r.jsonl", "a", {"exact": 1 / 3}) as record:
        record.step(0, seconds=1 / 3)
    run = read_records(tmp_path / "r.jsonl")["a"]
    assert (run.steps, run.header["config"]) == ([{"step": 0, "seconds": 0.3333333}], {"exact": 1 / 3})


def test_the_newest_step_of_a_kind_stays(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = [{"step": i, "kind_of": kind, "x": 1} for i, kind in enumerate("abc")]
    write_records(path, [RunRecord("1", HEADER, first), RunRecord("2", HEADER, [{"step": 0, "kind_of": "b", "x": 2}])])
    keep_newest(path, "kind_of")
    assert [(run.name, step["kind_of"], step["x"]) for run in read_records(path).values() for step in run.steps] == [
        ("1", "a", 1),
        ("1", "c", 1),
        ("2", "b", 2),
    ]
    write_records(path, [*read_records(path).values(), RunRecord("3", HEADER, first)])
    keep_newest(path, "kind_of")
    assert list(read_records(path)) == ["3"]


def test_every_benchmark_has_an_output() -> None:
    assert make_parser("What it does.", "x.jsonl").parse_args([]).output == RESULTS / "x.jsonl"


def test_committed_records_are_small() -> None:
    large = {path.name: path.stat().st_size for path in RESULTS.iterdir() if path.stat().st_size > 64_000}
    assert large == {}, "commit aggregates: see ShortRecord, keep_newest and `knapformer report -o x.jsonl`"
