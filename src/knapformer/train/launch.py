"""Starting ranks: join those that torchrun started, or start some on this machine; and what they run on.

Reads the environment that torchrun sets; library code never does.
"""

import os
import pickle
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


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name; by default CUDA where there is one. Raises `SpecError` if it cannot be used."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise SpecError("device is cuda, but this machine has no CUDA device that torch can use; use --device cpu")
    return torch.device(name or ("cuda" if has_cuda else "cpu"))


def device_words(device: torch.device, ranks: int = 1) -> str:
    """A device for a reader: the name of a GPU, or how many threads of a CPU; and how many ranks have one each."""
    threads = torch.get_num_threads()
    cpu = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return f"{words} x {ranks}" if ranks > 1 else words


def run_on_ranks(function: Callable[..., Any], arguments: tuple[Any, ...], *, ranks: int, device_type: str) -> Any:
    """Call `function(device, *arguments)` on every rank, with torch.distributed initialised.

    Under torchrun this process is one of the ranks; otherwise `ranks` processes are started here, on CPU with the
    machine's cores divided between them.

    Returns:
        What the function returned on this rank; on rank 0 where ranks were started here.

    Raises:
        SpecError: for fewer than one rank, or more CUDA ranks than devices.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return _on_rank(int(os.environ.get("LOCAL_RANK", "0")), {}, device_type, function, arguments)
    if ranks < 1:
        raise SpecError(f"ranks is {ranks}; start at least one")
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        raise SpecError(f"{ranks} ranks need as many CUDA devices, this machine has {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory(prefix="knapformer-") as folder:
        start_processes(
            _started, args=(ranks, folder, device_type, function, arguments), nprocs=ranks, start_method="spawn"
        )
        return pickle.loads(Path(folder, "result").read_bytes())


def _started(rank: int, ranks: int, folder: str, *call: Any) -> None:
    """One of the ranks that were started here."""
    result = _on_rank(rank, {"init_method": f"file://{folder}/store", "rank": rank, "world_size": ranks}, *call)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))


def _on_rank(
    local_rank: int,
    meeting: dict[str, Any],
    device_type: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    elif meeting:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // meeting["world_size"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT, **meeting)
    try:
        return function(device, *arguments)
    finally:
        dist.destroy_process_group()
