"""`knapformer train`: train from a configuration file, under torchrun or on ranks started here."""

from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from knapformer.data import GroupSampler, read_manifest
from knapformer.report import RecordWriter
from knapformer.train import StepReport, TrainConfig, Trainer, read_config
from knapformer.train.launch import run_on_ranks
from knapformer.train.timeline import timeline
from knapformer.train.trackers import scalars, tensorboard


def train(config: Path, *, ranks: int | None = None, device: str | None = None) -> None:
    """Train an MMDiT on a folder or manifest of images and videos.

    Parameters
    ----------
    config
        TOML file; see docs/train.md for all keys.
    ranks
        Ranks to start when not under torchrun. Default: the file's.
    device
        cpu or cuda. Default: cuda where there is one.
    """
    settings = read_config(config)
    settings.shape()  # errors of the input are raised here, in one line, and not on every rank
    GroupSampler(settings.loader_groups(), read_manifest(settings.data.manifest).ids_by_source())
    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    run_on_ranks(_train, (settings,), ranks=ranks or settings.train.ranks, device_type=device_type)


def progress_bar() -> Progress:
    """The bar of a training run; shown on rank 0 only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        disable=dist.get_rank() != 0,
    )


def status(report: StepReport) -> str:
    """One line about a step."""
    return f"loss {report.loss:.4f}  {report.seconds:.2f} s  {report.tokens / report.seconds:,.0f} tokens/s"


def _train(device: torch.device, config: TrainConfig) -> None:
    trainer = Trainer(config, read_manifest(config.data.manifest), device)
    writer = tracker = None
    if dist.get_rank() == 0:
        tracker = tensorboard(config.train.tensorboard) if config.train.tensorboard else None
        writer = RecordWriter(
            config.train.record, "train", config.to_json(), f"{device.type} x {dist.get_world_size()}"
        )
    with progress_bar() as progress, timeline(config.train.timeline, dist.get_rank()) as next_step:
        task = progress.add_task("training", total=config.train.steps, status="")
        for step, report in trainer.fit():
            progress.update(task, completed=step + 1, status=status(report))
            if writer:
                writer.step(step, **report.to_json())
            if tracker:
                tracker(step, scalars(report))
            next_step()
