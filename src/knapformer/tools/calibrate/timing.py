"""How one pack is timed: its layers in each phase, and the attention inside them.

    forward     without a graph                 recompute   with one                 backward   of that graph

Attention is timed where it runs, inside the layer: the layout's `attend` is wrapped, and identities before and after it
in the graph mark when its backward begins (the gradient of its output is there) and ends (those of q, k and v are).
What a mark is: `knapformer.train.clock`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knapformer.attention import Layout
from knapformer.data.profile import PHASES
from knapformer.tools.calibrate.layers import Layers
from knapformer.train.clock import Clock


class _Span(torch.autograd.Function):
    """The identity; marks when its backward runs."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, marks: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.clock, ctx.marks = clock, marks
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.marks.append(ctx.clock.mark())
        return None, None, *grads


class TimedLayout:
    """A layout whose attention is timed; everything else is the layout's own."""

    def __init__(self, layout: Layout, clock: Clock) -> None:
        self._layout, self._clock = layout, clock
        self.marks: dict[str, list[Any]] = {name: [] for name in ("start", "stop", "grad_start", "grad_stop")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def attend(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, *, scale: float | None = None) -> Tensor:
        clock, marks = self._clock, self.marks
        q, k, v = _Span.apply(clock, marks["grad_stop"], q_THK, k_THK, v_THK)
        marks["start"].append(clock.mark())
        o = self._layout.attend(q, k, v, scale=scale)
        marks["stop"].append(clock.mark())
        return _Span.apply(clock, marks["grad_start"], o)[0]

    def seconds(self, start: str, stop: str) -> float:
        """Time of attention so far, between two kinds of marks; forgets them."""
        # Layers are timed apart from each other, and gradients come in the reverse order for both kinds of marks alike.
        total = sum(self._clock.seconds(a, b) for a, b in zip(self.marks[start], self.marks[stop], strict=True))
        self.marks[start].clear()
        self.marks[stop].clear()
        return total


def time_pack(layers: Layers, layout: Layout, clock: Clock) -> tuple[dict[str, float], dict[str, float]]:
    """Run the layers on random inputs once.

    Returns:
        Seconds per layer by phase: of the layers, and of the attention in them.
    """
    timed: Any = TimedLayout(layout, clock)  # stands in for the layout
    inputs = layers.inputs(layout)

    def timed_call(call: Callable[[], Tensor], *kinds: str) -> tuple[float, float, Tensor]:
        clock.settle()
        start = clock.mark()
        result = call()
        stop = clock.mark()
        clock.settle()
        return clock.seconds(start, stop), timed.seconds(*kinds), result

    def backward() -> Tensor:
        return torch.autograd.grad(output, layers.leaves(inputs), gradient, allow_unused=True)[0]

    with torch.no_grad():
        forward_s = timed_call(lambda: layers.run(timed, *inputs), "start", "stop")
    *recompute_s, output = timed_call(lambda: layers.run(timed, *inputs), "start", "stop")
    gradient = torch.randn_like(output)
    backward_s = timed_call(backward, "grad_start", "grad_stop")
    both = [forward_s, recompute_s, backward_s]
    per = layers.shape.num_layers
    return (
        {phase: seconds[0] / per for phase, seconds in zip(PHASES, both, strict=True)},
        {phase: seconds[1] / per for phase, seconds in zip(PHASES, both, strict=True)},
    )
