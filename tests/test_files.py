"""Files are written whole or not at all, and what is read is checked in one place."""

import gzip
import os
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
