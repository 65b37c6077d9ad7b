"""Checkpoints by torch.distributed.checkpoint: saved on any number of ranks, restored on any other.

A checkpoint is complete once its `.metadata` is there, which is written last; `latest_checkpoint` looks for that, so a
run killed while saving goes on from the one before. What restores exactly: weights, optimiser state, next step, seed.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from knapformer.errors import DataError


def save_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, int]
) -> Path:
    """Write `folder/step-N` for `state["step"]` = N. Collective."""
    model_state, optim_state = get_state_dict(model, optimizer)
    target = Path(folder) / f"step-{state['step']:08d}"
    save({"model": model_state, "optim": optim_state, "run": dict(state)}, checkpoint_id=target)
    return target


def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Restore weights and optimiser in place; returns the run's state. Collective.

    Raises:
        DataError: if there is no complete checkpoint at `path`.
    """
    if not (Path(path) / ".metadata").is_file():
        raise DataError(f"{path} is not a complete checkpoint: it has no .metadata; choose a folder like step-00000100")
    model_state, optim_state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": model_state, "optim": optim_state, "run": {"step": 0, "seed": 0}}
    load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    return loaded["run"]


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in `folder`, or None."""
    complete = [p for p in Path(folder).glob("step-*") if (p / ".metadata").is_file()]
    return max(complete, key=lambda p: p.name, default=None)
