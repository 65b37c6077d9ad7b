"""What the README shows is run: its example under torchrun, its commands, its table. Its links: tests/docs."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_under_torchrun(tmp_path):
    code = re.search(r"## Twenty lines\n\n```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    script = tmp_path / "example.py"
    script.write_text(code[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = re.search(r"tokens per rank \[(.*)\] imbalance (\S+)", done.stdout)
    assert printed is not None, done.stdout
    assert sum(int(n) for n in printed[1].split()) == 900 + 64 + 80 + 49
    assert float(printed[2]) < 1.05


def test_its_table_is_that_of_the_record():
    from benchmarks.planners import render_table

    assert render_table(ROOT / "benchmarks" / "results" / "planners.jsonl") in README
