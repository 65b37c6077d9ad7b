"""Compare planners on traces: balance, step on the timeline, traffic, plan time; as run records (JSON lines).

    python benchmarks/planners.py --steps 20 -o benchmarks/results/planners.jsonl

For the default prices of a trace's model (500 TFLOP/s token-wise, 400 for attention) and the default links. Plan times
are CPU seconds of this process, on one core, so that what else the machine does counts little.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script, so that the package of reference planners is found
    sys.path.insert(0, str(ROOT))

from benchmarks.reference_planners import REFERENCE_PLANNERS  # noqa: E402

from knapformer.data.trace import Trace  # noqa: E402
from knapformer.data.workloads import load_workload  # noqa: E402
from knapformer.errors import KnapFormerError  # noqa: E402
from knapformer.plan import PLANNERS, BagSpec, Cluster, CostModel, Placement, Sequences, make_planner, measure  # noqa: E402
from knapformer.plan.timeline import timeline  # noqa: E402
from knapformer.report import environment  # noqa: E402

SCHEMA = 2
"""2: `step_over_ideal_overlap` is that of the timeline."""
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

Plan = Callable[[Sequences, Cluster, CostModel], Placement]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.table:
        print(render_table(args.output))
        return 0
    args.output.parent.mkdir(parents=True, exist_ok=True)
    common = {"schema": SCHEMA, "kind": "planners", "environment": environment(), "command": _command(argv)}
    with args.output.open("a") as file:
        for name in args.traces:
            trace = load_workload(name)
            for planner in args.planners:
                steps = min(args.steps, SLOW_STEPS.get(planner, args.steps), trace.num_steps)
                if trace.world_size > MAX_WORLD.get(planner, trace.world_size):
                    outcome: dict[str, Any] = {"skipped": f"more than {MAX_WORLD[planner]} ranks"}
                else:
                    outcome = compare(planner, trace, steps)
                record = {
                    **common,
                    "trace": trace.name,
                    "world_size": trace.world_size,
                    "planner": planner,
                    **outcome,
                }
                file.write(json.dumps(record) + "\n")
                file.flush()
                sys.stdout.write(summary(record) + "\n")
                sys.stdout.flush()
    return 0


def compare(planner: str, trace: Trace, num_steps: int) -> dict[str, Any]:
    """Mean and largest value of every metric over the first steps, and plan times [s]; or why there is none."""
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
    return {
        "steps": num_steps,
        "mean": {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]},
        "max": {name: float(np.max([m[name] for m in metrics])) for name in metrics[0]},
        "plan_seconds": {"median": float(np.median(seconds)), "p99": float(np.quantile(seconds, 0.99))},
    }


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
    mean = record["mean"]
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
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "skipped" not in record:
            records.setdefault(record["trace"], {})[record["planner"]] = record

    def step(record: dict[str, Any] | None, over_steps: str = "mean") -> str:
        return f"{record[over_steps]['step_over_ideal_overlap']:.4f}" if record else "-"

    lines = [
        "| trace | before balancing | best bags | best other planner | balanced | its worst step |",
        "|---|---|---|---|---|---|",
    ]
    for trace, by_planner in records.items():
        others = [record for name, record in by_planner.items() if name not in OURS]
        best = min(others, key=lambda record: record["mean"]["step_over_ideal_overlap"], default=None)
        ours = by_planner["balanced"]
        cells = [
            trace,
            step(by_planner["local"]),
            step(by_planner.get("best-bags")),
            f"{step(best)} {best['planner']}" if best else "-",
            f"**{step(ours)}**",
            step(ours, "max"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    ours = [name for name in PLANNERS if name != "bags"]
    parser = argparse.ArgumentParser(description="Compare planners on traces; append one run record per pair.")
    parser.add_argument("--traces", nargs="+", default=list(TRACES), help="workload names, data codes or trace files")
    parser.add_argument("--steps", type=int, default=20, help="first steps of each trace (slow planners: at most 5)")
    parser.add_argument(
        "--planners",
        nargs="+",
        default=[*ours, "best-bags", *REFERENCE_PLANNERS],
        help=f"any of {', '.join([*PLANNERS, *REFERENCE_PLANNERS])}, best-bags, or bags:SPEC such as bags:g4n8",
    )
    parser.add_argument("--table", action="store_true", help="print the table of an output file instead of measuring")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "results" / "planners.jsonl")
    return parser.parse_args(argv)


def _command(argv: Sequence[str] | None) -> str:
    """The command as it is written from the repository root; paths outside of it are reduced to their names."""
    words = sys.argv[1:] if argv is None else argv
    return shlex.join(["python", "benchmarks/planners.py", *(Path(w).name if w.startswith("/") else w for w in words)])


if __name__ == "__main__":
    raise SystemExit(main())
