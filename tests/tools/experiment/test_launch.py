"""What is started: torchrun's arguments, the Slurm script, and refusals that say what to do."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from knapformer.errors import BackendUnavailableError, SpecError
from knapformer.tools.experiment.grid import read_grid

pytest.importorskip("torch")
from torch.distributed.run import get_args_parser

from knapformer.tools.experiment import launch

ARGUMENTS = ["experiment", "flux-paper", "--engine", "torchrun", "--out", "a folder"]

# Long options of sbatch, from its manual page, https://slurm.schedmd.com/sbatch.html.
SBATCH = {
    *("account", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node", "gres", "job-name", "mem"),
    *("nodes", "ntasks-per-node", "open-mode", "output", "partition", "qos", "requeue", "signal", "time", "wckey"),
}


def script(tmp_path: Path, **slurm: object) -> str:
    pytest.importorskip("submitit")
    grid = replace(read_grid("flux-paper"), slurm=slurm)
    return launch.slurm_script(launch.slurm_executor(grid, tmp_path, ARGUMENTS, dry=True))


def test_one_node_needs_no_rendezvous() -> None:
    command = launch.torchrun_command(read_grid("tiny"), ["experiment", "tiny"])
    args = get_args_parser().parse_args(command[3:])
    assert (args.standalone, args.nproc_per_node, args.max_restarts, args.module) == (True, "2", 9, True)
    assert (args.training_script, args.training_script_args) == ("knapformer.cli.main", ["experiment", "tiny"])


def test_the_script_asks_slurm_for_four_nodes_of_eight(tmp_path: Path) -> None:
    lines = script(tmp_path, partition="gpu", time=90).splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = dict(
        line.removeprefix("#SBATCH --").split("=", 1) if "=" in line else (line.removeprefix("#SBATCH --"), "")
        for line in lines
        if line.startswith("#SBATCH")
    )
    assert set(asked) <= SBATCH
    wanted = {"nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "partition": "gpu", "time": "90"}
    assert asked | wanted == asked
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") or not line for line in lines[:last])  # sbatch reads no option behind a command


def test_a_job_runs_torchrun_on_every_node_and_then_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    tools, given = tmp_path / "tools", tmp_path / "arguments"
    tools.mkdir()
    for name, code in (
        ("sbatch", f'cp "$1" {tmp_path}/script; echo Submitted batch job 41'),
        ("scontrol", "printf 'node07\\nnode08\\n'"),
        ("srun", f'printf "%s\\n" "$@" > {given}'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{code}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[07-08]"}
    environment |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    job = launch.slurm_executor(read_grid("flux-paper"), tmp_path, ARGUMENTS).submit("{} cells".format, 120)
    assert job.job_id == "41"
    subprocess.run(["bash", "-eu", str(tmp_path / "script")], check=True, timeout=60)

    arguments = given.read_text().splitlines()
    start = arguments.index("torch.distributed.run")
    assert {"--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(arguments[:start])
    args = get_args_parser().parse_args(arguments[start + 1 :])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("4", "8", "c10d")
    assert (args.rdzv_endpoint, args.rdzv_id, args.standalone) == (f"node07:{launch.PORT}", "41.0", False)
    assert (args.training_script, args.training_script_args) == ("knapformer.cli.main", ARGUMENTS)
    assert f"{launch.FRESH_STORE}=1" in (tmp_path / "script").read_text()
    (result,) = tmp_path.glob("41_0_result.pkl")
    assert b"120 cells" in result.read_bytes()


def test_what_slurm_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"\[slurm\].*partitoin"):
        script(tmp_path, partitoin="gpu")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendUnavailableError, match="needs Slurm"):
        launch.slurm_executor(read_grid("flux-paper"), tmp_path, ARGUMENTS)
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(BackendUnavailableError, match=r"knapformer\[slurm\]"):
        launch.slurm_executor(read_grid("flux-paper"), tmp_path, ARGUMENTS)


def test_a_grid_for_more_ranks_offers_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 2)
    launch.check_ranks(read_grid("tiny"))
    with pytest.raises(SpecError, match=r"needs 32 ranks on 4 nodes; this machine has no GPU and 2 cores.*simulate"):
        launch.check_ranks(read_grid("flux-paper"))
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 8)
    with pytest.raises(SpecError, match="this machine has 8 GPUs"):
        launch.check_ranks(read_grid("flux-paper"))


def test_cores_are_divided_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 9)
    assert launch.rank_environment(read_grid("tiny"))["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch.rank_environment(read_grid("tiny"))["OMP_NUM_THREADS"] == "3"
