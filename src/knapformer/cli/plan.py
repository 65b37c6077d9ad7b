"""`knapformer plan`: plan recorded or generated lengths and print what a planner makes of them."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.console import Console

from knapformer.data import Trace, cluster_and_cost, load_workload
from knapformer.plan import Limits, Metrics, make_planner, measure
from knapformer.plan.planners import default_gamma
from knapformer.report.terminal import plain_table
from knapformer.tools.show.picture import draw_plan
from knapformer.tools.show.view import PlanView

FIGURES = (
    "time_imbalance",
    "token_imbalance",
    "attention_imbalance",
    "gap",
    "split_traffic",
    "cross_node_traffic",
    "routed_fraction",
    "split_sequences",
    "step_over_ideal",
    "step_over_ideal_overlap",
)


def plan(
    workload: str,
    *,
    planner: str | None = None,
    topology: str | None = None,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    gamma: float | None = None,
    profile: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    max_tokens_per_rank: int | None = None,
    figure: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Plan a workload's steps and print imbalance, traffic and planning time, before and after.

    Imbalances are max/mean over ranks. split_traffic is the share of q, k, v and o elements that cross ranks,
    split_sequences the number of sequences that are split, step_over_ideal the predicted step over perfectly
    balanced compute.

    Parameters
    ----------
    workload
        Preset (flux-joint-32, ...), data codes (g8b4i256f1s0,g4b1i512f85s1), or a trace file.
    planner
        balanced, bags or local. Default: bags if a topology is given, else balanced.
    topology
        Bag spec for planner bags, e.g. g4n8 or g1n8+g2n4+g8n2.
    ranks
        World size. Default: the workload's.
    ranks_per_node
        Ranks that share fast links. Default: the workload's, else all.
    gamma
        Time of an attention FLOP over that of a token-wise FLOP. Default: 1.0 for bags, as published, else 1.25.
    profile
        Measured prices instead of gamma: a file of knapformer calibrate, or the name of a shipped one.
    steps
        Steps to plan; a recording has no more than it has. Default: all of the trace.
    seed
        For generated lengths.
    max_tokens_per_rank
        Hard limit from memory.
    figure
        Draw the loads of the first step, before and after, into this file (PNG, SVG or PDF).
    as_json
        Print one JSON object and nothing else.
    """
    trace = load_workload(workload, world_size=ranks, num_steps=steps, seed=seed)
    name = planner or ("bags" if topology else "balanced")
    result = plan_trace(
        trace,
        name,
        topology,
        gamma=gamma,
        profile=profile,
        steps=steps,
        ranks_per_node=ranks_per_node,
        limits=Limits(max_tokens_per_rank),
        figure=figure,
    )
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)


def plan_trace(
    trace: Trace,
    planner: str,
    topology: str | None = None,
    *,
    gamma: float | None = None,
    profile: str | None = None,
    steps: int | None = None,
    ranks_per_node: int | None = None,
    limits: Limits | None = None,
    figure: Path | None = None,
) -> dict[str, Any]:
    """Plan every step of a trace; the object `knapformer plan --json` prints."""
    plan_one, plan_none = make_planner(planner, topology), make_planner("local")
    gamma = default_gamma(plan_one) if gamma is None else gamma
    cluster, cost = cluster_and_cost(trace, gamma, ranks_per_node, profile)
    before: list[Metrics] = []
    after: list[Metrics] = []
    seconds: list[float] = []
    for index in range(trace.num_steps if steps is None else min(steps, trace.num_steps)):
        sequences = trace.sequences(index)
        start = time.perf_counter()
        placement = plan_one(sequences, cluster, cost, limits or Limits())
        seconds.append(time.perf_counter() - start)
        at_home = plan_none(sequences, cluster, cost, Limits())
        after.append(measure(placement.validate(), cluster, cost))
        before.append(measure(at_home, cluster, cost))
        if figure is not None and len(after) == 1:
            draw_plan(PlanView.of(placement, cluster, cost, f"{trace.name}, step 0, {trace.world_size} ranks"), figure)
    return {
        "workload": trace.name,
        "ranks": trace.world_size,
        "planner": planner,
        "topology": topology,
        "steps": len(after),
        "before": _figures(before),
        "after": _figures(after),
        "plan_seconds": {"median": float(np.median(seconds)), "p99": float(np.quantile(seconds, 0.99))},
    }


def _figures(metrics: list[Metrics]) -> dict[str, dict[str, float]]:
    columns = {name: [getattr(m, name) for m in metrics] for name in FIGURES}
    return {name: {"mean": float(np.mean(values)), "max": float(np.max(values))} for name, values in columns.items()}


def _print(result: dict[str, Any]) -> None:
    def cell(side: str, name: str) -> str:
        return f"{result[side][name]['mean']:.4g} ({result[side][name]['max']:.4g})"

    rows = [(name.replace("_", " "), cell("before", name), cell("after", name)) for name in FIGURES]
    title = f"{result['workload']}: {result['ranks']} ranks, planner {result['planner']} {result['topology'] or ''}"
    caption = f"mean over {result['steps']} steps (worst step)"
    console, seconds = Console(), result["plan_seconds"]
    console.print(plain_table(title.rstrip(), ("", "before balancing", "planned"), rows, caption=caption))
    console.print(
        f"planning takes {seconds['median'] * 1e3:.2f} ms a step (99th percentile {seconds['p99'] * 1e3:.2f} ms)"
    )
