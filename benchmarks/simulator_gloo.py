"""The simulator against real runs: step times of gloo ranks on this machine, predicted before they are measured.

    python -m benchmarks.simulator_gloo -o benchmarks/results/simulator-gloo.jsonl

For each world size a small MMDiT trains under FSDP on made mixes of lengths, with the planners `local`, `bags` and
`balanced`. What the simulator is told is measured in the same run, on other work than it is asked about:

    prices        forward and backward of the model alone on packs of sequences, while all cores are busy
    exchange      attention of one sequence over all ranks, a short and a long one: a constant, and a price per byte
    step_seconds  a step of almost no tokens: collectives of parameters, optimiser, planning, routing, Python

Ranks share the machine's cores, and the simulator is told how many there are (`Scenario.cores`): with more ranks than
cores it should see that balance gains nothing. Reported: median absolute error of step time and of the speed-up over
`local`.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.common import make_parser
from torch.multiprocessing.spawn import start_processes

from knapformer import Cluster, Placement, SequenceBalancer, Sequences
from knapformer.attention import Layout
from knapformer.data.profile import Terms
from knapformer.models import MMDiT, MMDiTConfig
from knapformer.plan import Links, Planner, make_planner
from knapformer.report import RecordWriter
from knapformer.tools.simulate.presets import ModelShape
from knapformer.tools.simulate.scenario import Scenario
from knapformer.tools.simulate.step import StepOptions
from knapformer.train.parallel import make_mesh, shard_model

CONFIG = MMDiTConfig(
    in_channels=48, text_channels=32, pooled_channels=32, width=192, num_heads=4, axes_dims=(16, 16, 16),
    num_double=1, num_single=2,
)  # fmt: skip
SHAPE = ModelShape(
    "validation", "small MMDiT", 192, 4, 768, 1, 2, 24.0, 36.0, 15.0, 3e6, "joint", 16, (1, 1, 1), (1, 1, 1), "here"
)
TEXT = 16
BAGS = {2: "g2n1", 4: "g2n2", 8: "g4n2"}
# Lengths per rank, in turn; scaled down for more ranks, so that a step takes about a second.
MIXES: dict[str, list[list[int]]] = {
    "one long": [[1900], [120, 90], [200, 150, 60], [300]],
    "two long": [[1300], [160], [1100], [90, 80]],
    "middle": [[400, 300, 350], [500], [250, 260], [700]],
    "short": [[80] * 12, [60] * 4, [120] * 8, [100] * 2],
}
# The first two packs tell a sequence's constant from a token's price, the others attention's.
PACKS = [[64], [32] * 16, [512], [128] * 8, [1024], [1536], [2048], [256] * 4, [700, 300], [100]]


@dataclass(frozen=True)
class Measured:
    """What a run on some ranks measured [s]; `steps` is (mix, planner) -> repetitions."""

    packs: list[tuple[float, float]]
    short: float
    long: float
    empty: float
    steps: dict[tuple[str, str], list[float]]


def lengths_of(mix: str, world_size: int) -> list[list[int]]:
    scale = (2 / world_size) ** 0.35 if world_size > 2 else 1.0  # tokens and attention of a step about level over sizes
    return [[max(24, int(n * scale)) for n in MIXES[mix][rank % 4]] for rank in range(world_size)]


def planners(world_size: int) -> dict[str, Planner]:
    return {
        "local": make_planner("local"),
        "bags": make_planner("bags", BAGS[world_size]),
        "balanced": make_planner("balanced"),
    }


# ---- on the ranks ----


def timed(function: Callable[[], None]) -> float:
    """Wall time of the slowest rank, from a common start."""
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - start


def typical(function: Callable[[], None], repeats: int) -> float:
    """Median of several times, after one for warm-up."""
    return median([timed(function) for _ in range(repeats + 1)][1:])


@dataclass(frozen=True)
class Batch:
    """What a rank's loader would give: random rows."""

    lens: list[int]
    rows: list[torch.Tensor]  # noisy, target, text features, positions: one row per token
    vectors: list[torch.Tensor]  # time, pooled text: one row per sequence

    @classmethod
    def of(cls, lens: list[int]) -> "Batch":
        tokens, c = sum(lens), CONFIG
        rows = [torch.randn(tokens, width) for width in (c.in_channels, c.in_channels, c.text_channels)]
        vectors = [torch.rand(len(lens)), torch.randn(len(lens), c.pooled_channels)]
        return cls(lens, [*rows, torch.zeros(tokens, 3, dtype=torch.int32)], vectors)


def loss_of(model: torch.nn.Module, balancer: SequenceBalancer, batch: Batch) -> torch.Tensor:
    step = balancer.plan_routing(batch.lens, text_lens=[TEXT] * len(batch.lens))
    _, noisy, features = step.route(batch.rows[0], batch.rows[1:])
    target, text, ids = features or []
    layout, vectors = step.layout, step.deliver(*batch.vectors)
    image = layout.image_index
    out = model(noisy[image], text[layout.text_index], *vectors, ids, layout)
    return (out - target[image]).square().sum()


def measure_packs() -> list[tuple[float, float]]:
    """Forward and backward of the model on each pack, on every rank at once: CPU time of the thread."""
    model, results = MMDiT(CONFIG), []
    for lens in PACKS:
        layout, tokens = Layout.local(lens, [TEXT] * len(lens)), sum(lens)
        text = TEXT * len(lens)
        inputs = (
            torch.randn(tokens - text, CONFIG.in_channels), torch.randn(text, CONFIG.text_channels),
            torch.rand(len(lens)), torch.randn(len(lens), CONFIG.pooled_channels), torch.zeros(tokens, 3),
        )  # fmt: skip
        forward, backward = [], []
        for index in range(4):
            dist.barrier()  # all ranks compute at once
            start = time.thread_time()
            out = model(*inputs, layout)
            middle = time.thread_time()
            out.square().mean().backward()
            end = time.thread_time()
            if index:
                forward.append(middle - start)
                backward.append(end - middle)
        results.append((median(forward), median(backward)))
    return results


def measure_attend(length: int, world_size: int) -> float:
    """Forward and backward of attention of one sequence that all ranks share."""
    balancer = SequenceBalancer(f"g{world_size}n1", cost=None, gamma=1.0)
    step = balancer.plan_routing([length] if dist.get_rank() == 0 else [], CONFIG.width)
    layout = step.layout
    q, k, v = (torch.randn(layout.num_tokens, 4, 48, requires_grad=True) for _ in range(3))
    return typical(lambda: layout.attend(q, k, v).sum().backward(), 9)


def on_rank(rank: int, world_size: int, folder: str, prices: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world_size}", rank=rank, world_size=world_size,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    result: Any
    if prices is None:
        result = measure_packs()
    else:
        result = measure_steps(rank, world_size, prices)
    if rank == 0:
        torch.save(result, f"{folder}/result{world_size}.pt")
    dist.destroy_process_group()


def measure_steps(rank: int, world_size: int, prices: Any) -> Measured:
    short, long = measure_attend(8 * world_size, world_size), measure_attend(2048, world_size)
    model = shard_model(lambda: MMDiT(CONFIG), make_mesh("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    cluster, cost = scenario(world_size, prices).cluster, scenario(world_size, prices).cost_model()
    balancers = {
        name: SequenceBalancer(planner=planner, cost=cost, cluster=cluster)
        for name, planner in planners(world_size).items()
    }

    def train(balancer: SequenceBalancer, batch: Batch) -> None:
        loss_of(model, balancer, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    tiny = Batch.of([TEXT + 8])
    empty = typical(lambda: train(balancers["local"], tiny), 9)
    steps: dict[tuple[str, str], list[float]] = {}
    for mix in MIXES:
        batch = Batch.of(lengths_of(mix, world_size)[rank])
        for _ in range(5):  # planners in turn, so that a slow moment of the machine does not meet one of them alone
            for name, balancer in balancers.items():
                steps.setdefault((mix, name), []).append(timed(lambda b=balancer, x=batch: train(b, x)))
    return Measured([], short, long, empty, steps)


# ---- predicting ----


def fit_prices(packs: list[tuple[float, float]]) -> dict[str, Terms]:
    """Least squares over the packs, relative errors, negative prices dropped; per layer."""
    columns = np.array([[1, sum(p), sum(n * n for n in p) * SHAPE.num_heads, len(p)] for p in PACKS], dtype=np.float64)
    phases = {}
    for phase, seconds in zip(("recompute", "backward"), np.array(packs).T, strict=True):
        used = [0, 1, 2, 3]
        while True:
            found, *_ = np.linalg.lstsq(columns[:, used] / seconds[:, None], np.ones(len(PACKS)), rcond=None)
            if (found >= 0).all():
                break
            del used[int(np.argmin(found * columns[:, used].mean(axis=0)))]
        step, token, per_qk_pair, sequence = (
            dict(zip(used, found / SHAPE.num_layers, strict=True)).get(i, 0.0) for i in range(4)
        )
        phases[phase] = Terms(token, per_qk_pair, sequence, step)
    return {"forward": phases["recompute"], **phases}


def scenario(world_size: int, prices: dict[str, Terms], measured: Measured | None = None) -> Scenario:
    """What the simulator knows; with `measured`, also exchanges and the constant of a step."""
    cores = os.cpu_count() or 1
    options = StepOptions(
        checkpointing=False, prefetch=False, parameter_bytes=0, gradient_bytes=0, latency=1e-6, route_bytes=0
    )
    links = Links(intra_node=1e9, inter_node=1e9, element_bytes=4)
    plain = Scenario(model=SHAPE, cluster=Cluster(world_size, None, links), prices=prices, options=options, cores=cores)
    if measured is None:
        return plain
    share = min(1.0, cores / world_size)  # of a core that each rank has while all are busy
    attention = {p: Terms(0.0, t.per_qk_pair) for p, t in prices.items()}
    rows = sum(float(t.row_seconds(2048)) for p, t in attention.items() if p != "forward")
    compute = rows * SHAPE.num_heads * 2048 / world_size / share
    passes = 4  # q, k, v there and outputs back, forward and backward
    latency = measured.short * share / passes
    sent = 2 * 4 * 2048 * SHAPE.d_model * 4 / world_size * (1 - 1 / world_size)  # both directions of a step, per rank
    bandwidth = sent / max(1e-6, (measured.long - measured.short - compute) * share)
    links = Links(intra_node=bandwidth, inter_node=bandwidth, element_bytes=4)
    cluster = Cluster(world_size, None, links)

    def with_constant(seconds: float) -> Scenario:
        settings = StepOptions(
            checkpointing=False, prefetch=False, parameter_bytes=0, gradient_bytes=0, latency=latency, route_bytes=0,
            step_seconds=seconds, shard_size=1,
        )  # fmt: skip
        return Scenario(model=SHAPE, cluster=cluster, prices=prices, options=settings, cores=cores)

    tiny = Sequences.from_ranks([[TEXT + 8]] * world_size, [[TEXT]] * world_size)
    at_home = Placement.whole(tiny, tiny.home, world_size=world_size, num_heads=SHAPE.num_heads, planner="local")
    modelled = with_constant(0.0).time(at_home).end.max()
    return with_constant(max(0.0, float(measured.empty - modelled) * share))


def predict(world_size: int, prices: dict[str, Terms], measured: Measured, mix: str) -> dict[str, float]:
    lens = lengths_of(mix, world_size)
    sequences = Sequences.from_ranks(lens, [[TEXT] * len(one) for one in lens])
    known, cost = scenario(world_size, prices, measured), scenario(world_size, prices).cost_model()
    cluster = scenario(world_size, prices).cluster  # planned as the ranks planned
    return {
        name: float(known.time(planner(sequences, cluster, cost)).end.max())
        for name, planner in planners(world_size).items()
    }


def spawn(world_size: int, folder: str, prices: Any) -> Any:
    start_processes(on_rank, args=(world_size, folder, prices), nprocs=world_size, start_method="spawn")
    result = torch.load(f"{folder}/result{world_size}.pt", weights_only=False)
    for file in Path(folder).iterdir():
        file.unlink()
    return result


def main() -> None:
    parser = make_parser(__doc__, "simulator-gloo.jsonl")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=sorted(BAGS))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    errors, ratio_errors, index = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        packs = spawn(min(2, os.cpu_count() or 1), folder, None)
        prices = fit_prices(packs)
        config = {"ranks": args.ranks, "mixes": MIXES, "bags": BAGS, "cores": os.cpu_count(), "packs": packs}
        config |= {"prices": {p: [t.step, t.token, t.per_qk_pair, t.sequence] for p, t in prices.items()}}
        with RecordWriter(args.output, "simulator-gloo", config, "cpu, gloo, 1 thread a rank") as writer:
            for world_size in args.ranks:
                measured = spawn(world_size, folder, prices)
                known = scenario(world_size, prices, measured)
                print(
                    f"{world_size} ranks: empty step {measured.empty:.3f} s, attend {measured.short:.4f} and "
                    f"{measured.long:.4f} s; {known.cluster.links.intra_node / 1e6:.0f} MB/s, latency "
                    f"{known.options.latency * 1e3:.2f} ms, constant {known.options.step_seconds:.3f} s",
                    flush=True,
                )
                for mix in MIXES:
                    predicted = predict(world_size, prices, measured, mix)
                    real = {name: median(measured.steps[mix, name]) for name in predicted}
                    for name in predicted:
                        error = predicted[name] / real[name] - 1
                        speedups = predicted["local"] / predicted[name], real["local"] / real[name]
                        errors.append(abs(error))
                        if name != "local":
                            ratio_errors.append(abs(speedups[0] / speedups[1] - 1))
                        writer.step(
                            index, ranks=world_size, mix=mix, planner=name, predicted_seconds=predicted[name],
                            seconds=real[name], all_seconds=measured.steps[mix, name], error=error,
                            predicted_speedup=speedups[0], speedup=speedups[1], empty_seconds=measured.empty,
                            attend_seconds=[measured.short, measured.long],
                        )  # fmt: skip
                        index += 1
                        print(
                            f"{world_size} {mix:10} {name:9} {real[name]:.3f} s, predicted {predicted[name]:.3f} "
                            f"({error:+.1%}); speed-up {speedups[1]:.3f}, predicted {speedups[0]:.3f}"
                        )
            summary = {"median_error": median(errors), "median_speedup_error": median(ratio_errors)}
            writer.step(index, summary=True, worst_error=max(errors), worst_speedup_error=max(ratio_errors), **summary)
    print({key: f"{value:.1%}" for key, value in summary.items()}, f"worst {max(errors):.1%}, {max(ratio_errors):.1%}")


if __name__ == "__main__":
    main()
