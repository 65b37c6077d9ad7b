"""Attention kept under activation checkpointing: the same results, and its exchanges and kernels run once."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from knapformer import CostModel, Layout, SequenceBalancer
from knapformer.attention import KERNELS, RegisteredKernel, Segments, keep_attention
from knapformer.errors import PlanError
from tests.planners import RandomPlanner
from tests.ranks import run_ranks
from tests.side_by_side import SIDE_BY_SIDE, assert_each_group_is_balanced, balance

LENGTHS = [[90, 30], [23, 5], [], [7], [41], [2, 11], [60], [9]]
HEADS, WIDTH = 3, 12
PLAIN = {"use_reentrant": False}
KEEP = {"use_reentrant": False, "context_fn": keep_attention}


def block(x, weight, layout):
    """Two attentions, with work before, between and after that needs what they gave."""
    for _ in range(2):
        q, k, v = (x.tanh() @ weight).unflatten(1, (3, HEADS, -1)).unbind(1)
        x = x + (layout.attend(q.sin(), k, v).flatten(1) ** 2)
    return x


def train(rank, how, plan, *, plan_next=False):
    """Output, gradients and number of all-to-alls of two checkpointed blocks; and the step."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, 3 * WIDTH, generator=generator, dtype=torch.float64).div_(4).requires_grad_()
    x = torch.randn(sum(LENGTHS[rank]), WIDTH, generator=generator.manual_seed(rank + 1), dtype=torch.float64)
    x.requires_grad_()
    balancer = SequenceBalancer(cost=CostModel.from_shapes(WIDTH, HEADS), **plan)
    step = balancer.plan_routing(LENGTHS[rank])
    _, y, _ = step.route(x)
    counted, real = [0], dist.all_to_all_single

    def counting(*args, **kwargs):
        counted[0] += 1
        return real(*args, **kwargs)

    dist.all_to_all_single = counting
    try:
        for _ in range(2):
            y = checkpoint(block, y, weight, step.layout, **how) if how else block(y, weight, step.layout)
        if plan_next:
            balancer.plan_routing([3])
        (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y).sin()).sum().backward()
    finally:
        dist.all_to_all_single = real
    return y.detach(), x.grad, weight.grad, counted[0], step


def compare(rank, world_size, plan):
    """Same bits or not; exchanges without checkpointing, with it, and with attention kept; balance; stages."""
    expected, plain, kept = (train(rank, how, plan, plan_next=True) for how in ({}, PLAIN, KEEP))
    same = all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected[:3], plain[:3], kept[:3], strict=True)
    )
    tables = kept[4].split_attention
    return same, expected[3], plain[3], kept[3], balance(kept[4]), tables.num_stages if tables else 0


@pytest.mark.parametrize("planner", ["balanced", RandomPlanner(3)], ids=str)
def test_results_are_the_same_and_exchanges_run_once(planner):
    for same, without, plain, kept, _, stages in run_ranks(4, compare, {"planner": planner}):
        assert same
        # 2 blocks of 2 attentions of 2 exchanges, by stages, both ways, and the gradients' way home of `route`.
        assert stages >= 1 and kept == without == 16 * stages + 1 and plain == 24 * stages + 1


@pytest.mark.parametrize(("world_size", "spec"), SIDE_BY_SIDE)
def test_balancing_groups_side_by_side(world_size, spec):
    results = run_ranks(world_size, compare, {"bag_specs": spec})
    assert all(same and kept == without <= plain for same, without, plain, kept, _, _ in results)
    assert_each_group_is_balanced(spec, [found for *_, found, _ in results])
    splits = [plain > without for _, without, plain, *_ in results]
    assert splits == [spec == "g2n1" or (spec != "g1n2" and rank % 4 > 1) for rank in range(world_size)]


def kernel_calls(how, monkeypatch):
    calls = [0]

    def kernel(q, k, v, segments: Segments, scale):
        calls[0] += 1
        return (q * k.mean(0) + v).contiguous()

    monkeypatch.setitem(KERNELS, "counting", RegisteredKernel(kernel))
    layout = Layout.local([5, 4], kernel="counting")
    x = torch.randn(9, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(WIDTH, 3 * WIDTH, dtype=torch.float64, requires_grad=True)
    checkpoint(block, x, weight, layout, **how).sum().backward()
    return calls[0]


def test_kernels_run_once(monkeypatch):
    assert (kernel_calls(KEEP, monkeypatch), kernel_calls(PLAIN, monkeypatch)) == (2, 4)


def test_without_gradients_nothing_is_kept():
    layout = Layout.local([5])
    x, weight = torch.randn(5, WIDTH), torch.randn(WIDTH, 3 * WIDTH)
    with torch.no_grad():
        assert torch.equal(checkpoint(block, x, weight, layout, **KEEP), block(x, weight, layout))


def test_a_block_that_attends_more_often_when_recomputed_is_refused():
    layout, times = Layout.local([5]), iter([1, 2])
    x = torch.randn(5, HEADS, 4, requires_grad=True)

    def fickle(x):
        for _ in range(next(times)):
            x = layout.attend(x, x, x)
        return x.exp()

    y = checkpoint(fickle, x, **KEEP)
    with pytest.raises(PlanError, match="more often than its forward pass, which called it 1"):
        y.sum().backward()


def test_a_second_backward_is_refused():
    layout = Layout.local([5])
    x = torch.randn(5, HEADS, 4, requires_grad=True)
    y = checkpoint(lambda x: layout.attend(x, x, x), x, **KEEP).sum()
    y.backward(retain_graph=True)
    with pytest.raises(PlanError, match="one backward pass"):
        y.backward()
