"""One rank of the examples' test: every trainer, unbalanced and balanced, one after the other; writes their losses.

    python -m tests.examples.driver RANK WORLD_SIZE FOLDER

Processes of their own, and not those of `tests.ranks`, since trainers read the environment that launchers set.
"""

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

TRAINERS = {"fsdp2": "torch", "with_accelerate": "accelerate", "with_lightning": "lightning"}


def main(rank: str, world_size: str, folder: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="examples", GROUP_RANK="0")
    root = Path(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root / 'store'}", rank=int(rank), world_size=int(world_size))
    losses = {}
    for name, package in TRAINERS.items():
        if find_spec(package):
            train = importlib.import_module(f"examples.{name}").train
            losses[name] = [train(root / rank, balanced=balanced, epochs=2) for balanced in (False, True)]
    (root / f"{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
