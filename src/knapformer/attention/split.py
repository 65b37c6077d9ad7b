"""Attention of the sequences that several ranks share: send q, k, v to the rows' ranks, attend, send outputs back.

    q, k, v of split tokens --one all-to-all--> segments --kernel--> outputs --one all-to-all--> split tokens

The tables (`knapformer.plan.attention`) carry every pattern: whole heads, uneven heads, parts of a head's queries.
Sending and attending return a transfer under way, so that a caller puts other work before it waits. Where a rank has
too little of that, split attention goes in several stages, each with an all-to-all of its own there and back: while one
is computed, the next arrives and the last one's outputs return.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from knapformer.attention.kernels import Kernel, Segments
from knapformer.comm import DeviceExchange, RankGroup, Transfer, start_exchange
from knapformer.plan import AttentionExchange, Placement, attention_exchange


@dataclass(frozen=True, slots=True, eq=False)
class SplitAttention:
    """One rank's split attention for one step and one number of heads. Sending is collective over `group`.

    Attributes:
        group: the ranks that exchange it.
        qkv, out: the exchanges there and back.
        segments: of each stage, as attention kernels take them.
        num_heads: H of the model.
        head_group: heads c that travel together; a token is H / c rows of the exchanges.
    """

    group: RankGroup
    qkv: DeviceExchange
    out: DeviceExchange
    segments: tuple[Segments, ...]
    num_heads: int
    head_group: int

    @classmethod
    def of(cls, table: AttentionExchange, num_heads: int, group: RankGroup, device: torch.device) -> Self:
        rows, queries = table.out.num_target_rows, table.q_rows.tolist()
        arriving = [(q, k, k) for q, k in zip(queries, table.k_rows.tolist(), strict=True)]
        leaving = [(q,) for q in queries] if len(queries) > 1 else ((),)
        return cls(
            group,
            DeviceExchange.of(table.qkv, device, source_rows=((rows,) * 3,), target_rows=arriving),
            DeviceExchange.of(table.out, device, source_rows=leaving),
            tuple(Segments.of(q, k, device) for q, k in table.segment_lens()),
            num_heads,
            table.head_group,
        )

    def send(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, *, local_tokens: Sequence[int] = ()) -> Transfer:
        """q, k, v of this rank's split tokens; arrives stage by stage as (rows, c, K) q, k, v of its segments.

        Args:
            q_THK, k_THK, v_THK: of split tokens, and before them of local blocks: `Transfer.local`.
            local_tokens: tokens of each local block.
        """
        row = self.head_group, q_THK.shape[2]
        return start_exchange([q_THK, k_THK, v_THK], self.qkv, self.group, local_rows=local_tokens, arriving_shape=row)

    def attend(self, kernel: Kernel, arriving: Iterable[list[Tensor]], scale: float | None) -> Transfer:
        """Attention of this rank's segments, stage by stage as q, k and v arrive; the outputs are under way."""
        stages = zip(self.segments, arriving, strict=True)
        outputs = (kernel(q, k, v, segments, scale) for segments, (q, k, v) in stages)
        returned = self.give_back(next(outputs))
        for o in outputs:
            returned.send([o])
        return returned

    def give_back(self, o: Tensor) -> Transfer:
        """(rows, c, K) outputs of the first stage; all stages arrive as rows of this rank's split tokens."""
        return start_exchange([o], self.out, self.group)

    def rows(self, x_THK: Tensor) -> Tensor:
        """(T, H, K) -> (rows, c, K)."""
        return x_THK.reshape(len(x_THK) * self.num_heads // self.head_group, self.head_group, x_THK.shape[2])

    def tokens(self, rows: Tensor) -> Tensor:
        """(rows, c, K) -> (T, H, K)."""
        return rows.reshape(len(rows) * self.head_group // self.num_heads, self.num_heads, rows.shape[2])


class SplitTables:
    """The split attention of one rank in one step, for any number of heads. Holds no step, so that both may go at once.

    Args:
        placement: of the step.
        rank: of this process in the placement.
        ranks: of the placement that exchange with it.
        group: their process group.
        device: of the index tensors.
        num_stages: all-to-alls to make of each exchange.
        num_first: whole sequences to attend to before split attention, on this rank; the others follow it.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        ranks: range,
        group: RankGroup,
        device: torch.device,
        *,
        num_stages: int,
        num_first: int,
    ) -> None:
        self._placement, self._rank, self._ranks = placement, rank, ranks
        self._group, self._device = group, device
        self.num_stages, self.num_first = num_stages, num_first
        self._made: dict[tuple[int, int], SplitAttention] = {}

    def for_heads(self, num_heads: int, *, num_stages: int | None = None) -> SplitAttention:
        """Made when a layer first asks, and kept. `num_stages` if other than the step's."""
        key = num_heads, self.num_stages if num_stages is None else num_stages
        if key not in self._made:
            table = attention_exchange(self._placement.with_num_heads(num_heads), self._rank, num_stages=key[1])
            table = replace(table, qkv=table.qkv.narrow(self._ranks), out=table.out.narrow(self._ranks))
            self._made[key] = SplitAttention.of(table, num_heads, self._group, self._device)
        return self._made[key]
