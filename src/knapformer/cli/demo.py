"""`knapformer demo`: train on real images and clips over CPU ranks, unbalanced and balanced, and compare.

Both runs take every step's batch one after the other, in the same processes, so that a change in the machine's speed
hits both alike.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from cyclopts import Parameter
from rich.console import Console

from knapformer.cli.train import training_progress
from knapformer.data import build_demo, read_manifest
from knapformer.plan.planners import BagsPlanner, make_planner
from knapformer.report import RecordWriter, compare_runs, draw_comparison, read_records
from knapformer.report.terminal import plain_table
from knapformer.train import TrainConfig, Trainer
from knapformer.train.config import BalancerConfig
from knapformer.train.demo import PROFILE, demo_config
from knapformer.train.launch import device_words, run_on_ranks

UNBALANCED, BALANCED = "unbalanced", "balanced"


def demo(
    *,
    steps: int = 12,
    ranks: int = 2,
    planner: str | None = None,
    topology: str | None = None,
    out: Path = Path("runs/demo"),
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Train a small MMDiT on real photographs and clips over CPU ranks, unbalanced and then balanced.

    Parameters
    ----------
    steps
        Training steps; each is taken by both runs.
    ranks
        CPU ranks to start, of one thread each where there are as many cores.
    planner
        Planner of the balanced run. Default: bags if a topology is given, else balanced.
    topology
        Bag spec for planner bags.
    out
        Folder for the data set, the run record and the figure.
    as_json
        Print one JSON object and nothing else.
    """
    console = Console(quiet=as_json)
    name = planner or ("bags" if topology else "balanced")
    if isinstance(chosen := make_planner(name, topology), BagsPlanner):  # errors here, not on every rank
        chosen.spec.num_groups(ranks)
    build_demo(out / "data")
    record = out / "record.jsonl"
    record.unlink(missing_ok=True)
    config = demo_config(out / "data" / "manifest.jsonl", steps)
    balanced = BalancerConfig(planner=name, topology=topology, profile=PROFILE)
    console.print(f"training on real images and clips: {ranks} CPU ranks, {steps} steps, unbalanced and balanced")
    start = time.perf_counter()
    run_on_ranks(_train_both, (config, balanced, record, as_json), ranks=ranks, device_type="cpu")
    runs = read_records(record)
    comparison = compare_runs(runs[UNBALANCED], runs[BALANCED])
    figure = draw_comparison(runs[UNBALANCED], runs[BALANCED], out / "comparison.png")
    result = {
        **comparison.to_json(),
        "record": str(record),
        "figure": str(figure),
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        print(json.dumps(result))
        return
    figures = (
        ("median step time [s]", comparison.step_seconds, "{:.3f}"),
        ("tokens per second", comparison.tokens_per_second, "{:,.0f}"),
        ("measured imbalance (busy time, max/mean)", comparison.measured_imbalance, "{:.3f}"),
        ("modelled imbalance (max/mean)", comparison.modelled_imbalance, "{:.3f}"),
    )
    rows = [(name, form.format(values[UNBALANCED]), form.format(values[BALANCED])) for name, values, form in figures]
    console.print(plain_table("unbalanced against balanced", ("", UNBALANCED, BALANCED), rows))
    console.print(
        f"same batches, same losses: they differ by {comparison.largest_loss_difference:.1e} relative at most\n"
        f"speed-up {comparison.speedup:.2f}; perfect balance of the modelled work: {comparison.ideal_speedup:.2f}\n"
        f"figure {figure}, run record {record}"
    )


def _train_both(device: torch.device, config: TrainConfig, balanced: BalancerConfig, record: Path, quiet: bool) -> None:
    manifest = read_manifest(config.data.manifest)
    configs = {UNBALANCED: config, BALANCED: msgspec.structs.replace(config, balancer=balanced)}
    trainers = {name: Trainer(one, manifest, device) for name, one in configs.items()}
    writers: dict[str, Any] = {}
    if dist.get_rank() == 0:
        words = device_words(device, dist.get_world_size())
        writers = {name: RecordWriter(record, name, one.to_json(), words) for name, one in configs.items()}
    with training_progress(config.train.steps, quiet=quiet) as (bar, task):
        for step in range(config.train.steps):
            batch = trainers[UNBALANCED].load(step)
            reports = {name: trainer.step(batch) for name, trainer in trainers.items()}
            for name, writer in writers.items():
                writer.step(step, **reports[name].to_json())
            words = ", ".join(f"{name} {report.seconds:.2f} s" for name, report in reports.items())
            bar.update(task, advance=1, status=f"loss {reports[BALANCED].loss:.4f}  {words}")
