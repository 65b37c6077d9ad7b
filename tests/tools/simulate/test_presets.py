"""Presets: shapes agree with published sizes, names are read or refused with a message that helps."""

import tomllib
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from knapformer.errors import SpecError
from knapformer.tools.simulate.presets import (
    DevicePreset,
    ModelShape,
    cluster_preset,
    device_names,
    device_preset,
    model_names,
    model_preset,
    named_workload,
    workload_names,
)
from knapformer.tools.simulate.presets.shipped import read_presets


@pytest.mark.parametrize("name", model_names())
def test_blocks_hold_the_parameters_that_are_published(name: str) -> None:
    model = model_preset(name)
    blocks = model.layer_parameters().sum()
    assert len(model.layer_parameters()) == model.num_layers
    assert 0.94 * model.parameters < blocks <= 1.01 * model.parameters  # the rest: embeddings, refiners, output
    assert model.head_dim * model.num_heads == model.d_model
    assert model.source


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("flux1", (1024, 1024, 1), 4096),
        ("wan21-14b", (832, 480, 81), 32_760),
        ("wan21-14b", (1280, 720, 81), 75_600),
        ("hunyuanvideo", (1280, 720, 129), 118_800),
        ("cogvideox-5b", (720, 480, 49), 17_550),
        ("ltx-video", (768, 512, 121), 6_144),
        ("mochi", (848, 480, 163), 44_520),
        ("flux1", (3, 5, 1), 1),
    ],
)
def test_tokens_of_published_sizes(name: str, size: tuple[int, int, int], tokens: int) -> None:
    assert model_preset(name).visual_tokens(*size) == tokens


def test_work_is_24_and_4_of_a_joint_model_and_includes_the_text_that_is_crossed() -> None:
    flux, wan = model_preset("flux1"), model_preset("wan21-14b")
    assert flux.forward_flop(1000) == pytest.approx(24 * 1000 * 3072**2 + 4 * 1000**2 * 3072)
    d, text = 5120, 512
    per_token = 22.8 * d * d + 4 * text * d
    assert wan.forward_flop(1000) == pytest.approx(4 * text * d * d + 1000 * per_token + 4 * 1000**2 * d)
    assert wan.sequence_length(832, 480, 81) == 32_760
    assert flux.sequence_length(1024, 1024) == 4096 + 512


def test_the_cost_model_has_the_prices_of_the_device() -> None:
    cost = model_preset("flux1").cost_model("h100")
    assert cost.token == round(24 * 3072**2 / 500e12 * 1e15)
    assert cost.per_qk_pair == round(4 * 128 / 400e12 * 1e15)


@pytest.mark.parametrize("name", device_names())
def test_devices_sustain_less_than_their_peak(name: str) -> None:
    device = device_preset(name)
    assert device.attention_flops < device.token_flops < device.peak_flops
    assert device.source and device.sustained


def test_clusters_are_read() -> None:
    plain = cluster_preset("h100x32")
    assert (plain.intra_node, plain.inter_node) == pytest.approx((300e9, 40e9))
    assert plain.cluster().node_sizes == (8, 8, 8, 8)
    slow = cluster_preset("a100x12-pcie-nic100-node4-shard6")
    assert (slow.intra_node, slow.inter_node) == pytest.approx((25.6e9, 10e9))
    assert (slow.cluster().node_sizes, slow.shard_size) == ((4, 4, 4), 6)
    assert cluster_preset("h200x8-inter50-intra200").inter_node == 50e9


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("h100", "'h100'"),
        ("h100x0", "'h100x0'"),
        ("v100x8", "unknown device 'v100'"),
        ("h100x8-fast", "'fast'"),
        ("h100x8-nic0", "'nic0'"),
        ("h100x8-nic1-nic2", "'nic2'"),
        ("h100x8-node2.5", "node2.5"),
        ("h100x8-shard3", "shard3 must divide the 8 ranks"),
    ],
)
def test_other_clusters_are_refused_by_name(text: str, names: str) -> None:
    with pytest.raises(SpecError) as error:
        cluster_preset(text)
    assert names in str(error.value)


def test_unknown_models_are_refused_with_a_hint() -> None:
    with pytest.raises(SpecError, match="did you mean 'flux1'"):
        model_preset("flux_1")


@pytest.mark.parametrize("name", workload_names())
def test_workloads_grow_at_the_end(name: str) -> None:
    small, large = named_workload(name, world_size=3, num_steps=2), named_workload(name, world_size=5, num_steps=4)
    for a, b in zip(small.steps, large.steps, strict=False):
        assert all(np.array_equal(x, y) for x, y in zip(a.seq_lens, b.seq_lens, strict=False))
    other = named_workload(name, world_size=5, num_steps=4, seed=1)
    assert any(not np.array_equal(x, y) for x, y in zip(large.steps[0].seq_lens, other.steps[0].seq_lens, strict=True))


@pytest.mark.parametrize("share", [35, 60])
def test_a_mix_has_the_share_of_video_that_its_name_says(share: int) -> None:
    trace = named_workload(f"mix-v{share}-10s", world_size=64, num_steps=30)
    lens = np.concatenate([row for step in trace.steps for row in step.seq_lens])
    video = lens[lens > 60_000].sum() / lens.sum()
    assert set(lens[lens > 60_000].tolist()) == {63_960, 147_600}  # 10 s of 16 frames at 480p and 720p
    assert video == pytest.approx(share / 100, abs=0.05)


def test_recorded_workloads_and_unknown_ones() -> None:
    assert named_workload("flux-joint", world_size=32, num_steps=2).num_steps == 2
    with pytest.raises(SpecError, match="For simulation also: open-sora-2-stage1"):
        named_workload("nothing-like-it")
    with pytest.raises(SpecError, match="at least 1"):
        named_workload("mix-v35-10s", num_steps=0)
    with pytest.raises(SpecError, match="from 1 to 99 %"):
        named_workload("mix-v0-10s")


@pytest.mark.parametrize(("file", "kind"), [("devices.toml", DevicePreset), ("models.toml", ModelShape)])
def test_shipped_files_have_no_other_fields(file: str, kind: type) -> None:
    text = (files("knapformer.tools.simulate.presets") / file).read_text(encoding="utf-8")
    known = {field.name for field in fields(kind)} - {"name"}
    for name, table in tomllib.loads(text).items():
        assert set(table) <= known, name


def test_a_preset_with_a_wrong_field_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (files("knapformer.tools.simulate.presets") / "devices.toml").read_text(encoding="utf-8")
    (tmp_path / "devices.toml").write_text(text.replace("peak_flops = 312e12", 'peak_flops = "fast"'))
    monkeypatch.setattr("knapformer.tools.simulate.presets.shipped.files", lambda package: tmp_path)
    with pytest.raises(SpecError, match=r"devices\.toml, \[a100\]: Expected `float`, got `str` - at `\$\.peak_flops`"):
        read_presets("devices.toml", DevicePreset)
