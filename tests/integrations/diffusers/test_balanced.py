"""Balanced over ranks equals diffusers' own forward on every sample at home: under FSDP2 and DDP, for any placement.

Each rank runs the reference on its own samples, one by one, with an unwrapped copy of the model. Placements: the
balanced planner, one bag of all ranks (every sequence split), and one that leaves the last ranks without a token.
"""

import pytest

pytest.importorskip("diffusers", reason="needs pip install knapformer[diffusers]")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from knapformer import CostModel, SequenceBalancer
from knapformer.integrations.diffusers import pack
from tests.integrations.diffusers.families import CASES, exact, loss
from tests.planners import OneSidedPlanner
from tests.ranks import _PRELOAD, run_ranks
from tests.replicate import replicate

# Imported once by the server that forks the ranks, instead of by each: on a busy machine, ranks would wait for each
# other longer than the process group allows.
_PRELOAD.append("diffusers.models.transformers.transformer_flux")

HEADS = 3
HOMES = {2: [0, 0, 0, 1, 1], 3: [0, 0, 1, 1, 1], 4: [0, 1, 1, 1, 3]}  # no samples on the last of three, on one of four


def whole(grad):
    """All rows of a gradient that FSDP shards. By all-reduce: torch 2.11 has no `full_tensor` over gloo."""
    rows = torch.zeros(grad.shape, dtype=grad.dtype)
    first = dist.get_rank() * -(-len(rows) // dist.get_world_size())
    rows[first : first + len(grad.to_local())] = grad.to_local()
    dist.all_reduce(rows)
    return rows


def full_grads(model, scale):
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grad = parameter.grad
        grads[name.removeprefix("module.")] = (whole(grad) if isinstance(grad, DTensor) else grad) * scale
    model.zero_grad(set_to_none=True)
    return grads


def reference(case, model, samples):
    """Outputs of this rank's samples by diffusers' own forward, and gradients of all ranks' losses."""
    outputs = [case.alone(model, sample) for sample in samples]
    if outputs:
        loss(outputs, [sample.target for sample in samples]).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grads[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grads[name])
    return [out.detach() for out in outputs], grads


def shard(model, *, half=False):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for blocks in model.children():
        if isinstance(blocks, torch.nn.ModuleList):
            for block in blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def run(model, samples, balancer, wrong):
    batch = pack(model, samples, targets=True)
    step = balancer.plan_routing(**batch.lengths)
    inputs = batch.route(step)
    if wrong:
        inputs.vectors["timestep"] = inputs.timestep.flip(0)
    rows = model(inputs)
    balancer.plan_routing([1])  # the next batch is planned before this one's backward
    loss([rows], [inputs.target]).backward()
    return batch.unpack(model, rows, inputs, step), step


def differences(rank, world_size, name, wrong=False):
    case, dtype = CASES[name], torch.float64
    torch.set_default_dtype(dtype)
    errors, tokens = {}, {}
    with exact():
        alone = case.build(dtype)
        pairs = zip(case.samples(alone, dtype), HOMES[world_size], strict=True)
        mine = [sample for sample, home in pairs if home == rank]
        expected, wanted = reference(case, alone, mine)
        sharded, replicated = shard(case.build(dtype)), replicate(case.build(dtype))
        plans = {
            "balanced": (sharded, {}),
            "bags": (sharded, {"bag_specs": f"g{world_size}n1"}),
            "idle ranks": (sharded, {"planner": OneSidedPlanner()}),
            "balanced, ddp": (replicated, {}),
            "idle ranks, ddp": (replicated, {"planner": OneSidedPlanner()}),
            "bags, bf16": (shard(case.build(dtype), half=True), {"bag_specs": f"g{world_size}n1"}),
        }
        if world_size == 4:
            plans["groups of one bag"] = (sharded, {"bag_specs": "g2n1"})
        for plan, (model, options) in plans.items():
            if plan == "bags":
                model.enable_gradient_checkpointing()
            balancer = SequenceBalancer(cost=CostModel.from_shapes(48, HEADS), **options)
            outputs, step = run(model, mine, balancer, wrong)
            grads = full_grads(model, world_size)
            pairs = [*zip(outputs, expected, strict=True), *((grads[key], wanted[key]) for key in wanted)]
            errors[plan] = max(float((a - b).abs().max()) / max(1, float(b.abs().max())) for a, b in pairs)
            tokens[plan] = step.placement.tokens().tolist()
            if "bag" in plan:
                assert step.placement.split.all()
    return errors, tokens


def check(world_size, name):
    for errors, tokens in run_ranks(world_size, differences, name, timeout=240.0):
        assert 1e-4 < errors.pop("bags, bf16") < 0.3
        assert max(errors.values()) <= 1e-10, errors
        assert tokens["idle ranks"][-1] == 0
        assert max(tokens["balanced"]) < max(tokens["idle ranks"])


@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4])
def test_flux(world_size):
    check(world_size, "flux-dev")


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (2, "flux2"),
        (3, "sd3.5-medium"),
        (4, "qwen-image"),
        (2, "hunyuan-video"),
        (3, "cogvideox-5b"),
        (4, "wan"),
        (2, "ltx-video-i2v"),
        (3, "z-image"),
    ],
)
def test_every_family(world_size, name):
    check(world_size, name)


def test_the_comparison_can_fail():
    for errors, _ in run_ranks(3, differences, "flux-dev", True, timeout=240.0):
        assert min(errors.values()) > 1e-3
