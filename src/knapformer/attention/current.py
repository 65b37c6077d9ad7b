"""The step that code without a layout argument is running: `knapformer.attend(q, k, v)` inside `with step:`.

Activation checkpointing runs a block's forward again during backward, when another step may already be planned or
active. The step therefore travels with the autograd graph: what a step computes is marked, and a call made during
backward takes the step of the nearest mark upstream of the node that autograd is running, never the newest step.
"""

from collections import deque
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from knapformer.errors import PlanError


class HasLayout(Protocol):
    """A step, as far as attention needs to know it."""

    layout: Any  # a Layout; the steps make theirs when it is first asked for


_active: ContextVar[tuple[HasLayout, ...]] = ContextVar("knapformer_active_steps", default=())


def activate(step: HasLayout) -> None:
    """Make `step` the current one until `deactivate`; calls nest."""
    _active.set((*_active.get(), step))


def deactivate() -> None:
    _active.set(_active.get()[:-1])


def current_step(latest: HasLayout | None = None) -> Any:
    """The step of the backward pass that is running, else the innermost active one, else `latest`.

    Raises:
        PlanError: if there is none, or during a backward pass whose graph carries no step.
    """
    node = torch._C._current_autograd_node()
    if node is not None:
        return _step_of_graph(node)
    step = (_active.get() or (latest,))[-1]
    if step is None:
        raise PlanError("no step is active; call this inside `with step:` after step = balancer.plan_routing(...)")
    return step


def mark(tensor: Tensor, step: HasLayout) -> Tensor:
    """`tensor`, with `step` recorded in its graph."""
    return _Mark.apply(step, tensor) if tensor.requires_grad else tensor


def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, *, scale: float | None = None) -> Tensor:
    """`Layout.attend` of the current step, for models that cannot be handed a layout. Collective like it."""
    step = current_step()
    return mark(step.layout.attend(q_THK, k_THK, v_THK, scale=scale), step)


def cross_attend(q_THK: Tensor, k_NHK: Tensor, v_NHK: Tensor, *, scale: float | None = None) -> Tensor:
    """`Layout.cross_attend` of the current step, for models that cannot be handed a layout."""
    step = current_step()
    return mark(step.layout.cross_attend(q_THK, k_NHK, v_NHK, scale=scale), step)


class _Mark(Function):
    @staticmethod
    def forward(ctx: Any, step: HasLayout, tensor: Tensor) -> Tensor:
        ctx.knapformer_step = step
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads


def _step_of_graph(node: Any) -> HasLayout:
    queue, seen = deque([node]), {node}
    while queue:
        node = queue.popleft()
        step = getattr(node, "knapformer_step", None)
        if step is not None:
            return step
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in seen:
                seen.add(upstream)
                queue.append(upstream)
    raise PlanError(
        "attention was called during a backward pass (activation checkpointing) and its graph carries no step; "
        "hand the layout to the checkpointed block as an argument, or route its input with the step"
    )
