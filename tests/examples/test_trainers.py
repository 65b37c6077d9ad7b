"""Two epochs of the demo data through every example trainer, on two CPU ranks: the same losses balanced and not."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.driver import TRAINERS

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8  # 30 samples, 8 at a time, twice


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Trainer -> losses at home and balanced, of each rank."""
    folder = tmp_path_factory.mktemp("examples")
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.examples.driver"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder)],
            cwd=ROOT,
            env=env,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)[-4000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return first


@pytest.mark.parametrize("name", TRAINERS)
def test_balanced_and_at_home_agree(losses, name):
    if not find_spec(TRAINERS[name]):
        pytest.skip(f"{TRAINERS[name]} is not installed")
    at_home, balanced = losses[name]
    assert len(at_home) == STEPS == len(set(at_home))
    assert balanced == pytest.approx(at_home, rel=1e-5)
    assert at_home[-1] < at_home[0]
    assert at_home == pytest.approx(losses["fsdp2"][0], rel=1e-5)  # and all trainers do


@pytest.mark.parametrize("name", TRAINERS)
def test_the_difference_a_user_makes_is_small(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    marked = [line for line in lines if "  # +" in line or "  # ~" in line]
    assert 8 <= len(marked) <= 14
