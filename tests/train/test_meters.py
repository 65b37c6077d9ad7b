"""Speeds and drift from step times: found where they are, not moved by a bad step, not seen where there is nothing."""

import warnings

import numpy as np
import pytest

from knapformer.errors import KnapFormerWarning, SpecError
from knapformer.plan import CostModel
from knapformer.train.meters import StepMeter

COST = CostModel.from_shapes(64, 4)


def meter_of(speeds, *, steps=20, attention=1.0, noise=0.02, spikes=(), spike=10, balanced=False, window=32):
    """Fed with step times of ranks of these speeds; `spikes` are (step, rank) that take `spike` times as long."""
    rng = np.random.default_rng(0)
    ranks, meter = len(speeds), StepMeter(len(speeds), window=window)
    for step in range(steps):
        tokens = np.full(ranks, 2000) if balanced else rng.integers(100, 3000, ranks)
        area = tokens * (4000 if balanced else rng.integers(50, 12_000, ranks))
        work = 2e5 + 3e-4 * (tokens * COST.token + attention * area * COST.per_qk_pair)
        busy = work / np.array(speeds) * rng.normal(1, noise, ranks)
        for at, rank in spikes:
            busy[rank] *= spike if at == step else 1
        meter.add(tokens, area, busy.astype(np.int64))
    return meter


@pytest.mark.parametrize("balanced", [False, True])
def test_a_straggler_is_found_and_named(balanced):
    meter = meter_of([1, 1, 0.7, 1, 1], balanced=balanced)
    found = meter.estimate(COST)
    assert found.straggler == 2 and found.steps == 20
    assert found.speeds[2] == pytest.approx(700, abs=20)
    assert found.speeds[:2] + found.speeds[3:] == (1000,) * 4  # noise is exactly nominal
    assert meter.estimate(COST) == found
    with pytest.warns(KnapFormerWarning, match=r"rank 2 computes at 0\.(69|7\d) of the median rank's speed"):
        meter.warn(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meter.warn(found)  # once


def test_one_bad_step_moves_nothing_where_a_mean_would():
    spikes = [(7, 0), (11, 0)]
    found = meter_of([1, 1, 1], spikes=spikes).estimate(COST)
    assert found.speeds == (1000, 1000, 1000) and found.straggler is None
    assert found.pair_over_token == pytest.approx(1, abs=0.1)
    busy = np.array([step[2] for step in meter_of([1, 1, 1], spikes=spikes, balanced=True)._steps])
    assert busy.mean(axis=0)[0] > 1.5 * busy.mean(axis=0)[1]


def test_bad_clocks_do_not_move_prices():
    """Runs measured far too short weigh most in relative error, where Huber's weights are not."""
    found = meter_of([1, 1, 1], spikes=[(step, step % 3) for step in range(0, 20, 3)], spike=0.05).estimate(COST)
    assert found.speeds == (1000, 1000, 1000)
    assert found.pair_over_token == pytest.approx(1, abs=0.15)


def test_ranks_of_two_kinds():
    found = meter_of([1, 0.5, 1, 0.5, 1], noise=0.01).estimate(COST)
    assert np.array(found.speeds) == pytest.approx([1000, 500, 1000, 500, 1000], abs=15)


def test_drift_of_prices_is_seen_where_steps_tell_and_only_there():
    meter = meter_of([1, 1, 1], attention=1.6)
    found = meter.estimate(COST)
    assert found.pair_over_token == pytest.approx(1.6, rel=0.08) and found.speeds == (1000,) * 3
    with pytest.warns(KnapFormerWarning, match=r"attention costs 1\.[56]\d times what the cost model says"):
        meter.warn(found)
    assert meter_of([1, 1, 1], attention=1.6, balanced=True).estimate(COST).pair_over_token is None


def test_old_steps_are_forgotten():
    meter = meter_of([1, 0.6, 1], steps=30, window=8)
    rng = np.random.default_rng(1)
    for _ in range(8):
        tokens = rng.integers(100, 3000, 3)
        meter.add(tokens, tokens * 5000, (1e5 + tokens * 1e3).astype(np.int64))
    assert meter.estimate(COST).speeds == (1000,) * 3


def test_too_little_says_nothing():
    assert meter_of([1, 0.5], steps=3).estimate(COST) is None
    meter = StepMeter(2)
    for _ in range(6):
        meter.add(np.array([5, 0]), np.array([25, 0]), np.array([10, 0]))
    assert meter.estimate(COST) is None  # a clock that stands still
    with pytest.raises(SpecError, match=r"figures of \(3,\) ranks; this meter is for 2"):
        meter.add(*np.ones((3, 3)))
    with pytest.raises(SpecError, match="window=2"):
        StepMeter(2, window=2)
