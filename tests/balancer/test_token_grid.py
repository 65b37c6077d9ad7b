"""Ranks padded to a multiple of the token grid: same outputs, loss and gradients, and nothing of the padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from knapformer import CostModel, PackedBatch, SequenceBalancer
from knapformer.errors import SpecError
from knapformer.models import MMDiT, MMDiTConfig
from knapformer.plan import Cluster, Limits
from knapformer.plan.metrics import measure
from knapformer.train.step import flow_loss
from tests.planners import RandomPlanner
from tests.ranks import run_ranks

# (length, text) of each rank's sequences
BATCH = [[(40, 9), (7, 0), (1, 1)], [], [(61, 30)], [(5, 1), (1, 0)]]
GRID = 13
COST = CostModel.from_shapes(24, 4)


def results(rank, token_grid, planner, breaks=""):
    """Outputs, loss, and gradients of inputs and parameters, summed over ranks; and the step."""
    lens, text_lens = [n for n, _ in BATCH[rank]], [t for _, t in BATCH[rank]]
    generator = torch.Generator().manual_seed(rank)
    normal = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((sum(lens), 8), (sum(lens), 12), (len(lens),), (len(lens), 10))
    ]
    model = MMDiT(MMDiTConfig.tiny(axes_dims=(2, 2, 2))).double()
    plan = {"bag_specs": planner} if str(planner).startswith("g") else {"planner": planner}
    step = SequenceBalancer(cost=COST, token_grid=token_grid, **plan).plan_routing(lens, text_lens=text_lens)
    layout = step.layout
    shards, x, features = step.route(normal[0], [normal[1]])
    (txt,) = features or []
    assert sum(shards) == len(x) - len(layout.padding)
    assert not x[~layout.token_mask].any()
    assert layout.cu_seqlens[-1] == len(x) == layout.num_tokens
    assert sorted(layout.cu_seqlens.diff().tolist()) == sorted([*shards, *[len(p) for p in [layout.padding] if p]])
    assert layout.padding.start in layout.cu_seqlens
    time, pooled = step.deliver(normal[2].sigmoid(), normal[3])
    ids = torch.stack([layout.position] * 3, dim=1)
    out = model(x[layout.image_index], txt[layout.text_index], time, pooled, ids, layout)
    y = torch.zeros(len(x), 8, dtype=out.dtype).index_copy(0, layout.image_index, out) + 0 * txt.sum()
    loss = y.square().sum() if breaks else 0.0  # padding in the loss
    y = step.reverse_route(y)[1]
    loss = loss + (y * torch.arange(1, y.numel() + 1).view_as(y).sin()).sum()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    return [y.detach(), *(tensor.grad for tensor in normal), *grads], step


def difference(rank, world_size, token_grid, planner, breaks=""):
    (expected, _), (got, step) = results(rank, 1, planner), results(rank, token_grid, planner, breaks)
    errors = [
        float((a - b).abs().max()) / max(1.0, float(a.abs().max()))
        for a, b in zip(expected, got, strict=True)
        if a.numel()
    ]
    layout = step.layout
    assert layout.num_tokens % token_grid == 0
    assert layout.num_tokens - len(layout.padding) == step.placement.tokens()[step.rank]
    return max(errors, default=0.0), len(layout.padding), step.metrics.padding_tokens


@pytest.mark.parametrize(
    ("world_size", "planner"),
    [(1, "local"), (2, "local"), (3, RandomPlanner(1)), (4, RandomPlanner(7)), (4, "balanced")],
    ids=str,
)
def test_padding_changes_nothing(world_size, planner):
    found = run_ranks(world_size, difference, GRID, planner)
    assert max(error for error, *_ in found) < 1e-12
    padding = [rows for _, rows, _ in found]
    assert any(padding)
    assert [total for *_, total in found] == [sum(padding)] * world_size
    if planner == "local" and world_size == 2:
        assert padding[1] == 0  # nothing is padded where nothing is


@pytest.mark.parametrize("spec", ["g1n2", "g2n1"])
def test_balancing_groups_side_by_side(spec):
    """Each group's metrics have its own padding."""
    found = run_ranks(4, difference, GRID, spec)
    assert max(error for error, *_ in found) < 1e-12
    padding = [rows for _, rows, _ in found]
    totals = [padding[0] + padding[1], padding[2] + padding[3]]
    assert [total for *_, total in found] == np.repeat(totals, 2).tolist() and all(totals)


def test_padding_in_the_loss_is_noticed():
    assert run_ranks(1, difference, GRID, "local", "loss")[0][0] > 1e-3


def losses(rank, world_size, mode):
    """Loss of a batch from `flow_loss`, without and with padding."""
    lens, text_lens = [n for n, _ in BATCH[rank]], [t for _, t in BATCH[rank]]
    model, total = MMDiT(MMDiTConfig.tiny(axes_dims=(2, 2, 2))).double(), []
    text = torch.cat([torch.zeros(0)] + [torch.arange(n) < t for n, t in BATCH[rank]]).bool()
    tokens = {name: torch.ones(len(text), 8, dtype=torch.float64) for name in ("noisy", "target")}
    grids = torch.tensor([[1, 1, n - t] for n, t in BATCH[rank]], dtype=torch.int32).reshape(-1, 3)
    batch = PackedBatch(
        {**tokens, "text": text.int(), "pixels": (~text).int()},
        {"timestep": torch.rand(len(lens)), "pooled": torch.rand(len(lens), 10), "grids": grids},
        seq_lens=lens,
        text_lens=text_lens,
    )
    for token_grid in (1, GRID):
        step = SequenceBalancer(cost=COST, token_grid=token_grid).plan_routing(**batch.lengths)
        loss = flow_loss(model, step, batch, torch.eye(12).double(), mode=mode).detach()
        dist.all_reduce(loss)
        total.append(float(loss))
    return total


@pytest.mark.parametrize("mode", ["token", "sample"])
def test_padding_weighs_nothing_in_the_loss(mode):
    for plain, padded in run_ranks(2, losses, mode):
        assert plain == pytest.approx(padded, rel=1e-12)
        assert plain > 0.1


def test_padding_is_priced():
    def planned(rank, grid):
        return SequenceBalancer(cost=COST, token_grid=grid).plan_routing([33, 20])

    step = planned(0, 64)
    plain = measure(step.placement, Cluster(1), COST)
    assert step.metrics.padding_tokens == 11
    assert plain.padding_tokens == 0
    (extra,) = COST.load(np.array([11]), np.array([11 * 11 * COST.num_heads]))
    assert step.metrics.makespan == pytest.approx(plain.makespan + int(extra) / 10**15)
    assert step.metrics.step_over_ideal > plain.step_over_ideal == 1.0
    assert replace(step, token_grid=1).metrics == plain


def test_limits_hold_with_padding():
    balancer = SequenceBalancer(cost=COST, token_grid=64, limits=Limits(100))
    assert balancer.plan_routing([64]).layout.num_tokens == 64
    with pytest.raises(Exception, match="64"):
        balancer.plan_routing([65])
    for token_grid in (0, 101):
        with pytest.raises(SpecError, match=f"token_grid is {token_grid}; it must be at least 1 and at most"):
            SequenceBalancer(cost=COST, token_grid=token_grid, limits=Limits(100))


def test_pre_attn_refuses_padding():
    balancer = SequenceBalancer("g1n1", token_grid=4)
    balancer.plan_routing([5], 8)
    with pytest.raises(SpecError, match="know no padding, but token_grid is 4"):
        balancer.pre_attn(*[torch.zeros(8, 2, 4)] * 3)
