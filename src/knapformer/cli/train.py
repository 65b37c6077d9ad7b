"""`knapformer train`: train from a configuration file, under torchrun or on ranks started here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from knapformer.data import GroupSampler, read_manifest
from knapformer.report import RecordWriter
from knapformer.train import TrainConfig, Trainer, read_config
from knapformer.train.launch import choose_device, device_words, run_on_ranks
from knapformer.train.timeline import timeline
from knapformer.train.trackers import scalars, tensorboard


def train(config: Path, *, ranks: int | None = None, device: Literal["cpu", "cuda"] | None = None) -> None:
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
    run_on_ranks(_train, (settings,), ranks=ranks or settings.train.ranks, device_type=choose_device(device).type)


@contextmanager
def training_progress(steps: int, *, quiet: bool = False) -> Iterator[tuple[Progress, TaskID]]:
    """A bar over the steps of a run, on rank 0 only; its task has a field `status`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    status = TextColumn("{task.fields[status]}")
    with Progress(*columns, status, disable=quiet or dist.get_rank() != 0) as bar:
        yield bar, bar.add_task("training", total=steps, status="")


def _train(device: torch.device, config: TrainConfig) -> None:
    trainer = Trainer(config, read_manifest(config.data.manifest), device)
    run, writer, tracker = config.train, None, None
    if dist.get_rank() == 0:
        tracker = tensorboard(run.tensorboard) if run.tensorboard else None
        writer = RecordWriter(run.record, "train", config.to_json(), device_words(device, dist.get_world_size()))
    with training_progress(run.steps) as (bar, task), timeline(run.timeline, dist.get_rank()) as next_step:
        for step, report in trainer.fit():
            speed = f"{report.seconds:.2f} s  {report.tokens / report.seconds:,.0f} tokens/s"
            bar.update(task, completed=step + 1, status=f"loss {report.loss:.4f}  {speed}")
            if writer:
                writer.step(step, **report.to_json())
            if tracker:
                tracker(step, scalars(report))
            next_step()
