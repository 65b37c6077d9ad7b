"""The straight implementation that benchmarks compare with gives the results of the library: a fair comparison."""

import torch
import torch.distributed as dist
from benchmarks.straight import StraightBags

from knapformer import BagSpec, Layout, SequenceBalancer
from tests.ranks import run_ranks

LENGTHS = [[7, 3], [12], [], [5, 1, 2]]


def largest_difference(rank: int, world_size: int, spec: str, wrong: bool = False) -> float:
    step = SequenceBalancer(spec).plan_routing(LENGTHS[rank], 16)
    bags = BagSpec.parse(spec).bags()
    groups = {bag.start: dist.new_group(list(bag)) for bag in bags if len(bag) > 1}
    straight = StraightBags(step.placement, rank, bags, groups)
    shards = step.placement.token_shards
    in_bag = sorted(
        {s for s, holder in zip(shards.seq.tolist(), shards.rank.tolist(), strict=True) if holder in straight.bag}
    )
    full = Layout.local(step.placement.sequences.length[in_bag].tolist())

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return full.attend(q, k, v)

    x = torch.randn(sum(LENGTHS[rank]), 3, 4, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outputs = []
    for ours, leaf in zip((True, False), leaves, strict=True):
        routed = step.route(leaf)[1] if ours else straight.route(leaf, [])[0]
        q, k, v = routed.unbind(1)
        o = step.layout.attend(q, k, v) if ours else straight.attend(q, k, v * (2 if wrong else 1), kernel)
        home = step.reverse_route(o)[1] if ours else straight.reverse_route(o)
        (home * torch.arange(home.numel()).view_as(home).sin()).sum().backward()
        outputs.append(home.detach())
    pairs = [tuple(outputs), tuple(leaf.grad for leaf in leaves)]
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def test_straight_equals_the_library() -> None:
    for spec in ("g4n1", "g2n2", "g1n2+g2n1"):
        assert max(run_ranks(4, largest_difference, spec)) <= 1e-12


def test_the_comparison_can_fail() -> None:
    assert max(run_ranks(4, largest_difference, "g2n2", True)) > 0.1
