"""What wrong prices cost: plan with a price off by up to 50 %, judge by the right ones.

    python benchmarks/sensitivity.py -o benchmarks/results/sensitivity.jsonl

The right prices are those of FLUX's shapes with gamma 1.25 and a price per sequence (its modulation, 12 d_model^2
FLOP). One price at a time is scaled: `per_qk_pair` (which is gamma), `token`, or `sequence`. One run per trace and
planner, one line per price and factor: the mean over steps of

    time_imbalance             max/mean over ranks of load
    step_over_ideal            predicted step with no traffic hidden, over ideal compute; `_overlap` with traffic hidden

and `lost`, the step over that of the plan with right prices, minus 1. These are a model's figures, not measured steps.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from knapformer.data import load_workload
from knapformer.plan import Cluster, CostModel, Limits, Planner, make_planner, measure
from knapformer.report import RecordWriter

ROOT = Path(__file__).resolve().parents[1]
TRACES = ("flux-joint-32", "flux-mixed-32", "real-mix-32")
PLANNERS = ("bags:g1n32", "bags:g4n8", "bags:g8n4", "bags:g1n8+g2n4+g8n2", "balanced")
PRICES = ("per_qk_pair", "token", "sequence")
FACTORS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
FIGURES = ("time_imbalance", "step_over_ideal", "step_over_ideal_overlap")


def main() -> int:
    parser = argparse.ArgumentParser(description="What wrong prices cost; writes run records.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "results" / "sensitivity.jsonl")
    args = parser.parse_args()
    args.output.unlink(missing_ok=True)
    for trace in TRACES:
        for name in PLANNERS:
            with RecordWriter(
                args.output, f"{trace} {name}", {"trace": trace, "planner": name, "steps": args.steps}
            ) as out:
                worst = {}
                lines = _lines(trace, make_planner(*name.split(":")), args.steps)
                for i, line in enumerate(lines):
                    out.step(i, **line)
                    worst[line["price"]] = max(worst.get(line["price"], 0.0), line["lost"])
                exact = next(line for line in lines if line["factor"] == 1.0)
            words = ", ".join(f"{price} {100 * lost:.2f} %" for price, lost in worst.items())
            sys.stdout.write(f"{trace:14s} {name:22s} step {exact['step_over_ideal']:.4f}; most lost: {words}\n")
    return 0


def _lines(name: str, planner: Planner, steps: int) -> list[dict]:
    """Figures by price and factor, for one trace and planner."""
    trace = load_workload(name, num_steps=steps)
    d_model = trace.meta.get("d_model", 3072)
    right = CostModel.from_shapes(d_model, trace.meta.get("heads", 24), sequence_flop=12 * d_model**2)
    cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node"))
    batches = [trace.sequences(i) for i in range(min(steps, trace.num_steps))]
    lines = []
    for price in PRICES:
        of_price = []
        for factor in FACTORS:
            assumed = replace(right, **{price: round(factor * getattr(right, price))})
            plans = [measure(planner(batch, cluster, assumed, Limits()), cluster, right) for batch in batches]
            figures = {figure: fmean(getattr(plan, figure) for plan in plans) for figure in FIGURES}
            of_price.append({"price": price, "factor": factor, **figures})
        exact = of_price[FACTORS.index(1.0)]
        for line in of_price:
            lines.append({**line, "lost": line["step_over_ideal"] / exact["step_over_ideal"] - 1})
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
