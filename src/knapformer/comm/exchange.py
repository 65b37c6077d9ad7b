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

import numpy as np
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
from knapformer.plan.arrays import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExchange:
    """An `Exchange` with its index tensors on a device.

    Attributes:
        sources, targets: where rows lie in the message, before and after it travels. One of each, or one on one side
            and several on the other, if the exchange has several parts.
    """

    sources: tuple[Side, ...]
    targets: tuple[Side, ...]

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
            source_rows, target_rows: for stacked tensors, the rows of each. If the table has several parts, for each
                part on one of the sides; what leaves, or arrives, apart.
        """
        return cls(
            _sides(table.send_index, table.num_source_rows, table.input_split_sizes, source_rows, device),
            _sides(table.recv_index, table.num_target_rows, table.output_split_sizes, target_rows, device),
        )

    @property
    def num_parts(self) -> int:
        """Messages that the exchange consists of."""
        return max(len(self.sources), len(self.targets))


def _sides(
    index: Int64Array, num_rows: int, splits: Int64Array, parts: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[Side, ...]:
    if len(parts) == 1:
        return (Side.of(index, num_rows, splits, parts[0], device),)
    sides, row, at = [], 0, 0
    for lanes, sizes in zip(parts, np.split(splits, len(parts)), strict=True):
        count = int(sizes.sum())
        sides.append(Side.of(index[at : at + count] - row, sum(lanes), sizes, lanes if len(lanes) > 1 else (), device))
        row, at = row + sum(lanes), at + count
    return tuple(sides)


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
        tensors, table, group, differentiable: see `exchange`. If rows leave in parts, these are of the first.
        stay: rows of each part of each tensor, before those of the table, that is not sent: `Transfer.stayed`.
        row: trailing shape of what arrives, if a row of the tensors is several rows of the table.
    """
    wanted = [t.requires_grad for t in tensors] if differentiable is None else list(differentiable)
    joins = torch.is_grad_enabled() and any(wanted)
    transfer = Transfer(table, group, tensors, wanted if joins else [False] * len(tensors), list(stay), row)
    transfer.send(tensors)
    return transfer


class Transfer:
    """One exchange under way, and its way back. Made by `start_exchange`.

    An exchange of several parts has one array on one side, packed or unpacked at once, and several on the other, each
    with a message of its own, which travels while others are worked on.

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
        self.tokens: list[Tensor] = []  # carry the graph from start to wait; have no elements
        self.stayed: list[list[Tensor]] = []
        self._table, self._group = table, group
        self._stay, self._before = stay, list[int]()
        like = [(t.dtype, t.shape[1:]) for t in tensors]
        lanes = list(range(len(like))) if table.sources[0].lanes else None
        joins = [i for i, join in enumerate(wanted) if join]
        back = [like[i] for i in joins], joins if lanes else None
        if row is None:
            self._out, self._back = Format.of(like, lanes), Format.of(*back)
        else:
            self._out = Format.of([(dtype, torch.Size(row)) for dtype, _ in like], lanes)
            self._back = Format.of(*back, fold=like[0][1].numel() // torch.Size(row).numel())
        self._flights: list[tuple[Any, Tensor, Tensor] | None] = [None] * table.num_parts
        self._whole: Tensor | None = None  # where parts arrive that make one array
        self._sent = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send the next part, of an exchange whose rows leave in parts; `start_exchange` has sent the first."""
        # An input of our own makes autograd visit this exchange on every rank, whatever this rank's tensors need.
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=True) if any(self.wanted) else None
        made = _Start.apply(self, self._sent, anchor, *tensors)
        self._sent += 1
        self.tokens += made[: self.num_tokens]
        each = len(self._stay)
        self.stayed = [list(made[i : i + each]) for i in range(self.num_tokens, len(made), each or 1)]

    @property
    def num_tokens(self) -> int:
        """Waits that follow a send."""
        return len(self._table.targets)

    def wait(self, *before: Tensor) -> list[Tensor]:
        """The outputs, in the order of the tensors; once for each part that arrives apart.

        Args:
            before: where one tensor travels, parts to stand before the rows that arrive.
        """
        apart = len(self._table.targets) > 1
        part = len(self._table.targets) - len(self.tokens) if apart else 0
        count = 1 if apart else len(self.tokens)
        tokens, self.tokens, self.stayed = self.tokens[:count], self.tokens[count:], []
        return list(_Wait.apply(self, part, count, *tokens, *before))

    def launch(self, part: int, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Pack source rows and start their all-to-alls. Returns the parts of each tensor that stay."""
        sources, targets = self._table.sources, self._table.targets
        return self._launch(self._out, tensors, part, sources, targets, self._stay, range(len(targets)))

    def land(self, part: int, before: Sequence[Tensor]) -> list[Tensor]:
        """Wait, and take the target rows out of the message."""
        self._before = [len(each) for each in before]
        targets = self._table.targets
        return self._take(self._out, self._receive(part, targets), targets[part], [before])

    def launch_back(self, part: int, grads: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """`launch` for the gradients of the outputs that take part. Returns those of the parts before."""
        sources, targets = self._table.targets, self._table.sources
        order = range(len(targets))[::-1]  # backward, what was sent last is worked on first
        return self._launch(self._back, grads, part, sources, targets, self._before, order)

    def land_back(self, part: int, stayed: Sequence[Tensor]) -> list[Tensor]:
        """Wait, and add up the gradients of the source rows. `stayed` are those of all parts that `launch` returned."""
        received, side, each = self._receive(part, self._table.sources), self._table.sources[part], len(self._stay)
        if side.copies is not None:
            self._back.add_copies(received, side.copies)
        parts = [stayed[i * each : (i + 1) * each] for i, join in enumerate(self.wanted) if join]
        return self._take(self._back, received, side, parts)

    def _launch(
        self,
        format: Format,
        tensors: Sequence[Tensor],
        part: int,
        sources: tuple[Side, ...],
        targets: tuple[Side, ...],
        before: list[int],
        order: range,
    ) -> list[Sequence[Tensor]]:
        skip, side = sum(before), sources[part]
        message = format.pack(tensors, side, self._group.buffers, skip)
        if len(sources) == 1:
            splits = _cut(side.splits, len(targets))
            messages = message.split([sum(each) for each in splits])
            for i in order:
                self._fly(format, i, messages[i], splits[i], targets[i].splits, None)
        else:
            if self._whole is None:
                self._whole = self._group.buffers.take(
                    sum(targets[0].splits), format.width, format.word, message.device
                )
            splits = _cut(targets[0].splits, len(sources))
            received = self._whole.split([sum(each) for each in splits])[part]
            self._fly(format, part, message, side.splits, splits[part], received)
        return [tensor[:skip].split(before) if before else () for tensor in tensors]

    def _fly(
        self,
        format: Format,
        part: int,
        message: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        received: Tensor | None,
    ) -> None:
        handle, work = self._group.handle, None
        if handle is None:
            received = message if received is None else received.copy_(message)
        else:
            if received is None:
                size = sum(output_splits)
                received = self._group.buffers.take(size, format.width, format.word, message.device)
            work = dist.all_to_all_single(received, message, output_splits, input_splits, group=handle, async_op=True)
        self._flights[part] = work, message, received

    def _receive(self, part: int, targets: tuple[Side, ...]) -> Tensor:
        """The message that arrived for a part, or for all parts where they make one array."""
        apart = len(targets) > 1
        arrived = [self._arrive(i) for i in ([part] if apart else range(len(self._flights)))]
        whole, self._whole = self._whole, None
        return arrived[0] if whole is None else whole

    def _arrive(self, part: int) -> Tensor:
        flight, self._flights[part] = self._flights[part], None
        if flight is None:
            raise PlanInvariantError("an exchange was waited for twice, or before it was started")
        work, _, received = flight
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


def _cut(splits: list[int], parts: int) -> list[list[int]]:
    each = len(splits) // parts
    return [splits[i * each : (i + 1) * each] for i in range(parts)]


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, part: int, anchor: Tensor | None, *tensors: Tensor) -> Any:
        ctx.transfer, ctx.part = transfer, part
        stayed = transfer.launch(part, tensors)
        fixed = [each for parts, join in zip(stayed, transfer.wanted, strict=True) if not join for each in parts]
        ctx.mark_non_differentiable(*fixed)
        ctx.num_stayed = sum(map(len, stayed))
        return *(torch.empty(0, device=tensors[0].device) for _ in range(transfer.num_tokens)), *chain(*stayed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        stayed = grads[len(grads) - ctx.num_stayed :]
        landed = iter(ctx.transfer.land_back(ctx.part, stayed))
        return None, None, None, *(next(landed) if join else None for join in ctx.transfer.wanted)


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, part: int, num_tokens: int, *tensors: Tensor) -> Any:
        ctx.transfer, ctx.part, ctx.num_tokens = transfer, part, num_tokens
        outputs = transfer.land(part, tensors[num_tokens:])
        ctx.mark_non_differentiable(*(o for o, join in zip(outputs, transfer.wanted, strict=True) if not join))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        transfer = ctx.transfer
        before = transfer.launch_back(ctx.part, [g for g, join in zip(grads, transfer.wanted, strict=True) if join])
        tokens = [torch.empty(0, device=grads[0].device) for _ in range(ctx.num_tokens)]
        return None, None, None, *tokens, *chain(*before)
