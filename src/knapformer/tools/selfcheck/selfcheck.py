"""Does balancing change nothing here: on this machine, with this kernel, process group and model?

The same samples go through the same weights under several plans, forward and backward:

    unbalanced  whole sequences on their home ranks, no communication
    balanced    the default planner: some sequences split, most whole
    one bag     every sequence split over all ranks

Outputs, brought home, and the gradient of every parameter, summed over ranks, must agree. Before that, `unbalanced`
runs twice: a model that is not a function of its inputs (dropout, say) cannot be compared, and is named as such. Errors
are relative to the largest value of the tensor; for gradients, to at least a thousandth of the largest of all.

This finds attention that goes past the layout, things indexed by rank or by place instead of by sequence, randomness,
and kernels and networks that compute something else. It does not find what only other sizes bring up.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from knapformer.attention.kernels import choose_kernel
from knapformer.balancer import PackedBatch, RoutingStep, SequenceBalancer
from knapformer.errors import SpecError
from knapformer.plan import CostModel
from knapformer.tools.selfcheck.models import diffusers_batch
from knapformer.train.launch import device_words

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative error that passes, by dtype of the weights."""

_AGAIN = "unbalanced again"


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest error of a tensor under a plan."""

    plan: str
    tensor: str
    error: float


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What came of it; the same on every rank.

    Attributes:
        model, device, backend, dtype, kernel, ranks: what was checked.
        tolerance: largest relative error that passes.
        worst: for each plan, the tensor with the largest error.
        differs: tensors above the tolerance, the largest error first.
        split: for each plan, how many of the sequences were split.
        deterministic: whether the model gave the same twice without balancing.
    """

    model: str
    device: str
    backend: str
    dtype: str
    kernel: str
    ranks: int
    tolerance: float
    worst: tuple[Difference, ...]
    differs: tuple[Difference, ...]
    split: dict[str, str]
    deterministic: bool

    @property
    def passed(self) -> bool:
        return not self.differs

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def selfcheck(model: nn.Module, device: torch.device, *, length: int = 257, kernel: str | None = None) -> SelfCheck:
    """Compare balanced with unbalanced runs of a model. Collective over the world.

    Args:
        model: of this library; adapted, of diffusers; or any module that takes a routed `PackedBatch`, returns one row
            for each of its tokens, and has a method `example(length, generator)` that makes a sample of about that many
            tokens. Weights are taken from rank 0. Not wrapped: neither FSDP nor DDP.
        device: where to run.
        length: tokens of the longest sequence, about.
        kernel: attention kernel by name; default as in training.

    Raises:
        SpecError: for a model that cannot be checked.
    """
    model = model.to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise SpecError(f"{type(model).__name__} has no parameters that require gradients; there is nothing to check")
    world, dtype = dist.get_world_size(), parameters[0].dtype
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, 0)
    batch = _batch(model, _lengths(dist.get_rank(), world, length))
    plans: dict[str, dict[str, Any]] = {
        "unbalanced": {"planner": "local"},
        _AGAIN: {"planner": "local"},
        "balanced": {},
    }
    if world > 1:
        plans["one bag"] = {"bag_specs": f"g{world}n1"}
    found, split = {}, {}
    for plan, options in plans.items():
        balancer = SequenceBalancer(cost=CostModel.from_shapes(64, 1), kernel=kernel, device=device, **options)
        step = balancer.plan_routing(**batch.lengths)
        found[plan] = _run(model, batch, step)
        split[plan] = f"{int(step.placement.split.sum())} of {len(step.placement.split)}"
    reference = found.pop("unbalanced")
    del split["unbalanced"], split[_AGAIN]
    tolerance = TOLERANCE.get(dtype, 1e-2)
    errors = {plan: _errors(plan, reference, tensors) for plan, tensors in found.items()}
    again = errors.pop(_AGAIN)
    deterministic = max(e.error for e in again) <= tolerance
    compared = [again] if not deterministic else list(errors.values())
    differs = sorted((e for one in compared for e in one if not e.error <= tolerance), key=lambda e: -e.error)
    return SelfCheck(
        model=type(model).__name__,
        device=device_words(device),
        backend=str(dist.get_backend()),
        dtype=str(dtype).removeprefix("torch."),
        kernel=kernel or getattr(choose_kernel(None, device, dtype, head_dim=64), "__name__", "default"),
        ranks=world,
        tolerance=tolerance,
        worst=tuple(max(one, key=lambda e: e.error) for one in compared),
        differs=tuple(differs),
        split=split,
        deterministic=deterministic,
    )


def _lengths(rank: int, world: int, longest: int) -> list[int]:
    """Uneven on purpose: a long one on rank 0, nothing on the last of three ranks or more, odd sizes elsewhere."""
    if rank == 0:
        return [longest, max(1, longest // 20), max(1, longest // 9)]
    if rank == world - 1 > 1:
        return []
    return [max(1, longest // (6 + rank)), max(1, longest // 31)]


def _batch(model: nn.Module, lengths: Sequence[int]) -> Any:
    """This rank's samples, packed: something with `lengths` and `route`."""
    generators = [torch.Generator().manual_seed(1000 * dist.get_rank() + i) for i in range(len(lengths) + 1)]
    device = next(model.parameters()).device
    example: Any = getattr(model, "example", None)
    if example is None:
        return diffusers_batch(model, lengths, generators)
    samples = [example(length, generator) for length, generator in zip(lengths, generators, strict=False)]
    return PackedBatch.join(samples, like=example(1, generators[-1])).to(device)


def _run(model: nn.Module, batch: Any, step: RoutingStep) -> dict[str, Tensor]:
    """Outputs of this rank's samples at home, and gradients summed over ranks, by name."""
    model.zero_grad(set_to_none=True)
    here = batch.route(step)
    rows = model(here)
    layout = step.layout
    if len(rows) == layout.num_tokens:
        packed = rows
    elif len(rows) == len(layout.image_index):
        packed = rows.new_zeros(layout.num_tokens, *rows.shape[1:]).index_copy(0, layout.image_index, rows)
    else:
        raise SpecError(
            f"the model returned {len(rows)} rows for {layout.num_tokens} packed tokens, {len(layout.image_index)} of "
            "them visual; it must return one row for each, in packed order"
        )
    _, outputs, _ = step.reverse_route(packed)
    probe = torch.arange(1, outputs.numel() + 1, device=outputs.device, dtype=torch.float32).sin().view_as(outputs)
    (outputs.float() * probe).sum().backward()
    found = {"output": outputs.detach()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            dist.all_reduce(grad)
            found[f"gradient of {name}"] = grad
    model.zero_grad(set_to_none=True)
    return found


def _errors(plan: str, reference: dict[str, Tensor], tensors: dict[str, Tensor]) -> list[Difference]:
    """Relative error of each tensor, the same on every rank."""
    pairs = [(reference[name].double(), tensor.double()) for name, tensor in tensors.items()]
    measured = [((a - b).abs().max(), a.abs().max()) if a.numel() else (a.new_zeros(()),) * 2 for a, b in pairs]
    table = torch.stack([torch.stack(pair) for pair in measured]).nan_to_num(nan=float("inf"))
    dist.all_reduce(table, dist.ReduceOp.MAX)
    error, scale = table.cpu().unbind(1)
    least = torch.full_like(scale, float(scale[1:].max()) / 1000)
    least[0] = 0
    relative = error / torch.maximum(scale, least).clamp_min(torch.finfo(torch.float64).tiny)
    return [Difference(plan, name, float(e)) for name, e in zip(tensors, relative.tolist(), strict=True)]
