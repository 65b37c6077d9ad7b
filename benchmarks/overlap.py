"""How much of split attention's traffic hides behind whole sequences, where the link is slow enough to see it.

    sudo python -m benchmarks.overlap --mbit 400 -o benchmarks/results/overlap-netns.jsonl

Makes two hosts on this machine (network namespaces joined by a veth pair whose rate `tc tbf` limits; Linux, root,
iproute2), one rank each. Both share the attention of one long sequence; each has whole sequences of its own, as the
balanced planner leaves them. Steps (forward and backward of one attention layer) alternate between overlap on, overlap
off, and no traffic at all (the same work with every sequence whole). Reported: median step of each,

    traffic = off - none,    hidden = (off - on) / traffic

and the largest difference of outputs and gradients between on and off, which must be 0.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.common import make_parser

from knapformer import Cluster, CostModel, Limits, Placement, SequenceBalancer, Sequences
from knapformer.plan import Shards
from knapformer.report import RecordWriter

HEADS, HEAD_DIM = 8, 64
NAMES = ("knapformer-a", "knapformer-b")
ADDRESS = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class SplitFirst:
    """The first sequence over both ranks, half the tokens and half the heads each; the others stay at home."""

    split: bool
    name: str = "split-first"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        length, ids = sequences.length, np.arange(len(sequences))
        if not self.split:
            return Placement.whole(sequences, sequences.home, world_size=2, num_heads=HEADS, planner=self.name)
        seq, rank = np.insert(ids, 0, 0), np.insert(sequences.home, 0, 0)
        rank[1] = 1
        tables = []
        for total in (length, length * HEADS):
            start, stop = np.zeros_like(seq), total[seq]
            stop[0] = start[1] = total[0] // 2
            tables.append(Shards.sorted(seq, rank, start, stop))
        return Placement(sequences, 2, HEADS, tables[0], tables[1], self.name)


def main() -> None:
    parser = make_parser(__doc__, "overlap-netns.jsonl")
    parser.add_argument("--mbit", type=int, default=400, help="rate of the link")
    parser.add_argument("--long", type=int, default=2048, help="tokens of the shared sequence")
    parser.add_argument("--whole", type=int, nargs="+", default=[1024, 1024, 768, 768, 512], help="a rank's others")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args)
        return
    make_hosts(args.mbit)
    try:
        command = [sys.executable, "-m", "benchmarks.overlap", *sys.argv[1:]]
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", name, *command, "--rank", str(rank)])
            for rank, name in enumerate(NAMES)
        ]
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        remove_hosts()
    sys.exit(max(codes))


def make_hosts(mbit: int) -> None:
    """Two namespaces, a veth pair, addresses, and a rate limit on both ends."""
    remove_hosts()
    ends = ("kfa", "kfb")
    _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, address in zip(NAMES, ends, ADDRESS, strict=True):
        _ip("netns", "add", name)
        _ip("link", "set", end, "netns", name)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        _ip("-n", name, "link", "set", end, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        rate = ["rate", f"{mbit}mbit", "burst", "512kb", "latency", "200ms"]
        subprocess.run(
            ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf", *rate], check=True
        )


def remove_hosts() -> None:
    """Leave nothing behind."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "kfa" if args.rank == 0 else "kfb"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ADDRESS[0]}:29577",
        rank=args.rank,
        world_size=2,
        timeout=timedelta(minutes=5),
    )
    cost = CostModel.from_shapes(HEADS * HEAD_DIM, HEADS)
    shared = {
        name: SequenceBalancer(planner=SplitFirst(True), cost=cost, overlap=name == "on") for name in ("on", "off")
    }
    alone = SequenceBalancer(planner=SplitFirst(False), cost=cost)
    half = args.long // 2
    # Without traffic each rank attends half the rows of the long sequence as if it had them all: equal work.
    lens = ([args.long] if args.rank == 0 else []) + args.whole
    layouts = {name: balancer.plan_routing(lens).layout for name, balancer in shared.items()}
    layouts["none"] = alone.plan_routing([*args.whole, round(half * 2**0.5)]).layout
    times: dict[str, list[float]] = {name: [] for name in layouts}
    results: dict[str, list[torch.Tensor]] = {}
    for _ in range(args.repeats + 2):
        for name, layout in layouts.items():
            inputs = [random_rows(layout.num_tokens, i) for i in range(3)]
            dist.barrier()
            start = time.perf_counter()
            output = layout.attend(*inputs)
            output.backward(torch.ones_like(output))
            dist.barrier()
            times[name].append(time.perf_counter() - start)
            results[name] = [output.detach(), *(i.grad for i in inputs if i.grad is not None)]
    differ = max(float((a - b).abs().max()) for a, b in zip(results["on"], results["off"], strict=True))
    seconds = {name: median(values[2:]) for name, values in times.items()}
    traffic = seconds["off"] - seconds["none"]
    report: dict[str, Any] = {
        **{f"seconds_{name}": value for name, value in seconds.items()},
        "seconds_traffic": traffic,
        "hidden": (seconds["off"] - seconds["on"]) / traffic,
        "largest_difference": differ,
        "megabytes_each_way": 8 * half * HEADS // 2 * HEAD_DIM * 4 / 1e6,
    }
    if args.rank == 0:
        config = {key: value for key, value in vars(args).items() if key not in ("output", "rank")}
        with RecordWriter(args.output, f"overlap, {args.mbit} Mbit/s", config, "cpu x 2, gloo over veth") as writer:
            writer.step(0, **report)
        print(report)
    dist.destroy_process_group()


def random_rows(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HEADS, HEAD_DIM, generator=generator, requires_grad=True)


if __name__ == "__main__":
    main()
