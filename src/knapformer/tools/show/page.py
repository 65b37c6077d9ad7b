"""A plan as an interactive page: one HTML file that needs no network, drawn by `page.js`."""

import json
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from knapformer.files import write_text
from knapformer.report.html import escape, page, table
from knapformer.tools.show.style import THEMES, sequence_colours
from knapformer.tools.show.view import PlanView

_FIGURES = {
    "time_imbalance": "time, max / mean",
    "token_imbalance": "tokens, max / mean",
    "attention_imbalance": "attention area, max / mean",
    "routed_fraction": "tokens routed",
    "split_sequences": "sequences split",
    "split_traffic": "q, k, v, o that cross ranks",
    "cross_node_traffic": "q, k, v, o that cross nodes",
    "step_over_ideal": "step over ideal, nothing hidden",
    "step_over_ideal_overlap": "step over ideal, traffic hidden",
}
_HINT = """Bars are modelled loads per layer, forward: token-wise work below in a tint, attention above. Greys are whole
sequences, hues are split ones. Point at a block to see its sequence on every rank; a click keeps it, Escape lets go.
The dashed line is the lower bound."""


def write_plan_page(view: PlanView, path: str | os.PathLike[str], *, theme: str | None = None) -> Path:
    """Write the page. Raises `DataError` if it cannot be written.

    Args:
        view: what it shows.
        path: an .html file; its folder is made.
        theme: "light" or "dark" to begin with; None follows the reader's browser.
    """
    return write_text(path, page(view.title, _body(view), style=_resource("page.css"), theme=theme))


def _body(view: PlanView) -> Iterator[str]:
    before, after = view.before.to_json(), view.after.to_json()
    figures = [[title, f"{before[name]:.4g}", f"{after[name]:.4g}"] for name, title in _FIGURES.items()]
    data = json.dumps(page_data(view), separators=(",", ":")).replace("</", "<\\/")  # cannot end the script element
    yield '<button id="theme" type="button">light / dark</button>'
    yield f"<h1>{escape(view.title)}</h1><p>{_HINT}</p>"
    yield '<div id="panels"></div><div id="tip"></div>'
    yield "<h2>Figures</h2>" + table(["", "before balancing", "planned"], figures)
    yield f'<script id="data" type="application/json">{data}</script>'
    yield f'<script type="module">\n{_resource("page.js")}</script>'


def _resource(name: str) -> str:
    return (files("knapformer.tools.show") / name).read_text(encoding="utf-8")


def page_data(view: PlanView) -> dict[str, Any]:
    """What the page's script reads, as plain data."""
    b = view.blocks
    colours = (sequence_colours(view.split, THEMES["light"]) * 255).round().astype(int)
    return {
        "headings": [
            f"Before balancing: slowest rank {view.before.time_imbalance:.3f} x the mean",
            f"Planner '{view.planner}': slowest rank {view.after.time_imbalance:.3f} x the mean",
        ],
        "nodes": [[ranks.start, ranks.stop] for ranks in view.nodes],
        "heads": view.num_heads,
        "bound": view.bound,
        "length": view.length.tolist(),
        "text_length": view.text_length.tolist(),
        "split": view.split.tolist(),
        "traffic": view.traffic.tolist(),
        "colour": ["#{:02x}{:02x}{:02x}".format(*c) for c in colours.tolist()],
        "seq": b.seq.tolist(),
        "attention": b.is_attention.astype(int).tolist(),
        "start": b.start.tolist(),
        "stop": b.stop.tolist(),
        "height": b.height.round(6).tolist(),
        "home": b.home.tolist(),
        "home_base": b.home_base.round(6).tolist(),
        "rank": b.rank.tolist(),
        "base": b.base.round(6).tolist(),
    }
