"""Objects of the user's by name: from a module, from one in the current folder, from a file."""

import sys
from pathlib import Path

import pytest

from knapformer.errors import CalibrationError, SpecError
from knapformer.train.named import load_named


def test_a_module_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_named("pathlib:Path") is Path
    (tmp_path / "mine_only.py").write_text("answer = 42\n")
    assert load_named(f"{tmp_path}/mine_only.py:answer") == 42
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_only", raising=False)
    assert load_named("mine_only:answer") == 42


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pathlib", "'pathlib' names nothing in a module; give package.module:name"),
        ("pathlib:Pth", "'pathlib' has nothing called 'Pth'"),
        ("no.such.module:x", "cannot import 'no.such.module': No module named 'no'"),
        ("nowhere/x.py:f", "there is no file 'nowhere/x.py'"),
    ],
)
def test_what_is_missing_is_named(name: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        load_named(name)
    assert message in str(error.value)
    with pytest.raises(CalibrationError):
        load_named(name, error=CalibrationError)


def test_a_defect_of_the_user_s_module_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_named(f"{tmp_path}/bad.py:x")
