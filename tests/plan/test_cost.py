"""Prices: by hand, against the paper's FLOP formula, and exact in whole ticks."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import SpecError
from knapformer.plan import TICKS_PER_SECOND, Cluster, CostModel, Sequences, make_planner


def test_prices_by_hand() -> None:
    # One FLOP a tick. Token-wise: 24 * 64**2. A row against a key: 0.5 * 4 * 64 / 4 heads.
    cost = CostModel.from_shapes(64, 4, gamma=0.5, sequence_flop=1000, token_flops=TICKS_PER_SECOND)
    assert cost == CostModel(num_heads=4, token=98_304, per_qk_pair=32, sequence=1000, head_dim=16)
    assert cost.work(np.array([1, 10])).tolist() == [98_304 + 128 + 1000, 983_040 + 12_800 + 1000]


def test_the_defaults_are_flux() -> None:
    # 500 TFLOP/s: 2 ticks a FLOP. 24 * 3072**2 FLOP a token, 1.25 * 4 * 128 FLOP a row and key, 24 heads of 128.
    assert CostModel.from_shapes() == CostModel(24, 452_984_832, 1280, 0, 128)
    assert CostModel.from_shapes(linear_coeff=24) == CostModel.from_shapes(mlp_ratio=4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gamma": 1.0}, (24, 4)),
        ({"gamma": 0.49}, (24, 1.96)),
        ({"gamma": 0.0}, (24, 0)),
        ({"gamma": 1.0, "mlp_ratio": 2.0}, (16, 4)),
        ({"gamma": 1.0, "linear_coeff": 10.5}, (10.5, 4)),
        ({"gamma": 1.0, "linear_coeff": 10.5, "mlp_ratio": 99}, (10.5, 4)),  # the coefficient wins
        ({"gamma": 1.0, "attention_coeff": 3.0}, (24, 3)),
        ({"gamma": 2.0, "attention_coeff": 3.0}, (24, 6)),
    ],
)
@pytest.mark.parametrize(("d_model", "heads"), [(3072, 24), (128, 7), (5120, 40)])
@pytest.mark.parametrize("length", [1, 77, 4096, 334_560])
def test_work_is_the_paper_s_formula(
    options: dict, expected: tuple[float, float], d_model: int, heads: int, length: int
) -> None:
    cost = CostModel.from_shapes(d_model, heads, **options)
    linear, attention = (Fraction(c).limit_denominator(10_000) for c in expected)
    ticks = 2 * (linear * d_model**2 * length + attention * d_model * length**2)
    got = int(cost.work(np.array([length]))[0])
    assert abs(got - ticks) <= Fraction(length + heads * length**2, 2)  # each price is rounded to whole ticks
    other = 2 * (linear * d_model**2 * length + (attention + 1) * d_model * length**2)
    assert abs(got - other) > Fraction(length + heads * length**2, 2)  # the check can fail


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 10**9), st.integers(1, 10**6), st.integers(0, 10**9), st.integers(1, 300_000))
def test_work_is_exact(heads: int, token: int, per_qk_pair: int, sequence: int, length: int) -> None:
    cost = CostModel(heads, token, per_qk_pair, sequence)
    exact = sequence + token * length + per_qk_pair * heads * length * length
    if exact < 2**63:
        assert int(cost.work(np.array([length]))[0]) == exact


def test_float_arithmetic_would_not_be_exact() -> None:
    exact = 1 + 3 * 3_000_001 + 1000 * 24 * 3_000_001**2
    assert int(CostModel(24, 3, 1000, 1).work(np.array([3_000_001]))[0]) == exact
    assert int(float(exact)) != exact


def test_load_of_whole_sequences_is_their_work() -> None:
    cost = CostModel.from_shapes(64, 4, sequence_flop=1e5)
    seqs = Sequences.from_ranks([[3, 900], [], [41]])
    placement = make_planner("local")(seqs, Cluster(3), cost)
    load = cost.load(placement.tokens(), placement.area(), placement.num_shards())
    work = cost.work(seqs.length)
    assert load.tolist() == [work[0] + work[1], 0, work[2]]
    without = cost.load(placement.tokens(), placement.area())
    assert (load - without).tolist() == [2 * cost.sequence, 0, cost.sequence]


def test_only_ratios_matter_to_the_speed_assumed() -> None:
    slow, fast = CostModel.from_shapes(token_flops=1e12), CostModel.from_shapes(token_flops=500e12)
    lengths = np.array([256, 4096, 67_053])
    assert (slow.work(lengths) / fast.work(lengths)).tolist() == pytest.approx([500] * 3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CostModel(0, 1, 1), "num_heads is 0; it must be an integer of at least 1"),
        (lambda: CostModel(4, -1, 1), "token is -1; it must be an integer of at least 0"),
        (lambda: CostModel(4, 1.5, 1), "token is 1.5; it must be an integer"),  # type: ignore[arg-type]
        (lambda: CostModel(4, 1, np.int64(1)), "per_qk_pair is .*; it must be an integer"),  # type: ignore[arg-type]
        (lambda: CostModel(4, 1, 1, sequence=-2), "sequence is -2"),
        (lambda: CostModel(4, 1, 1, head_dim=0), "head_dim is 0; it must be an integer of at least 1"),
        (lambda: CostModel(True, 1, 1), "num_heads is True"),
        (lambda: CostModel(4, 0, 0), "both are 0"),
        (lambda: CostModel.from_shapes(0), "got d_model=0"),
        (lambda: CostModel.from_shapes(64, 0), "num_heads=0"),
        (lambda: CostModel.from_shapes(gamma=-0.1), "gamma=-0.1"),
        (lambda: CostModel.from_shapes(token_flops=0), "token_flops=0"),
        (lambda: CostModel.from_shapes(gamma=math.nan), "gamma=nan"),
        (lambda: CostModel.from_shapes(gamma=math.inf), "gamma=inf"),
        (lambda: CostModel.from_shapes(mlp_ratio=math.nan), "mlp_ratio"),
    ],
)
def test_impossible_prices(build, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build()
