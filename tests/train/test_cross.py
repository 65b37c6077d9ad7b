"""Cross-attention models between real processes: balanced equals unbalanced, wherever the text has to go.

The reference leaves every sequence at home. Text gradients are compared at home, where those of all holders add up.
Beside it: what the trainer no longer routes.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from knapformer import CostModel, SequenceBalancer
from knapformer.data import Grid, grid_positions
from knapformer.models import CrossDiT, CrossDiTConfig
from knapformer.train.parallel import make_mesh, shard_model
from tests.planners import OneSidedPlanner, RandomPlanner
from tests.ranks import run_ranks
from tests.train.test_equality import global_gradients

# (tokens, text) of each rank's sequences: a split sequence with text, no text, more text than tokens, an idle rank.
MIX = [[(40, 9), (7, 0)], [], [(61, 30), (3, 17)], [(90, 1), (1, 5)]]


@dataclass(frozen=True)
class Case:
    plan: object  # a bag spec, "auto", "local" or a planner
    fsdp: bool = False
    text: bool = True
    token_grid: int = 1
    breaks: str = ""


def build():
    return CrossDiT(CrossDiTConfig.tiny(num_heads=4, axes_dims=(2, 2, 2)))


def run_model(rank, world_size, case):
    """One forward and backward: outputs at home, gradients of all inputs at home and of parameters over all ranks."""
    double = torch.float64
    if case.fsdp:
        model = shard_model(build, make_mesh("cpu"), checkpointing=True, dtype=double)
    else:
        model = build().to(double)
    pairs = [pair for home in range(rank, len(MIX), world_size) for pair in MIX[home]]
    lens, text_lens = [p[0] for p in pairs], [p[1] * case.text for p in pairs]
    generator = torch.Generator().manual_seed(rank + 1)
    shapes = [(sum(lens), 8), (sum(text_lens), 12), (len(lens),), (len(lens), 10)]
    leaves = [torch.randn(shape, generator=generator, dtype=double).requires_grad_() for shape in shapes]
    grids = torch.tensor([[1, 1, n] for n in lens], dtype=torch.int32).reshape(-1, 3)
    options = {"planner": case.plan}
    if isinstance(case.plan, str) and case.plan != "local":
        options = {"bag_specs": case.plan}
    balancer = SequenceBalancer(cost=CostModel.from_shapes(24, 4), token_grid=case.token_grid, **options)
    step = balancer.plan_routing(lens, context_lens=text_lens)
    _, x, _ = step.route(leaves[0])
    time, pooled, grids = step.deliver(leaves[2].sigmoid(), leaves[3], grids)
    (text,) = step.deliver_context(leaves[1])
    layout = step.layout
    text = text * broken_rows(step, case.breaks)[:, None]
    if case.breaks == "next sequence":
        text = text.roll(1, dims=0)
    if case.breaks == "gradient of one holder":
        kept = broken_rows(step, "one holder")[:, None]
        text = text * kept + (text * (1 - kept)).detach()
    out = model(x, text, time, pooled, layout.positions(grids), layout)
    _, y, _ = step.reverse_route(out)
    balancer.plan_routing([3] * (rank + 1), context_lens=[2] * (rank + 1))  # must change nothing
    loss = (y * torch.arange(1, y.numel() + 1, dtype=double).view_as(y).sin()).sum()
    scale = world_size if case.fsdp else 1  # FSDP averages over ranks
    (loss * scale).backward()
    grads = [leaf.grad / scale for leaf in leaves]
    return [y.detach(), *grads, *global_gradients(model, 1)], step


def broken_rows(step, breaks):
    """(context rows here,) weights: all 1, or with "one holder" 0 on all ranks that hold a sequence but the first."""
    shards, layout = step.placement.token_shards, step.layout
    ones = []
    for seq, rows in zip(layout.sequence_ids, layout.context.lens.tolist(), strict=True):
        first = int(shards.rank[shards.seq == seq].min())
        ones += [0.0 if breaks == "one holder" and step.rank != first else 1.0] * rows
    return torch.tensor(ones, dtype=torch.float64)


def differences(rank, world_size, cases):
    """Largest error of each case against the local plan, and over how many ranks its texts went."""
    found, home = [], {}
    for case in cases:
        if case.text not in home:
            home[case.text] = run_model(rank, world_size, Case("local", text=case.text))[0]
        got, step = run_model(rank, world_size, case)
        errors = [
            float((a - b).abs().max()) / max(1.0, float(a.abs().max()))
            for a, b in zip(home[case.text], got, strict=True)
            if a.numel()
        ]
        placed = step.placement
        seqs = np.flatnonzero(placed.sequences.context_length)
        copies = [len(set(placed.token_shards.rank[placed.token_shards.seq == s].tolist())) for s in seqs]
        found.append((max(errors, default=0.0), max(copies, default=0), step.layout.num_tokens))
    return found


WORLDS = {
    1: [Case("g1n1"), Case("auto", fsdp=True)],
    2: [Case("g2n1"), Case("auto"), Case(OneSidedPlanner()), Case("g2n1", text=False)],
    3: [Case("g3n1"), Case("g1n1+g2n1", fsdp=True), Case("auto", token_grid=13)],
    4: [Case("g4n1"), Case("auto", fsdp=True), Case(RandomPlanner(2)), Case("g2n1", fsdp=True), Case("g1n2")],
}


@pytest.mark.parametrize("world_size", WORLDS)
def test_balanced_equals_unbalanced(world_size):
    cases = WORLDS[world_size]
    by_rank = run_ranks(world_size, differences, cases)
    for found in zip(*by_rank, strict=True):
        assert max(error for error, _, _ in found) <= 1e-12
    copies = [found[0][1] for found in zip(*by_rank, strict=True)]
    assert max(copies) == world_size  # a text did reach that many ranks
    if world_size == 2:
        assert by_rank[1][2][2] == 0  # all tokens on rank 0


def test_the_comparison_can_fail():
    """Text on one of its holders only, gradients of one holder only, the text of a neighbour."""
    faults = ["one holder", "gradient of one holder", "next sequence"]
    by_rank = run_ranks(3, differences, [replace(WORLDS[3][0], breaks=fault) for fault in faults])
    for found in zip(*by_rank, strict=True):
        assert max(error for error, _, _ in found) > 1e-3


# -- what is routed -------------------------------------------------------------------------------------------------


def bytes_routed(rank, world_size, channels, width):
    """Bytes this rank sends to others: positions routed, grids delivered instead, and hidden states routed."""
    grids = [[(1, 9, 7), (2, 3, 5)], [(1, 1, 1)], []][rank]
    text = [[11, 0], [4], []][rank]
    lens = [t + int(np.prod(g)) for t, g in zip(text, grids, strict=True)]
    ids = [
        np.concatenate([np.zeros((t, 3), np.int32), grid_positions(Grid(*g))]) for t, g in zip(text, grids, strict=True)
    ]
    ids = torch.from_numpy(np.concatenate([np.zeros((0, 3), np.int32), *ids]))
    step = SequenceBalancer(planner=RandomPlanner(0)).plan_routing(lens, text_lens=text)
    latents, target, hidden = (torch.randn(sum(lens), size) for size in (channels, channels, width))
    tags = torch.zeros(sum(lens), dtype=torch.int32)
    rows = torch.tensor(grids, dtype=torch.int32).reshape(-1, 3)
    sent = []
    send = dist.all_to_all_single

    def counting(output, message, output_splits, input_splits, **kwargs):
        away = sum(input_splits) - input_splits[rank]
        sent.append(away * message[0].numel() * message.element_size() if len(message) else 0)
        return send(output, message, output_splits, input_splits, **kwargs)

    dist.all_to_all_single = counting
    try:
        _, _, (_, routed, _) = step.route(latents, [target, ids, tags])
        step.route(latents, [target, tags])
        (delivered,) = step.deliver(rows)
        step.route(hidden, [ids])
    finally:
        dist.all_to_all_single = send
    assert torch.equal(step.layout.positions(delivered), routed) and routed.dtype == torch.int32
    with_ids, without, for_grids, with_hidden = sent
    return with_ids, without + for_grids, with_hidden


def test_positions_are_recomputed_and_not_routed():
    """16 of 152 bytes a token with 16 channels of latents; hidden states of width 256 would be 1,040 and come back."""
    by_rank = run_ranks(3, bytes_routed, 16, 256)
    with_ids, with_grids, hidden = np.sum(by_rank, axis=0)
    assert with_grids < with_ids < hidden / 6
    assert with_grids <= with_ids * 137 / 152
