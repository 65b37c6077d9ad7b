"""`knapformer.data` needs NumPy alone, until files are read (msgspec) or pixels (Pillow, PyAV)."""

import subprocess
import sys

EXTRAS = ("torch", "msgspec", "duckdb", "av", "PIL", "skimage", "skvideo")
BLOCK = f"import sys\nfor name in {EXTRAS}: sys.modules[name] = None\n"


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=60)


def test_workloads_sampler_and_text_need_numpy_only() -> None:
    code = """
from knapformer.data import *
from knapformer.data import GroupSampler, Item, LoaderGroup, MediaOptions, load_workload, pooled_features, sample_grid
from pathlib import Path
assert load_workload("g8b4i256f1s0,g4b1i512f85s1").world_size == 12
item = Item(id=0, path=Path("a"), kind="image", caption="", width=64, height=32, source="s")
assert sample_grid(item, MediaOptions()).num_tokens == 8
assert GroupSampler([LoaderGroup("s", 1, 2)], {"s": [1, 2]}).batch(0)
assert pooled_features([5], 4).shape == (4,)
used = {name for name, module in sys.modules.items() if module is not None}
assert not {"torch", "msgspec", "duckdb", "av", "PIL"} & used
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_the_check_can_fail() -> None:
    result = run("import knapformer.data.media")
    assert result.returncode != 0 and "torch" in result.stderr


def test_every_module_but_the_one_of_tensors_imports_without_extras() -> None:
    code = """
import importlib, pkgutil, knapformer.data
for module in pkgutil.iter_modules(knapformer.data.__path__, "knapformer.data."):
    if module.name != "knapformer.data.media":
        importlib.import_module(module.name)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_reading_a_file_names_the_package_that_is_missing(tmp_path) -> None:
    (tmp_path / "m.jsonl").write_text('{"path": "a.png"}')
    readers = (
        "read_manifest('m.jsonl')",
        "load_workload('real-mix-8')",
        "Profile.load('demo-cpu')",
        "read_manifest('m.pq')",
    )
    (tmp_path / "m.pq").write_bytes(b"PAR1")
    for call in readers:
        error = run(f"import os\nos.chdir({str(tmp_path)!r})\nfrom knapformer.data import *\n{call}").stderr
        package = "duckdb" if "pq" in call else "msgspec"
        assert "BackendUnavailableError" in error and f"needs {package}; install it with: pip install" in error


def test_missing_media_packages_are_named(tmp_path) -> None:
    for name, package in (("a.png", "Pillow"), ("a.mp4", "PyAV")):
        (tmp_path / name).write_bytes(b"x")
        error = run(f"from knapformer.data import read_manifest\nread_manifest({str(tmp_path)!r})").stderr
        assert "BackendUnavailableError" in error and package in error and "knapformer[media]" in error
        (tmp_path / name).unlink()
