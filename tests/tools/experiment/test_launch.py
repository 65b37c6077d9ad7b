"""What is started: torchrun's arguments, the Slurm script, and refusals that say what to do."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from knapformer.errors import SpecError
from knapformer.tools.experiment.grid import read_grid

pytest.importorskip("torch")
from torch.distributed.run import get_args_parser

from knapformer.tools.experiment import launch

ARGUMENTS = ["experiment", "flux-paper", "--engine", "torchrun", "--out", "a folder"]

# Long options of sbatch, from its manual page, https://slurm.schedmd.com/sbatch.html.
SBATCH = {
    *("account", "chdir", "comment", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node", "gres"),
    *("job-name", "mem", "nodes", "ntasks-per-node", "open-mode", "output", "partition", "qos", "requeue", "time"),
}


FLUX = read_grid("flux-paper")


def script(folder: Path, **slurm: object) -> str:
    return launch.slurm_script(replace(FLUX, slurm=slurm), folder, ARGUMENTS)


def install(folder: Path, **programs: str) -> str:
    """Put shell programs into a folder; returns a PATH with them before bash's own tools."""
    folder.mkdir()
    for name, code in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_one_node_needs_no_rendezvous() -> None:
    command = launch.torchrun_command(read_grid("tiny"), ["experiment", "tiny"])
    args = get_args_parser().parse_args(command[3:])
    assert (args.standalone, args.nproc_per_node, args.max_restarts, args.module) == (True, "2", 9, True)
    assert (args.training_script, args.training_script_args) == ("knapformer", ["experiment", "tiny"])


def test_the_script_asks_slurm_for_four_nodes_of_eight(tmp_path: Path) -> None:
    lines = script(tmp_path, partition="gpu", time=90, cpus_per_task=12, exclusive=True, requeue=False).splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = dict(
        line.removeprefix("#SBATCH --").split("=", 1) if "=" in line else (line.removeprefix("#SBATCH --"), "")
        for line in lines
        if line.startswith("#SBATCH")
    )
    assert set(asked) <= SBATCH
    wanted = {"nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "partition": "gpu", "time": "90"}
    wanted |= {"cpus-per-task": "12", "exclusive": "", "output": str(tmp_path / "slurm" / "%j.log")}
    assert asked | wanted == asked and "requeue" not in asked
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])  # sbatch reads no option behind a command
    assert "#SBATCH --requeue" in script(tmp_path)


@pytest.mark.parametrize("setup", [[], ["module load 'cuda 13'", "export NCCL_DEBUG=WARN"]])
def test_bash_takes_the_script(tmp_path: Path, setup: list[str]) -> None:
    text = script(tmp_path, setup=setup, comment="it's $HOME")
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60).returncode == 0
    body = text[text.index("\n\n") :]
    assert all(body.index(line) < body.index("srun") for line in setup)
    broken = subprocess.run(["bash", "-n"], input=text + "if", text=True, stderr=subprocess.DEVNULL, timeout=60)
    assert broken.returncode != 0


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_runs_torchrun_on_every_node_and_then_the_report(tmp_path: Path, status: int) -> None:
    given, reported = tmp_path / "given", tmp_path / "reported"
    path = install(
        tmp_path / "tools",
        scontrol="printf 'node07\\nnode08\\n'",
        srun=f'printf "%s\\n" "$@" > {given}; env > {given}.env; exit {status}',
        python=f'printf "%s\\n" "$@" > {reported}',
    )
    (tmp_path / "script").write_text(script(tmp_path, setup=["export SITE=here"]).replace(sys.executable, "python"))
    environment = {"PATH": path, "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[07-08]"}
    done = subprocess.run(["bash", "-u", str(tmp_path / "script")], env=environment, timeout=60, check=False)
    assert done.returncode == status

    arguments = given.read_text().splitlines()
    start = arguments.index("torch.distributed.run")
    assert {"--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(arguments[:start])
    args = get_args_parser().parse_args(arguments[start + 1 :])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend, args.max_restarts) == ("4", "8", "c10d", 120)
    assert (args.rdzv_endpoint, args.rdzv_id, args.standalone) == (f"node07:{launch.PORT}", "41.0", False)
    assert (args.training_script, args.training_script_args) == ("knapformer", ARGUMENTS)
    assert {f"{launch.FRESH_STORE}=1", "SITE=here"} <= set(Path(f"{given}.env").read_text().splitlines())
    assert reported.read_text().split()[:4] == ["-m", "knapformer", "report", str(tmp_path)]


@pytest.mark.parametrize(
    ("slurm", "message"),
    [
        ({"time": 1.5}, "time = 1.5 is no option of sbatch"),
        ({"additional_parameters": {"qos": "high"}}, "additional-parameters = {'qos': 'high'}"),
        ({"comment": "a\nrm"}, "comment = 'a"),
        ({"time=1 --wrap": "x"}, "time=1 --wrap = 'x' is no option"),
        ({"setup": "module load cuda"}, "setup is 'module load cuda'; give a list of lines"),
    ],
)
def test_what_is_no_option_of_slurm(tmp_path: Path, slurm: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        script(tmp_path, **slurm)


def test_a_script_is_submitted_where_there_is_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.sh"
    job.write_text("#!/bin/bash\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.submit(job) is None
    submitted = tmp_path / "submitted"
    monkeypatch.setenv("PATH", install(tmp_path / "good", sbatch=f'echo "$@" > {submitted}; echo "41;cluster"'))
    assert launch.submit(job) == "41"
    assert submitted.read_text().split() == ["--parsable", str(job)]
    refusal = "echo 'sbatch: error: invalid partition specified: gpuu' >&2; exit 1"
    monkeypatch.setenv("PATH", install(tmp_path / "bad", sbatch=refusal))
    with pytest.raises(SpecError, match=r"sbatch refused .*job\.sh.*invalid partition specified: gpuu"):
        launch.submit(job)


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
