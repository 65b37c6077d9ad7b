"""Eager and compiled blocks over random batches, on the CPU: graphs, seconds to compile, seconds of a step.

    python -m benchmarks.compile -o benchmarks/results/compile-cpu.jsonl        # needs a C++ compiler

Each step is the forward and backward pass of a model on one process for one batch; batches have 0 to 8 sequences and
corner cases (no sequence, one token, no text) among them. CPU seconds, one thread; `graphs` counts what torch.compile
was asked to compile so far. Compiling happens in the first step of either kind and is left out of what is printed.
"""

import random
import sys
import time
from statistics import median

import torch
import torch._dynamo
from benchmarks.common import make_parser
from torch import Tensor

from knapformer.attention import Layout
from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, PackedModel, compile_blocks
from knapformer.report import RecordWriter, read_records

SHAPE = {"in_channels": 64, "pooled_channels": 64, "width": 512, "num_heads": 8, "axes_dims": (16, 24, 24)}
MODELS = {
    "dit": lambda: DiT(DiTConfig(depth=3, **SHAPE)),
    "mmdit": lambda: MMDiT(MMDiTConfig(text_channels=64, num_double=1, num_single=2, **SHAPE)),
}


def main() -> int:
    parser = make_parser(__doc__, "compile-cpu.jsonl")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--longest", type=int, default=400, help="visual tokens of a sequence")
    args = parser.parse_args()
    args.output.unlink(missing_ok=True)
    torch.set_num_threads(1)
    for name, build in MODELS.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        models = {"eager": build(), "compiled": build()}
        compile_blocks(models["compiled"])
        writers = {
            way: RecordWriter(args.output, f"{name} {way}", {**SHAPE, "longest": args.longest}, "cpu, 1 thread")
            for way in models
        }
        for step, lengths in enumerate(make_batches(args.batches, args.longest, with_text=name == "mmdit")):
            for way, model in models.items():
                start, wall = time.process_time(), time.perf_counter()
                run(model, lengths)
                seconds, wall = time.process_time() - start, time.perf_counter() - wall
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if way == "compiled" else 0
                tokens = sum(map(sum, lengths))
                writers[way].step(step, seconds=seconds, wall_seconds=wall, graphs=graphs, tokens=tokens)
    for name, record in read_records(args.output).items():
        full = [step for step in record.steps[1:] if step["tokens"] > 200]
        each = median(step["seconds"] / step["tokens"] for step in full)
        words = f"first step {record.steps[0]['wall_seconds']:.1f} s, {record.steps[-1]['graphs']} graphs"
        sys.stdout.write(f"{name:15s} {1e6 * each:.1f} us a token, {words}\n")
    return 0


def make_batches(number: int, longest: int, *, with_text: bool) -> list[list[tuple[int, int]]]:
    """(text, visual) lengths."""
    rng = random.Random(0)
    corners = [[(20, 300), (5, 200)], [], [(0, 1)], [(0, 300)], [(30, 0)], [(1, 1)]]
    others = [[(rng.randint(0, 60), rng.randint(1, longest)) for _ in range(rng.randint(0, 8))] for _ in range(number)]
    batches = [*corners, *others][:number]
    return batches if with_text else [[(0, sum(pair)) for pair in batch] for batch in batches]


def run(model: PackedModel, lengths: list[tuple[int, int]]) -> None:
    """Forward and backward."""
    layout = Layout.local([sum(pair) for pair in lengths], [text for text, _ in lengths])
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    streams = [normal(len(layout.image_index), 64)]
    if isinstance(model, MMDiT):
        streams.append(normal(len(layout.text_index), 64))
    vectors = normal(layout.num_sequences).sigmoid(), normal(layout.num_sequences, 64)
    ids = torch.stack([layout.position] * 3, dim=1)
    model(*streams, *vectors, ids, layout).square().sum().backward()
    model.zero_grad()


if __name__ == "__main__":
    raise SystemExit(main())
