"""`knapformer replay`: every rank's share of a step on the one device at hand, measured."""

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from knapformer.data import Profile
from knapformer.plan import Cluster, CostModel, Placement, Sequences, make_planner, measure
from knapformer.report import RecordWriter
from knapformer.tools.replay.replay import CPU_SHAPE, FLUX_SHAPE, Replayed, replay_model, scaled
from knapformer.tools.replay.replay import replay as replay_placement
from knapformer.tools.simulate.presets import named_workload


def command(
    workload: str,
    *,
    planner: str | None = None,
    topology: str | None = None,
    ranks: int | None = None,
    steps: int = 1,
    device: str | None = None,
    width: int | None = None,
    heads: int | None = None,
    double: int | None = None,
    single: int | None = None,
    scale: float | None = None,
    gamma: float = 1.25,
    profile: str | None = None,
    repeats: int = 3,
    record: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Run each rank's share of a step one after the other on this device; report measured imbalance and step time.

    Work is done as placed, at home and planned; exchanges are copies. On a CPU the model and the lengths are small by
    default.

    Parameters
    ----------
    workload
        Preset, data codes, or a trace file.
    planner
        balanced, bags or local. Default: bags if a topology is given, else balanced.
    topology
        Bag spec for planner bags.
    ranks
        Ranks to replay. Default: the workload's.
    steps
        Steps to replay.
    device
        cpu or cuda. Default: cuda where there is one.
    width, heads, double, single
        Shape of the MMDiT. Default: FLUX's blocks, one of each kind, on CUDA; a small one on CPU.
    scale
        Divide all lengths by this. Default: 1 on CUDA, 16 on CPU.
    gamma
        Time of an attention FLOP over that of a token-wise FLOP, for planning.
    profile
        Measured prices to plan with instead, a path or a shipped name.
    repeats
        Measurements of each rank; the median counts.
    record
        Append a run record to this file.
    as_json
        Print one JSON object and nothing else.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    defaults = FLUX_SHAPE if where.type == "cuda" else CPU_SHAPE
    width, heads, double, single = (
        default if value is None else value
        for value, default in zip((width, heads, double, single), defaults[:4], strict=True)
    )
    scale = defaults[4] if scale is None else scale
    trace = named_workload(workload, world_size=ranks, num_steps=steps)
    model = replay_model(width, heads, double, single, where)
    half = torch.bfloat16 if where.type == "cuda" else None
    cost = Profile.load(profile).cost_model() if profile else CostModel.from_shapes(width, heads, gamma=gamma)
    cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node"))
    plans = {
        "local": make_planner("local"),
        "planned": make_planner(planner or ("bags" if topology else "balanced"), topology),
    }
    measured: dict[str, list[Replayed]] = {name: [] for name in plans}
    modelled: dict[str, list[float]] = {name: [] for name in plans}
    for step in trace.steps:
        lens, texts = scaled(step.seq_lens, step.text_lens, scale)
        sequences = Sequences.from_ranks(lens, texts if trace.meta.get("text", "joint") == "joint" else None)
        for name, plan in plans.items():
            placement: Placement = plan(sequences, cluster, cost)
            modelled[name].append(measure(placement, cluster, cost).time_imbalance)
            measured[name].append(replay_placement(placement, model, where, repeats=repeats, autocast=half))
    words = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu, 1 thread"
    settings: dict[str, Any] = {
        "workload": trace.name,
        "ranks": trace.world_size,
        "steps": trace.num_steps,
        "planner": plans["planned"].name,
        "topology": topology,
        "device": words,
        "width": width,
        "heads": heads,
        "blocks": [double, single],
        "scale": scale,
    }
    result = settings | {name: _figures(measured[name], modelled[name]) for name in plans}
    result["speedup"] = result["local"]["step_seconds"] / result["planned"]["step_seconds"]
    if record is not None:
        with RecordWriter(record, f"replay-{trace.name}-{result['planner']}", settings, words) as writer:
            writer.step(0, **{key: value for key, value in result.items() if key not in settings})
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)


def _figures(replays: list[Replayed], modelled: list[float]) -> dict[str, Any]:
    return {
        "step_seconds": fmean(one.step_seconds for one in replays),
        "imbalance": fmean(one.imbalance for one in replays),
        "modelled_imbalance": fmean(modelled),
        "rank_seconds": [one.seconds for one in replays],
    }


def _print(result: dict[str, Any]) -> None:
    topology = f" {result['topology']}" if result["topology"] else ""
    table = Table(
        title=f"{result['workload']}, {result['ranks']} ranks replayed on {result['device']}, planner "
        f"{result['planner']}{topology}",
        caption=f"mean of {result['steps']} steps; lengths over {result['scale']:g}; speed-up {result['speedup']:.3f}",
    )
    table.add_column("")
    for name in ("at home", "planned"):
        table.add_column(name, justify="right")
    for title, key in (
        ("slowest rank, which dictates the step, seconds", "step_seconds"),
        ("measured imbalance (max/mean)", "imbalance"),
        ("modelled imbalance (max/mean)", "modelled_imbalance"),
    ):
        table.add_row(title, f"{result['local'][key]:.4g}", f"{result['planned'][key]:.4g}")
    Console().print(table)
