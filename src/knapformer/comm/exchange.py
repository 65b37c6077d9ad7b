"""The one differentiable collective: rows of any number of tensors of any dtypes, in one all-to-all each way.

    start                                         wait
    tensors --copy--> message --all-to-all- - - --> message --gather--> outputs
      ^                                                                   |
      '---------gather-- message <- - - all-to-all-- message <--copy------'   (backward: the same, mirrored)

Each byte is copied once on either side. Work placed between `start` and `wait` runs while the message travels, and
since autograd runs nodes in reverse order of creation, its backward runs while the gradients travel back.

Tensors lie *beside* each other in a row of the message (they share one table: a token's features), or *stacked*, rows
after rows (q, k and v of split attention, whose rows go different ways). They travel as raw words, so every dtype
arrives bit-exact. The adjoint of sending a row to several ranks is adding up what returns. A rank joins the backward
collective whenever any rank does, also if it sent no row or its own input needs no gradient.
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
from knapformer.comm.message import Format
from knapformer.errors import PlanInvariantError
from knapformer.plan import Exchange


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Where the rows of one tensor lie in the message, before and after it travels.

    Attributes:
        send: (source rows,) message row of each source row, its first one if it is sent to several ranks.
        arrive: (target rows,) message row of each target row.
        again_from, again_to: source row and message row of every further copy of a source row.
    None stands for an index that takes all rows of the message in order, or for no further copies.
    """

    send: Tensor | None
    arrive: Tensor | None
    again_from: Tensor | None
    again_to: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExchange:
    """An `Exchange` with its index tensors on a device.

    Attributes:
        lanes: one for tensors that lie beside each other; one per tensor for stacked ones.
        input_split_sizes, output_split_sizes: message rows to and from each rank.
    """

    lanes: tuple[Lane, ...]
    input_split_sizes: list[int]
    output_split_sizes: list[int]

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
        num_sent, num_received = len(table.send_index), len(table.recv_index)
        send = np.empty(table.num_source_rows, dtype=np.int64)
        send[table.send_index[::-1]] = np.arange(num_sent)[::-1]  # of several copies, the first is written last
        arrive = np.empty(num_received, dtype=np.int64)
        arrive[table.recv_index] = np.arange(num_received)
        is_copy = np.ones(num_sent, dtype=bool)
        is_copy[send] = False
        copies = np.flatnonzero(is_copy)
        copied = table.send_index[copies]
        lanes, source, target = [], 0, 0
        for rows, arriving in zip(source_rows or (len(send),), target_rows or (num_received,), strict=True):
            mine = (copied >= source) & (copied < source + rows)
            lanes.append(
                Lane(
                    _index(send[source : source + rows], num_sent, device),
                    _index(arrive[target : target + arriving], num_received, device),
                    torch.from_numpy(copied[mine] - source).to(device) if mine.any() else None,
                    torch.from_numpy(copies[mine]).to(device) if mine.any() else None,
                )
            )
            source, target = source + rows, target + arriving
        return cls(tuple(lanes), table.input_split_sizes.tolist(), table.output_split_sizes.tolist())


def exchange(
    tensors: Sequence[Tensor],
    table: DeviceExchange,
    group: RankGroup,
    *,
    differentiable: Sequence[bool] | None = None,
) -> list[Tensor]:
    """Move rows of `tensors`, each (source rows, ...), to their targets, each (target rows, ...). Collective.

    Args:
        tensors: the same number, dtypes and trailing shapes on every rank. With a table of one lane, any dtypes, one
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
) -> "Transfer":
    """Send the rows; `Transfer.wait` returns what `exchange` does. Ranks must call it in the same order."""
    wanted = [t.requires_grad for t in tensors] if differentiable is None else list(differentiable)
    joins = torch.is_grad_enabled() and any(wanted)
    transfer = Transfer(table, group, tensors, wanted if joins else [False] * len(tensors))
    # An input of our own makes autograd visit this exchange on every rank, whatever this rank's tensors need.
    anchor = torch.empty(0, device=tensors[0].device, requires_grad=True) if joins else None
    transfer.token = _Start.apply(transfer, anchor, *tensors)
    return transfer


class Transfer:
    """One exchange under way, and its way back. Made by `start_exchange`."""

    def __init__(self, table: DeviceExchange, group: RankGroup, tensors: Sequence[Tensor], wanted: list[bool]) -> None:
        self.wanted = wanted
        self.token: Tensor | None = None  # carries the graph from start to wait; has no elements
        self._group = group
        self._splits = table.input_split_sizes, table.output_split_sizes
        like = [(t.dtype, t.shape[1:]) for t in tensors]
        lanes = [table.lanes[i % len(table.lanes)] for i in range(len(tensors))]
        self._out = lanes, Format(like, stacked=len(table.lanes) > 1)
        joins = [i for i, join in enumerate(wanted) if join]
        self._back = [lanes[i] for i in joins], Format([like[i] for i in joins], stacked=len(table.lanes) > 1)
        self._flight: tuple[Any, Tensor, Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """The outputs, in the order of the tensors. Once only."""
        token, self.token = self.token, None  # not kept: the graph refers to this transfer
        return list(_Wait.apply(self, token))

    def launch(self, tensors: Sequence[Tensor]) -> None:
        """Pack source rows and start the all-to-all."""
        lanes, format = self._out
        message = self._pack(tensors, format, [lane.send for lane in lanes], self._splits[0])
        for i, (tensor, lane) in enumerate(zip(tensors, lanes, strict=True)):
            if lane.again_from is not None and lane.again_to is not None:
                again = format.words(tensor, i).index_select(0, lane.again_from)
                format.view(message, i).index_copy_(0, lane.again_to, again)
        self._fly(message, format, *self._splits)

    def land(self) -> list[Tensor]:
        """Wait, and take the target rows out of the message."""
        lanes, format = self._out
        received = self._receive()
        outputs = format.take(received, [lane.arrive for lane in lanes])
        self._group.buffers.give(received)
        return outputs

    def launch_back(self, grads: Sequence[Tensor]) -> None:
        """`launch` for the gradients of the outputs that take part."""
        lanes, format = self._back
        message = self._pack(grads, format, [lane.arrive for lane in lanes], self._splits[1])
        self._fly(message, format, *reversed(self._splits))

    def land_back(self) -> list[Tensor]:
        """Wait, and add up the gradients of the source rows."""
        lanes, format = self._back
        received = self._receive()
        grads = format.take(received, [lane.send for lane in lanes])
        for i, lane in enumerate(lanes):
            if lane.again_from is not None and lane.again_to is not None:
                copies = format.view(received, i).index_select(0, lane.again_to)
                grads[i] = _add_rows(grads[i], lane.again_from, format.restore(copies, i))
        self._group.buffers.give(received)
        return grads

    def _pack(
        self, tensors: Sequence[Tensor], format: Format, index: Sequence[Tensor | None], splits: list[int]
    ) -> Tensor:
        if len(tensors) == 1 and index[0] is None:
            return format.words(tensors[0], 0)  # already the message
        message = self._group.buffers.take(sum(splits), format, tensors[0].device)
        format.put(message, index, tensors)
        return message

    def _fly(self, message: Tensor, format: Format, input_splits: list[int], output_splits: list[int]) -> None:
        handle = self._group.handle
        if handle is None:
            self._flight = (None, message, message)
            return
        received = self._group.buffers.take(sum(output_splits), format, message.device)
        work = dist.all_to_all_single(received, message, output_splits, input_splits, group=handle, async_op=True)
        self._flight = (work, message, received)

    def _receive(self) -> Tensor:
        """The message that arrived; valid until its buffer is given back."""
        if self._flight is None:
            raise PlanInvariantError("an exchange was waited for twice, or before it was started")
        (work, sent, received), self._flight = self._flight, None
        if work is not None:
            work.wait()
            self._group.buffers.give(sent)
        return received


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, anchor: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.transfer = transfer
        transfer.launch(tensors)
        return torch.empty(0, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        grads = iter(ctx.transfer.land_back())
        return None, None, *(next(grads) if join else None for join in ctx.transfer.wanted)


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, token: Tensor | None) -> Any:
        ctx.transfer = transfer
        outputs = transfer.land()
        ctx.mark_non_differentiable(*(o for o, join in zip(outputs, transfer.wanted, strict=True) if not join))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        transfer = ctx.transfer
        transfer.launch_back([g for g, join in zip(grads, transfer.wanted, strict=True) if join])
        return None, torch.empty(0, device=grads[0].device)


def _add_rows(rows: Tensor, index: Tensor, more: Tensor) -> Tensor:
    """`rows` with `more` added at `index`; half precision is summed in fp32."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide).index_add_(0, index, more.to(wide)).to(rows.dtype)


def _index(index: np.ndarray, num_rows: int, device: torch.device) -> Tensor | None:
    """`index` into `num_rows` rows, or None if it takes all of them in order."""
    if len(index) == num_rows and np.array_equal(index, np.arange(num_rows)):
        return None
    return torch.from_numpy(np.ascontiguousarray(index)).to(device)
