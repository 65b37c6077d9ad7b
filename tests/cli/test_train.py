"""`knapformer train` and `knapformer demo` as a user starts them, on real files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knapformer.cli.app import run
from knapformer.report import read_records
from tests.cli.test_plan import knapformer

CONFIG = """
[data]
manifest = "pictures"
max_text = 30
[[data.loaders]]
source = "images"
num_loaders = 2
batch = 2
[model]
width = 32
num_heads = 2
num_double = 1
num_single = 1
axes_dims = [4, 6, 6]
[train]
steps = 3
record = "{record}"
checkpoints = "{checkpoints}"
tensorboard = "{folder}/board"
timeline = "{folder}/timeline"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, size in enumerate([(64, 48), (16, 16), (32, 80), (48, 48)]):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    path = tmp_path / "run.toml"
    path.write_text(
        CONFIG.format(record=tmp_path / "record.jsonl", checkpoints=tmp_path / "checkpoints", folder=tmp_path)
    )
    return path


def test_train_starts_ranks_and_goes_on_under_torchrun(config: Path, tmp_path: Path) -> None:
    done = knapformer("train", str(config), "--ranks", "2", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    first = read_records(tmp_path / "record.jsonl")["train"]
    assert [step["step"] for step in first.steps] == [0, 1, 2]
    assert all(np.isfinite(first.column("loss")))
    assert_tracked(tmp_path, first.column("loss"))
    config.write_text(config.read_text().replace("steps = 3", "steps = 5"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["-m", "knapformer", "train", str(config), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = read_records(tmp_path / "record.jsonl")["train"]  # the newest run of that name
    assert [step["step"] for step in resumed.steps] == [3, 4]
    assert resumed.steps[0]["loss"] != first.steps[0]["loss"]


def assert_tracked(folder: Path, losses: list[float]) -> None:
    """TensorBoard has the record's losses; each rank's timeline has its exchanges."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "board")).Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(losses)
    for rank in (0, 1):
        events = json.loads((folder / "timeline" / f"rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {"exchange: send", "exchange: receive", "exchange: receive gradients"} <= names
        assert any("all_to_all" in name or "alltoall" in name for name in names)


def test_train_names_what_is_wrong(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a rank is started, so this process can be the command."""
    good = config.read_text()
    for old, new, message in (
        ("num_heads = 2", "num_heads = 5", "width 32 is not a multiple of num_heads 5"),
        ('source = "images"', 'source = "clips"', "loader group 'clips': no samples of that source"),
        ('manifest = "pictures"', 'manifest = "nowhere"', "nowhere"),
    ):
        config.write_text(good.replace(old, new))
        assert run(["train", str(config), "--ranks", "2", "--device", "cpu"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1


def test_the_demo_prints_one_object(tmp_path: Path) -> None:
    done = knapformer("demo", "--steps", "2", "--out", str(tmp_path / "demo"), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["largest_loss_difference"] < 1e-4
    assert result["modelled_imbalance"]["unbalanced"] > 1.7 > 1.01 > result["modelled_imbalance"]["balanced"]
    assert Path(result["figure"]).read_bytes().startswith(b"\x89PNG")
    assert set(read_records(result["record"])) == {"unbalanced", "balanced"}
