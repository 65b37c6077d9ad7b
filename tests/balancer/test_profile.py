"""Measured prices by path, and speeds of ranks: the same on every rank, and what is wrong is raised by every rank."""

import pytest

from knapformer import SequenceBalancer
from knapformer.data import Profile
from knapformer.errors import CalibrationError, RankMismatchError, SpecError
from tests.data.profiles import profile_of
from tests.ranks import run_ranks


def with_profiles(rank, world_size, good, lens):
    """Prices by path; then a path that is missing on one rank, and on all; then speeds."""
    balancer = SequenceBalancer(cost=good)
    errors = []
    for path in (good if rank else "missing.json", "missing.json"):
        with pytest.raises((RankMismatchError, CalibrationError)) as caught:
            SequenceBalancer(cost=path)
        errors.append((type(caught.value).__name__, str(caught.value)))
    even = balancer.plan_routing(lens[rank])
    balancer.set_speeds([1000, 500])
    uneven = balancer.plan_routing(lens[rank])
    with pytest.raises(SpecError, match="3 speeds for 2 ranks"):
        balancer.set_speeds([1000] * 3)
    return balancer.cost(), errors, even.placement.tokens().tolist(), uneven.placement.tokens().tolist()


def test_prices_by_path_and_speeds(tmp_path):
    path = profile_of().save(tmp_path / "p.json")
    lens = [[900, 300, 300, 200], [100]]
    results = run_ranks(2, with_profiles, str(path), lens)
    for cost, errors, even, uneven in results:
        assert cost == Profile.load(path).cost_model()
        assert errors[0][0] == "RankMismatchError" and "ranks disagree on the cost model" in errors[0][1]
        assert errors[1] == ("CalibrationError", results[0][1][1][1])
        assert max(even) - min(even) < 100
        assert uneven[0] > 1.5 * uneven[1]  # the second rank is half as fast
    assert "cannot read the profile 'missing.json'" in results[0][1][1][1]
