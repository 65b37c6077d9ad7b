"""Pictures of a profile: points are its measurements against its laws, read back from the axes; the page opens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapformer.data import Profile
from knapformer.data.profile import FITS, PHASES
from knapformer.errors import DataError
from knapformer.report.html import escape
from knapformer.tools.calibrate.page import draw_fits, fit_rows, fits_figure, write_fits_page
from tests.browser import needs_browser, width_in_browser

PROFILE = Profile.load("demo-cpu")


def points(axes: Any) -> dict[str, np.ndarray]:
    """Label -> (N, 2) points, of the lines that the legend names."""
    return {line.get_label(): line.get_xydata() for line in axes.lines if not line.get_label().startswith("_")}


@pytest.mark.parametrize("number", range(len(FITS)))
def test_points_are_how_far_a_law_is_off(number: int) -> None:
    axes = fits_figure(PROFILE, columns=2).axes[number]
    drawn = points(axes)
    for label, held_out in (("fitted", False), ("held out", True)):
        samples = [s for s in PROFILE.samples if s.held_out == held_out]
        measured = np.array([sum(s.layer[phase].seconds for phase in PHASES) for s in samples])
        modelled = np.array([PROFILE.seconds(s.lengths, fit=FITS[number]) for s in samples])
        want = np.stack([measured * 1e3, 100 * (modelled / measured - 1)], axis=1)
        np.testing.assert_allclose(drawn[label], want)
    # The mean that the title names is that of the points.
    mean = np.abs(drawn["held out"][:, 1]).mean() / 100
    assert mean == pytest.approx(PROFILE.fits[FITS[number]].mean_error, rel=1e-6)
    assert f"{mean:.1%} mean" in axes.get_title()


def test_laws_share_a_scale_and_rows_are_per_row() -> None:
    *laws, rows = fits_figure(PROFILE, columns=4).axes
    assert len({axes.get_ylim() for axes in laws}) == 1
    drawn = points(rows)
    assert list(drawn) == ["measured", "token, row, sequence and step", "table of row times"]
    equal = [s for s in PROFILE.samples if len(set(s.lengths)) == 1]
    seconds = [sum(s.attention[p].seconds for p in PHASES) / PROFILE.shape.num_heads / sum(s.lengths) for s in equal]
    np.testing.assert_allclose(drawn["measured"][:, 0], [s.lengths[0] for s in equal])
    np.testing.assert_allclose(drawn["measured"][:, 1], np.array(seconds) * 1e6)


def test_the_table_has_the_errors_of_every_law() -> None:
    heads, rows = fit_rows(PROFILE)
    assert len(heads) == 4 + len(PHASES) and all(len(row) == len(heads) for row in rows)
    for name, row in zip(FITS, rows, strict=True):
        fit = PROFILE.fits[name]
        assert row[1:4] == [f"{fit.gamma:.3f}", f"{fit.mean_error:.2%}", f"{fit.worst_error:.2%}"]


def test_files_are_written_whole_or_an_error_names_them(tmp_path: Path) -> None:
    named = replace(PROFILE, name="a <b>")
    assert draw_fits(named, tmp_path / "deep" / "p.png").read_bytes().startswith(b"\x89PNG")
    text = write_fits_page(named, tmp_path / "deep" / "p.html").read_text()
    assert text.count("<svg") == 1 and "a &lt;b&gt;" in text and "<b>" not in text
    assert all(escape(cell) in text for row in fit_rows(PROFILE)[1] for cell in row)
    for write in (draw_fits, write_fits_page):
        with pytest.raises(DataError, match=r"cannot write .*taken\.png"):
            (tmp_path / "taken.png").mkdir(exist_ok=True)
            write(PROFILE, tmp_path / "taken.png")
    with pytest.raises(DataError, match=r"cannot draw into .*p\.xyz"):
        draw_fits(PROFILE, tmp_path / "p.xyz")


@needs_browser
def test_the_page_is_as_wide_as_its_window(tmp_path: Path) -> None:
    assert width_in_browser(write_fits_page(PROFILE, tmp_path / "p.html"), tmp_path, 500) == 500
