"""No layer makes the host wait for the device: attention asks for no value, count or copy of what a device holds.

On a GPU such an operation stalls the launch of everything behind it. On the CPU nothing stalls, so that the operations
themselves are looked for: in the dispatcher, and for those that a CPU tensor answers without it, in Python's calls.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from knapformer import CostModel, Layout, SequenceBalancer
from tests.planners import RandomPlanner, UnevenHeadsPlanner
from tests.ranks import RankError, run_ranks


class HostSyncError(RuntimeError):
    """An operation for which a host waits for its device."""


# Give the host values, or make tensors of values the host has, which is a copy too.
VALUES = ("item", "tolist", "numpy", "cpu", "pin_memory")
CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__")
FORBIDDEN_CALLS = {
    torch.Tensor: (*VALUES, *CONVERSIONS),
    torch: ("tensor", "as_tensor", "from_numpy", "asarray"),
}


class NoHostSync(TorchDispatchMode):
    """Raises where an operation that is dispatched would make the host wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        reason = self.reason(func, args, kwargs)
        if reason:
            raise HostSyncError(f"{func}: {reason}")
        return func(*args, **kwargs)

    @staticmethod
    def reason(func: Any, args: tuple, kwargs: dict) -> str | None:
        if torch.Tag.data_dependent_output in func.tags:
            return "its result is a value on the host"
        packet = func.overloadpacket
        if packet in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            return "it counts what a mask selects" if masks else None
        if packet is torch.ops.aten.repeat_interleave and kwargs.get("output_size") is not None:
            return None
        if torch.Tag.dynamic_output_shape in func.tags:
            return "the shape of its result depends on values"
        to = kwargs.get("device")
        if packet is torch.ops.aten._to_copy and to is not None and torch.device(to) != args[0].device:
            return "it copies between devices"
        if packet is torch.ops.aten.copy_ and args[0].device != args[1].device:
            return "it copies between devices"
        return None


@contextmanager
def no_host_calls() -> Iterator[None]:
    """Raises where Python asks a tensor for its values, or hands values over.

    By replacing the methods: a mode would be off inside of `backward`, which is such a call itself.
    """

    def refuse(name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            raise HostSyncError(f"{name} is called")

        return call

    with ExitStack() as stack:
        for owner, names in FORBIDDEN_CALLS.items():
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, refuse(name)))
        yield


def without_host_sync(fn: Callable[[], Any]) -> Any:
    with NoHostSync(), no_host_calls():
        return fn()


# -- attention ------------------------------------------------------------------------------------------------------

LENGTHS = [[40, 1, 7], [23, 90], [5, 5]]
HEADS, HEAD_DIM = 6, 4


def attend_twice(rank: int, world_size: int, planner: Any, fault: str | None = None) -> tuple[int, int]:
    """Attends once to have the tables built, then forward and backward again under watch.

    Returns:
        Packed tokens of whole sequences here, and of split ones.
    """
    cost = CostModel.from_shapes(HEADS * HEAD_DIM, HEADS)
    kwargs = {"bag_specs": planner} if isinstance(planner, str) else {"planner": planner}
    layout = SequenceBalancer(cost=cost, **kwargs).plan_routing(LENGTHS[rank]).layout
    qkv = [torch.randn(layout.num_tokens, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
    grad = torch.randn(layout.num_tokens, HEADS, HEAD_DIM)
    layout.attend(*qkv).backward(grad)
    expected = [x.grad for x in qkv]
    for x in qkv:
        x.grad = None

    def again() -> None:
        output = Faulty.apply(layout.attend(*qkv), fault)
        output.backward(grad)

    without_host_sync(again)
    for x, right in zip(qkv, expected, strict=True):
        assert x.grad is not None and torch.equal(x.grad, right)
    return layout.num_whole_tokens, layout.num_tokens - layout.num_whole_tokens


class Faulty(torch.autograd.Function):
    """The identity, whose forward or backward asks for a value if told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str | None) -> Tensor:
        ctx.fault = fault
        if fault == "forward":
            x.sum().item()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.fault == "backward":
            grads[0].nonzero()
        if ctx.fault == "backward, in Python":
            grads[0].tolist()
        return grads[0], None


PLANNERS = {1: ["g1n1"], 2: ["g2n1", "g1n2", RandomPlanner(0)], 3: ["g3n1", "g1n1+g2n1", UnevenHeadsPlanner()]}


@pytest.mark.parametrize(
    ("world_size", "planner"), [(n, planner) for n, planners in PLANNERS.items() for planner in planners], ids=str
)
def test_attention_does_not_wait_for_the_device(world_size: int, planner: Any) -> None:
    run_ranks(world_size, attend_twice, planner)


def test_whole_and_split_sequences_are_both_covered() -> None:
    tokens = [run_ranks(2, attend_twice, "g2n1"), run_ranks(3, attend_twice, "g1n1+g2n1")]
    assert all(split and not whole for whole, split in tokens[0])
    assert any(whole for whole, _ in tokens[1]) and any(split for _, split in tokens[1])


@pytest.mark.parametrize("fault", ["forward", "backward", "backward, in Python"])
def test_the_test_can_fail(fault: str) -> None:
    """Also in backward, whose nodes autograd runs with the modes of the thread that called it."""
    with pytest.raises(RankError, match="HostSyncError: "):
        run_ranks(1, attend_twice, "g1n1", fault)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_on_cuda_does_not_wait(dtype: torch.dtype) -> None:
    """There, CUDA itself tells: for whole sequences, as one process has no others."""
    layout = Layout.local([40, 1, 7, 192], device="cuda")
    qkv = [torch.randn(240, 4, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    grad = torch.randn(240, 4, 64, device="cuda", dtype=dtype)
    layout.attend(*qkv).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layout.attend(*qkv).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- what is looked for ---------------------------------------------------------------------------------------------

X = torch.arange(6.0)
MASK = X > 2
WAITING: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X.sum() > 0),
    "int": lambda: int(X[2]),
    "float": lambda: float(X[2]),
    "if": lambda: 1 if X.any() else 2,
    "slice": lambda: X[: torch.ones((), dtype=torch.long)],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: X.nonzero(),
    "where of a mask": lambda: torch.where(MASK),
    "masked_select": lambda: X.masked_select(MASK),
    "index by a mask": lambda: X[MASK],
    "assignment by a mask": lambda: X.clone().__setitem__(MASK, X[:3]),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "bincount": lambda: torch.bincount(X.long()),
    "repeat_interleave by a tensor": lambda: torch.repeat_interleave(X, X.long()),
    "equal": lambda: torch.equal(X, X + 1),
    "allclose": lambda: torch.allclose(X, X + 1),
    "tensor": lambda: torch.tensor([1, 2]),
    "from_numpy": lambda: torch.from_numpy(X.new_zeros(0).numpy()),
    "copy to another device": lambda: X.to("meta"),
}
FREE: dict[str, Callable[[], Any]] = {
    "index_select": lambda: X.index_select(0, torch.arange(3)),
    "index by a tensor": lambda: X[torch.arange(3)],
    "where": lambda: torch.where(MASK, X, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "repeat_interleave of a known size": lambda: torch.repeat_interleave(X, X.long(), output_size=15),
    "cat of splits": lambda: torch.cat(X.split([2, 4])),
    "dtype": lambda: X.to(torch.bfloat16),
    "shape": lambda: torch.empty(len(X), X.shape[0], X.numel()),
}


@pytest.mark.parametrize("name", WAITING)
def test_an_operation_that_waits_is_found(name: str) -> None:
    with pytest.raises(HostSyncError):
        without_host_sync(WAITING[name])


@pytest.mark.parametrize("name", FREE)
def test_other_operations_are_not(name: str) -> None:
    without_host_sync(FREE[name])
