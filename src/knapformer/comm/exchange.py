"""The one differentiable collective: rows of any number of tensors of any dtypes, in one all-to-all each way.

    send_forward                                  receive_forward
    tensors --pack--> message --all-to-all- - - --> message --unpack--> outputs
      ^                                                                   |
      '-------unpack-- message <- - - all-to-all-- message <--pack--------'
    receive_backward                              send_backward

Each byte is copied once on either side. Work placed between sending and receiving runs while the message travels, and
since autograd runs nodes in reverse order of creation, its backward runs while the gradients travel back.

Tensors lie *beside* each other in a row of the message (they share one table: a token's features), or *stacked*, rows
after rows (q, k and v of split attention, whose rows go different ways). They travel as raw words, so every dtype
arrives bit-exact. The adjoint of sending a row to several ranks is adding up what returns. A rank joins the backward
collective whenever any rank does, also if it sent no row or its own input needs no gradient.

An exchange may go in several *stages*, each a message of its own that travels while others are worked on. On one side
the stages make up one array, packed or unpacked at once; on the other each has an array of its own.

Rows that do not travel may stand before those that do, in *local blocks*. Sending hands them out, receiving takes what
was made of them and puts it before the rows that arrive, so nothing is split or concatenated around an exchange.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from knapformer.comm.groups import RankGroup
from knapformer.comm.message import MessageLayout
from knapformer.comm.pack_index import PackIndex
from knapformer.errors import PlanInvariantError
from knapformer.plan import Exchange
from knapformer.plan.arrays import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExchange:
    """An `Exchange` with its index tensors on a device.

    Attributes:
        sources, targets: where rows lie in the messages, before and after they travel. One of each; or, of an exchange
            in several stages, one on the side where they make up one array and one a stage on the other.
    """

    sources: tuple[PackIndex, ...]
    targets: tuple[PackIndex, ...]

    @classmethod
    def of(
        cls,
        table: Exchange,
        device: torch.device,
        *,
        source_rows: Sequence[tuple[int, ...]] = ((),),
        target_rows: Sequence[tuple[int, ...]] = ((),),
    ) -> Self:
        """Every source row of `table` must be sent at least once, as all exchanges of a placement do.

        Args:
            table: one rank's view.
            device: of the index tensors.
            source_rows, target_rows: for stacked tensors, the rows of each. One entry a stage on the side where each
                stage has an array of its own.
        """
        return cls(
            _pack_indices(table.send_index, table.num_source_rows, table.input_split_sizes, source_rows, device),
            _pack_indices(table.recv_index, table.num_target_rows, table.output_split_sizes, target_rows, device),
        )

    @property
    def num_stages(self) -> int:
        """Messages that the exchange consists of."""
        return max(len(self.sources), len(self.targets))


def _pack_indices(
    array_row: Int64Array, num_rows: int, splits: Int64Array, stages: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[PackIndex, ...]:
    if len(stages) == 1:
        return (PackIndex.of(array_row, num_rows, splits, stages[0], device),)
    indices, row, at = [], 0, 0
    for stacked_rows, sizes in zip(stages, np.split(splits, len(stages)), strict=True):
        count, rows = int(sizes.sum()), sum(stacked_rows)
        stacked = stacked_rows if len(stacked_rows) > 1 else ()
        indices.append(PackIndex.of(array_row[at : at + count] - row, rows, sizes, stacked, device))
        row, at = row + rows, at + count
    return tuple(indices)


def exchange(
    tensors: Sequence[Tensor],
    table: DeviceExchange,
    group: RankGroup,
    *,
    differentiable: Sequence[bool] | None = None,
) -> list[Tensor]:
    """Move rows of `tensors`, each (source rows, ...), to their targets, each (target rows, ...). Collective.

    Args:
        tensors: the same number, dtypes and trailing shapes on every rank. Of a table for stacked tensors one each, of
            one dtype and trailing shape; else any dtypes, one row each per source row.
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
    local_rows: Sequence[int] = (),
    arriving_shape: Sequence[int] | None = None,
) -> "Transfer":
    """Send the rows; `Transfer.wait` returns what `exchange` does. Ranks must call it in the same order.

    Args:
        tensors, table, group, differentiable: see `exchange`. If stages leave one by one, these are of the first.
        local_rows: rows of each local block of each tensor, which stand before those of the table.
        arriving_shape: trailing shape of what arrives, if a row of the tensors is several rows of the table.
    """
    wanted = [t.requires_grad for t in tensors] if differentiable is None else list(differentiable)
    joins = torch.is_grad_enabled() and any(wanted)
    wanted = wanted if joins else [False] * len(tensors)
    transfer = Transfer(table, group, tensors, wanted, list(local_rows), arriving_shape)
    transfer.send(tensors)
    return transfer


class _InFlight(NamedTuple):
    """A message under way: torch's handle, what is sent (kept until it arrived), where it arrives."""

    work: Any
    message: Tensor
    received: Tensor


class Transfer:
    """One exchange under way, and its way back. Made by `start_exchange`.

    Attributes:
        wanted: which tensors take part in the backward exchange.
        local: the local blocks of each tensor; until `wait`.
    """

    def __init__(
        self,
        table: DeviceExchange,
        group: RankGroup,
        tensors: Sequence[Tensor],
        wanted: list[bool],
        local_rows: list[int],
        arriving_shape: Sequence[int] | None,
    ) -> None:
        self.wanted = wanted
        self.local: list[list[Tensor]] = []
        # Tensors without elements that tie receiving to sending in the graph. `wait` lets go of them and of the local
        # blocks, because their graph refers to this transfer.
        self._links: list[Tensor] = []
        self._table, self._group = table, group
        self._local_rows, self._rows_before = local_rows, list[int]()
        kinds = [(t.dtype, t.shape[1:]) for t in tensors]
        all_stacked = list(range(len(kinds))) if table.sources[0].stacked else None
        joining = [i for i, joins in enumerate(wanted) if joins]
        kinds_back, stacked_back = [kinds[i] for i in joining], joining if all_stacked else None
        if arriving_shape is None:
            self._forward = MessageLayout.of(kinds, all_stacked)
            self._backward = MessageLayout.of(kinds_back, stacked_back)
        else:
            arriving = torch.Size(arriving_shape)
            rows_per_token = kinds[0][1].numel() // arriving.numel()
            self._forward = MessageLayout.of([(dtype, arriving) for dtype, _ in kinds], all_stacked)
            self._backward = MessageLayout.of(kinds_back, stacked_back, rows_per_token)
        self._in_flight: list[_InFlight | None] = [None] * table.num_stages
        self._arriving_array: Tensor | None = None  # where the messages of all stages arrive, if they make one array
        self._num_sent = 0

    # -- what callers use ------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send the next stage, of an exchange whose stages leave one by one; `start_exchange` has sent the first."""
        # An input of our own makes autograd visit this exchange on every rank, whatever this rank's tensors need.
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=True) if any(self.wanted) else None
        made = _Send.apply(self, self._num_sent, anchor, *tensors)
        self._num_sent += 1
        self._links += made[: self.num_receives]
        blocks, each = list(made[self.num_receives :]), len(self._local_rows)
        self.local = [blocks[i : i + each] for i in range(0, len(blocks), each or 1)]

    def wait(self, *local: Tensor) -> list[Tensor]:
        """The outputs, in the order of the tensors; call it once for each stage that arrives with its own array.

        Args:
            local: where one tensor travels, blocks to stand before the rows that arrive.
        """
        is_staged = self.num_receives > 1
        stage = self.num_receives - len(self._links) if is_staged else 0
        count = 1 if is_staged else len(self._links)
        links, self._links, self.local = self._links[:count], self._links[count:], []
        return list(_Receive.apply(self, stage, count, *links, *local))

    # -- what autograd's nodes call --------------------------------------------------------------------------------

    @property
    def num_receives(self) -> int:
        """Receives that follow a send."""
        return len(self._table.targets)

    def send_forward(self, stage: int, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Pack source rows and start their all-to-alls. Returns the local blocks of each tensor."""
        sources, targets = self._table.sources, self._table.targets
        return self._send(self._forward, tensors, stage, sources, targets, self._local_rows, range(len(targets)))

    def receive_forward(self, stage: int, local: Sequence[Tensor]) -> list[Tensor]:
        """Wait, and take the target rows out of the message, behind the local blocks."""
        self._rows_before = [len(block) for block in local]
        targets = self._table.targets
        return self._unpack(self._forward, self._receive(stage, targets), targets[stage], [local])

    def send_backward(self, stage: int, grads: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """`send_forward` for the gradients of the outputs that take part. Returns those of the local blocks."""
        sources, targets = self._table.targets, self._table.sources
        latest_first = range(len(targets))[::-1]  # backward, what was sent last is worked on first
        return self._send(self._backward, grads, stage, sources, targets, self._rows_before, latest_first)

    def receive_backward(self, stage: int, local: Sequence[Tensor]) -> list[Tensor]:
        """Wait, and add up the gradients of the source rows. `local` are those of all blocks of all tensors."""
        index, each = self._table.sources[stage], len(self._local_rows)
        received = self._receive(stage, self._table.sources)
        if index.copies is not None:
            self._backward.add_copies(received, index.copies)
        blocks = [local[i * each : (i + 1) * each] for i, joins in enumerate(self.wanted) if joins]
        return self._unpack(self._backward, received, index, blocks)

    # -- both ways -------------------------------------------------------------------------------------------------

    def _send(
        self,
        layout: MessageLayout,
        tensors: Sequence[Tensor],
        stage: int,
        sources: tuple[PackIndex, ...],
        targets: tuple[PackIndex, ...],
        local_rows: list[int],
        order: range,
    ) -> list[Sequence[Tensor]]:
        skip, index = sum(local_rows), sources[stage]
        message = layout.pack(tensors, index, self._group.buffers, skip)
        if len(sources) == 1:
            splits = _by_stage(index.splits, len(targets))
            messages = message.split([sum(each) for each in splits])
            for i in order:
                self._post(layout, i, messages[i], splits[i], targets[i].splits, None)
        else:
            if self._arriving_array is None:
                rows = sum(targets[0].splits)
                self._arriving_array = self._group.buffers.take(rows, layout.width, layout.word, message.device)
            splits = _by_stage(targets[0].splits, len(sources))
            received = self._arriving_array.split([sum(each) for each in splits])[stage]
            self._post(layout, stage, message, index.splits, splits[stage], received)
        return [tensor[:skip].split(local_rows) if local_rows else () for tensor in tensors]

    def _post(
        self,
        layout: MessageLayout,
        stage: int,
        message: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        received: Tensor | None,
    ) -> None:
        """Start the all-to-all of one stage."""
        handle, work = self._group.handle, None
        if handle is None:
            received = message if received is None else received.copy_(message)
        else:
            if received is None:
                received = self._group.buffers.take(sum(output_splits), layout.width, layout.word, message.device)
            work = dist.all_to_all_single(received, message, output_splits, input_splits, group=handle, async_op=True)
        self._in_flight[stage] = _InFlight(work, message, received)

    def _receive(self, stage: int, targets: tuple[PackIndex, ...]) -> Tensor:
        """The message that arrived for a stage, or for all stages where they make one array."""
        is_staged = len(targets) > 1
        arrived = [self._arrive(i) for i in ([stage] if is_staged else range(len(self._in_flight)))]
        array, self._arriving_array = self._arriving_array, None
        return arrived[0] if array is None else array

    def _arrive(self, stage: int) -> Tensor:
        flight, self._in_flight[stage] = self._in_flight[stage], None
        if flight is None:
            raise PlanInvariantError("an exchange was waited for twice, or before it was started")
        if flight.work is not None:
            flight.work.wait()
        return flight.received

    def _unpack(
        self, layout: MessageLayout, message: Tensor, index: PackIndex, local: Sequence[Sequence[Tensor]]
    ) -> list[Tensor]:
        """The rows of each tensor, behind its local blocks."""
        room = sum(map(len, local[0]))
        outputs = layout.unpack(message, index, self._group.buffers, room)
        if room:
            for output, blocks in zip(outputs, local, strict=True):
                torch.cat(list(blocks), out=output[:room])
        return outputs


def _by_stage(splits: list[int], num_stages: int) -> list[list[int]]:
    each = len(splits) // num_stages
    return [splits[i * each : (i + 1) * each] for i in range(num_stages)]


class _Send(Function):
    """Sending, and receiving the gradients."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, stage: int, anchor: Tensor | None, *tensors: Tensor) -> Any:
        ctx.transfer, ctx.stage = transfer, stage
        local = transfer.send_forward(stage, tensors)
        fixed = [block for blocks, joins in zip(local, transfer.wanted, strict=True) if not joins for block in blocks]
        ctx.mark_non_differentiable(*fixed)
        ctx.num_local = sum(map(len, local))
        return *(torch.empty(0, device=tensors[0].device) for _ in range(transfer.num_receives)), *chain(*local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        local = grads[len(grads) - ctx.num_local :]
        received = iter(ctx.transfer.receive_backward(ctx.stage, local))
        return None, None, None, *(next(received) if joins else None for joins in ctx.transfer.wanted)


class _Receive(Function):
    """Receiving, and sending the gradients back."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, stage: int, num_links: int, *tensors: Tensor) -> Any:
        ctx.transfer, ctx.stage, ctx.num_links = transfer, stage, num_links
        outputs = transfer.receive_forward(stage, tensors[num_links:])
        ctx.mark_non_differentiable(*(o for o, joins in zip(outputs, transfer.wanted, strict=True) if not joins))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        transfer = ctx.transfer
        joining = [grad for grad, joins in zip(grads, transfer.wanted, strict=True) if joins]
        local = transfer.send_backward(ctx.stage, joining)
        links = [torch.empty(0, device=grads[0].device) for _ in range(ctx.num_links)]
        return None, None, None, *links, *chain(*local)
