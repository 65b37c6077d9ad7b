"""Split attention in stages: the same results as in one, forward and backward, in the order of the timeline."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from knapformer import Cluster, CostModel, Links, SequenceBalancer
from knapformer.attention.kernels import sdpa_loop
from knapformer.comm import Transfer
from knapformer.plan.timeline import order, timeline
from tests.planners import OneSidedPlanner, RandomPlanner
from tests.ranks import run_ranks

LENGTHS = [[90, 3], [23], [], [61]]
HEADS = 6


def outcome(rank, num_stages, spec):
    """Outputs and gradients of one attention, and the all-to-alls it took."""
    x = torch.randn(sum(LENGTHS[rank]), HEADS * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    x.requires_grad_()
    options = {"bag_specs": spec} if isinstance(spec, str) else {"planner": spec}
    step = SequenceBalancer(cost=CostModel.from_shapes(24, HEADS), **options).plan_routing(LENGTHS[rank])
    step.split_attention.num_stages = num_stages
    _, y, _ = step.route(x)
    counted, real = [0], dist.all_to_all_single

    def counting(*args, **kwargs):
        counted[0] += 1
        return real(*args, **kwargs)

    dist.all_to_all_single = counting
    try:
        q, k, v = (f(y).unflatten(1, (HEADS, 4)) for f in (torch.sin, torch.cos, torch.tanh))
        out = step.layout.attend(q, k, v).flatten(1)
        (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).view_as(out).sin()).sum().backward()
    finally:
        dist.all_to_all_single = real
    return out.detach(), x.grad, counted[0]


def compare(rank, world_size, spec):
    expected = outcome(rank, 1, spec)
    errors, counts = [], [expected[2]]
    for num_stages in (2, 3):
        got = outcome(rank, num_stages, spec)
        errors += [float((a - b).abs().max()) for a, b in zip(expected[:2], got[:2], strict=True) if a.numel()]
        counts.append(got[2])
    return max(errors, default=0.0), counts


@pytest.mark.parametrize("spec", ["g4n1", "g2n2", "balanced", RandomPlanner(5), OneSidedPlanner()], ids=str)
def test_stages_change_no_result(spec):
    spec = "auto" if spec == "balanced" else spec
    for error, counts in run_ranks(4, compare, spec):
        assert error <= 1e-12
        # There and back, forward and backward, and the route's way home.
        assert counts == [4 + 1, 8 + 1, 12 + 1]


def chosen_stages(rank, world_size, bandwidth, overlap):
    cluster = Cluster(world_size, links=Links(bandwidth, bandwidth))
    balancer = SequenceBalancer("g2n1", cost=CostModel.from_shapes(3072, 24), cluster=cluster, overlap=overlap)
    return balancer.plan_routing([4000] if rank == 0 else []).split_attention.num_stages


def test_stages_are_used_where_they_gain_something():
    assert run_ranks(2, chosen_stages, 300e9, True) == [4, 4]  # nothing but the sequence itself to hide behind
    assert run_ranks(2, chosen_stages, 1e18, True) == [1, 1]  # no traffic to speak of
    assert run_ranks(2, chosen_stages, 300e9, False) == [1, 1]


def order_of_work(rank, world_size):
    """What `attend` does, in order, as actions of the timeline; and the timeline's order and first run."""
    done = []
    cluster = Cluster(world_size, links=Links(30e9, 30e9))
    balancer = SequenceBalancer(cost=CostModel.from_shapes(24, HEADS), cluster=cluster)
    lens = [[900, 30, 20, 10], [25, 40]][rank]
    step = balancer.plan_routing(lens)
    tables = step.split_attention
    tables.num_stages = 2
    split, (first, second) = tables.for_heads(HEADS), step.layout._whole
    names = {id(first): ("first", -1), id(second): ("second", -1)}
    names |= {id(segments): ("split", stage) for stage, segments in enumerate(split.segments)}

    def noting_kernel(q, k, v, segments, scale=None):
        done.append(("compute", *names[id(segments)]))
        return sdpa_loop(q, k, v, segments, scale)

    def noting_post(transfer, layout, stage, *args):
        what = "qkv" if transfer._table is split.qkv else "out"
        done.append(("start", what, stage))
        return post(transfer, layout, stage, *args)

    def noting_arrive(transfer, stage):
        done.append(("wait", "qkv" if transfer._table is split.qkv else "out", stage))
        return arrive(transfer, stage)

    post, arrive = Transfer._post, Transfer._arrive
    q = torch.randn(step.layout.num_tokens, HEADS, 4)
    with (
        mock.patch.object(Transfer, "_post", noting_post),
        mock.patch.object(Transfer, "_arrive", noting_arrive),
        mock.patch("knapformer.attention.layout.choose_kernel", lambda *_, **__: noting_kernel),
    ):
        step.layout.attend(q, q, q)
    planned = [tuple(action) for action in order(2) if action.what not in ("before", "after")]
    plan = timeline(step.placement, cluster, step.cost)
    return done == planned, len(first) == plan.work.num_first[rank], step.layout.num_whole_tokens > 0


def test_attention_works_in_the_order_of_the_timeline():
    assert run_ranks(2, order_of_work) == [(True, True, True)] * 2
