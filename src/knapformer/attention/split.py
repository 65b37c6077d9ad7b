"""Attention of the sequences that several ranks share: send q, k, v to the rows' ranks, attend, send outputs back.

    q, k, v of split tokens --one all-to-all--> segments --kernel--> outputs --one all-to-all--> split tokens

The tables (`knapformer.plan.attention`) carry every pattern: whole heads, uneven heads, parts of a head's queries.
Sending and giving back return a transfer under way, so that a caller puts other work before it waits.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from knapformer.attention.kernels import Segments
from knapformer.comm import DeviceExchange, RankGroup, Transfer, start_exchange
from knapformer.plan import AttentionExchange


@dataclass(frozen=True, slots=True, eq=False)
class SplitAttention:
    """One rank's split attention for one step and one number of heads. Sending is collective over `group`."""

    group: RankGroup
    qkv: DeviceExchange
    out: DeviceExchange
    segments: Segments
    num_heads: int
    head_group: int

    @classmethod
    def of(cls, table: AttentionExchange, num_heads: int, group: RankGroup, device: torch.device) -> Self:
        num_rows, num_queries = table.out.num_target_rows, table.out.num_source_rows
        num_keys = (table.qkv.num_target_rows - num_queries) // 2
        return cls(
            group,
            DeviceExchange.of(
                table.qkv, device, source_rows=(num_rows,) * 3, target_rows=(num_queries, num_keys, num_keys)
            ),
            DeviceExchange.of(table.out, device),
            Segments.of(table.q_lens, table.k_lens, device),
            num_heads,
            table.head_group,
        )

    def send(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Transfer:
        """q, k, v of this rank's split tokens; arrives as (rows, head_group, K) q, k, v of this rank's segments."""
        return start_exchange([self._rows(x) for x in (q_THK, k_THK, v_THK)], self.qkv, self.group)

    def give_back(self, o: Tensor) -> Transfer:
        """(rows, head_group, K) outputs of this rank's segments; arrives as rows of this rank's split tokens."""
        return start_exchange([o], self.out, self.group)

    def tokens(self, rows: Tensor) -> Tensor:
        """(rows, head_group, K) rows of this rank's split tokens -> (T, H, K)."""
        return rows.reshape(len(rows) * self.head_group // self.num_heads, self.num_heads, rows.shape[2])

    def _rows(self, x_THK: Tensor) -> Tensor:
        return x_THK.reshape(len(x_THK) * self.num_heads // self.head_group, self.head_group, x_THK.shape[2])
