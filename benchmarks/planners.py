"""Compare planners on traces: balance, step on the timeline, traffic, plan time; a run record, one line per pair.

    python -m benchmarks.planners --steps 20 -o benchmarks/results/planners.jsonl

For the default prices of a trace's model (500 TFLOP/s token-wise, 400 for attention) and the default links. Plan times
are CPU seconds of this process, on one core, so that what else the machine does counts little.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import ShortRecord, keep_newest, make_parser
from benchmarks.reference_planners import REFERENCE_PLANNERS

from knapformer.data.trace import Trace
from knapformer.data.workloads import load_workload
from knapformer.errors import KnapFormerError
from knapformer.plan import PLANNERS, BagSpec, Cluster, CostModel, Placement, Sequences, make_planner, measure
from knapformer.plan.timeline import timeline
from knapformer.report import read_records
from knapformer.report.statistics import Estimate

TRACES = (
    "flux-lowres-32",
    "flux-mixed-32",
    "flux-joint-32",
    "flux-joint-128",
    "real-mix-32",
    "real-mix-8",
    "video-v35-16",
    "video-v50-32",
)
SLOW_STEPS = {"flexsp": 5, "zellige": 5}
"""Steps for planners that need seconds for each."""

MAX_WORLD = {"flexsp": 128, "zellige": 128, "nested-groups": 2048, "karmarkar-karp": 2048}
"""Largest world that a planner is run on; beyond it a plan takes minutes."""

OURS = ("local", "best-bags", "balanced")
"""Planners with columns of their own in the table."""

ABSOLUTE = ("makespan", "lower_bound")
"""Metrics that say nothing about a planner by themselves; not recorded."""

FIGURES = "mean and largest over steps; half: of the 95 % interval of step_over_ideal_overlap"
"""What a record's numbers are."""

Plan = Callable[[Sequences, Cluster, CostModel], Placement]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.table:
        print(render_table(args.output))
        return 0
    settings = {"steps": args.steps, "figures": FIGURES}
    name = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}-{os.getpid()}"
    with ShortRecord(args.output, name, settings) as out:
        pairs = ((trace, planner) for trace in map(load_workload, args.traces) for planner in args.planners)
        for number, (trace, planner) in enumerate(pairs):
            outcome = compare(planner, trace, args.steps)
            record = {"trace": trace.name, "world_size": trace.world_size, "planner": planner, **outcome}
            out.step(number, **record)
            sys.stdout.write(summary(record) + "\n")
            sys.stdout.flush()
    keep_newest(args.output, "trace", "planner")
    return 0


def compare(planner: str, trace: Trace, num_steps: int) -> dict[str, Any]:
    """Mean and largest value of metrics over the first steps, and plan times [s]; or why there is none."""
    if trace.world_size > MAX_WORLD.get(planner, trace.world_size):
        return {"skipped": f"more than {MAX_WORLD[planner]} ranks"}
    num_steps = min(num_steps, SLOW_STEPS.get(planner, num_steps), trace.num_steps)
    cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node"))
    cost = CostModel.from_shapes(trace.meta.get("d_model", 3072), trace.meta.get("heads", 24))
    metrics: list[dict[str, float]] = []
    seconds: list[float] = []
    plan = find_plan(planner)
    for step in range(trace.head(num_steps).num_steps):
        sequences = trace.sequences(step)
        try:
            if not seconds and planner not in SLOW_STEPS:
                plan(sequences, cluster, cost)  # the first call pays for caches
            start = time.process_time()
            placement = plan(sequences, cluster, cost)
            seconds.append(time.process_time() - start)
        except KnapFormerError as error:
            return {"steps": num_steps, "skipped": f"{type(error).__name__}: {error}"}
        metrics.append(measure(placement.validate(), cluster, cost).to_json())
    figures = [name for name in metrics[0] if name not in ABSOLUTE]
    return {
        "steps": num_steps,
        "figures": {name: _mean_and_largest([m[name] for m in metrics]) for name in figures},
        "half": Estimate.of([m["step_over_ideal_overlap"] for m in metrics]).half,
        "plan_seconds": {"median": float(np.median(seconds)), "p99": float(np.quantile(seconds, 0.99))},
    }


def _mean_and_largest(values: list[float]) -> list[float]:
    return [float(np.mean(values)), float(np.max(values))]


def find_plan(planner: str) -> Plan:
    """A planner by name: one of the library's, `bags:SPEC`, `best-bags`, or a reference planner."""
    if planner == "best-bags":
        return best_bags
    name, _, topology = planner.partition(":")
    return REFERENCE_PLANNERS[name] if name in REFERENCE_PLANNERS else make_planner(name, topology or None)


def best_bags(sequences: Sequences, cluster: Cluster, cost: CostModel) -> Placement:
    """The uniform bags of 1, 2, 4 or 8 ranks with the least step on the timeline."""
    sizes = [size for size in (1, 2, 4, 8) if cluster.world_size % size == 0]
    specs = [BagSpec(((size, cluster.world_size // size),)) for size in sizes]
    placements = [make_planner("bags", spec)(sequences, cluster, cost) for spec in specs]
    return min(placements, key=lambda placement: timeline(placement, cluster, cost).step)


def summary(record: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{record['trace']:16s} {record['planner']:16s} "
    if "skipped" in record:
        return head + f"skipped: {record['skipped']}"
    mean = {name: figure[0] for name, figure in record["figures"].items()}
    return head + (
        f"step {mean['step_over_ideal_overlap']:.4f} (nothing hidden {mean['step_over_ideal']:.4f})  "
        f"time {mean['time_imbalance']:.4f}  tokens {mean['token_imbalance']:.4f}  "
        f"traffic {mean['split_traffic']:.3f}, across nodes {mean['cross_node_traffic']:.3f}  "
        f"routed {mean['routed_fraction']:.3f}  "
        f"{1e3 * record['plan_seconds']['median']:.1f} ms, {record['steps']} steps"
    )


def render_table(path: Path) -> str:
    """The table of the README, from the newest record of each (trace, planner): step over ideal on the timeline."""
    records: dict[str, dict[str, dict[str, Any]]] = {}
    for record in (step for run in read_records(path).values() for step in run.steps if "skipped" not in step):
        records.setdefault(record["trace"], {})[record["planner"]] = record

    def step(record: dict[str, Any] | None, *, worst: bool = False) -> str:
        return f"{record['figures']['step_over_ideal_overlap'][worst]:.4f}" if record else "-"

    lines = [
        "| trace | before balancing | best bags | best other planner | balanced | its worst step |",
        "|---|---|---|---|---|---|",
    ]
    for trace, by_planner in records.items():
        others = [record for name, record in by_planner.items() if name not in OURS]
        best = min(others, key=lambda record: record["figures"]["step_over_ideal_overlap"][0], default=None)
        ours = by_planner["balanced"]
        cells = [
            trace,
            step(by_planner["local"]),
            step(by_planner.get("best-bags")),
            f"{step(best)} {best['planner']}" if best else "-",
            f"**{step(ours)}**",
            step(ours, worst=True),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    ours = [name for name in PLANNERS if name != "bags"]
    parser = make_parser(__doc__, "planners.jsonl")
    parser.add_argument("--traces", nargs="+", default=list(TRACES), help="workload names, data codes or trace files")
    parser.add_argument("--steps", type=int, default=20, help="first steps of each trace (slow planners: at most 5)")
    parser.add_argument(
        "--planners",
        nargs="+",
        default=[*ours, "best-bags", *REFERENCE_PLANNERS],
        help=f"any of {', '.join([*PLANNERS, *REFERENCE_PLANNERS])}, best-bags, or bags:SPEC such as bags:g4n8",
    )
    parser.add_argument("--table", action="store_true", help="print the table of an output file instead of measuring")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
