"""`knapformer replay`: every rank's share of a step on the one device at hand, measured."""

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from knapformer.data import Profile
from knapformer.plan import Cluster, CostModel, make_planner, measure
from knapformer.report import RecordWriter
from knapformer.report.terminal import plain_table
from knapformer.tools.replay.replay import Replay, Replayed, ReplayShape, replay_model, scaled
from knapformer.tools.simulate.presets import named_workload
from knapformer.train.launch import choose_device, device_words


def command(
    workload: str,
    *,
    planner: str | None = None,
    topology: str | None = None,
    ranks: int | None = None,
    steps: int = 1,
    device: Literal["cpu", "cuda"] | None = None,
    width: int | None = None,
    heads: int | None = None,
    double: int | None = None,
    single: int | None = None,
    scale: float | None = None,
    gamma: float = 1.25,
    profile: str | None = None,
    repeats: int = 3,
    record: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Run each rank's share of a step one after the other on this device; report measured imbalance and step time.

    Work is done before balancing and as planned; exchanges are copies. On a CPU the model and the lengths are small by
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
    width
        Width of the MMDiT's tokens. Default: FLUX's 3072 on CUDA, 256 on CPU.
    heads
        Its attention heads. Default: FLUX's 24 on CUDA, 4 on CPU.
    double
        Its double-stream blocks. Default: one.
    single
        Its single-stream blocks. Default: one.
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
    where = choose_device(device)
    given = {"width": width, "num_heads": heads, "num_double": double, "num_single": single, "scale": scale}
    shape = ReplayShape.of(where, given)
    trace = named_workload(workload, world_size=ranks, num_steps=steps)
    replay = Replay(replay_model(shape, where), where, repeats=repeats)
    fallback = CostModel.from_shapes(shape.width, shape.num_heads, gamma=gamma)
    cost = Profile.load(profile).cost_model() if profile else fallback
    cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node"))
    plans = {
        "local": make_planner("local"),
        "planned": make_planner(planner or ("bags" if topology else "balanced"), topology),
    }
    measured: dict[str, list[Replayed]] = {name: [] for name in plans}
    modelled: dict[str, list[float]] = {name: [] for name in plans}
    for index in range(trace.num_steps):
        sequences = scaled(trace, index, shape.scale)
        for name, plan in plans.items():
            placement = plan(sequences, cluster, cost)
            modelled[name].append(measure(placement, cluster, cost).time_imbalance)
            measured[name].append(replay(placement))
    settings: dict[str, Any] = {
        "workload": trace.name,
        "ranks": trace.world_size,
        "steps": trace.num_steps,
        "planner": plans["planned"].name,
        "topology": topology,
        "device": device_words(where),
        "width": shape.width,
        "heads": shape.num_heads,
        "blocks": [shape.num_double, shape.num_single],
        "scale": shape.scale,
    }
    result = settings | {name: _figures(measured[name], modelled[name]) for name in plans}
    result["speedup"] = result["local"]["step_seconds"] / result["planned"]["step_seconds"]
    if record is not None:
        with RecordWriter(record, f"replay-{trace.name}-{result['planner']}", settings, settings["device"]) as writer:
            writer.step(0, **{key: value for key, value in result.items() if key not in settings})
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(_table(result))


def _figures(replays: list[Replayed], modelled: list[float]) -> dict[str, Any]:
    return {
        "step_seconds": fmean(one.step_seconds for one in replays),
        "imbalance": fmean(one.imbalance for one in replays),
        "modelled_imbalance": fmean(modelled),
        "rank_seconds": [one.seconds for one in replays],
    }


def _table(result: dict[str, Any]) -> Table:
    named = (
        ("slowest rank, which dictates the step, seconds", "step_seconds"),
        ("measured imbalance (max/mean)", "imbalance"),
        ("modelled imbalance (max/mean)", "modelled_imbalance"),
    )
    rows = [(title, f"{result['local'][key]:.4g}", f"{result['planned'][key]:.4g}") for title, key in named]
    return plain_table(
        f"{result['workload']}, {result['ranks']} ranks replayed on {result['device']}, planner "
        f"{result['planner']} {result['topology'] or ''}".rstrip(),
        ("", "before balancing", "planned"),
        rows,
        caption=f"mean of {result['steps']} steps; lengths over {result['scale']:g}; speed-up {result['speedup']:.3f}",
    )
