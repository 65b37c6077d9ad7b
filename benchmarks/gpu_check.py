"""Is this GPU used rightly and well? Checks every attention kernel and the copies by index, then measures them.

    python benchmarks/gpu_check.py -o benchmarks/results/gpu-check.jsonl

Under 8 minutes on one GPU: measuring stops at --seconds. Without a GPU it checks what runs on the CPU, says what it
skipped, and ends in seconds. Each result is a line of the run record and a line on the terminal; the exit status is 1
if a check failed. Speeds are medians of CUDA events, on buffers larger than the caches.
"""

import argparse
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("knapformer") is None:  # a machine with torch and a checkout, and nothing installed
    sys.path.insert(0, str(ROOT / "src"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from knapformer.attention import KERNELS, Layout, Segments  # noqa: E402
from knapformer.attention.conformance import TOLERANCES, check_attention_kernel  # noqa: E402
from knapformer.comm import rows_triton  # noqa: E402
from knapformer.data import load_workload  # noqa: E402
from knapformer.errors import KnapFormerError  # noqa: E402
from knapformer.report import RecordWriter  # noqa: E402

WORKLOAD, HEADS, HEAD_DIM, DTYPE = "flux-joint-32", 24, 128, torch.bfloat16
ROW_BYTES = {"one head": 256, "three heads": 768, "hidden state": 6144}
"""Rows that are moved: heads of 128 values and a hidden state of 3,072, in bf16."""
MOVED_BYTES, MOVES = 256 << 20, 10
GOAL = 0.8
"""Part of a copy's bandwidth that moving rows by index should reach."""

Result = dict[str, Any]


class Run:
    """What the checks share.

    Attributes:
        device: the GPU, or the CPU.
        deadline: on the monotonic clock; no measurement begins after it [s].
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.deadline = device, time.monotonic() + seconds

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def seconds_of(self, *parts: Callable[[], Any], times: int = 20) -> list[float]:
        """Median time of each of several calls made in turn [s]."""
        for _ in range(3):
            for part in parts:
                part()
        seconds: list[list[float]] = [[] for _ in parts]
        for _ in range(times):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
            events[0].record()
            for part, event in zip(parts, events[1:], strict=True):
                part()
                event.record()
            torch.cuda.synchronize()
            for i, (start, stop) in enumerate(itertools.pairwise(events)):
                seconds[i].append(start.elapsed_time(stop) / 1e3)
            if time.monotonic() > self.deadline:
                break
        return [statistics.median(values) for values in seconds]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    run = Run(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), args.seconds)
    failed = 0
    config = {"seconds": args.seconds, "workload": WORKLOAD, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": str(DTYPE)}
    with RecordWriter(args.output, "gpu-check", config | _packages(), device=_name(run.device)) as record:
        _say(f"{_name(run.device)}, torch {torch.__version__}")
        for number, result in enumerate(results(run)):
            record.step(number, **result)
            failed += result.get("ok") is False
            _say(_line(result))
        _say(f"{failed} checks failed" if failed else "all checks that ran passed")
    return 1 if failed else 0


def results(run: Run) -> Iterator[Result]:
    """Checks first, as measurements of something wrong are worth nothing."""
    yield from conformance(run)
    yield from rows_equal(run)
    yield from layer(run)
    yield from bandwidth(run)
    yield from attention_speed(run)


# ---- checks ----


def conformance(run: Run) -> Iterator[Result]:
    """Every kernel, in every dtype, against the public suite."""
    for name, entry in KERNELS.items():
        for dtype in TOLERANCES:
            head: Result = {"check": "conformance", "kernel": name, "dtype": str(dtype)}
            reason = _cannot_run(name, run.device, dtype)
            yield head | (
                {"skipped": reason} if reason else _outcome(check_attention_kernel, entry.kernel, run.device, dtype)
            )


def rows_equal(run: Run) -> Iterator[Result]:
    """Rows moved by index, against torch's index operations: bit for bit."""
    head = {"check": "rows", "by": "triton" if rows_triton._has_kernel(_words(1, 2, run.device)) else "torch"}
    if run.on_gpu and head["by"] == "torch":
        yield {"check": "rows", "by": "triton", "skipped": "Triton is not installed or does not run"}
    for dtype in (torch.int64, torch.int32, torch.uint8):
        for words in (1, 7, 32, 768, 9001):
            yield head | {"dtype": str(dtype), "words": words} | _outcome(_compare_rows, dtype, words, run.device)


def _compare_rows(dtype: torch.dtype, words: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(words)
    message = _words(3001, words + 16, device).to(dtype)
    order = torch.randperm(3001, generator=generator).to(device)
    for columns in (slice(0, words), slice(16, words + 16), slice(3, words + 3)):
        indices = [order[:1500], order[1500:1501], order[1501:]]
        taken = [rows_triton.take_rows(message[:, columns], index) for index in indices]
        target, expected = message.clone(), message.clone()
        sources = [rows + 1 for rows in taken]
        for index, rows, source in zip(indices, taken, sources, strict=True):
            _demand(torch.equal(rows, message[:, columns].index_select(0, index)), "rows taken differ")
            expected[:, columns].index_copy_(0, index, source)
        rows_triton.put_all_rows(target[:, columns], indices, sources)
        _demand(torch.equal(target, expected), "rows put differ")
        alone = message.clone()
        for index, source in zip(indices, sources, strict=True):
            rows_triton.put_rows(alone[:, columns], index, source)
        _demand(torch.equal(alone, expected), "rows put alone differ")


def layer(run: Run) -> Iterator[Result]:
    """Attention of a layout: finite gradients at lengths of 64 modulo 128, and no wait of the host for the device."""
    for name in KERNELS:
        head: Result = {"check": "layer", "kernel": name, "dtype": str(DTYPE)}
        reason = _cannot_run(name, run.device, DTYPE)
        yield head | ({"skipped": reason} if reason else _outcome(_run_layer, name, run))


def _run_layer(name: str, run: Run) -> None:
    lens = [64, 192, 320, 448, 77, 1]
    layout = Layout.local(lens, device=run.device, kernel=name)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, sum(lens), 4, HEAD_DIM, generator=generator)
    q[..., 0], k[..., 0] = 1, -120 * HEAD_DIM**0.5
    qkv = [x.to(run.device, DTYPE).requires_grad_() for x in (q, k, v)]
    grad = torch.ones_like(qkv[0])
    torch.autograd.grad(layout.attend(*qkv), qkv, grad)
    if run.on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        output = layout.attend(*qkv)
        grads = torch.autograd.grad(output, qkv, grad)
    finally:
        if run.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    _demand(all(bool(torch.isfinite(x).all()) for x in (output, *grads)), "output or gradients are not finite")


# ---- measurements ----


def bandwidth(run: Run) -> Iterator[Result]:
    """Bytes read and written per second by row moves, and as a part of what a plain copy reaches."""
    if not run.on_gpu:
        yield {"measure": "bandwidth", "skipped": "no CUDA device"}
        return
    for what, row_bytes in ROW_BYTES.items():
        words, rows = row_bytes // 8, MOVED_BYTES // row_bytes
        source, target = _words(rows, words, run.device), _words(rows, words, run.device)
        copied = _speed(run, lambda target=target, source=source: target.copy_(source))
        yield {"measure": "bandwidth", "rows": what, "by": "copy", "bytes_per_second": copied}
        for order, index in _orders(rows, run.device).items():
            for by, move in _moves(source, target, index).items():
                head = {"measure": "bandwidth", "rows": what, "by": by, "order": order}
                if time.monotonic() > run.deadline:
                    yield head | {"skipped": "no time left"}
                    continue
                speed = _speed(run, move)
                yield head | {"bytes_per_second": speed, "part_of_copy": speed / copied, "goal": GOAL}


def _speed(run: Run, move: Callable[[], Any]) -> float:
    """Bytes read and written per second; of several moves in a row, so that the launch of one hides behind another."""
    (seconds,) = run.seconds_of(lambda: [move() for _ in range(MOVES)])
    return 2 * MOVED_BYTES * MOVES / seconds


def _orders(rows: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    run = 512  # rows of a shard that stay together, as in a placement
    blocks = torch.randperm(rows // run, generator=generator)
    in_runs = (blocks[:, None] * run + torch.arange(run)).flatten()
    rest = torch.arange(len(in_runs), rows)
    return {
        "runs of 512": torch.cat([in_runs, rest]).to(device),
        "any": torch.randperm(rows, generator=generator).to(device),
    }


def _moves(source: Tensor, target: Tensor, index: Tensor) -> dict[str, Callable[[], Any]]:
    third = len(index) // 3
    indices = [index[:third], index[third : 2 * third], index[2 * third :]]
    parts = [source[:third], source[third : 2 * third], source[2 * third :]]
    return {
        "take_rows": lambda: rows_triton.take_rows(source, index, target),
        "put_rows": lambda: rows_triton.put_rows(target, index, source),
        "put_all_rows, 3 tensors": lambda: rows_triton.put_all_rows(target, indices, parts),
        "torch index_select": lambda: torch.index_select(source, 0, index, out=target),
        "torch index_copy_": lambda: target.index_copy_(0, index, source),
    }


def attention_speed(run: Run) -> Iterator[Result]:
    """Forward and backward of each kernel on what the least, the middle and the most loaded rank have at home."""
    if not run.on_gpu:
        yield {"measure": "attention", "skipped": "no CUDA device"}
        return
    for load, lens in _reference_lengths().items():
        for name, entry in KERNELS.items():
            head: Result = {"measure": "attention", "kernel": name, "load": load, "lengths": lens}
            reason = _cannot_run(name, run.device, DTYPE)
            if time.monotonic() > run.deadline:
                reason = "no time left"
            if reason:
                yield head | {"skipped": reason}
                continue
            try:
                yield head | _time_attention(run, entry.kernel, lens)
            except (KnapFormerError, RuntimeError) as error:
                yield head | {"ok": False, "message": f"{type(error).__name__}: {error}"}


def _reference_lengths() -> dict[str, list[int]]:
    ranks = sorted(load_workload(WORKLOAD).steps[0].seq_lens, key=lambda lens: sum(n * n for n in lens))
    return {"least": list(ranks[0]), "middle": list(ranks[len(ranks) // 2]), "most": list(ranks[-1])}


def _time_attention(run: Run, kernel: Callable[..., Tensor], lens: list[int]) -> Result:
    segments, shape = Segments.of(lens, lens, run.device), (sum(lens), HEADS, HEAD_DIM)
    qkv = [torch.randn(shape, device=run.device, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    grad, outputs = torch.randn(shape, device=run.device, dtype=DTYPE), [torch.empty(0)]

    def forward() -> None:
        outputs[0] = kernel(*qkv, segments, None)

    def backward() -> None:
        torch.autograd.grad(outputs[0], qkv, grad)

    ahead, back = run.seconds_of(forward, backward)
    flop = 4 * HEAD_DIM * HEADS * float(np.square(lens, dtype=np.float64).sum())  # of a forward pass
    return {
        "forward_seconds": ahead,
        "backward_seconds": back,
        "forward_flop_per_second": flop / ahead,
        "backward_flop_per_second": 2.5 * flop / back,  # it computes the logits once more
    }


# ---- small parts ----


def _cannot_run(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    entry = KERNELS[name]
    obstacle = entry.obstacle(device, dtype, HEAD_DIM)
    if obstacle is None and entry.load is not None:
        try:
            entry.load()
        except KnapFormerError as error:
            return str(error)
    return obstacle


def _outcome(check: Callable[..., None], *args: Any) -> Result:
    start = time.perf_counter()
    try:
        check(*args)
    except Exception as error:  # a failed check is a result; the others still run
        return {"ok": False, "message": f"{type(error).__name__}: {error}"}
    return {"ok": True, "seconds": time.perf_counter() - start}


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def _words(rows: int, words: int, device: torch.device) -> Tensor:
    return torch.arange(rows * words, device=device).mul_(2654435761).view(rows, words)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _packages() -> Result:
    versions: Result = {"cuda": torch.version.cuda}
    for package in ("triton", "flash-attn", "flash-attn-3"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {"packages": versions}


def _line(result: Result) -> str:
    words = []
    for name, value in result.items():
        if name in ("seconds", "goal") or (name == "lengths" and len(value) > 8):
            continue
        if name.endswith("flop_per_second"):
            words.append(f"{name.split('_')[0]} {value / 1e12:.0f} TFLOP/s")
        elif name.endswith("_seconds"):
            words.append(f"{name.split('_')[0]} {1e3 * value:.2f} ms")
        elif name == "bytes_per_second":
            words.append(f"{value / 1e9:.0f} GB/s")
        elif name == "part_of_copy":
            words.append(f"{100 * value:.0f} % of a copy")
        elif name == "ok":
            words.append("ok" if value else "FAILED")
        elif name in ("skipped", "message"):
            words.append(f"{name}: {value}")
        else:
            words.append(str(value))
    return "  ".join(words)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and measure attention kernels and row moves on this GPU.")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-check.jsonl")
    parser.add_argument("--seconds", type=float, default=360, help="no measurement begins after this (default: 360)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
