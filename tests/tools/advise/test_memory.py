"""Chances of a step that does not fit, against enumeration; the token limit against the simulator's estimate."""

import itertools
from math import comb

import numpy as np
import pytest

from knapformer.errors import PlanError
from knapformer.plan import Limits, Sequences, make_planner
from knapformer.tools.advise.memory import USABLE, TokenMemory, chance_above
from knapformer.tools.simulate.scenario import Scenario

DICE = np.arange(1, 7), np.ones(6, dtype=np.int64)


@pytest.mark.parametrize(("draws", "limit"), [(1, 4), (2, 8), (3, 16), (5, 17), (3, 18), (2, 1)])
def test_sums_of_dice(draws, limit):
    rolls = [sum(r) for r in itertools.product(range(1, 7), repeat=draws)]
    want = np.mean([total > limit for total in rolls])
    # 6 limits of a die are whole bins only where they divide them; half a die off keeps sums clear of the limit
    assert chance_above(limit + 0.5, draws, *DICE) == pytest.approx(want, abs=1e-3)


def test_tiny_chances_keep_their_size():
    """One length in a million is too long, and two of it are needed: far below what a Fourier transform could tell."""
    length, count = np.array([1, 100]), np.array([999_999, 1])
    want = sum(comb(8, k) * 1e-6**k * (1 - 1e-6) ** (8 - k) for k in range(2, 9))
    assert chance_above(150, 8, length, count) == pytest.approx(want, rel=1e-6)
    assert chance_above(800, 8, length, count) == 0.0
    assert chance_above(7, 8, length, count) == pytest.approx(1.0)


def test_many_draws_keep_their_mean():
    """1,024 ranks of 16 samples: lengths are a small part of a bin, and rounding them would shift the sum."""
    length, count, draws = np.array([300, 2000, 40_000]), np.array([60, 35, 5]), 16_384
    mean = np.average(length, weights=count) * draws
    spread = np.sqrt(np.average((length - mean / draws) ** 2, weights=count) * draws)
    for deviations, want in ((0, 0.5), (1, 0.1587), (-1, 0.8413)):
        assert chance_above(mean + deviations * spread, draws, length, count) == pytest.approx(want, rel=0.15)
    tail = chance_above(mean + 3 * spread, draws, length, count)
    assert 0.00135 < tail < 0.003  # bins spread the sum a little: to the safe side


def test_the_limit_fits_and_little_more_does_not():
    scenario = Scenario.of("flux1", "h100x4")
    room = TokenMemory.of(scenario)
    whole, split = room.limit(split=False), room.limit(split=True)
    assert 0 < split < whole

    def peak(planner: str, tokens: int) -> float:
        lens = [[tokens]] * 4 if planner == "local" else [[4 * tokens], [], [], []]
        topology = None if planner == "local" else "g4n1"
        plan = make_planner(planner, topology)
        placement = plan(Sequences.from_ranks(lens), scenario.cluster, scenario.cost_model(), Limits())
        return float(scenario.memory(placement).max())

    usable = USABLE * scenario.memory_bytes
    assert peak("local", whole) == pytest.approx(room.at(whole, split=False))
    assert peak("local", whole) <= usable < peak("local", whole + 128)
    assert peak("bags", split) <= usable


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(PlanError, match=r"FLUX\.2 does not fit: it needs about \d+ GB.*shard it over more ranks"):
        TokenMemory.of(Scenario.of("flux2", "h100x2"))
