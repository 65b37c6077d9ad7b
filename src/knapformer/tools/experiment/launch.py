"""Starts the ranks of a grid: torchrun on this machine, or a Slurm job that runs torchrun on each of its nodes.

Both run the command that the user gave, once per rank; it then finds itself inside a launch and joins it. A rank that
dies makes torchrun start all ranks of the launch again, and the grid goes on behind the cell that brought it down. A
job that Slurm requeues goes on where it was.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from knapformer.errors import SpecError
from knapformer.tools.experiment.grid import Experiment

PORT = 29500
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it (torch 2.13), restarted ranks find the addresses of dead ones in the store and wait for them."""


def torchrun_command(grid: Experiment, arguments: list[str], rendezvous: tuple[str, str] | None = None) -> list[str]:
    """The command that starts a grid's ranks on one node.

    Args:
        grid: its ranks.
        arguments: of `knapformer`, for every rank.
        rendezvous: where several nodes meet, as `host:port`, and under which id; None for one node.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(grid.ranks_in_node)]
    if rendezvous is None:
        command += ["--standalone"]
    else:
        endpoint, name = rendezvous
        command += ["--nnodes", str(grid.num_nodes), "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", endpoint, "--rdzv-id", name]
    restarts = sum(1 for _ in grid.cells())  # each cell may bring its ranks down once
    return [*command, "--max-restarts", str(restarts), "-m", "knapformer", *arguments]


def current_launch() -> str:
    """Id of the launch that this process is a rank of; empty if torchrun did not start it."""
    # Not the count of restarts: only on the node where a rank died does that rise.
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def rank_environment(grid: Experiment) -> dict[str, str]:
    """Environment of ranks on this machine: without GPUs, its cores are divided between them."""
    environment = {FRESH_STORE: "1", **os.environ}
    if torch.cuda.is_available():
        return environment
    threads = max(1, (os.cpu_count() or 1) // grid.ranks_in_node)
    return {"OMP_NUM_THREADS": str(threads), **environment}


def check_ranks(grid: Experiment) -> None:
    """Raises `SpecError` if this machine has fewer devices than the grid has ranks, and says what to do."""
    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    if grid.num_ranks <= (gpus or cores):
        return
    has = f"{gpus} GPUs" if gpus else f"no GPU and {cores} cores"
    raise SpecError(
        f"grid {grid.name!r} needs {grid.num_ranks} ranks on {grid.num_nodes} nodes; this machine has {has}. "
        "Predict it with --engine simulate, submit it with --engine slurm, or start this command with torchrun there"
    )


# ---- Slurm ---------------------------------------------------------------------------------------------------------

SLURM_SCRIPT = """\
#!/bin/bash
{options}

{setup}# The job's first host is where the ranks meet. A requeued job meets under a new id.
export RENDEZVOUS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{port}"
export RENDEZVOUS_ID="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"
export {fresh_store}=1

srun --kill-on-bad-exit=1 --ntasks-per-node=1 {torchrun}
status=$?

# The ranks write a report themselves unless they died.
{report}
exit $status
"""


def slurm_script(grid: Experiment, folder: Path, arguments: list[str]) -> str:
    """A batch script that runs a grid with torchrun on every node, and then reports on it.

    Long options of `sbatch` come from the grid's table `slurm`, with `_` or `-` in their names; true stands for an
    option without a value, false leaves out one that is set here. `setup` is a list of lines of shell to run first.

    Args:
        grid: its nodes, ranks and options.
        folder: of the run, on a file system that all nodes see; the job's output goes there.
        arguments: of `knapformer`, for every rank.

    Raises:
        SpecError: for what cannot be an option.
    """
    given = dict(grid.slurm)
    setup = given.pop("setup", [])
    if not isinstance(setup, list) or not all(isinstance(line, str) for line in setup):
        raise SpecError(f"grid {grid.name!r}: [slurm] setup is {setup!r}; give a list of lines of shell")
    options = {
        "job-name": grid.name,
        "nodes": grid.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": grid.ranks_in_node,
        "time": 60,
        "requeue": True,
        "open-mode": "append",
        "chdir": str(Path.cwd()),  # paths of the command are relative to it
        "output": str((folder / "slurm" / "%j.log").absolute()),
    }
    options |= {name.replace("_", "-"): value for name, value in given.items()}
    torchrun = torchrun_command(grid, arguments, ("$RENDEZVOUS", "$RENDEZVOUS_ID"))
    knapformer = [sys.executable, "-m", "knapformer"]
    report = [*knapformer, "report", str(folder), "-o", str(folder / "report.html"), "-o", str(folder / "report.md")]
    return SLURM_SCRIPT.format(
        options="\n".join(_sbatch_line(grid, *option) for option in options.items() if option[1] is not False),
        setup="".join(f"{line}\n" for line in setup),
        port=PORT,
        fresh_store=FRESH_STORE,
        torchrun=_quoted(torchrun),
        report=_quoted(report),
    )


def submit(script: Path) -> str | None:
    """Give a script to `sbatch`; returns the job's number, or None where there is no `sbatch`.

    Raises:
        SpecError: if Slurm refuses it, with Slurm's words.
    """
    if shutil.which("sbatch") is None:
        return None
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SpecError(f"sbatch refused {str(script)!r}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]  # behind a semicolon, the cluster


def _sbatch_line(grid: Experiment, name: str, value: object) -> str:
    if not re.fullmatch("[a-z][a-z-]*", name) or not isinstance(value, str | int) or "\n" in str(value):
        raise SpecError(
            f"grid {grid.name!r}: [slurm] {name} = {value!r} is no option of sbatch; give a long option's name and a "
            "string, a whole number, true or false"
        )
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"


def _quoted(command: list[str]) -> str:
    """A command as bash reads it, in which words that begin with `$` are variables."""
    return " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in command)
