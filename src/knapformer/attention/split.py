"""Attention of the sequences that several ranks share: send q, k, v to the rows' ranks, attend, send outputs back.

    q, k, v of split tokens --one all-to-all--> segments --kernel--> outputs --one all-to-all--> split tokens

The tables (`knapformer.plan.attention`) carry every pattern: whole heads, uneven heads, parts of a head's queries.
Sending, computing and returning are three methods, so that a caller can put other work between them.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from knapformer.attention.kernels import Segments
from knapformer.comm import DeviceExchange, RankGroup, exchange
from knapformer.plan import AttentionExchange


@dataclass(frozen=True, slots=True, eq=False)
class SplitAttention:
    """One rank's split attention for one step and one number of heads. All methods are collective over `group`."""

    group: RankGroup
    qkv: DeviceExchange
    out: DeviceExchange
    segments: Segments
    head_group: int
    num_queries: int
    num_keys: int

    @classmethod
    def of(cls, table: AttentionExchange, group: RankGroup, device: torch.device) -> Self:
        return cls(
            group,
            DeviceExchange.of(table.qkv, device),
            DeviceExchange.of(table.out, device),
            Segments.of(table.q_lens, table.k_lens, device),
            table.head_group,
            table.out.num_source_rows,
            table.qkv.num_target_rows - table.out.num_source_rows >> 1,
        )

    def send(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of this rank's split tokens -> (rows, head_group, K) q, k, v of this rank's segments."""
        rows = torch.cat([q_THK, k_THK, v_THK])
        rows = rows.reshape(len(rows) * rows.shape[1] // self.head_group, self.head_group, rows.shape[2])
        (received,) = exchange([rows], self.qkv, self.group)
        q, k, v = received.split([self.num_queries, self.num_keys, self.num_keys])
        return q, k, v

    def give_back(self, o: Tensor, num_heads: int) -> Tensor:
        """(rows, head_group, K) outputs of this rank's segments -> (T, H, K) outputs of this rank's split tokens."""
        (rows,) = exchange([o], self.out, self.group)
        return rows.reshape(len(rows) * self.head_group // num_heads, num_heads, rows.shape[2])
