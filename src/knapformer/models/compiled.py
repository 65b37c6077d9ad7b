"""torch.compile for blocks: what lies before and after attention compiles, attention and its exchanges do not.

    block.forward:   @piece before_attention -> layout.attend -> @piece after_attention

Each piece is one whole graph, without breaks, for all blocks of a class and for every number of rows. Torch would make
more of them: it specialises on sizes 0 and 1, and a rank may hold no token, one sequence, or no text. So the rows of
every argument are marked as unknown ("unbacked") sizes, about which nothing may be assumed.

Not compiled: attention, which loops over sequences and waits for other ranks, and what a model does once per step.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.errors import SpecError


def piece(method: Callable[..., Any]) -> Any:
    """A method of a block that `compile_blocks` compiles. Its tensor arguments have rows first; it calls no collective.

    Arguments may be tensors, rotations, and tuples of them.
    """

    @wraps(method)
    def run(self: nn.Module, *args: Any) -> Any:
        backend = getattr(self, "compile_backend", None)
        if backend is None:
            return method(self, *args)
        _mark_rows(args)
        return _compiled(method, backend)(self, *args)

    run.is_piece = True  # pyright: ignore[reportAttributeAccessIssue]
    return run


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the pieces of every block in `model`, in place; they compile when they are first run.

    Comes before or after `fully_shard` and activation checkpointing, as you like. Copies of the model are compiled too.

    Args:
        model: has blocks among its modules.
        backend: of torch.compile, a name or a function.

    Raises:
        SpecError: no module has a piece.
    """
    blocks = [module for module in model.modules() if _has_pieces(type(module))]
    if not blocks:
        raise SpecError(
            f"{type(model).__name__} has no module with a piece to compile; mark methods that take rows and call no "
            "collective with @knapformer.models.piece"
        )
    for block in blocks:
        block.compile_backend = backend  # pyright: ignore[reportArgumentType]


@cache
def _has_pieces(kind: type) -> bool:
    return any(getattr(value, "is_piece", False) for base in kind.__mro__ for value in vars(base).values())


@cache
def _compiled(method: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """One function for all blocks of a class, so that they share its graph."""
    # Inductor's folding of constants asks whether sizes are 0, which these do not say.
    options: Any = {"joint_graph_constant_folding": False} if backend == "inductor" else None
    return torch.compile(method, backend=backend, fullgraph=True, options=options)


def _mark_rows(value: Any) -> None:
    from torch._dynamo.decorators import mark_unbacked  # torch imports its compiler when it is first needed

    if isinstance(value, Tensor):
        mark_unbacked(value, 0)
    elif isinstance(value, Rotation):
        _mark_rows((value.cos_TP, value.sin_TP))
    else:
        for item in value:
            _mark_rows(item)
