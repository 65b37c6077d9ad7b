import numpy as np
import pytest

from knapformer.data import DataCode, generate_trace, load_workload, parse_data_codes
from knapformer.errors import SpecError

JOINT = "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"


def test_parse() -> None:
    assert parse_data_codes("g8b4i256f1s0,g4b1i512f85s1") == (
        DataCode(8, 4, 256, 1, video=False),
        DataCode(4, 1, 512, 85, video=True),
    )
    assert ",".join(map(str, parse_data_codes(JOINT))) == JOINT


@pytest.mark.parametrize(
    ("text", "column", "bad"),
    [
        ("", 1, "the end"),
        ("x", 1, "'x'"),
        ("g8b4i256f1s0junk", 13, "'junk'"),
        ("g8b4i256f1s0,", 14, "the end"),
        ("g8b4i256f1s0,,g1b1i16f1s0", 14, "','"),
        ("g8b4i256f1s0,g4b1i512", 22, "the end"),
        ("g8 b4i256f1s0", 3, "' b4i256f1s0'"),
        ("g-8b4i256f1s0", 1, "'g-8b4i256f1s0'"),
        ("g8b4i256f1s2", 11, "'s2'"),
        ("g0b4i256f1s0", 1, "'g0'"),
        ("g8b0i256f1s0", 3, "'b0'"),
        ("g8b4i0f1s0", 5, "'i0'"),
        ("g8b4i256f1s0,g8b4i256f0s0", 22, "'f0'"),
        ("g٣b4i256f1s0", 1, "'g٣b4i256f1s0'"),
    ],
)
def test_errors_name_the_column(text: str, column: int, bad: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_data_codes(text)
    assert f"at column {column}" in str(error.value)
    assert bad in str(error.value)


@pytest.mark.parametrize(
    ("code", "tokens"),
    [
        ("g1b1i256f1s0", 256),
        ("g1b1i256f4s0", 1024),  # key frames count in full
        ("g1b1i256f85s1", 6400),  # 85 frames are 25 latent ones
        ("g1b1i512f85s1", 25600),
        ("g1b1i256f34s1", 2560),
        ("g1b1i256f2s1", 256),  # never less than one latent frame
        ("g1b1i255f1s0", 225),  # sides are rounded down
    ],
)
def test_paper_tokens(code: str, tokens: int) -> None:
    assert parse_data_codes(code)[0].paper_tokens() == tokens


def test_frames_divide_exactly() -> None:
    # 33 / 2.2 is 14.999999999999998 in floating point.
    assert parse_data_codes("g1b1i16f33s1")[0].paper_tokens(vae_temporal=2.2) == 15
    assert parse_data_codes("g1b1i16f32s1")[0].paper_tokens(vae_temporal=2.2) == 14


def test_text_lengths_reach_both_ends() -> None:
    trace = generate_trace("g4b50i16f1s0", num_steps=20, max_text=7)
    counts = np.bincount(np.concatenate([row for step in trace.steps for row in step.text_lens]))
    assert len(counts) == 8
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500)


def visual_by_code(trace, codes) -> list[tuple[np.ndarray, np.ndarray]]:
    result = []
    first = 0
    for code in codes:
        ranks = range(first, first + code.ranks)
        text = np.concatenate([step.text_lens[rank] for step in trace.steps for rank in ranks])
        whole = np.concatenate([step.seq_lens[rank] for step in trace.steps for rank in ranks])
        result.append((whole - text, text))
        first += code.ranks
    return result


def test_distribution_equals_the_recorded_trace() -> None:
    codes = parse_data_codes(JOINT)
    recorded = visual_by_code(load_workload("flux-joint-32"), codes)
    drawn = visual_by_code(generate_trace(JOINT, num_steps=100, seed=11), codes)
    for code, (old, old_text), (new, new_text) in zip(codes, recorded, drawn, strict=True):
        base = code.paper_tokens()
        for visual, text in ((old, old_text), (new, new_text)):
            draws = len(visual) / code.batch  # one aspect factor per rank and step
            spread = 0.08 * base
            # Uniform between floor(0.96 base) and floor(1.04 base), nearly reaching both ends.
            assert np.floor(0.96 * base) <= visual.min() <= 0.96 * base + spread * 6 / draws + 1
            assert np.floor(1.04 * base) >= visual.max() >= 1.04 * base - spread * 6 / draws - 1
            assert abs(visual.mean() - base) < 4 * spread / np.sqrt(12 * draws) + 1
            assert text.min() <= 3 and 389 <= text.max() <= 392
            assert abs(text.mean() - 196) < 4 * 393 / np.sqrt(12 * len(text))


def test_one_aspect_factor_per_rank_and_step() -> None:
    trace = generate_trace("g2b5i512f1s0", num_steps=3)
    visual = np.array([[np.ptp(s - t) for s, t in zip(p.seq_lens, p.text_lens, strict=True)] for p in trace.steps])
    assert (visual == 0).all()
    firsts = {int(s[0] - t[0]) for p in trace.steps for s, t in zip(p.seq_lens, p.text_lens, strict=True)}
    assert len(firsts) > 1


def test_larger_worlds_and_longer_traces_begin_alike() -> None:
    small = generate_trace(JOINT, num_steps=2, seed=5)
    large = generate_trace(JOINT, world_size=96, num_steps=4, seed=5)
    assert large.world_size == 96
    for few, many in zip(small.steps, large.steps, strict=False):
        assert [row.tolist() for row in few.seq_lens] == [row.tolist() for row in many.seq_lens[:32]]
    other = generate_trace(JOINT, num_steps=2, seed=6)
    assert [row.tolist() for row in other.steps[0].seq_lens] != [row.tolist() for row in small.steps[0].seq_lens]


def test_settings() -> None:
    trace = generate_trace("g2b3i64f1s0", world_size=4, num_steps=1, max_text=0, aspect=(1, 1), vae_spatial=8)
    assert [row.tolist() for row in trace.steps[0].seq_lens] == [[64] * 3] * 4
    assert trace.meta["text"] == "joint" and trace.meta["data_codes"] == "g2b3i64f1s0"
    assert generate_trace("g1b1i16f1s0", num_steps=50).steps[7].seq_lens[0][0] >= 1  # 0.96 tokens are one


@pytest.mark.parametrize(
    ("codes", "settings", "message"),
    [
        (JOINT, {"world_size": 48}, "multiple of 32, got 48"),
        (JOINT, {"world_size": 0}, "multiple of 32, got 0"),
        ("g1b1i8f1s0", {}, "resolution of at least 16"),
        (JOINT, {"num_steps": 0}, "num_steps is 0"),
        (JOINT, {"aspect": (1.1, 0.9)}, "low <= high"),
        (JOINT, {"max_text": -1}, "max_text is -1"),
        ((), {}, "no data code"),
    ],
)
def test_settings_out_of_range(codes, settings: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        generate_trace(codes, **settings)


def test_a_code_built_by_hand_is_checked() -> None:
    with pytest.raises(SpecError, match="batch is 0"):
        DataCode(1, 0, 256, 1, video=False)
