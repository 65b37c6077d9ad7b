"""Attention of any placement equals attention at home, between real processes: outputs and every gradient."""

import pytest
import torch

from knapformer import Cluster, CostModel, Layout, SequenceBalancer
from tests.planners import OneSidedPlanner, RandomPlanner, UnevenHeadsPlanner
from tests.ranks import run_ranks
from tests.side_by_side import SIDE_BY_SIDE, assert_each_group_is_balanced, balance

LENGTHS = {
    "mixed": [[40, 1, 7], [23], [], [90], [5, 5], [3], [61], [2]],
    "giant": [[2503], [], [], [], [], [], [], []],
    "equal": [[33]] * 8,
    "short": [[1]] * 8,
    "nobody": [[]] * 8,
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def attention_layer(x, weight, heads, attend):
    q, k, v = (x @ weight).unflatten(1, (3, heads, -1)).unbind(1)
    return attend(torch.sin(q), k, v).flatten(1)


def difference(rank, world_size, spec, heads, mix, dtype, breaks=False, options=None):
    """The largest error on this rank, and the imbalance of its balancing group before and after."""
    lens = LENGTHS[mix][rank]
    width = heads * 4
    generator = torch.Generator().manual_seed(0)
    cost = CostModel.from_shapes(width, heads)
    plan = {"planner": spec} if not isinstance(spec, str) else {"bag_specs": spec}
    plan |= options or {}
    results = []
    for kwargs in ({"planner": "local"}, plan):
        generator.manual_seed(0)
        weight = torch.randn(width, 3 * width, generator=generator, dtype=torch.float64).to(dtype).div_(width**0.5)
        weight.requires_grad_()
        generator.manual_seed(rank + 1)
        x = torch.randn(sum(lens), width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        step = SequenceBalancer(cost=cost, **kwargs).plan_routing(lens)
        _, y, _ = step.route(x)
        y = attention_layer(y, weight, heads, step.layout.attend)
        if breaks and kwargs is plan:
            y = y.flip(0)
        _, y, _ = step.reverse_route(y)
        (y * torch.arange(1, y.numel() + 1, dtype=dtype).view_as(y).sin()).sum().backward()
        grad = weight.grad.clone()
        torch.distributed.all_reduce(grad)
        results.append((y.detach(), x.grad, grad))
    worst = 0.0
    for one, other in zip(*results, strict=True):
        if one.numel():
            scale = max(1.0, float(one.abs().max()))
            worst = max(worst, float((one - other).abs().max()) / scale)
    return worst, balance(step)


def check(world_size, spec, heads, mix, dtype=torch.float64):
    for error, _ in run_ranks(world_size, difference, spec, heads, mix, dtype):
        assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("world_size", "spec"),
    [
        (1, "g1n1"),
        (2, "g2n1"),
        (3, "g3n1"),
        (4, "g1n4"),
        (4, "g2n2"),
        (4, "g4n1"),
        (4, "g1n2+g2n1"),
        (5, "g5n1"),
        (6, "g1n2+g4n1"),
        (8, "g8n1"),
        (8, "g1n2+g2n1+g4n1"),
    ],
)
def test_bags(world_size, spec):
    check(world_size, spec, 12, "mixed")


@pytest.mark.parametrize(("world_size", "spec"), [(1, "g1n1"), (3, "g3n1"), (6, "g1n2+g4n1")])
def test_fp32(world_size, spec):
    check(world_size, spec, 12, "mixed", torch.float32)


@pytest.mark.parametrize("heads", [5, 6])
@pytest.mark.parametrize(("world_size", "spec"), SIDE_BY_SIDE)
def test_balancing_groups_side_by_side(world_size, spec, heads):
    results = run_ranks(world_size, difference, spec, heads, "mixed", torch.float64)
    assert max(error for error, _ in results) <= 1e-12
    assert_each_group_is_balanced(spec, [found for _, found in results])


@pytest.mark.parametrize("heads", [7, 12, 24, 30])
def test_heads(heads):
    check(4, "g4n1", heads, "mixed")
    check(4, UnevenHeadsPlanner(), heads, "mixed")


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_any_placement(world_size):
    for planner in (RandomPlanner(0), RandomPlanner(1), UnevenHeadsPlanner(), OneSidedPlanner()):
        check(world_size, planner, 7, "mixed")


@pytest.mark.parametrize("mix", ["giant", "equal", "short", "nobody"])
def test_corner_cases(mix):
    check(4, "g4n1", 4, mix)
    check(4, "g2n1+g1n2", 4, mix)
    check(3, UnevenHeadsPlanner(), 3, mix)


@pytest.mark.parametrize("node_sizes", [(2, 2), (1, 3), (1, 1, 2)])
@pytest.mark.parametrize("spec", ["auto", RandomPlanner(4), UnevenHeadsPlanner()], ids=str)
def test_nodes(spec, node_sizes):
    """Split attention stays in a node's group where the placement does, and uses the whole group where it does not."""
    options = {"cluster": Cluster(4, node_sizes=node_sizes), "verify": False, "overlap": node_sizes != (2, 2)}
    for error, _ in run_ranks(4, difference, spec, 6, "mixed", torch.float64, False, options):
        assert error <= 1e-12


def on_a_part_of_the_world(rank, world_size):
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3, 4])]
    group = groups[0] if rank in (0, 2) else groups[1]
    step = SequenceBalancer(planner=UnevenHeadsPlanner(), group=group).plan_routing([5 + rank, 3])
    q = torch.randn(8 + rank, 5, 4, dtype=torch.float64)
    _, x, _ = step.route(q)
    home = Layout.local([5 + rank, 3]).attend(q, q, q)
    _, back, _ = step.reverse_route(step.layout.attend(x, x, x))
    return step.placement.world_size, float((home - back).abs().max())


def test_a_group_that_is_a_part_of_the_world():
    results = run_ranks(5, on_a_part_of_the_world)
    assert [world for world, _ in results] == [2, 3, 2, 3, 3]
    assert max(error for _, error in results) <= 1e-12


def test_the_comparison_can_fail():
    assert all(error > 0.01 for error, _ in run_ranks(2, difference, "g2n1", 4, "mixed", torch.float64, True))
