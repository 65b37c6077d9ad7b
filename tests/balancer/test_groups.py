"""Balancing groups side by side: a bag spec smaller than the world, every group balanced on its own.

Everything is compared with one process that attends to each rank's own sequences, forward and backward, so a group
that loses heads, takes another group's rows or waits for another group's ranks is seen on the rank where it happens.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from knapformer import SequenceBalancer
from knapformer.attention import Layout
from knapformer.balancer import subgroups
from tests.ranks import run_ranks

HEADS, HEAD_DIM = 4, 4
WIDTH = HEADS * HEAD_DIM
SPECS = [("g1n2", 2), ("g1n2", 3), ("g1n2", 4), ("g2n1", 2), ("g2n1", 3), ("g2n1", 4), ("g1n2+g2n1", 2)]


def lengths(rank):
    """One long sequence in every group, ranks with several, with one of one token, and with none."""
    return [[23, 5], [8], [], [1, 9, 4]][(rank + rank // 4) % 4]


def varlen(q, k, v, lens):
    outputs = [q[:0]]
    for one in zip(*(x.split(lens) for x in (q, k, v)), strict=True):
        outputs.append(F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in one)).transpose(0, 1))
    return torch.cat(outputs)


def projected(x, weight):
    return (x @ weight).view(-1, 3, HEADS, HEAD_DIM).unbind(1)


def run(rank, world_size, spec, how):
    """Errors of this rank: output, gradient of the input, gradient of the weight summed over ranks; balance."""
    lens = lengths(rank)
    generator = torch.Generator().manual_seed(rank)
    x0 = torch.randn(sum(lens), WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    seeds = torch.randn(len(lens), WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(WIDTH, 3 * WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    weight.requires_grad_()
    home = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens, dtype=torch.int64))

    def results(y):
        (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y).cos()).sum().backward()
        torch.distributed.all_reduce(weight.grad)
        found = y.detach(), x0.grad, seeds.grad, weight.grad
        x0.grad = seeds.grad = weight.grad = None
        return found

    expected = results(varlen(*projected(x0 + seeds[home], weight), lens).flatten(1))

    balancer = SequenceBalancer(spec, 0.5)
    step = next(iter(planned_ahead(balancer, lens))) if how == "prefetch" else balancer.plan_routing(lens, WIDTH)
    _, x, _ = step.route(x0)
    (rows,) = step.deliver(seeds)
    q, k, v = projected(x + rows[step.layout.sequence_index], weight)
    if how == "pre_attn":
        full_lens, *qkv = balancer.pre_attn(q, k, v)
        _, o = balancer.post_attn(varlen(*qkv, full_lens.tolist()))
        _, same = balancer.post_attn(balancer.pre_attn(q, k, v)[1])
        assert torch.equal(same, q)
    else:
        o = step.layout.attend(q, k, v)
    got = results(step.reverse_route(o.flatten(1))[1])
    errors = [float((a - b).abs().max()) for a, b in zip(expected, got, strict=True) if a.numel()]
    return max(errors, default=0.0), step.metrics.time_imbalance, step.placement.world_size


def planned_ahead(balancer, lens):
    with balancer.prefetch([lens], lengths=list, token_dim=WIDTH) as steps:
        yield from (step for _, step in steps)


@pytest.mark.parametrize("how", ["pre_attn", "attend", "prefetch"])
@pytest.mark.parametrize(("spec", "repeats"), SPECS)
def test_every_group_gives_what_one_process_gives(spec, repeats, how):
    group_size = 4 if "+" in spec else 2
    for error, imbalance, size in run_ranks(group_size * repeats, run, spec, how):
        assert error <= 1e-12
        assert size == group_size
        if spec == "g2n1":
            assert imbalance <= 1.1


def numbered_over_the_world(rank, world_size, spec, how):
    """What was wrong: subgroups counted over the world, and compared with the length of one group."""
    kept = subgroups.crosses_subgroups
    subgroups.crosses_subgroups = lambda placement, subgroup_of: rank >= 2 or kept(placement, subgroup_of)
    try:
        return run(rank, world_size, spec, how)
    finally:
        subgroups.crosses_subgroups = kept


def test_a_group_that_takes_the_wide_exchange_alone_still_gives_the_same():
    """`attend` may use the whole group's exchange at any time; only its cost depends on the choice."""
    assert all(error <= 1e-12 for error, *_ in run_ranks(4, numbered_over_the_world, "g1n2", "attend"))


def test_heads_lost_in_one_group_are_noticed():
    """Half of the heads of the second group's outputs, taken twice."""
    errors = run_ranks(4, losing_heads, "g1n2")
    assert [error > 0.01 for error in errors] == [False, False, True, True]


def losing_heads(rank, world_size, spec):
    lens = [7]
    x = torch.randn(7, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    balancer = SequenceBalancer(spec, 0.5)
    balancer.plan_routing(lens, WIDTH)
    full_lens, q, k, v = balancer.pre_attn(x, x, x)
    o = varlen(q, k, v, full_lens.tolist())
    if rank >= 2:
        half = o[:, : HEADS // 2]
        o = half.repeat(1, 2, 1)
    _, o = balancer.post_attn(o)
    return float((o - Layout.local(lens).attend(x, x, x)).abs().max())


def a_group_beside_another(rank, world_size):
    """A balancer of ranks 1 to 4 of 5: no sub-groups can be made, bags are what the spec says all the same."""
    group = torch.distributed.new_group([1, 2, 3, 4])
    if rank == 0:
        return None
    balancer = SequenceBalancer("g2n2", 0.5, group=group)
    lens = [6, 3 + rank]
    step = balancer.plan_routing(lens, WIDTH)
    x0 = torch.randn(sum(lens), WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    _, x, _ = step.route(x0)
    q = x.view(-1, HEADS, HEAD_DIM)
    full_lens, *qkv = balancer.pre_attn(q, q, q)
    assert qkv[0].shape[1] == HEADS // 2
    _, o = balancer.post_attn(varlen(*qkv, full_lens.tolist()))
    _, same = balancer.post_attn(qkv[0])
    assert torch.equal(same, q)
    home = x0.view(-1, HEADS, HEAD_DIM)
    return float((step.reverse_route(o)[1] - varlen(home, home, home, lens)).abs().max())


def test_a_group_that_is_no_world():
    assert all(error is None or error <= 1e-12 for error in run_ranks(5, a_group_beside_another))


def freed_without_the_collector(rank, world_size):
    """A step whose attention was used goes with its last reference, tables and all."""
    gc.collect()
    gc.disable()
    try:
        balancer = SequenceBalancer("g2n1", 0.5)
        step = balancer.plan_routing([9, 4], WIDTH)
        x = torch.randn(13, WIDTH, dtype=torch.float64, requires_grad=True)
        _, y, _ = step.route(x)
        q = y.view(-1, HEADS, HEAD_DIM)
        step.reverse_route(step.layout.attend(q, q, q).flatten(1))[1].sum().backward()
        gone = weakref.ref(step), weakref.ref(step.split_attention), weakref.ref(step.layout)
        del step, y, q
        balancer.plan_routing([3], WIDTH)
        return [ref() is None for ref in gone]
    finally:
        gc.enable()


def test_a_step_is_freed_with_its_last_reference():
    assert run_ranks(2, freed_without_the_collector) == [[True] * 3] * 2
