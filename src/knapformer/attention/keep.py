"""Attention that activation checkpointing does not run again: exchanges and kernels run once forward, once backward.

    checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

Recomputing a block needs the output of its attention, not the attention. So the forward pass computes attention in a
graph of its own, which nothing recomputes, and keeps the output; recomputation takes the outputs in order; the backward
of what the forward pass made runs through the graph that was kept. Per layer that keeps q, k, v, what arrived for split
attention, and the output, where plain checkpointing keeps the block's input only; the rest of the block is recomputed.

A block must call attention the same number of times when it is recomputed, as checkpointing demands of it anyway.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from knapformer.errors import PlanError

Attention = Callable[..., Tensor]
Attend = Callable[[Attention, Tensor, Tensor, Tensor], Tensor]

_attend: ContextVar[Attend | None] = ContextVar("knapformer_keep_attention", default=None)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` takes as its `context_fn`."""
    outputs: list[Tensor] = []
    return _Scope(_keep_in(outputs)), _Scope(lambda: _take_from(outputs))


def attend_kept(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attention(q, k, v)`: kept, or taken from what was kept, inside a block that is checkpointed so."""
    attend = _attend.get()
    return attention(q, k, v) if attend is None else attend(attention, q, k, v)


class _Scope(AbstractContextManager[None]):
    """Lets `attend_kept` do what `make` makes. Checkpointing may enter the context of recomputation several times."""

    def __init__(self, make: Callable[[], Attend]) -> None:
        self._make = make
        self._token: Token[Attend | None] | None = None

    def __enter__(self) -> None:
        self._token = _attend.set(self._make())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _attend.reset(self._token)


def _keep_in(outputs: list[Tensor]) -> Callable[[], Attend]:
    def attend(attention: Attention, *qkv: Tensor) -> Tensor:
        output = _Kept.apply(attention, *qkv) if torch.is_grad_enabled() else attention(*qkv)
        outputs.append(output.detach())
        return output

    return lambda: attend


def _take_from(outputs: list[Tensor]) -> Attend:
    left = iter(outputs)

    def attend(attention: Attention, *qkv: Tensor) -> Tensor:
        output = next(left, None)
        if output is None:
            raise PlanError(
                f"a recomputed block calls attention more often than its forward pass, which called it {len(outputs)} "
                "times; keep_attention needs blocks that do the same each time"
            )
        return _Again.apply(output, *qkv)

    return attend


class _Kept(Function):
    """Attention in a graph of its own, made under no hooks, so that checkpointing does not drop what it saves."""

    @staticmethod
    def forward(ctx: Any, attention: Attention, *qkv: Tensor) -> Tensor:
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in qkv]
            output = attention(*inputs)
        ctx.kept = inputs, output
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.kept is None:
            raise PlanError("kept attention has one backward pass; a second one needs plain checkpointing")
        (inputs, output), ctx.kept = ctx.kept, None
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grads))
        return None, *(next(found) if x.requires_grad else None for x in inputs)


class _Again(Function):
    """The kept output as a function of the recomputed inputs: a node where there was one. Its backward never runs."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *qkv: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise PlanError("backward ran through a recomputed block instead of its forward pass")
