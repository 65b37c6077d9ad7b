"""A placement as bars: every shard is a block with two places, at its sequence's home rank and where it is planned.

    rank 0      rank 1            rank 0      rank 1
    [ C att ]                     [ A att ]   [ C att ]        attention above,
    [ A att ]   [ B att ]   ->    [ C att ]   [ B att ]        token-wise work below,
    [ C tok ]                     [ C tok ]   [ C tok ]        a block is as high as it takes [ms]
    [ A tok ]   [ B tok ]         [ A tok ]   [ B tok ]

A block keeps its height when it moves, since a shard's work does not depend on the rank. Pictures, pages and animations
draw these blocks and compute nothing. Prices per sequence are left out: they belong to no shard.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from knapformer.plan import TICKS_PER_SECOND, Cluster, CostModel, Metrics, Placement, lower_bound, measure
from knapformer.plan.arrays import Int64Array, exclusive_cumsum, starts_within
from knapformer.plan.attention import split_pairs
from knapformer.plan.predict import attention_traffic

MILLISECOND = TICKS_PER_SECOND // 1000


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """All shards of a step, structure of arrays: token shards, then attention shards.

    Attributes:
        seq: (N,) sequence id.
        is_attention: (N,) whether the block is attention work.
        start, stop: (N,) the shard's tokens, or its attention rows.
        height: (N,) work of the shard [ms per layer, forward].
        home, home_base: (N,) its sequence's home rank, and where the block begins in that rank's bar [ms].
        rank, base: (N,) the same as planned.
    """

    seq: Int64Array
    is_attention: np.ndarray
    start: Int64Array
    stop: Int64Array
    height: np.ndarray
    home: Int64Array
    home_base: np.ndarray
    rank: Int64Array
    base: np.ndarray

    def __len__(self) -> int:
        return len(self.seq)


@dataclass(frozen=True, slots=True, eq=False)
class PlanView:
    """What a picture of one step shows.

    Attributes:
        title: of the picture.
        planner: which made the placement.
        num_heads: query heads; a sequence has that many attention rows per token.
        blocks: the bars.
        length, text_length: (S,) tokens of each sequence.
        split: (S,) whether several ranks share the sequence.
        traffic: (S,) bytes of the sequence's q, k, v and o that cross ranks, per layer, forward.
        nodes: ranks of each node.
        bound: what no placement can beat [ms].
        before, after: metrics before balancing and as planned.
    """

    title: str
    planner: str
    num_heads: int
    blocks: Blocks
    length: Int64Array
    text_length: Int64Array
    split: np.ndarray
    traffic: Int64Array
    nodes: tuple[range, ...]
    bound: float
    before: Metrics
    after: Metrics

    @classmethod
    def of(cls, placement: Placement, cluster: Cluster, cost: CostModel, title: str = "") -> Self:
        """The view of a placement whose heads are the cost model's."""
        sequences = placement.sequences
        at_home = Placement.whole(
            sequences,
            sequences.home,
            world_size=placement.world_size,
            num_heads=placement.num_heads,
            planner="local",
        )
        return cls(
            title=title,
            planner=placement.planner,
            num_heads=placement.num_heads,
            blocks=_blocks(placement, cost),
            length=sequences.length,
            text_length=sequences.text_length,
            split=placement.split,
            traffic=_bytes_across_ranks(placement, cluster, cost),
            nodes=tuple(cluster.node_ranks()),
            bound=lower_bound(sequences, cluster, cost) / MILLISECOND,
            before=measure(at_home, cluster, cost),
            after=measure(placement, cluster, cost),
        )

    @property
    def world_size(self) -> int:
        return self.nodes[-1].stop

    def top(self, *, home: bool) -> float:
        """The highest bar, or the bound if that is higher [ms]."""
        b = self.blocks
        ends = (b.home_base if home else b.base) + b.height
        return max(float(ends.max(initial=0.0)), self.bound)


def _blocks(placement: Placement, cost: CostModel) -> Blocks:
    """Blocks in whole ticks, then in milliseconds."""
    sequences, tokens, rows = placement.sequences, placement.token_shards, placement.attention_shards
    order = placement.packed_order()
    token_work = cost.token * tokens.count[order]
    row_price = cost.per_qk_pair * sequences.length[rows.seq]
    row_order = np.lexsort((rows.start, rows.seq, placement.split[rows.seq], rows.rank))
    row_work = (row_price * rows.count)[row_order]
    token_top = cost.token * placement.tokens()
    token_home_top = cost.token * sequences.tokens_at_home(placement.world_size)
    area = cost.per_qk_pair * placement.num_heads * sequences.length * sequences.length
    area_base = exclusive_cumsum(area) - exclusive_cumsum(area)[np.searchsorted(sequences.home, sequences.home)]
    seq = np.concatenate([tokens.seq[order], rows.seq[row_order]])
    home = sequences.home[seq]
    home_tokens = cost.token * (sequences.home_start[tokens.seq] + tokens.start)[order]
    home_rows = token_home_top[sequences.home[rows.seq]] + area_base[rows.seq] + row_price * rows.start
    rank = np.concatenate([tokens.rank[order], rows.rank[row_order]])
    base = [
        starts_within(tokens.rank[order], token_work),
        token_top[rows.rank[row_order]] + starts_within(rows.rank[row_order], row_work),
    ]
    return Blocks(
        seq=seq,
        is_attention=np.arange(len(seq)) >= len(order),
        start=np.concatenate([tokens.start[order], rows.start[row_order]]),
        stop=np.concatenate([tokens.stop[order], rows.stop[row_order]]),
        height=np.concatenate([token_work, row_work]) / MILLISECOND,
        home=home,
        home_base=np.concatenate([home_tokens, home_rows[row_order]]) / MILLISECOND,
        rank=rank,
        base=np.concatenate(base) / MILLISECOND,
    )


def _bytes_across_ranks(placement: Placement, cluster: Cluster, cost: CostModel) -> Int64Array:
    """(S,) bytes that cross ranks for each sequence."""
    shard, _ = split_pairs(placement)
    traffic = attention_traffic(placement)
    crosses = traffic.source != traffic.target
    rows = np.zeros(len(placement.sequences), dtype=np.int64)
    np.add.at(rows, placement.attention_shards.seq[shard], np.where(crosses, traffic.rows, 0))
    return rows * (cost.head_dim * cluster.links.element_bytes)
