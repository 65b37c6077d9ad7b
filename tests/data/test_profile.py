"""Profiles: predictions by hand, prices for planners, files, and what is said of files that make no sense."""

import copy
import json

import numpy as np
import pytest

from knapformer.data import Profile, shipped_profiles
from knapformer.data.profile import PHASES, Terms
from knapformer.errors import CalibrationError
from knapformer.plan import Cluster, CostModel, Sequences, make_planner
from tests.data.profiles import HEADS, TRUE, profile_of


@pytest.fixture(scope="module")
def profile():
    return profile_of()


def test_predictions_are_the_formula(profile):
    lengths = [100, 7, 2000]
    for phase in PHASES:
        t = TRUE[phase]
        expected = t.step + 3 * t.sequence + sum(t.token * n + t.per_qk_pair * HEADS * n * n for n in lengths)
        assert profile.seconds(lengths, phase, fit="terms") == pytest.approx(expected, rel=1e-6)
        assert profile.seconds([*lengths, 1], phase, fit="terms") != pytest.approx(expected, rel=1e-6)
    assert profile.seconds(lengths) == pytest.approx(sum(profile.seconds(lengths, p) for p in PHASES))
    assert profile.seconds([], "forward", fit="terms") == pytest.approx(TRUE["forward"].step)


def test_a_table_is_linear_inside_and_proportional_outside():
    table = Terms(1.0, lengths=(10, 20, 40), row=(1.0, 3.0, 3.0))
    assert table.row_seconds([10, 15, 20, 30, 40]).tolist() == [1, 2, 3, 3, 3]
    assert table.row_seconds([5, 80]).tolist() == [0.5, 6.0]
    assert Terms(1.0, 2.0).row_seconds(7) == 14


def test_prices_for_planners_are_the_mean_of_the_passes(profile):
    cost = profile.cost_model()
    assert cost == CostModel(HEADS, round((2.5e-5 + 4e-5) / 2 * 1e15), round(6.5e-9 * 1e15), round(1e-4 * 1e15), 16)
    assert profile.cost_model(("forward",)).token == 20_000_000_000
    placement = make_planner("balanced")(Sequences.from_ranks([[900, 4000], [30], []]), Cluster(3), cost)
    assert placement.validate().tokens().max() < 4000


def test_files(profile, tmp_path):
    path = profile.save(tmp_path / "deep" / "p.json")
    assert Profile.load(path) == profile
    assert Profile.load(path).cost_model() == profile.cost_model()
    with pytest.raises(CalibrationError, match=r"cannot read the profile 'nowhere.json'.*knapformer calibrate"):
        Profile.load("nowhere.json")
    path.write_text("{")
    with pytest.raises(CalibrationError, match=r"p\.json is not JSON"):
        Profile.load(path)
    with pytest.raises(CalibrationError, match="cannot write"):
        profile.save(path / "below-a-file.json")


def test_shipped_profiles_can_be_planned_with():
    assert "demo-cpu" in shipped_profiles()
    for name in shipped_profiles():
        found = Profile.load(name)
        assert found.name == name
        assert found.cost_model().token > 0 and found.cost_model().per_qk_pair > 0
        assert found.fits[found.recommended].mean_error <= 0.05


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["schema"], 3, "a 'profile' of schema 2"),
        (["kind"], "run", "a 'profile' of schema 2"),
        (["shape", "num_heads"], 0, r"num_heads is 0; it must be a finite number of at least 1 - at `\$.shape`"),
        (["shape", "num_heads"], 4.5, r"Expected `int`, got `float` - at `\$.shape.num_heads`, which is 4.5"),
        (["shape", "d_model"], "wide", r"Expected `int`, got `str` - at `\$.shape.d_model`, which is 'wide'"),
        (["shape", "d_model"], True, r"Expected `int`, got `bool` - at `\$.shape.d_model`, which is True"),
        (
            ["fits", "terms", "phases", "forward", "token"],
            -1e-9,
            r"token is -1e-09; it must be .* at `\$.fits.terms.phases.forward`",
        ),
        (
            ["fits", "terms", "phases", "backward", "per_qk_pair"],
            float("nan"),
            r"per_qk_pair is nan; it must be .* at `\$.fits.terms.phases.backward`",
        ),
        (["fits", "terms", "phase_error", "backward"], "x", r"`\$.fits.terms.phase_error.backward`, which is 'x'"),
        (["fits", "table", "phases", "forward", "row"], [3.0, 1.0], "rising ones, as 'row' has"),
        (["fits", "table", "phases", "forward", "row"], [10**400], r"row\[0\]`"),
        (
            ["fits", "table", "phases", "forward", "lengths"],
            [0],
            r"lengths are \(0,\); .* `\$.fits.table.phases",
        ),
        (["fits", "two_term"], [], r"Expected `object`, got `array` - at `\$.fits.two_term`"),
        (["recommended"], "best", "recommended is 'best'; expected one of two_term, terms, table"),
        (["samples"], [3], r"Expected `object`, got `int` - at `\$.samples\[0\]`, which is 3"),
        (["device"], None, r"Expected `object`, got `null` - at `\$.device`"),
    ],
)
def test_errors_name_file_key_and_value(profile, keys, value, message):
    data = json.loads(json.dumps(profile.to_json()))
    assert Profile.from_json(data, "p.json") == profile
    broken = copy.deepcopy(data)
    at = broken
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    with pytest.raises(CalibrationError, match=f"^p.json: .*{message}"):
        Profile.from_json(broken, "p.json")
    del at[keys[-1]]
    with pytest.raises(CalibrationError, match=rf"^p.json: (?=.*\b{keys[-1]}\b).*(missing|must have|expected)"):
        Profile.from_json(broken, "p.json")


def test_rows_that_fall_with_the_length_are_refused(profile):
    data = json.loads(json.dumps(profile.to_json()))
    data["fits"]["table"]["phases"]["forward"]["row"].reverse()
    with pytest.raises(CalibrationError, match="times that do not fall with the length"):
        Profile.from_json(data)
    with pytest.raises(CalibrationError, match="profile: Expected `object`, got `int`"):
        Profile.from_json(3)
    with pytest.raises(CalibrationError, match="no phase 'sideways'"):
        profile.seconds([1], "sideways")
    assert np.isfinite(profile.gamma)
