"""`knapformer.data` needs NumPy alone, until pixels are read."""

import subprocess
import sys

BLOCK = "import sys\nfor name in ('torch', 'av', 'PIL', 'skimage', 'skvideo'): sys.modules[name] = None\n"


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=60)


def test_workloads_sampler_and_text_need_numpy_only() -> None:
    code = """
from knapformer.data import *
from knapformer.data import GroupSampler, Item, LoaderGroup, MediaOptions, load_workload, pooled_features, sample_grid
from pathlib import Path
assert load_workload("real-mix-8").world_size == 8
item = Item(id=0, path=Path("a"), kind="image", caption="", width=64, height=32, source="s")
assert sample_grid(item, MediaOptions()).num_tokens == 8
assert GroupSampler([LoaderGroup("s", 1, 2)], {"s": [1, 2]}).batch(0)
assert pooled_features([5], 4).shape == (4,)
assert not {"torch", "av", "PIL"} & {name for name, module in sys.modules.items() if module is not None}
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_the_check_can_fail() -> None:
    result = run("import knapformer.data.media")
    assert result.returncode != 0 and "torch" in result.stderr


def test_missing_media_packages_are_named(tmp_path) -> None:
    for name, package in (("a.png", "Pillow"), ("a.mp4", "PyAV")):
        (tmp_path / name).write_bytes(b"x")
        error = run(f"from knapformer.data import read_manifest\nread_manifest({str(tmp_path)!r})").stderr
        assert "BackendUnavailableError" in error and package in error and "knapformer[media]" in error
        (tmp_path / name).unlink()
