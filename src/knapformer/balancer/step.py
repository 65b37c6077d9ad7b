"""One planned step: its placement, the exchanges that carry it out on this rank, and the layout the model runs on.

A step is immutable. Whatever is computed with it keeps using it, also in backward and in recomputation, so any number
of steps may be in flight: planning the next batch before this one's backward changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from knapformer.attention import Layout
from knapformer.attention.current import activate, deactivate, mark
from knapformer.attention.split import SplitTables
from knapformer.comm import DeviceExchange, RankGroup, exchange, gather_integers
from knapformer.comm.gather import check_equal, stable_digest
from knapformer.errors import PlanError
from knapformer.plan import (
    Cluster,
    CostModel,
    Exchange,
    Metrics,
    Placement,
    measure,
    sequence_exchange,
    token_exchange,
)
from knapformer.plan.placement import per_rank
from knapformer.plan.timeline import timeline


@dataclass(frozen=True, eq=False)
class RoutingStep:
    """What `SequenceBalancer.plan_routing` returns. Methods that move rows are collective over the balancing group.

    Attributes:
        placement: where every token and attention row of the step goes.
        cluster: the ranks it was planned for.
        cost: the prices it was planned with.
        group: the balancing group.
        attention_ranks: the ranks of the balancing group that share this rank's split attention: its node, its compute
            bag, or all, if a sequence spans several of those.
        attention_group: their process group.
        device: where index tensors live.
        kernel: attention kernel by name, None for the device's default.
        verify: whether routed tensors are compared across ranks before they move, so that errors are collective.
        overlap: whether traffic of split attention travels behind attention of whole sequences.
        token_grid: every rank's packed rows are padded to a multiple of it.
        plan_seconds: time this rank took to gather lengths, plan, and compare plans [s]; of a prefetched step, to plan,
            in its thread.
    """

    placement: Placement
    cluster: Cluster
    cost: CostModel
    group: RankGroup
    attention_ranks: range
    attention_group: RankGroup
    device: torch.device
    kernel: str | None = None
    verify: bool = True
    overlap: bool = True
    token_grid: int = 1
    plan_seconds: float = 0.0

    @property
    def rank(self) -> int:
        """This process' rank in the balancing group."""
        return self.group.rank

    @cached_property
    def layout(self) -> Layout:
        """This rank's packed tokens, and `attend` over them."""
        return Layout.of(
            self.placement,
            self.rank,
            self.device,
            kernel=self.kernel,
            split_attention=self.split_attention,
            overlap=self.overlap,
            token_grid=self.token_grid,
        )

    @cached_property
    def metrics(self) -> Metrics:
        """Modelled loads, imbalances and traffic of the placement."""
        return measure(self.placement, self.cluster, self.cost, token_grid=self.token_grid)

    def prepare(self, num_heads: int) -> Self:
        """Make now what routing and the first layer of a model with `num_heads` heads would make when they need it."""
        _ = self.layout, self._to_shards, self._to_home, self._to_holders
        if self.placement.sequences.context_length.any():
            _ = self.layout.context, self._context_to_holders
        if self.split_attention is not None:
            self.split_attention.for_heads(num_heads)
        return self

    def route(
        self, x: Tensor, features: Sequence[Tensor] | None = None
    ) -> tuple[list[int], Tensor, list[Tensor] | None]:
        """Move this rank's tokens to where the placement wants them.

        Args:
            x: (tokens at home, ...) of any dtype, in the order of the lengths given to `plan_routing`.
            features: more tensors with one row per token, each of any dtype; they travel in the same message.

        Returns:
            Lengths of the packed shards here, x, and features, with (packed tokens here, ...) rows. Bit-exact;
            gradients flow back to the home ranks. Rows of padding are zero, and no shard.

        Raises:
            PlanError, RankMismatchError: on every rank, if a rank's tensors do not fit the plan or the other ranks'.
        """
        tensors = self._move("route", [x, *(features or [])], self._to_shards, self.placement.sequences.tokens_at_home)
        if padding := self.layout.padding:
            tensors = [_insert(tensor, padding) for tensor in tensors]
        return list(self.layout.seq_lens), tensors[0], tensors[1:] if features is not None else None

    def reverse_route(
        self, x: Tensor, features: Sequence[Tensor] | None = None
    ) -> tuple[list[int], Tensor, list[Tensor] | None]:
        """Bring packed tokens home, without padding: the inverse of `route`, also in the order of rows. See there."""
        tensors = [x, *(features or [])]
        if padding := self.layout.padding:
            tensors = [_remove(tensor, padding, self.layout.num_tokens) for tensor in tensors]
        tensors = self._move("reverse_route", tensors, self._to_home, lambda _: self.placement.tokens())
        lengths = self.placement.sequences.length[self.placement.sequences.of_rank(self.rank)].tolist()
        return lengths, tensors[0], tensors[1:] if features is not None else None

    def deliver(self, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Give per-sequence rows (timesteps, pooled text) to exactly the ranks that have tokens of the sequence.

        Args:
            vectors: (sequences at home, ...) each, of any dtype.

        Returns:
            (layout.num_sequences, ...) each, in the order of `layout.sequence_index`. Gradients add up at home.
        """
        world = self.placement.world_size
        counts = np.bincount(self.placement.sequences.home, minlength=world)
        return tuple(self._move("deliver", list(vectors), self._to_holders, lambda _: counts))

    def deliver_context(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Give the rows beside each sequence, such as text it cross-attends to, to every rank with tokens of it.

        Args:
            rows: (context rows at home, ...) each, of any dtype, in the order of `context_lens`.

        Returns:
            (layout.context.num_rows, ...) each, for `layout.cross_attend`. Gradients add up at home.
        """
        sequences = self.placement.sequences

        def counts(world_size: int) -> np.ndarray:
            return per_rank(sequences.home, sequences.context_length, world_size)

        return tuple(self._move("deliver_context", list(rows), self._context_to_holders, counts))

    def __enter__(self) -> Self:
        activate(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deactivate()

    # -- tables of this rank, made when first used ----------------------------------------------------------------

    @cached_property
    def _digest(self) -> int:
        return self.placement.digest()

    @cached_property
    def _token_table(self) -> Exchange:
        return token_exchange(self.placement, self.rank)

    @cached_property
    def _to_shards(self) -> DeviceExchange:
        return DeviceExchange.of(self._token_table, self.device)

    @cached_property
    def _to_home(self) -> DeviceExchange:
        return DeviceExchange.of(self._token_table.inverse(), self.device)

    @cached_property
    def _to_holders(self) -> DeviceExchange:
        return DeviceExchange.of(sequence_exchange(self.placement, self.rank), self.device)

    @cached_property
    def _context_to_holders(self) -> DeviceExchange:
        rows = self.placement.sequences.context_length
        return DeviceExchange.of(sequence_exchange(self.placement, self.rank, rows), self.device)

    @cached_property
    def split_attention(self) -> SplitTables | None:
        """The exchanges of split attention; None if no sequence of this rank's attention group is split."""
        rows, ranks = self.placement.attention_shards, self.attention_ranks
        here = (rows.rank >= ranks.start) & (rows.rank < ranks.stop)
        if not self.placement.split[rows.seq[here]].any():
            return None
        plan = timeline(self.placement, self.cluster, self.cost, token_grid=self.token_grid)
        num_stages = plan.num_stages if self.overlap else 1
        num_first = int(plan.work.num_first[self.rank])
        return SplitTables(
            self.placement,
            self.rank,
            ranks,
            self.attention_group,
            self.device,
            num_stages=num_stages,
            num_first=num_first,
        )

    def _move(
        self, verb: str, tensors: list[Tensor], table: DeviceExchange, rows_of: Callable[[int], np.ndarray]
    ) -> list[Tensor]:
        differentiable = self._agree(verb, tensors, rows_of(self.placement.world_size)) if self.verify else None
        moved = exchange(tensors, table, self.group, differentiable=differentiable)
        return [mark(tensor, self) for tensor in moved]

    def _agree(self, verb: str, tensors: list[Tensor], expected_rows: np.ndarray) -> list[bool]:
        """Compare the tensors of all ranks; return which of them need a gradient on any rank."""
        rows = {len(t) if t.ndim else -1 for t in tensors}
        num_rows = rows.pop() if len(rows) == 1 else -2  # -2: the tensors of this rank differ
        kinds = [(str(t.dtype), tuple(t.shape[1:])) for t in tensors]
        wants = sum(1 << i for i, t in enumerate(tensors) if t.requires_grad)
        signature = [stable_digest(verb), stable_digest(kinds), self._digest]
        table = gather_integers(self.group, np.array([*signature, wants, num_rows], dtype=np.int64))
        check_equal(
            self.group.ranks,
            table,
            [
                "the call (route, reverse_route, deliver, deliver_context)",
                "dtypes or trailing shapes of the tensors",
                "the step's plan",
            ],
            "make the same calls in the same order on every rank; tensors may differ in their number of rows only",
        )
        for rank, got, expected in zip(self.group.ranks, table[:, 4].tolist(), expected_rows.tolist(), strict=True):
            if got != expected:
                found = "tensors with different numbers of rows" if got == -2 else f"{got} rows"
                raise PlanError(f"rank {rank}: {verb} got {found}, the step has {expected} on this rank")
        wanted = int(np.bitwise_or.reduce(table[:, 3]))
        return [bool(wanted >> i & 1) for i in range(len(tensors))]


def _insert(tensor: Tensor, padding: range) -> Tensor:
    """Rows of zeros at the positions `padding`."""
    zeros = tensor.new_zeros(len(padding), *tensor.shape[1:])
    return torch.cat([tensor[: padding.start], zeros, tensor[padding.start :]])


def _remove(tensor: Tensor, padding: range, num_rows: int) -> Tensor:
    """The other rows. A tensor that has not `num_rows` stays as it is, to be reported on all ranks."""
    if not tensor.ndim or len(tensor) != num_rows:
        return tensor
    return torch.cat([tensor[: padding.start], tensor[padding.stop :]])
