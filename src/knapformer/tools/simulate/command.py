"""`knapformer simulate`: what a workload would cost on a cluster one does not have."""

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from knapformer.data import Profile
from knapformer.errors import SpecError
from knapformer.plan import Limits, make_planner
from knapformer.report.terminal import plain_table
from knapformer.tools.simulate.chrome import write_chrome_trace
from knapformer.tools.simulate.presets import cluster_preset, model_preset, named_workload
from knapformer.tools.simulate.scenario import Scenario, Simulation, model_of
from knapformer.tools.simulate.scenario import simulate as simulate_trace
from knapformer.tools.simulate.work import profile_prices


def command(
    workload: str,
    *,
    cluster: str,
    planner: str | None = None,
    topology: str | None = None,
    model: str | None = None,
    profile: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    max_tokens_per_rank: int | None = None,
    checkpointing: bool = True,
    overlap: bool = True,
    step_seconds: float = 0.0,
    trace: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Predict step time, throughput, utilisation, imbalance and memory on a virtual cluster.

    The speed-up over no balancing is balance * traffic * overlap: what equal loads gain, what exchanges cost when
    nothing hides them, and what hiding them gains.

    Parameters
    ----------
    workload
        Preset (flux-joint, open-sora-2-stage2, mix-v45-10s, ...), data codes, or a trace file.
    cluster
        Device, ranks and links, e.g. h100x32, a100x64-pcie-nic100, h100x32-inter50, b200x16-node4-shard8.
    planner
        balanced, bags or local. Default: bags if a topology is given, else balanced.
    topology
        Bag spec for planner bags, e.g. g8n4.
    model
        flux1, flux2, sd35-large, qwen-image, wan21-14b, hunyuanvideo, ... Default: the workload's.
    profile
        Measured prices (knapformer calibrate), a path or a shipped name, instead of the device's assumed rates.
    steps
        Steps to simulate. Default: 10, or as many as a recording has.
    seed
        For generated lengths.
    max_tokens_per_rank
        Hard limit for the planner.
    checkpointing
        Recompute every layer in backward.
    overlap
        Hide exchanges behind attention of whole sequences.
    step_seconds
        Constant per step, for whatever the simulation leaves out.
    trace
        Write the first step's timeline here, for ui.perfetto.dev.
    as_json
        Print one JSON object and nothing else.
    """
    preset = cluster_preset(cluster)
    lengths = named_workload(workload, world_size=preset.world_size, num_steps=steps or 10, seed=seed)
    shape = model_preset(model) if model else model_of(lengths)
    measured = Profile.load(profile) if profile else None
    if measured is not None and (measured.shape.d_model, measured.shape.num_heads) != (shape.d_model, shape.num_heads):
        raise SpecError(
            f"profile {measured.name!r} is of width {measured.shape.d_model} with {measured.shape.num_heads} heads, "
            f"model {shape.name!r} has {shape.d_model} and {shape.num_heads}; calibrate with the model's shape"
        )
    scenario = Scenario.of(
        shape,
        preset,
        None if measured is None else profile_prices(measured),
        checkpointing=checkpointing,
        overlap=overlap,
        step_seconds=step_seconds,
    )
    chosen = make_planner(planner or ("bags" if topology else "balanced"), topology)
    limits = Limits(max_tokens_per_rank)
    result = simulate_trace(lengths, scenario, chosen, limits)
    if trace is not None:
        first = lengths.sequences(0)
        placement = chosen(first, scenario.cluster, scenario.cost_model(), limits)
        write_chrome_trace(scenario.time(placement, record=True), trace)
    head = {"cluster": preset.name, "device": preset.device.title, "model": shape.name, "topology": topology}
    head |= {"prices": "assumed rates" if measured is None else f"profile {measured.name}"}
    if as_json:
        print(json.dumps(head | result.to_json()))
    else:
        _print(head, result)


def _print(head: dict[str, Any], result: Simulation) -> None:
    topology = f" {head['topology']}" if head["topology"] else ""
    title = f"{result.workload} on {head['cluster']}, model {head['model']}, planner {result.planner}{topology}"
    parts = result.speedup
    rows = {
        "step, seconds": f"{result.step_seconds:.3f}",
        "without balancing, seconds": f"{result.local_step_seconds:.3f}",
        "speed-up": f"{parts.total:.3f}",
        "  balance * traffic * overlap": f"{parts.balance:.3f} * {parts.traffic:.3f} * {parts.overlap:.3f}",
        "tokens per second": f"{result.tokens_per_second:,.0f}",
        "HFU, MFU (dense peak)": f"{result.hfu:.1%}, {result.mfu:.1%}",
        "imbalance (max/mean)": f"{result.imbalance:.3f}",
        "waiting for ranks, seconds": _kinds(result.waiting_seconds),
        "waiting for bytes, seconds": _kinds(result.exposed_seconds),
        "peak memory, estimated GB": f"{result.peak_memory_bytes / 1e9:.0f}" + ("" if result.fits else ", too much"),
    }
    caption = f"mean of {result.steps} steps; {head['prices']}"
    Console(highlight=False).print(plain_table(title, ("", ""), list(rows.items()), caption=caption))


def _kinds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.3f}" for kind, value in seconds.items() if value >= 5e-4) or "0"
