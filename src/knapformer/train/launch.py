"""Starting ranks: join those that torchrun started, or start some on this machine.

Reads the environment that torchrun sets; library code never does.
"""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from knapformer.errors import SpecError

TIMEOUT = timedelta(minutes=10)


def run_on_ranks(function: Callable[..., None], arguments: tuple[Any, ...], *, ranks: int, device_type: str) -> None:
    """Call `function(device, *arguments)` on every rank, with torch.distributed initialised.

    Under torchrun this process is one of the ranks; otherwise `ranks` processes are started here, on CPU with the
    machine's cores divided between them.

    Raises:
        SpecError: for fewer than one rank, or more CUDA ranks than devices.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        _rank(int(os.environ.get("LOCAL_RANK", "0")), None, None, device_type, function, arguments)
        return
    if ranks < 1:
        raise SpecError(f"ranks is {ranks}; start at least one")
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        raise SpecError(f"{ranks} ranks need as many CUDA devices, this machine has {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory(prefix="knapformer-") as folder:
        store = str(Path(folder) / "store")
        start_processes(
            _rank, args=(ranks, store, device_type, function, arguments), nprocs=ranks, start_method="spawn"
        )


def _rank(
    local_rank: int,
    world_size: int | None,
    store: str | None,
    device_type: str,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    elif world_size is not None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    if store is None:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)
    else:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=local_rank,
            world_size=world_size or 1,
            timeout=TIMEOUT,
        )
    try:
        function(device, *arguments)
    finally:
        dist.destroy_process_group()
