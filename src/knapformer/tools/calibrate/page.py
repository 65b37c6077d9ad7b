"""A picture of a profile: each law against what was measured, fitted packs and held-out ones; also as a page (HTML)."""

import base64
import html
import os
from pathlib import Path
from typing import Any

import numpy as np

from knapformer.data.profile import FITS, PHASES, Profile
from knapformer.errors import DataError
from knapformer.report.drawing import AFTER, BEFORE, new_figure, save

_WORDS = {"two_term": "two-term law", "terms": "token, row, sequence and step", "table": "table of row times"}


def draw_fits(profile: Profile, path: str | os.PathLike[str]) -> Path:
    """Modelled over measured time of every pack, for each law, and attention's time per row; into a picture.

    Raises:
        BackendUnavailableError: without matplotlib.
        DataError: if the file cannot be written.
    """
    figure = new_figure(16, 4)
    *axes, rows = figure.subplots(1, len(FITS) + 1)
    measured = np.array([sum(s.layer[p].seconds for p in PHASES) for s in profile.samples])
    held_out = np.array([s.held_out for s in profile.samples])
    for axis, name in zip(axes, FITS, strict=True):
        modelled = np.array([profile.seconds(s.lengths, fit=name) for s in profile.samples])
        for chosen, colour, marker, label in (~held_out, AFTER, "o", "fitted"), (held_out, BEFORE, "x", "held out"):
            axis.plot(
                measured[chosen] * 1e3, 100 * (modelled / measured - 1)[chosen], marker, color=colour, label=label
            )
        axis.axhline(0, color="black", linewidth=1)
        fit = profile.fits[name]
        axis.set(
            title=f"{_WORDS[name]}\nheld out: {fit.mean_error:.1%} mean, {fit.worst_error:.1%} worst",
            xlabel="measured [ms per layer, all phases]",
            xscale="log",
        )
        axis.legend(frameon=False)
    low, high = (f(a.get_ylim()[i] for a in axes) for i, f in ((0, min), (1, max)))
    for axis in axes:
        axis.set_ylim(low, high)
    axes[0].set_ylabel("modelled over measured [%]")
    _draw_rows(profile, rows)
    shape = profile.shape
    figure.suptitle(
        f"{profile.name}: {shape.block}, width {shape.d_model}, {shape.num_heads} heads, {shape.dtype}, "
        f"{profile.kernel} on {profile.device['name']}"
    )
    return save(figure, path)


def write_fits_page(profile: Profile, picture: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """One HTML file with the picture inside and the figures of every law below it; it needs nothing else.

    Raises:
        DataError: if a file cannot be read or written.
    """
    target = Path(path)
    columns = ("law", "gamma", "held out, mean", "held out, worst", *(f"{phase}, mean" for phase in PHASES))
    lines = [f"<tr>{''.join(f'<th>{c}</th>' for c in columns)}</tr>"]
    for name in FITS:
        fit = profile.fits[name]
        errors = (fit.mean_error, fit.worst_error, *(fit.phase_error[phase] for phase in PHASES))
        cells = (_WORDS[name], f"{fit.gamma:.3f}", *(f"{error:.2%}" for error in errors))
        mark = " style='font-weight:bold'" if name == profile.recommended else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    try:
        image = base64.b64encode(Path(picture).read_bytes()).decode()
        target.write_text(
            f"<!doctype html><meta charset='utf-8'><title>{html.escape(profile.name)}</title>"
            "<style>body{font:14px sans-serif}td,th{padding:.2em .8em;text-align:right}img{max-width:100%}</style>"
            f"<h1>Profile {html.escape(profile.name)}</h1><img src='data:image/png;base64,{image}' alt='fits'>"
            f"<table>{''.join(lines)}</table><p>The law in bold is recommended. A mixed pack differs from the sum of "
            f"its sequences by {profile.additivity:.1%} on average.</p>\n",
            encoding="utf-8",
        )
    except OSError as error:
        raise DataError(f"cannot write {str(target)!r}: {error}") from error
    return target


def _draw_rows(profile: Profile, axis: Any) -> None:
    """Time of one attention row against length: measured, and by the laws."""
    heads = profile.shape.num_heads
    equal = [s for s in profile.samples if len(set(s.lengths)) == 1]
    lengths = np.array([s.lengths[0] for s in equal])
    measured = [sum(s.attention[p].seconds for p in PHASES) / (heads * sum(s.lengths)) for s in equal]
    axis.plot(lengths, np.array(measured) * 1e6, "o", color=AFTER, label="measured")
    fine = np.geomspace(lengths.min(), lengths.max(), 100)
    for name, style in (("terms", "--"), ("table", "-")):
        row = sum(profile.terms(p, name).row_seconds(fine) for p in PHASES)
        axis.plot(fine, row * 1e6, style, color=BEFORE, label=_WORDS[name])
    axis.set(
        title="attention, per (head, query) row", xlabel="length [tokens]", ylabel="[µs], all phases", xscale="log"
    )
    axis.set_yscale("log")
    axis.legend(frameon=False)
