"""A plan as an image: the bars of all ranks, before balancing above and as planned below, with the bound as a line."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from knapformer.report.drawing import new_figure, save
from knapformer.tools.show.style import THEMES, Theme, block_colours, sequence_colours
from knapformer.tools.show.view import PlanView

_TALLEST = 4.0
"""The panels share one scale, unless bars of one are more than so many times as high as those of the other."""
_EDGES_UP_TO = 64  # ranks: above, lines between blocks would be wider than blocks


def draw_plan(view: PlanView, path: str | os.PathLike[str], *, theme: str = "light") -> Path:
    """Draw into a PNG, SVG or PDF file. Raises `DataError` if it cannot be written."""
    colours = THEMES[theme]
    tops = view.top(home=True), view.top(home=False)
    ratio = min(_TALLEST, max(1 / _TALLEST, tops[0] / tops[1] if tops[1] else 1.0))
    figure = new_figure(min(24.0, 9.0 + 0.05 * view.world_size), 7.0)
    figure.set_facecolor(colours.background)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=[max(ratio, 1.0), max(1 / ratio, 1.0)])
    for axes, home, top, metrics, name in (
        (panels[0], True, tops[0], view.before, "before balancing"),
        (panels[1], False, tops[1], view.after, f"planner '{view.planner}'"),
    ):
        frame(axes, view, colours, top)
        add_blocks(axes, view, colours, rectangles(view, 1.0 - home))
        moved = (
            f", {metrics.routed_fraction:.0%} of tokens routed, {metrics.split_traffic:.0%} of q, k, v, o cross ranks"
        )
        axes.set_title(
            f"{name}: slowest rank {metrics.time_imbalance:.3f} x the mean{'' if home else moved}",
            loc="left",
            color=colours.ink,
            fontsize=10,
        )
    panels[1].set_xlabel("rank", color=colours.ink)
    add_legend(panels[0], view, colours)
    figure.suptitle(view.title, color=colours.ink)
    return save(figure, path)


def frame(axes: Any, view: PlanView, colours: Theme, top: float) -> None:
    """Axes of a bar chart over ranks: nodes as bands, the bound as a line."""
    axes.set_facecolor(colours.background)
    axes.set(xlim=(-0.6, view.world_size - 0.4), ylim=(0, max(top * 1.06, 1e-9)))
    axes.set_ylabel("modelled load [ms per layer]", color=colours.ink, fontsize=9)
    axes.tick_params(colors=colours.ink)
    axes.spines[:].set_color(colours.ink)
    for number, ranks in enumerate(view.nodes):
        if number % 2:
            axes.axvspan(ranks.start - 0.5, ranks.stop - 0.5, color=colours.band, zorder=0, linewidth=0)
    axes.axhline(view.bound, color=colours.bound, linewidth=1, linestyle="--", zorder=3)


def rectangles(view: PlanView, progress: float) -> np.ndarray:
    """(N, 4, 2) corners of all blocks on their way from home (0) to where they are planned (1)."""
    b = view.blocks
    x = b.home + (b.rank - b.home) * progress
    y = b.home_base + (b.base - b.home_base) * progress
    left, right, top = x - 0.4, x + 0.4, y + b.height
    return np.stack(
        [np.stack(corner, axis=-1) for corner in ((left, y), (right, y), (right, top), (left, top))], axis=1
    )


def add_blocks(axes: Any, view: PlanView, colours: Theme, corners: np.ndarray) -> Any:
    """Draw blocks; returns the collection, so that an animation may move it."""
    from matplotlib.collections import PolyCollection

    edges = view.world_size <= _EDGES_UP_TO
    b = view.blocks
    faces = block_colours(sequence_colours(view.split, colours), b.seq, b.is_attention, colours)
    blocks = PolyCollection(
        list(corners),
        facecolors=faces,
        edgecolors=colours.background if edges else faces,
        linewidths=0.4 if edges else 0.0,
        antialiased=edges,
        zorder=2,
    )
    return axes.add_collection(blocks, autolim=False)


def add_legend(axes: Any, view: PlanView, colours: Theme) -> None:
    """What colours and lines mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    two = np.array([True, False])
    split, whole = sequence_colours(two, colours)
    entries = [
        Patch(color=split, label=f"split sequences ({int(view.split.sum())}), a hue each"),
        Patch(color=whole, label=f"whole sequences ({int((~view.split).sum())}), greys"),
        Patch(color=block_colours(np.array([whole]), np.array([0]), np.array([False]), colours)[0], label="token-wise"),
        Line2D([], [], color=colours.bound, linestyle="--", linewidth=1, label="lower bound"),
    ]
    axes.legend(
        handles=entries,
        ncols=4,
        loc="upper right",
        frameon=False,
        fontsize=8,
        labelcolor=colours.ink,
        borderaxespad=0.1,
    )
