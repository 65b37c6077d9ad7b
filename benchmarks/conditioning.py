"""Ways to give each token its sequence's shift, scale and gate: time and memory, forward and backward, on the CPU.

    python -m benchmarks.conditioning -o benchmarks/results/conditioning-cpu.jsonl

    expanded    x * (1 + scale[index]) + shift[index] as autograd has it: (tokens, width) rows made, kept for backward
    segments    one operation per sequence on its rows, which lie together, and one concatenation
    whole       an autograd.Function that keeps x, scale and index; its temporaries are of full size
    blocks      the same, 256 rows at a time: what `knapformer.attention.rows` does

Values of a step, which is one `modulate` and one `add_gated` of a block, forward and backward: CPU seconds of one
thread; `kept_bytes`, what forward leaves for backward beside its inputs and outputs; `peak_bytes`, most bytes alive
beside its inputs at any time. Both are over the bytes of x.
"""

import sys
import time
import weakref
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from benchmarks.common import make_parser
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from knapformer.attention import rows as row_operations
from knapformer.report import RecordWriter, read_records


def expanded(x: Tensor, branch: Tensor, mod: Tensor, index: Tensor, _: list[int]) -> Tensor:
    shift, scale, gate = mod.unbind(1)
    y = x * (1 + scale.index_select(0, index)) + shift.index_select(0, index)
    return y + gate.index_select(0, index) * branch


def segments(x: Tensor, branch: Tensor, mod: Tensor, _: Tensor, lens: list[int]) -> Tensor:
    parts = zip(x.split(lens), branch.split(lens), mod.unbind(0), strict=True)
    return torch.cat([a * (1 + scale) + shift + gate * b for a, b, (shift, scale, gate) in parts])


def blocks(x: Tensor, branch: Tensor, mod: Tensor, index: Tensor, _: list[int]) -> Tensor:
    shift, scale, gate = mod.unbind(1)
    return row_operations.add_gated(row_operations.modulate(x, shift, scale, index), branch, gate, index)


def whole(x: Tensor, branch: Tensor, mod: Tensor, index: Tensor, lens: list[int]) -> Tensor:
    block, row_operations.BLOCK_ROWS = row_operations.BLOCK_ROWS, len(x)
    try:
        return blocks(x, branch, mod, index, lens)
    finally:
        row_operations.BLOCK_ROWS = block


WAYS: dict[str, Callable[..., Tensor]] = {
    "expanded": expanded,
    "segments": segments,
    "whole": whole,
    "blocks": blocks,
}


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def own(self, *tensors: Tensor) -> None:
        """Storages that are not counted."""
        self._seen.update(tensor.untyped_storage() for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


def main() -> int:
    parser = make_parser(__doc__, "conditioning-cpu.jsonl")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    args.output.unlink(missing_ok=True)
    torch.set_num_threads(1)
    for num_sequences in args.sequences:
        inputs, lens = make_inputs(args.tokens, args.width, num_sequences)
        config = {
            "tokens": args.tokens,
            "width": args.width,
            "sequences": num_sequences,
            "block": row_operations.BLOCK_ROWS,
        }
        names = {way: f"{way} x{num_sequences}" for way in WAYS}
        writers = {way: RecordWriter(args.output, name, config, "cpu, 1 thread") for way, name in names.items()}
        memory = {way: measure_memory(WAYS[way], inputs, lens) for way in WAYS}
        for step in range(args.repeats):
            for way in WAYS:  # in turn, so that a change in the machine's speed hits all alike
                writers[way].step(step, **memory[way], cpu_seconds=run(WAYS[way], inputs, lens))
    for name, record in read_records(args.output).items():
        kept, peak = (record.steps[0][key] for key in ("kept_bytes", "peak_bytes"))
        sys.stdout.write(f"{name:14s} {median(record.column('cpu_seconds')):.4f} s  kept {kept:.2f}  peak {peak:.2f}\n")
    return 0


def make_inputs(tokens: int, width: int, num_sequences: int) -> tuple[list[Tensor], list[int]]:
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randint(1, tokens, (num_sequences - 1,), generator=generator).sort().values.tolist()
    lens = torch.tensor([0, *cuts, tokens]).diff()
    floats = [
        torch.randn(shape, generator=generator) for shape in ((tokens, width),) * 2 + ((num_sequences, 3, width),)
    ]
    return [*(x.requires_grad_() for x in floats), torch.arange(num_sequences).repeat_interleave(lens)], lens.tolist()


def run(way: Callable[..., Tensor], inputs: list[Tensor], lens: list[int]) -> float:
    """CPU seconds of forward and backward."""
    grad = torch.ones_like(inputs[0])
    start = time.thread_time()
    torch.autograd.grad(way(*inputs, lens), inputs[:3], grad)
    return time.thread_time() - start


def measure_memory(way: Callable[..., Tensor], inputs: list[Tensor], lens: list[int]) -> dict[str, float]:
    grad, each = torch.ones_like(inputs[0]), inputs[0].nbytes
    with LiveBytes() as live:
        live.own(*inputs, grad)
        out = way(*inputs, lens)
        kept = live.now - out.nbytes
        torch.autograd.grad(out, inputs[:3], grad)
    return {"kept_bytes": kept / each, "peak_bytes": live.peak / each}


if __name__ == "__main__":
    raise SystemExit(main())
