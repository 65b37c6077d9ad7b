"""A picture of a profile: each law against what was measured, fitted packs and held-out ones; also as a page (HTML)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from knapformer.data.profile import FITS, PHASES, Profile
from knapformer.files import write_text
from knapformer.report.drawing import AFTER, BEFORE, new_figure, save
from knapformer.report.html import escape, figure, page, table

_WORDS = {"two_term": "two-term law", "terms": "token, row, sequence and step", "table": "table of row times"}


def draw_fits(profile: Profile, path: str | os.PathLike[str]) -> Path:
    """The picture: modelled over measured time of every pack for each law, and attention's time per row.

    Raises:
        BackendUnavailableError: without matplotlib.
        DataError: if the file cannot be written.
    """
    return save(fits_figure(profile, columns=len(FITS) + 1), path)


def write_fits_page(profile: Profile, path: str | os.PathLike[str]) -> Path:
    """One HTML file with the picture and, below it, the figures of every law.

    Raises:
        BackendUnavailableError: without matplotlib.
        DataError: if the file cannot be written.
    """
    return write_text(path, page(f"Profile {profile.name}", _body(profile)))


def _body(profile: Profile) -> Iterator[str]:
    yield f"<h1>Profile {escape(profile.name)}</h1>"
    yield figure(fits_figure(profile, columns=2))
    yield table(*fit_rows(profile), ours=(_WORDS[profile.recommended],))
    yield (
        f"<p>The law in bold is recommended. A mixed pack differs from the sum of its sequences by "
        f"{profile.additivity:.1%} on average.</p>"
    )


def fit_rows(profile: Profile) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table of laws: gamma, and errors on packs that no law was fitted to."""
    rows = []
    for name in FITS:
        fit = profile.fits[name]
        errors = (fit.mean_error, fit.worst_error, *(fit.phase_error[phase] for phase in PHASES))
        rows.append([_WORDS[name], f"{fit.gamma:.3f}", *(f"{error:.2%}" for error in errors)])
    return ["law", "gamma", "held out, mean", "held out, worst", *(f"{phase}, mean" for phase in PHASES)], rows


def fits_figure(profile: Profile, columns: int) -> Any:
    """A panel for each law, all on one scale, and one for attention's rows, in so many columns."""
    rows = -(-(len(FITS) + 1) // columns)
    drawn = new_figure(4.2 * columns, 4 * rows)
    *panels, last = drawn.subplots(rows, columns, squeeze=False).flat
    for axes, name in zip(panels, FITS, strict=True):
        _draw_fit(profile, name, axes)
    low, high = min(axes.get_ylim()[0] for axes in panels), max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(low, high)
    _draw_rows(profile, last)
    shape = profile.shape
    drawn.suptitle(
        f"{profile.name}: {shape.block}, width {shape.d_model}, {shape.num_heads} heads, {shape.dtype}\n"
        f"{profile.kernel} on {profile.device['name']}"
    )
    return drawn


def _draw_fit(profile: Profile, name: str, axes: Any) -> None:
    """How far one law is off, for every pack."""
    measured = np.array([sum(s.layer[p].seconds for p in PHASES) for s in profile.samples])
    modelled = np.array([profile.seconds(s.lengths, fit=name) for s in profile.samples])
    held_out = np.array([s.held_out for s in profile.samples])
    off = 100 * (modelled / measured - 1)
    axes.plot(measured[~held_out] * 1e3, off[~held_out], "o", color=AFTER, label="fitted")
    axes.plot(measured[held_out] * 1e3, off[held_out], "x", color=BEFORE, label="held out")
    axes.axhline(0, color="black", linewidth=1)
    fit = profile.fits[name]
    axes.set(
        title=f"{_WORDS[name]}\nheld out: {fit.mean_error:.1%} mean, {fit.worst_error:.1%} worst",
        xlabel="measured [ms per layer, all phases]",
        ylabel="modelled over measured [%]",
        xscale="log",
    )
    axes.legend(frameon=False)


def _draw_rows(profile: Profile, axes: Any) -> None:
    """Time of one attention row against length: measured, and by the laws."""
    heads = profile.shape.num_heads
    equal = [s for s in profile.samples if len(set(s.lengths)) == 1]
    lengths = np.array([s.lengths[0] for s in equal])
    measured = [sum(s.attention[p].seconds for p in PHASES) / (heads * sum(s.lengths)) for s in equal]
    axes.plot(lengths, np.array(measured) * 1e6, "o", color=AFTER, label="measured")
    fine = np.geomspace(lengths.min(), lengths.max(), 100)
    for name, style in (("terms", "--"), ("table", "-")):
        row = sum(profile.terms(p, name).row_seconds(fine) for p in PHASES)
        axes.plot(fine, row * 1e6, style, color=BEFORE, label=_WORDS[name])
    axes.set(
        title="attention, per (head, query) row", xlabel="length [tokens]", ylabel="[µs], all phases", xscale="log"
    )
    axes.set_yscale("log")
    axes.legend(frameon=False)
