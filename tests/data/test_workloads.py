from pathlib import Path

import numpy as np
import pytest

from knapformer.data import generate_trace, load_workload, parse_data_codes, preset_names, write_trace
from knapformer.errors import DataError, KnapFormerWarning, SpecError


def lengths(trace) -> list:
    return [[row.tolist() for row in step.seq_lens] for step in trace.steps]


def test_preset_names() -> None:
    assert preset_names() == (
        "flux-joint-32", "flux-lowres-32", "flux-mixed-32", "real-mix-32", "real-mix-8", "video-v35-16", "video-v50-32",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "world_size", "num_steps", "longest", "text"),
    [
        ("flux-joint-32", 32, 100, 26_959, "joint"),
        ("flux-lowres-32", 32, 30, 657, "joint"),
        ("flux-mixed-32", 32, 100, 17_403, "joint"),
        ("real-mix-8", 8, 30, 67_053, "joint"),
        ("real-mix-32", 32, 30, 67_052, "joint"),
        ("video-v35-16", 16, 20, 334_560, "cross"),
        ("video-v50-32", 32, 20, 334_560, "cross"),
    ],
)
def test_presets(name: str, world_size: int, num_steps: int, longest: int, text: str) -> None:
    trace = load_workload(name)
    assert (trace.name, trace.world_size, trace.num_steps, trace.text) == (name, world_size, num_steps, text)
    assert max(int(row.max()) for step in trace.steps for row in step.seq_lens if len(row)) == longest
    assert trace.meta["d_model"] == trace.meta["heads"] * 128
    assert trace.meta["ranks_per_node"] == 8
    assert lengths(load_workload(name, num_steps=2)) == lengths(trace)[:2]


def test_a_family_name_means_its_recorded_world() -> None:
    assert lengths(load_workload("flux-joint")) == lengths(load_workload("flux-joint-32"))
    assert load_workload("real-mix").world_size == 32
    assert load_workload("real-mix", world_size=8).name == "real-mix-8"


@pytest.mark.parametrize("asked", [("flux-joint", 512), ("flux-joint-512", None), ("flux-joint-512", 512)])
def test_other_world_sizes_are_drawn_from_the_codes(asked: tuple[str, int | None]) -> None:
    trace = load_workload(asked[0], world_size=asked[1], num_steps=3)
    codes = load_workload("flux-joint").meta["data_codes"]
    assert (trace.name, trace.world_size, trace.num_steps) == ("flux-joint-512", 512, 3)
    assert lengths(trace) == lengths(generate_trace(codes, world_size=512, num_steps=3))
    per_group = sum(code.ranks * code.batch for code in parse_data_codes(codes))
    assert all(step.num_sequences == 16 * per_group for step in trace.steps)


def test_seeds_and_longer_runs_draw_anew() -> None:
    recorded = load_workload("flux-lowres-32")
    assert lengths(load_workload("flux-lowres-32", seed=1)) != lengths(recorded)
    assert load_workload("flux-lowres-32", seed=1).num_steps == recorded.num_steps
    assert load_workload("flux-lowres-32", num_steps=31).num_steps == 31


def test_data_codes() -> None:
    trace = load_workload("g2b1i256f1s0", world_size=4, seed=3)
    assert trace.num_steps == 20
    assert lengths(trace) == lengths(generate_trace("g2b1i256f1s0", world_size=4, num_steps=20, seed=3))
    with pytest.raises(SpecError, match="column 3"):
        load_workload("g2x")


def test_trace_file(tmp_path: Path) -> None:
    trace = load_workload("real-mix-8", num_steps=3)
    write_trace(trace, tmp_path / "own.json.gz")
    path = str(tmp_path / "own.json.gz")
    assert lengths(load_workload(path)) == lengths(trace)
    assert lengths(load_workload(path, num_steps=1, world_size=8)) == lengths(trace)[:1]
    with pytest.raises(SpecError, match="is for 8 ranks but 16 were asked"):
        load_workload(path, world_size=16)
    with pytest.warns(KnapFormerWarning, match="has 3 recorded steps, 4 were asked for; all are taken"):
        assert lengths(load_workload(path, num_steps=4)) == lengths(trace)
    with pytest.raises(SpecError, match="ask for 1 to 3"):
        load_workload(path, num_steps=0)
    with pytest.raises(DataError, match="cannot read"):
        load_workload(str(tmp_path / "none.json"))


def test_unknown_names_list_presets_and_close_matches() -> None:
    with pytest.raises(SpecError) as error:
        load_workload("flux-jiont-32")
    assert "did you mean 'flux-joint-32'" in str(error.value)
    for name in preset_names():
        assert name in str(error.value)
    with pytest.raises(SpecError, match="unknown workload ''"):
        load_workload("")


def test_impossible_sizes() -> None:
    with pytest.raises(SpecError, match=r"not exist for 64 ranks.*\[8, 32\]"):
        load_workload("real-mix", world_size=64)
    with pytest.raises(SpecError, match="not exist for 12 ranks"):
        load_workload("video-v35-12")
    with pytest.raises(SpecError, match="is for 32 ranks but 64"):
        load_workload("flux-joint-32", world_size=64)
    with pytest.raises(SpecError, match="multiple of 32"):
        load_workload("flux-joint", world_size=16)
    with pytest.warns(KnapFormerWarning, match="has 30 recorded steps, 31 were asked for"):
        assert load_workload("real-mix-8", num_steps=31).num_steps == 30
    with pytest.raises(SpecError, match="ask for 1 to 100"):
        load_workload("flux-joint", num_steps=0)


def test_a_seed_for_a_recorded_trace_is_said_to_be_ignored(tmp_path: Path) -> None:
    with pytest.warns(KnapFormerWarning, match="seed 4 is ignored") as caught:
        assert lengths(load_workload("real-mix-8", seed=4)) == lengths(load_workload("real-mix-8"))
    assert caught[0].filename == __file__
    write_trace(load_workload("real-mix-8", num_steps=1), tmp_path / "t.json")
    with pytest.warns(KnapFormerWarning, match="seed 4 is ignored") as caught:
        load_workload(str(tmp_path / "t.json"), seed=4)
    assert caught[0].filename == __file__


def test_video_presets_hold_the_stated_share_of_tokens_in_clips() -> None:
    for name, share in (("video-v35-16", 0.39), ("video-v50-32", 0.51)):
        every = np.concatenate([row for step in load_workload(name).steps for row in step.seq_lens])
        assert every[every > 10_000].sum() / every.sum() == pytest.approx(share, abs=0.005)
