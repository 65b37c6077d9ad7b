"""The simulator against published figures, and what it says of balancing on clusters we do not have.

    python -m benchmarks.simulator -o benchmarks/results/simulator.jsonl

* `published`: the joint image/video row of KnapFormer (arXiv 2508.06001) on 32 H100, without balancing and with bags
  `g8n4`, with one set of parameters. Given by the publication and its code: gamma 0.49, parameters sharded over 4 ranks
  and replicated, every layer checkpointed, routing of whole tokens both ways, no optimiser. Ours, fitted to the two
  step times: the rate of token-wise work, and a constant per step. Two numbers for two numbers: the step times are a
  check of consistency, not a prediction. HFU is one: it follows from the count of FLOP alone.
* `speedups`: `local`, bags and `balanced` on several clusters at the presets' assumed rates, steps of ideal efficiency:
  no constant per step.
* `scale`: seconds to simulate a step of up to 8,192 ranks on this machine.
"""

import time
from dataclasses import dataclass, replace

from benchmarks.common import ShortRecord, make_parser

from knapformer.plan import make_planner
from knapformer.report import RecordWriter
from knapformer.tools.simulate.presets import cluster_preset, model_preset, named_workload
from knapformer.tools.simulate.scenario import Scenario, model_of, simulate


@dataclass(frozen=True)
class Row:
    """A published measurement."""

    planner: str
    topology: str | None
    step_seconds: float
    hfu: float


PUBLISHED = (Row("local", None, 8.05, 0.1269), Row("bags", "g8n4", 3.44, 0.2974))
PEAK = cluster_preset("h100x32").device.peak_flops

GAMMA = 0.49
TOKEN_FLOPS = 330e12
STEP_SECONDS = 0.8
ROUTE_BYTES = 2 * 2 * 3072  # whole tokens in bf16, there and back

CLUSTERS = (
    "h100x32",
    "h100x32-inter50",
    "h100x32-pcie",
    "h100x32-inter50-pcie",
    "h100x32-nic100",
    "a100x32",
    "b200x32",
    "h100x8",
    "h100x128",
    "h100x1024",
)
PLANNERS = (("local", None), ("bags", 4), ("bags", 8), ("balanced", None))
WORKLOADS = ("flux-joint", "flux-mixed", "flux-lowres", "open-sora-2-stage2", "mix-v35-10s", "mix-v60-15s")


def published_scenario(token_flops: float = TOKEN_FLOPS, step_seconds: float = STEP_SECONDS) -> Scenario:
    """32 H100 with the published settings.

    gamma compares attention with token-wise work over forward and backward, 3 parts of FLOP that cost 3.5 in attention.
    """
    preset = cluster_preset("h100x32-shard4")
    attention = token_flops / GAMMA * 3.5 / 3
    device = replace(preset.device, token_flops=token_flops, attention_flops=attention)
    return Scenario.of(
        "flux1",
        replace(preset, device=device),
        update_seconds=0.0,
        step_seconds=step_seconds,
        route_bytes=float(ROUTE_BYTES),
    )


def published(writer: RecordWriter, steps: int) -> None:
    everything = named_workload("flux-joint-32", num_steps=100)
    flop = [published_scenario().flop(everything.sequences(i), recompute=True) for i in range(100)]
    counted = {f"{row.step_seconds} s": sum(flop) / 100 / row.step_seconds / 32 / PEAK for row in PUBLISHED}
    writer.step(0, part="flop", hfu_of_published_steps=counted)
    print("FLOP of 100 steps over the published step times:", {k: f"{v:.2%}" for k, v in counted.items()})
    trace = named_workload("flux-joint-32", num_steps=steps)
    cases = {"fitted": published_scenario(), "without constant": published_scenario(step_seconds=0.0)}
    cases["assumed rates"] = Scenario.of("flux1", "h100x32-shard4", update_seconds=0.0, route_bytes=float(ROUTE_BYTES))
    rows = [*PUBLISHED, Row("bags", "g4n8", 0, 0), Row("bags", "g2n16", 0, 0), Row("balanced", None, 0, 0)]
    for index, (case, scenario) in enumerate(cases.items()):
        for row in rows:
            result = simulate(trace, scenario, make_planner(row.planner, row.topology))
            error = result.step_seconds / row.step_seconds - 1 if row.step_seconds else None
            figures = result.to_json() | {"case": case, "topology": row.topology, "published": row.step_seconds or None}
            writer.step(index, part="published", error=error, published_hfu=row.hfu or None, **figures)
            print(
                f"published, {case}: {row.planner} {row.topology or ''} {result.step_seconds:.2f} s, "
                f"HFU {result.hfu:.2%}, {result.tokens_per_second / 1e3:.1f} K tokens/s"
                + (f", error {error:+.1%}" if error is not None else "")
            )


def speedups(writer: RecordWriter, steps: int) -> None:
    index = 0
    for cluster in CLUSTERS:
        preset = cluster_preset(cluster)
        for workload in WORKLOADS if cluster == "h100x32" else WORKLOADS[:1]:
            if workload.startswith("flux") and preset.world_size % 32:
                continue  # their codes name 32 ranks
            trace = named_workload(workload, world_size=preset.world_size, num_steps=steps)
            model = model_of(trace)
            scenario = Scenario.of(model, preset)
            for planner, bag in PLANNERS:
                topology = f"g{bag}n{preset.world_size // bag}" if bag else None
                result = simulate(trace, scenario, make_planner(planner, topology))
                figures = result.to_json() | {"topology": topology, "cluster": cluster, "model": model.name}
                writer.step(index, part="speedups", **figures)
                index += 1
                s = result.speedup
                print(
                    f"{workload} {cluster}: {planner} {topology or ''} {result.step_seconds:.3f} s, "
                    f"HFU {result.hfu:.1%}, {s.total:.3f} = {s.balance:.3f} * {s.traffic:.3f} * {s.overlap:.3f}"
                )


def scale(writer: RecordWriter) -> None:
    for ranks in (32, 1024, 8192):
        trace = named_workload("flux-joint", world_size=ranks, num_steps=1)
        scenario = Scenario.of(model_preset("flux1"), f"h100x{ranks}")
        for planner, topology in (("bags", f"g8n{ranks // 8}"), ("balanced", None)):
            start = time.perf_counter()
            simulate(trace, scenario, make_planner(planner, topology))
            seconds = time.perf_counter() - start
            writer.step(0, part="scale", ranks=ranks, planner=planner, seconds=seconds)
            print(f"{ranks} ranks, {planner}: planned and simulated, four variants, in {seconds:.1f} s")


def main() -> None:
    parser = make_parser(__doc__, "simulator.jsonl")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    config = {"gamma": GAMMA, "token_flops": TOKEN_FLOPS, "step_seconds": STEP_SECONDS, "steps": args.steps}
    with ShortRecord(args.output, "simulator", config, "simulated") as writer:
        published(writer, args.steps)
        speedups(writer, args.steps)
        scale(writer)


if __name__ == "__main__":
    main()
