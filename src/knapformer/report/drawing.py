"""Figures without a display: one place that needs matplotlib, and the colours of before and after."""

import io
import os
from pathlib import Path
from typing import Any

from knapformer.errors import BackendUnavailableError, DataError
from knapformer.files import write_bytes

HUES = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Okabe and Ito's palette: distinct to colour-blind readers."""
BEFORE, AFTER = "#D55E00", "#0072B2"
BEFORE_LIGHT, AFTER_LIGHT = "#F2B48A", "#8CBFE0"


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure that can be saved. Raises `BackendUnavailableError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailableError(
            "drawing needs matplotlib; install it with: pip install 'knapformer[demo]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Strip frames and write the file; its folder is made. Raises `DataError` if it cannot be written."""
    target = Path(path)
    try:
        picture = _rendered(figure, target.suffix[1:] or "png", dpi=130)
    except ValueError as error:
        raise DataError(f"cannot draw into {str(target)!r}: {error}") from error
    return write_bytes(target, picture)


def inline_svg(figure: Any) -> str:
    """A figure as an element of an HTML page: what is black in it has the colour of the text around it."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "knapformer", "svg.fonttype": "none"}):
        text = _rendered(figure, "svg", metadata={"Date": None}, transparent=True).decode()
    text = text.replace("#000000", "currentColor")
    return text[text.index("<svg") :].replace("<svg", '<svg fill="currentColor"', 1)


def _rendered(figure: Any, form: str, **options: Any) -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, **options)
    return buffer.getvalue()
