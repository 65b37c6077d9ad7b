"""Metrics of a run while it goes on, to TensorBoard or any other tracker.

A tracker is a function of the step and its numbers, so that of any service is a line:

    for step, report in trainer.fit():
        wandb.log(scalars(report), step)

They are those of the run record; lists over ranks become their mean and largest value.
"""

from collections.abc import Callable, Mapping
from statistics import fmean

from knapformer.errors import BackendUnavailableError
from knapformer.train.trainer import StepReport

Tracker = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its numbers by name."""


def scalars(report: StepReport) -> dict[str, float]:
    """A step's numbers by name, `tokens_per_second` among them."""
    found = {"tokens_per_second": report.tokens / report.seconds}
    for name, value in report.to_json().items():
        if isinstance(value, list):
            found |= {f"{name}/mean": fmean(value), f"{name}/max": float(max(value))} if value else {}
        elif value is not None:
            found[name] = float(value)
    return found


def tensorboard(folder: str) -> Tracker:
    """A tracker that writes event files into a folder. Raises `BackendUnavailableError` without tensorboard."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise BackendUnavailableError(
            "[train] tensorboard needs tensorboard; install it with: pip install 'knapformer[tensorboard]'"
        ) from error
    writer = SummaryWriter(folder)

    def track(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track
