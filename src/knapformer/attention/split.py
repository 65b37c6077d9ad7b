"""Attention of the sequences that several ranks share: send q, k, v to the rows' ranks, attend, send outputs back.

    q, k, v of split tokens --one all-to-all--> segments --kernel--> outputs --one all-to-all--> split tokens

The tables (`knapformer.plan.attention`) carry every pattern: whole heads, uneven heads, parts of a head's queries.
Sending and giving back return a transfer under way, so that a caller puts other work before it waits.
"""

from collections.abc import Sequence
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

    def send(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, *, stay: Sequence[int] = ()) -> Transfer:
        """q, k, v of this rank's split tokens; arrives as (rows, head_group, K) q, k, v of this rank's segments.

        Args:
            q_THK, k_THK, v_THK: of split tokens, and before them of parts that stay: `Transfer.stayed`.
            stay: tokens of each of these parts.
        """
        row = self.head_group, q_THK.shape[2]
        return start_exchange([q_THK, k_THK, v_THK], self.qkv, self.group, stay=stay, row=row)

    def give_back(self, o: Tensor) -> Transfer:
        """(rows, head_group, K) outputs of this rank's segments; arrives as rows of this rank's split tokens."""
        return start_exchange([o], self.out, self.group)

    def rows(self, x_THK: Tensor) -> Tensor:
        """(T, H, K) -> (rows, head_group, K)."""
        return x_THK.reshape(len(x_THK) * self.num_heads // self.head_group, self.head_group, x_THK.shape[2])

    def tokens(self, rows: Tensor) -> Tensor:
        """(rows, head_group, K) -> (T, H, K)."""
        return rows.reshape(len(rows) * self.head_group // self.num_heads, self.num_heads, rows.shape[2])
