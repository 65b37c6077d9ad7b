"""Balanced equals unbalanced for whole models: outputs, input gradients and every parameter gradient.

The reference leaves every sequence at home and runs the plain model; the other side runs any placement, under FSDP2 or
not, with activation checkpointing, and with the next batch planned before backward.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from knapformer import CostModel, SequenceBalancer
from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig
from knapformer.train.parallel import make_mesh, shard_model
from tests.planners import OneSidedPlanner, RandomPlanner, UnevenHeadsPlanner
from tests.ranks import RankError, run_ranks
from tests.side_by_side import SIDE_BY_SIDE, assert_each_group_is_balanced, balance

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
# (length, text) of each rank's sequences; text only where both are equal, no text where 0
MIXES = {
    "mixed": [[(40, 9), (7, 0)], [(23, 23)], [], [(61, 30)], [(5, 1), (1, 0)], [(8, 8), (2, 1)], [(33, 0)], [(12, 3)]],
    "first rank idle": [[], [(90, 12)], [(4, 4)], [(30, 0), (1, 1)], [], [], [(7, 2)], []],
    "giant": [[(700, 50)], [], [], [], [], [], [], []],
    "equal": [[(17, 5)]] * 8,
    "images only": [[(20, 0)], [(9, 0), (3, 0)], [(1, 0)], [(14, 0)], [], [(6, 0)], [(2, 0)], [(11, 0)]],
    "text only": [[(20, 20)], [(9, 9), (3, 3)], [(1, 1)], [(14, 14)], [], [(6, 6)], [(2, 2)], [(11, 11)]],
    "shorter than a bag": [[(1, 0)], [(2, 1)], [(1, 1)], [(3, 0)], [(1, 0)], [], [], [(1, 0)]],
    "long": [[(8423, 100)], [(7, 0)], [(1, 0)]],
}


@dataclass(frozen=True)
class Case:
    spec: object  # a bag spec or a planner
    mix: str = "mixed"
    heads: int = 4
    kind: str = "mmdit"
    dtype: torch.dtype = torch.float64
    fsdp: bool = False
    replicas: int = 1
    checkpointing: bool | str = False
    plan_next: bool = False
    breaks: str = ""
    compile: str | bool = False


def build(case):
    if case.kind == "mmdit":
        return MMDiT(MMDiTConfig.tiny(num_heads=case.heads, axes_dims=(2, 2, 2)))
    return DiT(DiTConfig.tiny(num_heads=case.heads, axes_dims=(2, 2, 2), depth=2))


def run_model(rank, case):
    """One forward and backward; what came out, and all gradients, summed over ranks; and the step."""
    sharded = case.fsdp
    if sharded:
        model = shard_model(
            lambda: build(case),
            make_mesh("cpu", case.replicas),
            checkpointing=case.checkpointing,
            compile=case.compile,
            dtype=case.dtype,
        )
    else:
        model = build(case).to(case.dtype)
    model.train()
    pairs = MIXES[case.mix][rank]
    if case.kind == "dit":
        pairs = [(length, 0) for length, _ in pairs]
    lens, text = [p[0] for p in pairs], [p[1] for p in pairs]
    generator = torch.Generator().manual_seed(rank + 1)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype).requires_grad_()

    inputs = [random(sum(lens), 8), random(sum(lens), 12), random(len(lens)), random(len(lens), 10)]
    ids = torch.randint(0, 9, (sum(lens), 3), generator=generator, dtype=torch.int32)
    options = {"bag_specs": case.spec} if isinstance(case.spec, str) else {"planner": case.spec}
    if case.spec == "local":
        options = {"planner": "local"}
    balancer = SequenceBalancer(cost=CostModel.from_shapes(6 * case.heads, case.heads), **options)
    step = balancer.plan_routing(lens, text_lens=text)
    layout = step.layout
    _, x, (txt, ids) = step.route(inputs[0], [inputs[1], ids])
    time, pooled = step.deliver(inputs[2].sigmoid(), inputs[3])
    if case.breaks == "vectors":
        pooled = pooled.flip(0)
    if case.breaks == "positions":
        ids = ids.flip(0)
    if case.kind == "mmdit":
        out = model(x[layout.image_index], txt[layout.text_index], time, pooled, ids, layout)
        y = out.new_zeros(layout.num_tokens, out.shape[1]).index_copy(0, layout.image_index, out)
        y = y + 0 * txt.sum()
    else:
        y = model(x, time, pooled, ids, layout)
    _, y, _ = step.reverse_route(y)
    if case.plan_next:
        balancer.plan_routing([3] * (rank + 1), text_lens=[1] * (rank + 1))
    loss = (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y).sin()).sum()
    scale = dist.get_world_size() if sharded else 1  # FSDP averages over ranks
    (loss * scale).backward()
    grads = global_gradients(model, case.replicas)
    inputs = [torch.zeros_like(i) if i.grad is None else i.grad / scale for i in inputs]
    return [y.detach(), *inputs, *grads], step


def global_gradients(model, replicas):
    """Every parameter's gradient, whole and summed over ranks, in one collective: each costs 50 ms at 8 ranks."""
    parts = []
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        if isinstance(grad, DTensor):
            shape, offset = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
            whole = torch.zeros(grad.shape, dtype=grad.dtype)
            whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = grad.to_local() / replicas
            grad = whole
        parts.append(grad)
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    return [g.view_as(part) for g, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]


def difference(rank, world_size, case):
    """The largest error on this rank, and the step."""
    reference = replace(case, spec="local", fsdp=False, checkpointing=False, plan_next=False, breaks="")
    (expected, _), (got, step) = run_model(rank, reference), run_model(rank, case)
    errors = [
        float((a - b).abs().max()) / max(1.0, float(a.abs().max()))
        for a, b in zip(expected, got, strict=True)
        if a.numel()
    ]
    return max(errors, default=0.0), step


def error(rank, world_size, case):
    return difference(rank, world_size, case)[0]


def check(world_size, *args, **kwargs):
    case = Case(*args, **kwargs)
    assert max(run_ranks(world_size, error, case)) <= TOLERANCE[case.dtype]


WORLDS = [
    (1, "g1n1"),
    (2, "g1n2"),
    (2, "g2n1"),
    (3, "g3n1"),
    (4, "g2n2"),
    (5, "g1n1+g4n1"),
    (6, "g1n2+g4n1"),
    (8, "g8n1"),
    (8, "g1n2+g2n1+g4n1"),
]


@pytest.mark.parametrize("kind", ["mmdit", "dit"])
@pytest.mark.parametrize(("world_size", "spec"), WORLDS)
def test_every_world_size(world_size, spec, kind):
    check(world_size, spec, kind=kind)


@pytest.mark.parametrize("kind", ["mmdit", "dit"])
@pytest.mark.parametrize(("world_size", "spec"), [(2, "g2n1"), (3, "g1n1+g2n1"), (4, "g4n1"), (8, "g4n2")])
def test_under_fsdp_with_checkpointing_and_the_next_batch_planned(world_size, spec, kind):
    check(world_size, spec, kind=kind, fsdp=True, checkpointing=True, plan_next=True)


def error_and_balance(rank, world_size, case):
    largest, step = difference(rank, world_size, case)
    return largest, balance(step)


@pytest.mark.parametrize("kind", ["mmdit", "dit"])
@pytest.mark.parametrize(("world_size", "spec"), SIDE_BY_SIDE)
def test_balancing_groups_side_by_side(world_size, spec, kind):
    """A bag spec smaller than the world: each group for itself, under FSDP over all of them."""
    how = "keep-attention" if kind == "dit" else True
    case = Case(spec, heads=6, kind=kind, fsdp=True, checkpointing=how, plan_next=True)
    results = run_ranks(world_size, error_and_balance, case)
    assert max(largest for largest, _ in results) <= 1e-12
    assert_each_group_is_balanced(spec, [found for _, found in results])


def test_attention_kept_under_checkpointing():
    check(3, UnevenHeadsPlanner(), heads=5, fsdp=True, checkpointing="keep-attention", plan_next=True)


@pytest.mark.parametrize("mix", ["mixed", "giant", "first rank idle"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_the_default_planner(world_size, mix):
    check(world_size, "auto", mix=mix)
    if world_size <= 4:
        check(world_size, "auto", mix=mix, kind="dit", fsdp=True, checkpointing=True, plan_next=True)


@pytest.mark.parametrize("kind", ["mmdit", "dit"])
def test_fp32(kind):
    check(3, "g3n1", kind=kind, dtype=torch.float32)
    check(4, UnevenHeadsPlanner(), kind=kind, dtype=torch.float32, fsdp=True)


@pytest.mark.parametrize("heads", [7, 12, 24, 30])
def test_heads(heads):
    check(4, "g4n1", heads=heads)
    check(3, UnevenHeadsPlanner(), heads=heads, fsdp=True)


@pytest.mark.parametrize(
    "planner", [RandomPlanner(0), RandomPlanner(7), UnevenHeadsPlanner(), OneSidedPlanner()], ids=str
)
def test_hand_written_placements(planner):
    check(3, planner, heads=5, kind="dit")
    check(4, planner, heads=7, fsdp=True, checkpointing=True, plan_next=True)


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix not in ("mixed", "long")])
def test_corner_cases(mix):
    check(4, "g4n1", mix=mix)
    check(4, "g1n2+g2n1", mix=mix, fsdp=True)
    check(3, UnevenHeadsPlanner(), mix=mix, fsdp=True, checkpointing=True)


def test_a_long_sequence_of_awkward_length():
    check(3, "g3n1", mix="long", heads=2, kind="dit", dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch looks at the gradients of all inputs
def test_compiled_blocks():
    check(2, "g2n1", fsdp=True, checkpointing=True, plan_next=True, compile="aot_eager")
    with pytest.raises(RankError, match="Invalid backend: 'none of these'"):  # blocks do go to the backend
        check(2, "g2n1", fsdp=True, compile="none of these")


def test_hybrid_sharding():
    check(4, "g4n1", fsdp=True, replicas=2)


@pytest.mark.parametrize("breaks", ["vectors", "positions"])
def test_the_comparison_can_fail(breaks):
    assert max(run_ranks(3, error, Case("g3n1", breaks=breaks))) > 1e-3


def modelled_imbalance(rank, world_size, case):
    return run_model(rank, case)[1].metrics.time_imbalance


def test_balance_is_reached_not_only_equality():
    before = run_ranks(4, modelled_imbalance, Case("local", mix="giant"))
    assert before == [4.0] * 4
    for spec in ("g4n1", "auto"):
        assert max(run_ranks(4, modelled_imbalance, Case(spec, mix="giant"))) < 1.01
