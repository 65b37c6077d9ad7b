"""Starts the ranks of a grid: torchrun on this machine, or a Slurm job that runs torchrun on each of its nodes.

Both run the command that the user gave, once per rank; it then finds itself inside a launch and joins it. A rank that
dies makes torchrun start all ranks of the launch again, and the grid goes on behind the cell that brought it down. A
job that Slurm requeues goes on where it was.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from knapformer.errors import BackendUnavailableError, SpecError
from knapformer.tools.experiment.grid import Grid

PORT = 29500
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it (torch 2.13), restarted ranks find the addresses of dead ones in the store and wait for them."""


def torchrun_command(grid: Grid, arguments: list[str], *, nodes: str | None = None) -> list[str]:
    """The command that starts a grid's ranks on one node.

    Args:
        grid: its ranks.
        arguments: of `knapformer`, for every rank.
        nodes: rendezvous of several nodes, as `host:port`; None for one node, which chooses a port itself.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={grid.ranks_in_node}"]
    if nodes is None:
        command += ["--standalone"]
    else:
        command += [f"--nnodes={grid.num_nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={nodes}"]
    restarts = sum(1 for _ in grid.cells())  # each cell may bring its ranks down once
    return [*command, f"--max-restarts={restarts}", "-m", "knapformer.cli.main", *arguments]


def current_launch() -> str:
    """Id of the launch that this process is a rank of; empty if torchrun did not start it."""
    # Not the count of restarts: only on the node where a rank died does that rise.
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def rank_environment(grid: Grid) -> dict[str, str]:
    """Environment of ranks on this machine: without GPUs, its cores are divided between them."""
    environment = {FRESH_STORE: "1", **os.environ}
    if torch.cuda.is_available():
        return environment
    threads = max(1, (os.cpu_count() or 1) // grid.ranks_in_node)
    return {"OMP_NUM_THREADS": str(threads), **environment}


def check_ranks(grid: Grid) -> None:
    """Raises `SpecError` if this machine has fewer devices than the grid has ranks, and says what to do."""
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    if grid.num_ranks <= (gpus or cores):
        return
    has = f"{gpus} GPUs" if gpus else f"no GPU and {cores} cores"
    raise SpecError(
        f"grid {grid.name!r} needs {grid.num_ranks} ranks on {grid.num_nodes} nodes; this machine has {has}. "
        "Predict it with --engine simulate, submit it with --engine slurm, or start this command with torchrun there"
    )


def slurm_executor(grid: Grid, folder: Path, arguments: list[str], *, dry: bool = False) -> Any:
    """A submitit executor whose jobs run a grid with torchrun on every node, and then a function on the first.

    Args:
        grid: its nodes, ranks and options of Slurm.
        folder: for logs and scripts; on a file system that all nodes see.
        arguments: of `knapformer`, for every rank.
        dry: whether Slurm need not be there.

    Raises:
        BackendUnavailableError: without submitit, or without Slurm.
        SpecError: for an option that submitit does not know.
    """
    try:
        from submitit import SlurmExecutor
    except ImportError as error:
        raise BackendUnavailableError(
            "engine 'slurm' needs submitit; install it with: pip install 'knapformer[slurm]'"
        ) from error

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2 if dry else super().affinity()

    endpoint = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    command = shlex.join(torchrun_command(grid, arguments, nodes="RENDEZVOUS"))
    launch = command.replace(
        "--rdzv-endpoint=RENDEZVOUS",
        '--rdzv-endpoint="$RENDEZVOUS" --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
    )
    tasks = "srun --kill-on-bad-exit=1 --ntasks-per-node=1"
    options = {
        "job_name": grid.name,
        "nodes": grid.num_nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": grid.ranks_in_node,
        "setup": [f"export RENDEZVOUS={endpoint}:{PORT} {FRESH_STORE}=1", f"{tasks} {launch}"],
        "use_srun": False,
        "time": 60,
        "additional_parameters": {"requeue": True},
        **grid.slurm,
    }
    try:
        executor = Executor(folder)
        executor.update_parameters(**options)
    except RuntimeError as error:
        raise BackendUnavailableError(f"engine 'slurm' needs Slurm: {error}") from error
    except (NameError, TypeError, ValueError) as error:
        raise SpecError(f"grid {grid.name!r}: [slurm]: {' '.join(str(error).split())}") from error
    return executor


def slurm_script(executor: Any) -> str:
    """The batch script that a submission would use."""
    # submitit writes it when it submits, and has no public name for the text alone.
    return executor._make_submission_file_text(executor._submitit_command_str, "dry-run")
