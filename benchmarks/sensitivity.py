"""What wrong prices cost: plan with a price off by up to 50 %, judge by the right ones.

    python -m benchmarks.sensitivity -o benchmarks/results/sensitivity.jsonl

The right prices are those of FLUX's shapes with gamma 1.25 and a price per sequence (its modulation, 12 d_model^2
FLOP). One price at a time is scaled: `per_qk_pair` (which is gamma), `token`, or `sequence`. One run per trace and
planner, one line per price: the largest over factors of the mean over steps of

    time_imbalance             max/mean over ranks of load
    step_over_ideal            predicted step with no traffic hidden, over ideal compute; `_overlap` with traffic hidden
    lost                       the step over that of the plan with right prices, minus 1

and in `by_factor` the four of each factor. These are a model's figures, not measured steps.
"""

import sys
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.common import ShortRecord, make_parser

from knapformer.data import load_workload
from knapformer.plan import Cluster, CostModel, Limits, Planner, make_planner, measure

TRACES = ("flux-joint-32", "flux-mixed-32", "real-mix-32")
PLANNERS = ("bags:g1n32", "bags:g4n8", "bags:g8n4", "bags:g1n8+g2n4+g8n2", "balanced")
PRICES = ("per_qk_pair", "token", "sequence")
FACTORS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
FIGURES = ("time_imbalance", "step_over_ideal", "step_over_ideal_overlap")


def main() -> int:
    parser = make_parser(__doc__, "sensitivity.jsonl")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    args.output.unlink(missing_ok=True)
    for trace in TRACES:
        for name in PLANNERS:
            figures = by_price(trace, make_planner(*name.split(":")), args.steps)
            lines = [step_of(price, by_factor) for price, by_factor in figures.items()]
            config = {"trace": trace, "planner": name, "steps": args.steps}
            with ShortRecord(args.output, f"{trace} {name}", config) as out:
                for number, line in enumerate(lines):
                    out.step(number, **line)
            exact = lines[0]["by_factor"]["1.0"]["step_over_ideal"]
            words = ", ".join(f"{line['price']} {100 * line['lost']:.2f} %" for line in lines)
            sys.stdout.write(f"{trace:14s} {name:22s} step {exact:.4f}; most lost: {words}\n")
    return 0


def step_of(price: str, by_factor: dict[str, dict[str, float]]) -> dict[str, Any]:
    """What is recorded of a price."""
    worst = {figure: max(one[figure] for one in by_factor.values()) for figure in (*FIGURES, "lost")}
    return {"price": price, **worst, "by_factor": by_factor}


def by_price(name: str, planner: Planner, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """price -> factor -> figures, for one trace and planner."""
    trace = load_workload(name, num_steps=steps)
    d_model = trace.meta.get("d_model", 3072)
    right = CostModel.from_shapes(d_model, trace.meta.get("heads", 24), sequence_flop=12 * d_model**2)
    cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node"))
    batches = [trace.sequences(i) for i in range(min(steps, trace.num_steps))]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for price in PRICES:
        of_price = found[price] = {}
        for factor in FACTORS:
            assumed = replace(right, **{price: round(factor * getattr(right, price))})
            plans = [measure(planner(batch, cluster, assumed, Limits()), cluster, right) for batch in batches]
            of_price[str(factor)] = {figure: fmean(getattr(plan, figure) for plan in plans) for figure in FIGURES}
        exact = of_price["1.0"]["step_over_ideal"]
        for figures in of_price.values():
            figures["lost"] = figures["step_over_ideal"] / exact - 1
    return found


if __name__ == "__main__":
    raise SystemExit(main())
