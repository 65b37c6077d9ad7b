"""Files are written whole or not at all, and what is read is checked in one place."""

import gzip
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from knapformer import files
from knapformer.errors import CalibrationError, DataError


class Point(msgspec.Struct):
    x: Annotated[int, msgspec.Meta(ge=0)]
    names: list[str] = []


def test_a_file_is_written_whole_and_its_folder_is_made(tmp_path: Path) -> None:
    target = files.write_text(tmp_path / "a" / "b.txt", "ä")
    assert target.read_text(encoding="utf-8") == "ä"
    files.write_json(target, {"x": 1})
    assert files.read_json(target, Point) == Point(1)
    assert os.listdir(target.parent) == ["b.txt"]  # nothing is left beside it


def test_what_cannot_be_written_leaves_the_old_file_and_says_so(tmp_path: Path) -> None:
    target = files.write_text(tmp_path / "a.json", "old")
    with pytest.raises(DataError, match="Out of range float"):
        files.write_json(target, {"x": float("nan")})
    with pytest.raises(CalibrationError, match=r"cannot write .*a\.json/b"):
        files.write_text(target / "b", "new", error=CalibrationError)
    with pytest.raises(DataError, match="Is a directory"):
        files.write_text(tmp_path, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_failure_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = files.write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DataError, match="No space left on device"):
        files.write_text(target, "new")
    assert (target.read_text(), os.listdir(tmp_path)) == ("old", ["a.txt"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"x": "1"}', r"Expected `int`, got `str` - at `\$.x`"),
        ('{"x": -1}', r"Expected `int` >= 0 - at `\$.x`"),
        ("{}", "missing required field `x`"),
        ('{"x": 1, "names": [2]}', r"at `\$.names\[0\]`"),
        ('{"x": 1', "is not JSON"),
        ("", "is not JSON"),
        ('{"x": NaN}', "is not JSON"),
        ('{"y": ' + "[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
    ],
)
def test_what_is_wrong_names_file_and_place(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = files.write_bytes(tmp_path / "p.json", content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message) as caught:
        files.read_json(file, Point)
    assert str(file) in str(caught.value)


def test_toml_and_plain_data_are_checked_alike(tmp_path: Path) -> None:
    file = files.write_text(tmp_path / "p.toml", "x = 3\nnames = ['a']\n")
    assert files.read_toml(file, Point) == files.convert({"x": 3, "names": ["a"]}, Point, "here") == Point(3, ["a"])
    with pytest.raises(DataError, match=r"here: Expected `int`, got `str` - at `\$.x`"):
        files.convert({"x": "3"}, Point, "here")
    with pytest.raises(DataError, match="is not TOML"):
        files.read_toml(files.write_text(file, "x = = 3"), Point)


def test_gzip_is_recognised_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = files.write_bytes(tmp_path / "p.json.gz", gzip.compress(b'{"x": 3}'))
    assert files.read_json(file, Point) == Point(3)
    with pytest.raises(DataError, match="damaged gzip"):
        files.read_json(files.write_bytes(tmp_path / "cut.gz", file.read_bytes()[:-9]), Point)
    bomb = files.write_bytes(tmp_path / "bomb.gz", gzip.compress(bytes(1 << 22)))
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    with pytest.raises(DataError, match="larger than 1,048,576 bytes"):
        files.read_bytes(bomb)
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        files.read_bytes(tmp_path / "missing")


@dataclass(frozen=True)
class Box:
    """A type that checks itself, as those of the library do."""

    sides: dict[str, dict[int, tuple[float, int]]]
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.sides:
            raise CalibrationError("sides are empty; give at least one")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"sides": {"a": {"1": [1, 2]}, "b": {"1": [1, 2], "16": [1, "2"]}}}, "`$.sides.b.16[1]`, which is '2'"),
        ({"sides": {"a": {"1": [1]}}}, "of length 2"),
        ({"sides": {"a": {"x": [1, 2]}}}, "Expected `int`, got `str` - at `key` in `$.sides.a`"),
        ({"sides": {}}, "sides are empty; give at least one"),
        ({"sides": {"a": {}}, "points": [{"x": 1}, {"x": -1}]}, "`int` >= 0 - at `$.points[1].x`, which is -1"),
        ({"sides": {"a": {"1": [10**400, 1]}}}, "out of range - at `$.sides.a"),
        ({"sides": {"a": {"1": [1, "2" * 900]}}}, "2...2222222222222'"),
    ],
)
def test_keys_of_mappings_and_wrong_values_are_named(content: object, message: str) -> None:
    text = json.dumps(content)
    with pytest.raises(DataError) as caught:
        files.decode_json(text, Box, "box.json")
    assert str(caught.value).startswith("box.json: ") and message in str(caught.value) and len(str(caught.value)) < 200
    with pytest.raises(DataError) as again:
        files.convert(json.loads(text), Box, "box.json")
    assert str(again.value).partition(" - at ")[2] == str(caught.value).partition(" - at ")[2]


def test_hostile_json_gives_errors_of_the_library() -> None:
    hostile = [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "1" + 400 * "0",
        "1" * 9999,
        '"\\ud800"',
        '"\\udc00x"',
        "[" * 2000 + "]" * 2000,
    ]
    for value in hostile:
        for text in (value, f'{{"sides": {{"a": {value}}}}}', f'{{"sides": {{"a": {{"1": [{value}, 1]}}}}}}'):
            with pytest.raises(DataError, match="hostile"):
                files.decode_json(text, Box, "hostile")
    with pytest.raises(DataError, match=r"here: .*out of range"):
        files.convert({"sides": {"a": {"1": [10**400, 1]}}}, Box, "here")
    nested: object = 1
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(DataError, match="here"):
        files.convert({"sides": {"a": nested}}, Box, "here")


def test_lines_are_numbered_as_a_reader_counts_them(tmp_path: Path) -> None:
    file = files.write_bytes(tmp_path / "a.jsonl", gzip.compress(b'{"x": 1}\n\n  \n{"x": 2}\r\n'))
    found = [(number, files.decode_json(line, Point, f"{file}:{number}").x) for number, line in files.read_lines(file)]
    assert found == [(1, 1), (4, 2)]
