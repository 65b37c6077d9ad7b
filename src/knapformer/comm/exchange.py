"""The one differentiable collective: rows of any number of tensors of any dtypes, in one all-to-all each way.

Tensors travel as bytes, each with its own dtype, so what arrives is bit-exact. Several tensors lie beside each other
in a row of the message:

    x (N, 64) bf16   pos (N, 3) int32   ->   message (rows sent, 128 + 12) uint8

Gradients take the same path backwards: the adjoint of sending a row to several ranks is adding up what returns.
A rank joins the backward collective whenever any rank does, also if it sent no row or its own input needs no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from knapformer.comm.groups import RankGroup
from knapformer.plan import Exchange


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExchange:
    """An `Exchange` with its index tensors on a device; None stands for an index that would change nothing.

    Attributes:
        send: (rows sent,) source row of each row sent.
        arrive: (target rows,) received row of each target row.
        send_back: (rows received,) target row of each row received: what backward sends.
        arrive_back: (source rows,) sent row of each source row, where each is sent exactly once.
        adds_up: whether a source row is sent more than once or never, so that backward must add up by `send`.
    """

    send: Tensor | None
    arrive: Tensor | None
    send_back: Tensor | None
    arrive_back: Tensor | None
    adds_up: bool
    input_split_sizes: list[int]
    output_split_sizes: list[int]
    num_source_rows: int
    num_target_rows: int

    @classmethod
    def of(cls, table: Exchange, device: torch.device) -> Self:
        bijective = table.is_bijective
        arrive = _inverse_permutation(table.recv_index)
        return cls(
            _index(table.send_index, table.num_source_rows, device),
            _index(arrive, len(arrive), device),
            _index(table.recv_index, len(arrive), device),
            _index(_inverse_permutation(table.send_index), len(table.send_index), device) if bijective else None,
            not bijective,
            table.input_split_sizes.tolist(),
            table.output_split_sizes.tolist(),
            table.num_source_rows,
            table.num_target_rows,
        )


def exchange(
    tensors: Sequence[Tensor],
    table: DeviceExchange,
    group: RankGroup,
    *,
    differentiable: Sequence[bool] | None = None,
) -> list[Tensor]:
    """Move rows of `tensors`, each (source rows, ...), to their targets, each (target rows, ...). Collective.

    Args:
        tensors: any dtypes; the same number, dtypes and trailing shapes on every rank.
        table: this rank's view of the exchange.
        group: the ranks of the table.
        differentiable: which tensors take part in the backward exchange; must be equal on all ranks. Default: those
            that require a gradient here, which is right where all ranks run the same model.
    """
    wanted = [t.requires_grad for t in tensors] if differentiable is None else list(differentiable)
    joins = torch.is_grad_enabled() and any(wanted)
    # An input of our own makes autograd visit this exchange on every rank, whatever this rank's tensors need.
    anchor = torch.empty(0, device=tensors[0].device, requires_grad=True) if joins else None
    return list(_Exchange.apply(table, group, wanted if joins else [False] * len(tensors), anchor, *tensors))


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, table: DeviceExchange, group: RankGroup, wanted: list[bool], anchor: Any, *tensors: Tensor
    ) -> Any:
        ctx.table, ctx.group, ctx.wanted = table, group, wanted
        like = [(t.dtype, t.shape[1:]) for t in tensors]
        ctx.like = [one for one, join in zip(like, wanted, strict=True) if join]
        received = _all_to_all(
            _select(_pack(tensors), table.send), table.output_split_sizes, table.input_split_sizes, group
        )
        outputs = _unpack(received, like, table.arrive)
        ctx.mark_non_differentiable(*(o for o, join in zip(outputs, wanted, strict=True) if not join))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        table: DeviceExchange = ctx.table
        sent = _pack([g for g, join in zip(grads, ctx.wanted, strict=True) if join])
        received = _all_to_all(
            _select(sent, table.send_back), table.input_split_sizes, table.output_split_sizes, ctx.group
        )
        if table.adds_up:
            rows = _unpack(received, ctx.like, None)
            summed = iter([_add_up(r, table) for r in rows])
        else:
            summed = iter(_unpack(received, ctx.like, table.arrive_back))
        return None, None, None, None, *(next(summed) if join else None for join in ctx.wanted)


def _all_to_all(rows: Tensor, output_splits: list[int], input_splits: list[int], group: RankGroup) -> Tensor:
    if group.handle is None:
        return rows.clone()  # an output never shares memory with an input
    received = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), output_splits, input_splits, group=group.handle)
    return received


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """(N, ...) tensors -> (N, bytes) uint8."""
    rows = [t.detach().reshape(len(t), t.shape[1:].numel()).contiguous().view(torch.uint8) for t in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def _unpack(rows: Tensor, like: list[tuple[torch.dtype, torch.Size]], index: Tensor | None) -> list[Tensor]:
    """(N, bytes) uint8 -> tensors of the given dtypes and trailing shapes, rows taken in the order of `index`."""
    widths = [dtype.itemsize * shape.numel() for dtype, shape in like]
    parts = rows.split(widths, dim=1) if len(like) > 1 else [rows]
    if len(like) > 1 and index is None:
        parts = [
            p.clone(memory_format=torch.contiguous_format) for p in parts
        ]  # a view could lie unaligned for its dtype
    parts = [_select(p, index) for p in parts]
    return [p.flatten().view(dtype).view(len(p), *shape) for p, (dtype, shape) in zip(parts, like, strict=True)]


def _add_up(rows: Tensor, table: DeviceExchange) -> Tensor:
    """Sum returned rows into their source rows; half precision is summed in fp32."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros((table.num_source_rows, *rows.shape[1:]), dtype=wide, device=rows.device)
    return total.index_add_(0, table.send, rows.to(wide)).to(rows.dtype)  # type: ignore[arg-type]


def _select(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _inverse_permutation(index: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(index)
    inverse[index] = np.arange(len(index))
    return inverse


def _index(index: np.ndarray, num_rows: int, device: torch.device) -> Tensor | None:
    """`index` into `num_rows` rows, or None if it takes all of them in order."""
    if len(index) == num_rows and np.array_equal(index, np.arange(num_rows)):
        return None
    return torch.from_numpy(np.ascontiguousarray(index)).to(device)
