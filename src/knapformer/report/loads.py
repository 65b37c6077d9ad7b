"""A picture of two placements of one step: modelled load of every rank, at home and planned, over the lower bound."""

import os
from pathlib import Path

import numpy as np

from knapformer.plan import TICKS_PER_SECOND, Cluster, CostModel, Placement, lower_bound
from knapformer.report.drawing import AFTER, AFTER_LIGHT, BEFORE, BEFORE_LIGHT, new_figure, save


def draw_loads(
    before: Placement,
    after: Placement,
    cluster: Cluster,
    cost: CostModel,
    path: str | os.PathLike[str],
    title: str = "",
) -> Path:
    """Stacked bars per rank: token-wise work below, attention above [ms per layer, forward]."""
    figure = new_figure(12, 4)
    left, right = figure.subplots(1, 2, sharey=True)
    milliseconds = 1e3 / TICKS_PER_SECOND
    bound = lower_bound(before.sequences, cluster, cost) * milliseconds
    for axes, placement, dark, light, name in (
        (left, before, BEFORE, BEFORE_LIGHT, "at home"),
        (right, after, AFTER, AFTER_LIGHT, f"planner '{after.planner}'"),
    ):
        ranks = np.arange(placement.world_size)
        tokens = cost.load(placement.tokens(), np.zeros_like(placement.area()), placement.num_shards()) * milliseconds
        attention = cost.row_key * placement.area() * milliseconds
        axes.bar(ranks, tokens, 0.8, color=light, label="token-wise work")
        axes.bar(ranks, attention, 0.8, bottom=tokens, color=dark, label="attention")
        axes.axhline(bound, color="black", linewidth=1, linestyle="--", label="lower bound")
        load = tokens + attention
        axes.set(title=f"{name}: slowest rank {load.max() / load.mean():.2f} x the mean", xlabel="rank")
        axes.legend(frameon=False)
    left.set_ylabel("modelled load [ms per layer]")
    figure.suptitle(title)
    return save(figure, path)
