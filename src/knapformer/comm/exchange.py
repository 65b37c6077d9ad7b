"""The one differentiable collective: rows of any number of tensors of any dtypes, in one all-to-all each way.

    start                                         wait
    tensors --pack--> message --all-to-all- - - --> message --unpack--> outputs
      ^                                                                   |
      '-------unpack-- message <- - - all-to-all-- message <--pack--------'   (backward: the same, mirrored)

Each byte is copied once on either side. Work placed between `start` and `wait` runs while the message travels, and
since autograd runs nodes in reverse order of creation, its backward runs while the gradients travel back.

Tensors lie *beside* each other in a row of the message (they share one table: a token's features), or *stacked*, rows
after rows (q, k and v of split attention, whose rows go different ways). They travel as raw words, so every dtype
arrives bit-exact. The adjoint of sending a row to several ranks is adding up what returns. A rank joins the backward
collective whenever any rank does, also if it sent no row or its own input needs no gradient.

Rows that stay on this rank may stand before those that travel. `start` hands them out in parts, `wait` takes parts that
are to stand before the rows that arrive, so that nothing has to be split or concatenated around an exchange.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from knapformer.comm.groups import RankGroup
from knapformer.comm.message import Format
from knapformer.comm.sides import Side
from knapformer.errors import PlanInvariantError
from knapformer.plan import Exchange


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExchange:
    """An `Exchange` with its index tensors on a device.

    Attributes:
        source, target: where rows lie in the message, before and after it travels.
    """

    source: Side
    target: Side

    @classmethod
    def of(
        cls,
        table: Exchange,
        device: torch.device,
        *,
        source_rows: tuple[int, ...] = (),
        target_rows: tuple[int, ...] = (),
    ) -> Self:
        """Every source row of `table` must be sent at least once, as all exchanges of a placement do.

        Args:
            table: one rank's view.
            device: of the index tensors.
            source_rows, target_rows: for stacked tensors, the rows of each; they add up to the table's.
        """
        return cls(
            Side.of(table.send_index, table.num_source_rows, table.input_split_sizes, source_rows, device),
            Side.of(table.recv_index, table.num_target_rows, table.output_split_sizes, target_rows, device),
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
        tensors: the same number, dtypes and trailing shapes on every rank. With a table without lanes, any dtypes, one
            row each per source row; else one tensor per lane, of one dtype and trailing shape.
        table: this rank's view of the exchange.
        group: the ranks of the table.
        differentiable: which tensors take part in the backward exchange; must be equal on all ranks. Default: those
            that require a gradient here, which is right where all ranks run the same model.
    """
    return start_exchange(tensors, table, group, differentiable=differentiable).wait()


def start_exchange(
    tensors: Sequence[Tensor],
    table: DeviceExchange,
    group: RankGroup,
    *,
    differentiable: Sequence[bool] | None = None,
    stay: Sequence[int] = (),
    row: Sequence[int] | None = None,
) -> "Transfer":
    """Send the rows; `Transfer.wait` returns what `exchange` does. Ranks must call it in the same order.

    Args:
        tensors, table, group, differentiable: see `exchange`.
        stay: rows of each part of each tensor, before those of the table, that is not sent: `Transfer.stayed`.
        row: trailing shape of what arrives, if a row of the tensors is several rows of the table.
    """
    wanted = [t.requires_grad for t in tensors] if differentiable is None else list(differentiable)
    joins = torch.is_grad_enabled() and any(wanted)
    transfer = Transfer(table, group, tensors, wanted if joins else [False] * len(tensors), list(stay), row)
    # An input of our own makes autograd visit this exchange on every rank, whatever this rank's tensors need.
    anchor = torch.empty(0, device=tensors[0].device, requires_grad=True) if joins else None
    transfer.token, *parts = _Start.apply(transfer, anchor, *tensors)
    transfer.stayed = [parts[i : i + len(stay)] for i in range(0, len(parts), len(stay) or 1)]
    return transfer


class Transfer:
    """One exchange under way, and its way back. Made by `start_exchange`.

    Attributes:
        stayed: the parts of each tensor that were not sent; until `wait`.
    """

    def __init__(
        self,
        table: DeviceExchange,
        group: RankGroup,
        tensors: Sequence[Tensor],
        wanted: list[bool],
        stay: list[int],
        row: Sequence[int] | None,
    ) -> None:
        self.wanted = wanted
        # These two are let go by `wait`, because their graph refers to this transfer.
        self.token: Tensor | None = None  # carries the graph from start to wait; has no elements
        self.stayed: list[list[Tensor]] = []
        self._table, self._group = table, group
        self._stay, self._before = stay, list[int]()
        like = [(t.dtype, t.shape[1:]) for t in tensors]
        lanes = list(range(len(like))) if table.source.lanes else None
        joins = [i for i, join in enumerate(wanted) if join]
        back = [like[i] for i in joins], joins if lanes else None
        if row is None:
            self._out, self._back = Format.of(like, lanes), Format.of(*back)
        else:
            self._out = Format.of([(dtype, torch.Size(row)) for dtype, _ in like], lanes)
            self._back = Format.of(*back, fold=like[0][1].numel() // torch.Size(row).numel())
        self._flight: tuple[Any, Tensor, Tensor] | None = None

    def wait(self, *before: Tensor) -> list[Tensor]:
        """The outputs, in the order of the tensors. Once only.

        Args:
            before: where one tensor travels, parts to stand before the rows that arrive.
        """
        token, self.token, self.stayed = self.token, None, []
        return list(_Wait.apply(self, token, *before))

    def launch(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Pack source rows and start the all-to-all. Returns the parts of each tensor that stay."""
        return self._send(self._out, tensors, self._table.source, self._table.target, self._stay)

    def land(self, before: Sequence[Tensor]) -> list[Tensor]:
        """Wait, and take the target rows out of the message."""
        self._before = [len(part) for part in before]
        return self._take(self._out, self._receive(), self._table.target, [before])

    def launch_back(self, grads: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """`launch` for the gradients of the outputs that take part. Returns those of the parts before."""
        return self._send(self._back, grads, self._table.target, self._table.source, self._before)

    def land_back(self, stayed: Sequence[Tensor]) -> list[Tensor]:
        """Wait, and add up the gradients of the source rows. `stayed` are those of all parts that `launch` returned."""
        received, side, each = self._receive(), self._table.source, len(self._stay)
        if side.copies is not None:
            self._back.add_copies(received, side.copies)
        parts = [stayed[i * each : (i + 1) * each] for i, join in enumerate(self.wanted) if join]
        return self._take(self._back, received, side, parts)

    def _send(
        self, format: Format, tensors: Sequence[Tensor], source: Side, target: Side, before: list[int]
    ) -> list[Sequence[Tensor]]:
        group, skip = self._group, sum(before)
        message = received = format.pack(tensors, source, group.buffers, skip)
        work = None
        if group.handle is not None:
            received = group.buffers.take(sum(target.splits), format.width, format.word, message.device)
            work = dist.all_to_all_single(
                received, message, target.splits, source.splits, group=group.handle, async_op=True
            )
        self._flight = work, message, received
        return [tensor[:skip].split(before) if before else () for tensor in tensors]

    def _receive(self) -> Tensor:
        """The message that arrived."""
        if self._flight is None:
            raise PlanInvariantError("an exchange was waited for twice, or before it was started")
        (work, _, received), self._flight = self._flight, None
        if work is not None:
            work.wait()
        return received

    def _take(self, format: Format, message: Tensor, side: Side, before: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The rows of each tensor, behind its parts in `before`."""
        room = sum(map(len, before[0]))
        outputs = format.unpack(message, side, self._group.buffers, room)
        if room:
            for output, parts in zip(outputs, before, strict=True):
                torch.cat(list(parts), out=output[:room])
        return outputs


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, anchor: Tensor | None, *tensors: Tensor) -> Any:
        ctx.transfer = transfer
        stayed = transfer.launch(tensors)
        fixed = [part for parts, join in zip(stayed, transfer.wanted, strict=True) if not join for part in parts]
        ctx.mark_non_differentiable(*fixed)
        return torch.empty(0, device=tensors[0].device), *chain(*stayed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, *stayed = grads
        landed = iter(ctx.transfer.land_back(stayed))
        return None, None, *(next(landed) if join else None for join in ctx.transfer.wanted)


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, token: Tensor | None, *before: Tensor) -> Any:
        ctx.transfer = transfer
        outputs = transfer.land(before)
        ctx.mark_non_differentiable(*(o for o, join in zip(outputs, transfer.wanted, strict=True) if not join))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        transfer = ctx.transfer
        before = transfer.launch_back([g for g, join in zip(grads, transfer.wanted, strict=True) if join])
        return None, torch.empty(0, device=grads[0].device), *chain(*before)
