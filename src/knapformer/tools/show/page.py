"""A plan as an interactive page: one HTML file that needs no network, drawn by the script in `page.html`."""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from knapformer.errors import DataError
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


def write_plan_page(view: PlanView, path: str | os.PathLike[str], *, theme: str | None = None) -> Path:
    """Write the page. Raises `DataError` if it cannot be written.

    Args:
        view: what it shows.
        path: an .html file; its folder is made.
        theme: "light" or "dark" to begin with; None follows the reader's browser.
    """
    template = (files("knapformer.tools.show") / "page.html").read_text(encoding="utf-8")
    if theme is not None:
        template = template.replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">', 1)
    data = json.dumps(page_data(view), separators=(",", ":")).replace("</", "<\\/")  # cannot end the script element
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(template.replace("@DATA@", data, 1), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write the page {str(target)!r}: {error}") from error
    return target


def page_data(view: PlanView) -> dict[str, Any]:
    """What the page's script reads, as plain data."""
    b = view.blocks
    colours = (sequence_colours(view.split, THEMES["light"]) * 255).round().astype(int)
    before, after = view.before.to_json(), view.after.to_json()
    return {
        "title": view.title,
        "headings": [
            f"At home: slowest rank {view.before.time_imbalance:.3f} x the mean",
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
        "figures": [[title, f"{before[name]:.4g}", f"{after[name]:.4g}"] for name, title in _FIGURES.items()],
    }
