"""Planning inline against planning ahead, on the demo: how much of a step is spent waiting for a batch and its plan.

    python -m benchmarks.prefetch -o benchmarks/results/prefetch-cpu.jsonl

Trains the demo's model on the demo's files over CPU ranks: a block of steps that load and plan inline, a block of
`Trainer.fit`, and so on, each by a fresh trainer, so that a change in the machine's speed hits both alike. Values of a
step beside the trainer's own:

    total_seconds    from the end of the step before, on rank 0: also the loading that `seconds` leaves out when inline
    exposed          gathering and planning that the step waited for, over `seconds`: plan_seconds inline, and ahead
                     wait_seconds, which also has the wait for loading
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import msgspec
import torch
import torch.distributed as dist
from benchmarks.common import make_parser

from knapformer.data import build_demo, read_manifest
from knapformer.report import RecordWriter, read_records
from knapformer.train import StepReport, TrainConfig, Trainer
from knapformer.train.config import BalancerConfig
from knapformer.train.demo import demo_config
from knapformer.train.launch import run_on_ranks

INLINE, AHEAD = "inline", "prefetch"


def main() -> int:
    parser = make_parser(__doc__, "prefetch-cpu.jsonl")
    parser.add_argument("--steps", type=int, default=12, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=3, help="blocks of each way")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    args.output.unlink(missing_ok=True)
    with TemporaryDirectory() as folder:
        build_demo(Path(folder))
        config = demo_config(Path(folder) / "manifest.jsonl", args.steps)
        config = msgspec.structs.replace(config, balancer=BalancerConfig())
        run_on_ranks(measure, (config, args.blocks, args.output), ranks=args.ranks, device_type="cpu")
    for name, run in read_records(args.output).items():
        share = f"exposed {100 * mean(run.column('exposed')):.2f} % mean, {100 * max(run.column('exposed')):.2f} % most"
        times = [f"{key} {median(run.column(key)):.4f} s" for key in ("plan_seconds", "seconds", "total_seconds")]
        sys.stdout.write(f"{name:8s}  {share}; medians: {', '.join(times)}; {len(run.steps)} steps\n")
    return 0


def measure(device: torch.device, config: TrainConfig, blocks: int, output: Path) -> None:
    """Runs on every rank; rank 0 writes."""
    manifest, writers = read_manifest(config.data.manifest), {}
    if dist.get_rank() == 0:
        words = f"{device.type} x {dist.get_world_size()}, {torch.get_num_threads()} thread each"
        plain = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, manifest="the demo's"))
        writers = {name: RecordWriter(output, name, plain.to_json(), words) for name in (INLINE, AHEAD)}
    for block in range(blocks + 1):
        for name in (INLINE, AHEAD):
            trainer = Trainer(config, manifest, device)
            before = time.perf_counter()
            for step, report in inline(trainer) if name == INLINE else trainer.fit():
                now = time.perf_counter()
                exposed = (report.plan_seconds if name == INLINE else report.wait_seconds) / report.seconds
                # Left out: the first block, which warms caches up, and each block's first steps, which have nothing
                # before them to hide behind.
                if block and step > 1 and name in writers:
                    values = {"block": block, "total_seconds": now - before, "exposed": exposed}
                    writers[name].step(step, **values, **report.to_json())
                before = now


def inline(trainer: Trainer) -> Iterator[tuple[int, StepReport]]:
    """What `Trainer.fit` does, without a thread."""
    for step in range(trainer.config.train.steps):
        yield step, trainer.step(trainer.load(step))


if __name__ == "__main__":
    raise SystemExit(main())
