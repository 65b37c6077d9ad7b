"""Fits: prices that are known are found again, and the law that is recommended is the one that predicts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.data.profile import PHASES, Timing
from knapformer.errors import CalibrationError
from knapformer.tools.calibrate.fitting import additivity, fit_laws, isotonic
from tests.data.profiles import FLOPS, HEADS, TRUE, samples_of


def slowed(sample, factor):
    return replace(sample, layer={p: Timing(factor * t.seconds, 0, 0) for p, t in sample.layer.items()})


def test_known_prices_are_found_again():
    fits, recommended = fit_laws(samples_of(), HEADS, FLOPS)
    for phase in PHASES:
        found, true = fits["terms"].phases[phase], TRUE[phase]
        for name in ("token", "per_qk_pair", "sequence", "step"):
            assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6, abs=1e-15)
    assert fits["terms"].worst_error < 1e-6 < fits["two_term"].mean_error
    assert recommended == "terms"
    # Both phases of a plain layer: (4 + 9) over 30 FLOP against (25000 + 40000) over 3000.
    assert fits["terms"].gamma == pytest.approx((13e-9 / 30) / (65e-6 / 3000), rel=1e-6)


def test_held_out_packs_do_not_touch_the_prices():
    samples = samples_of()
    changed = [slowed(s, 9) if s.held_out else s for s in samples]
    right, wrong = (fit_laws(s, HEADS, FLOPS)[0]["terms"] for s in (samples, changed))
    assert right.phases == wrong.phases
    assert wrong.mean_error == pytest.approx(8 / 9)


def test_a_kernel_that_gets_slower_by_steps_needs_the_table():
    fits, recommended = fit_laws(samples_of(lambda _, n: 2e-6 if n < 200 else 2e-5 if n < 700 else 1e-4), HEADS, FLOPS)
    assert recommended == "table"
    assert fits["table"].mean_error < 0.5 * fits["terms"].mean_error


def test_the_simplest_law_that_predicts_as_well_is_recommended():
    samples = samples_of()
    for i, s in enumerate(samples):
        tokens, area = sum(s.lengths), HEADS * sum(n * n for n in s.lengths)
        rows = Timing(1e-8 * area, 0, 0)
        layer = Timing(1e-5 * tokens + rows.seconds, 0, 0)
        samples[i] = replace(s, layer=dict.fromkeys(PHASES, layer), attention=dict.fromkeys(PHASES, rows))
    fits, recommended = fit_laws(samples, HEADS, FLOPS)
    assert recommended == "two_term"
    assert fits["two_term"].worst_error < 1e-9


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 5)), min_size=1, max_size=12))
def test_isotonic(entries):
    values, weights = (np.array(column) for column in zip(*entries, strict=True))
    rising = isotonic(values, weights)
    assert (np.diff(rising) >= -1e-12).all()
    assert rising @ weights == pytest.approx(values @ weights)
    if (np.diff(values) >= 0).all():
        assert rising.tolist() == values.tolist()
    for other in (np.sort(values), np.full_like(values, values.mean()), np.maximum.accumulate(values)):
        assert weights @ (rising - values) ** 2 <= weights @ (other - values) ** 2 + 1e-9


def test_additivity_is_the_distance_of_packs_from_their_parts():
    samples = samples_of()
    terms = dict(TRUE)
    assert additivity(samples, terms) < 1e-9
    slow = [slowed(s, 1.2) if len(set(s.lengths)) > 1 else s for s in samples]
    assert additivity(slow, terms) == pytest.approx(0.2)
    with pytest.raises(CalibrationError, match="no pack of several lengths"):
        additivity([s for s in samples if len(s.lengths) == 1], terms)


def test_measurements_that_determine_nothing_are_refused():
    samples = samples_of()
    with pytest.raises(CalibrationError, match=r"2 packs of 2 lengths to fit and 18 held out"):
        fit_laws([replace(s, held_out=i > 1) for i, s in enumerate(samples)], HEADS, FLOPS)
    zero = replace(samples[0], attention=dict.fromkeys(PHASES, Timing(0.0, 0, 0)))
    with pytest.raises(CalibrationError, match=r"attention of lengths \(64,\), forward: 0.0 s; times must be positive"):
        fit_laws([zero, *samples[1:]], HEADS, FLOPS)


def test_noise_of_a_few_percent_does_not_spoil_the_fit():
    fits, _ = fit_laws(samples_of(noise=0.03), HEADS, FLOPS)
    assert fits["terms"].mean_error < 0.05
    assert fits["terms"].phases["forward"].token == pytest.approx(TRUE["forward"].token, rel=0.1)
