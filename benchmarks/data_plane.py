"""What routing and split attention cost beside the all-to-all they need: time, copies, operations; as run records.

    python -m benchmarks.data_plane --ranks 4 8 -o benchmarks/results/data-plane-cpu.jsonl

For each call (route, reverse route, attend without its kernel), forward and backward: CPU seconds of this rank's
process, against a bare `all_to_all_single` of the same bytes and against a straight implementation (`straight.py`).
Calls alternate within a repetition; figures are medians over repetitions, then means over ranks. Copies count each byte
written by an operation that copies; the bound is one write into the message and one out of it. `floor` is the bare
all-to-alls with just these copies, between buffers that are kept: what a call could cost at best. gloo on one machine:
CPU figures, not those of a network.

`parts` is attend as it is by default, where traffic is to be hidden: in as many parts as the model of the cluster says,
each with all-to-alls of its own. `ours` has one each way.

Memory of attend is that of all tensors alive at once, but for those given to it and those of the kernel. Unavoidable at
once is the largest of (R: arrived q, k, v, which the kernel keeps for its backward; O: the output, kept by the caller)

    qkv out + qkv in        qkv in + R        R + o out + o in        R + o in + O                          forward
    O + R + do out + do in        O + R + do in + do        O + dqkv out + dqkv in        O + dqkv in + dqkv   backward

`held` is what the library's pool keeps, in use or not.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common import make_parser
from benchmarks.straight import StraightBags
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from knapformer import BagSpec, SequenceBalancer
from knapformer.attention import Segments, SplitAttention, register_kernel
from knapformer.report import RecordWriter

WIDTH, HEADS = 512, 8
COPYING = {"index_select", "index_copy_", "copy_", "cat", "clone", "index", "index_add_", "_to_copy", "add", "zeros"}
VIEWS = {"view", "detach", "split", "split_with_sizes", "narrow", "slice", "alias", "unsqueeze", "transpose", "set_"}
ALLOCATIONS = {"empty", "new_empty", "empty_like"}


class _NoKernel(torch.autograd.Function):
    """Stands for the attention kernel at no cost: the queries are the outputs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)  # as a kernel does
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(_zeros(x.shape) for x in ctx.saved_tensors)


_made: list[Tensor] = []
"""Every gradient of the stand-in."""


@cache
def _zeros(shape: torch.Size) -> Tensor:
    """A gradient of the stand-in, made once, so that it costs nothing when timed."""
    _made.append(torch.zeros(shape))
    return _made[-1]


@cache
def _ones(shape: torch.Size) -> Tensor:
    """Gradients that a call is given."""
    return torch.ones(shape)


def no_kernel(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, /) -> Tensor:
    return _NoKernel.apply(q, k, v)


class CountCopies(TorchDispatchMode):
    """Counts operations, and the bytes that copying ones write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in VIEWS | ALLOCATIONS:
            self.operations += 1
            if name in COPYING:
                written = args[2] if name == "index_copy_" and len(args) == 3 else result
                written = args[3] if name == "index_copy_" else written
                self.bytes += written.numel() * written.element_size() if isinstance(written, Tensor) else 0
        return result


class PeakMemory(TorchDispatchMode):
    """Most bytes of tensors alive at once, but for those that exist before."""

    def __init__(self, existing: Sequence[Tensor]) -> None:
        super().__init__()
        self._existing = {x.untyped_storage()._cdata for x in existing}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in self._existing:
                self._alive.setdefault(key, (StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return result


def main() -> None:
    parser = make_parser(__doc__, "data-plane-cpu.jsonl")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--tokens", type=int, default=4000, help="tokens a rank")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, f"{folder}/store", args.tokens, args.repeats, args.output)
            start_processes(_rank, args=arguments, nprocs=ranks, start_method="spawn")


def layouts(ranks: int) -> dict[str, str]:
    """Planner or bag spec of each case."""
    specs = {f"bags g{ranks}": f"g{ranks}n1"}
    if ranks == 8:
        specs |= {"bags g4": "g4n2", "bags mixed": "g1n2+g2n1+g4n1"}
    return specs | {"balanced": "auto"}


def _rank(rank: int, ranks: int, store: str, tokens: int, repeats: int, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    register_kernel("none", no_kernel)
    for name, spec in layouts(ranks).items():
        config = {"ranks": ranks, "layout": name, "tokens": tokens, "width": WIDTH, "heads": HEADS, "repeats": repeats}
        figures = measure_layout(spec, tokens, repeats)
        mean = {call: {k: _mean(v) for k, v in values.items()} for call, values in figures.items()}
        if rank == 0:
            with RecordWriter(output, f"data plane, {ranks} ranks, {name}", config, f"cpu x {ranks}, gloo") as writer:
                for step, (call, values) in enumerate(mean.items()):
                    writer.step(step, call=call, **values)
                    print(ranks, name, call, {k: round(v, 5) for k, v in values.items()}, flush=True)
    dist.destroy_process_group()


def measure_layout(spec: str, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Call -> figures, of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    balancer, in_parts = (SequenceBalancer(spec, kernel="none", overlap=overlap) for overlap in (False, True))
    lens = _lengths(rank, ranks, tokens)
    step, parts = balancer.plan_routing(lens, WIDTH), in_parts.plan_routing(lens, WIDTH)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(sum(lens), WIDTH, generator=generator, requires_grad=True)
    tags = torch.arange(sum(lens) * 3, dtype=torch.int32).view(-1, 3)
    here = step.layout.num_tokens
    y = torch.randn(here, WIDTH, generator=generator, requires_grad=True)
    qkv = [torch.randn(here, HEADS, WIDTH // HEADS, generator=generator, requires_grad=True) for _ in range(3)]
    calls: dict[str, dict[str, Callable[[], Tensor]]] = {
        "route": {"ours": lambda: step.route(x, [tags])[1]},
        "reverse_route": {"ours": lambda: step.reverse_route(y)[1]},
        "attend": {"ours": lambda: step.layout.attend(*qkv), "parts": lambda: parts.layout.attend(*qkv)},
    }
    if spec != "auto":
        bags = BagSpec.parse(spec).bags()
        groups = {bag.start: dist.new_group(list(bag)) for bag in bags if len(bag) > 1}
        straight = StraightBags(step.placement, rank, bags, groups)
        calls["route"]["straight"] = lambda: straight.route(x, [tags])[0]
        calls["reverse_route"]["straight"] = lambda: straight.reverse_route(y)
        calls["attend"]["straight"] = lambda: straight.attend(*qkv, _NoKernel.apply)
    leaves, sent = [x, y, *qkv], _bytes_sent(step)
    figures = {}
    for call, ways in calls.items():
        alone = {"bare": _bare(step, sent[call]), "floor": _bare(step, sent[call], copies=True)}
        _measure_call(ways, alone, leaves, 2)  # warm up
        figures[call] = _measure_call(ways, alone, leaves, repeats) | _count(ways, leaves, sent[call])
    figures["attend"] |= _memory(calls["attend"], step, qkv)
    return figures


def _measure_call(
    ways: dict[str, Callable[[], Tensor]], alone: dict[str, Callable[[], None]], leaves: list[Tensor], repeats: int
) -> dict[str, float]:
    """Median CPU seconds of forward and backward of each way, and of the bare all-to-alls of the same bytes.

    Gradients are given, and those of leaves let go, beforehand: making ones and adding up over calls is no part of one.
    """
    times: dict[str, list[float]] = {name: [] for way in ways for name in (f"{way}_forward", f"{way}_backward")}
    times |= {f"{name}_both": [] for name in alone}
    for _ in range(repeats):
        for way, call in ways.items():
            for leaf in leaves:
                leaf.grad = None
            dist.barrier()
            start = time.process_time()
            out = call()
            middle = time.process_time()
            out.backward(_ones(out.shape))
            times[f"{way}_forward"].append(middle - start)
            times[f"{way}_backward"].append(time.process_time() - middle)
        for name, run in alone.items():
            dist.barrier()
            start = time.process_time()
            run()
            times[f"{name}_both"].append(time.process_time() - start)
    return {name: median(values) for name, values in times.items()}


def _count(ways: dict[str, Callable[[], Tensor]], leaves: list[Tensor], sent: tuple[int, int, int]) -> dict[str, float]:
    """Operations and copied bytes of forward and backward together; the bound is each byte in and out, both ways."""
    figures: dict[str, float] = {"bytes_bound": 2 * (sent[0] + sent[1])}
    for way, call in ways.items():
        grad = _ones(call().shape)
        for leaf in leaves:
            leaf.grad = None
        with CountCopies() as counted:
            call().backward(grad)
        figures |= {f"{way}_operations": counted.operations, f"{way}_copied": counted.bytes}
    return figures


def _memory(ways: dict[str, Callable[[], Tensor]], step: Any, qkv: list[Tensor]) -> dict[str, float]:
    """Peak of attend and its backward, and what the module's docstring calls unavoidable [bytes]."""
    figures: dict[str, float] = {"unavoidable_bytes": _unavoidable(step, qkv[0].numel() * 4)}
    for way, call in ways.items():
        grad = _ones(call().shape)
        for leaf in qkv:
            leaf.grad = None
        with PeakMemory([*qkv, grad, *_made]) as peak:
            out = call()
            out.backward(grad)
        figures[f"{way}_peak_bytes"] = peak.bytes
    figures["ours_held_bytes"] = step.attention_group.buffers.bytes_held
    return figures


def _unavoidable(step: Any, output: int) -> int:
    if not step._shares_attention:
        return output
    split = step.split_attention.for_heads(HEADS)
    wide = split.head_group * WIDTH // HEADS * 4
    qkv_out, qkv_in, o_out, o_in = (rows * wide for rows in _split_rows(split))
    return max(
        qkv_out + qkv_in,
        2 * qkv_in,
        qkv_in + o_out + o_in,
        qkv_in + o_in + output,
        output + qkv_in + o_in + o_out,
        output + qkv_in + 2 * o_out,
        output + qkv_in + qkv_out,
        output + qkv_out + 3 * output,
    )


def _bytes_sent(step: Any) -> dict[str, tuple[int, int, int]]:
    """Call -> bytes this rank puts into messages, takes out of them, in one direction, and number of exchanges."""
    home = int(step.placement.sequences.tokens_at_home(dist.get_world_size())[step.rank])
    row, tag = WIDTH * 4, 16
    figures = {
        "route": (home * (row + tag), step.layout.num_tokens * (row + tag), 1),
        "reverse_route": (step.layout.num_tokens * row, home * row, 1),
        "attend": (0, 0, 0),
    }
    if step._shares_attention:
        split = step.split_attention.for_heads(HEADS)
        wide = split.head_group * WIDTH // HEADS * 4
        out, into, back, home_again = _split_rows(split)
        figures["attend"] = ((out + back) * wide, (into + home_again) * wide, 2)
    return figures


def _split_rows(split: SplitAttention) -> list[int]:
    """Rows of q, k and v that leave and that arrive, and of outputs."""
    sides = split.qkv.sources, split.qkv.targets, split.out.sources, split.out.targets
    return [sum(sum(part.splits) for part in side) for side in sides]


def _bare(step: Any, sent: tuple[int, int, int], *, copies: bool = False) -> Callable[[], None]:
    """All-to-alls of the same bytes there and back (the mean of the ranks, evenly spread), and nothing else.

    Args:
        step: of the calls.
        sent: see `_bytes_sent`.
        copies: copy into and out of the message too.
    """
    exchanges = 1 if sent[2] == 1 else 2
    group = step.group if exchanges == 1 else step.attention_group
    each = max(1, int(_mean(sent[0])) // group.size // 4 // exchanges)
    if not sent[2] or group.handle is None:
        return lambda: None
    send, receive, source, target = (torch.zeros(each * group.size) for _ in range(4))

    def run() -> None:
        for _ in range(2 * exchanges):
            if copies:
                send.copy_(source)
            dist.all_to_all_single(receive, send, group=group.handle)
            if copies:
                target.copy_(receive)

    return run


def _lengths(rank: int, ranks: int, tokens: int) -> list[int]:
    """About `tokens` a rank: a few long sequences, many short ones; ranks differ."""
    if rank % 4 == 0:
        return [tokens]
    if rank % 4 == 1:
        return [tokens * 3 // 8] * 3
    return [tokens // 20 + 7 * i for i in range(16)]


def _mean(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
