"""How good a placement is: loads, imbalances, traffic, and the bound that no placement can beat.

imbalance is max/mean over ranks (>= 1); makespan the largest load; gap = makespan / lower bound - 1. Traffic counts
the elements of q, k, v and o that cross ranks in one forward pass of one layer: a uniform bag of g crosses 1 - 1/g.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from knapformer.plan.arrays import Int64Array, exact_sum
from knapformer.plan.attention import split_pairs
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import TICKS_PER_SECOND, CostModel
from knapformer.plan.placement import Placement
from knapformer.plan.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one placement.

    Attributes:
        time_imbalance, token_imbalance, attention_imbalance: max/mean over ranks of load, tokens, attention area.
        gap: makespan over lower bound, minus 1.
        split_traffic: share of all q, k, v, o elements that cross ranks.
        cross_node_traffic: share that crosses nodes.
        routed_fraction: share of tokens that leave their home rank.
        split_sequences: number of sequences that are split.
        makespan, lower_bound: per layer, forward [s].
    """

    time_imbalance: float
    token_imbalance: float
    attention_imbalance: float
    gap: float
    split_traffic: float
    cross_node_traffic: float
    routed_fraction: float
    split_sequences: int
    makespan: float
    lower_bound: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Rows of the split attention that pass between ranks, one entry per (attention shard, token shard) pair.

    Attributes:
        source: rank that holds the tokens.
        target: rank that computes the rows.
        q_rows: query rows sent to the target; as many output rows come back.
        kv_rows: key rows sent to the target; as many value rows go with them.
    """

    source: Int64Array
    target: Int64Array
    q_rows: Int64Array
    kv_rows: Int64Array

    @property
    def rows(self) -> Int64Array:
        """Rows of q, k, v and o together."""
        return 2 * (self.q_rows + self.kv_rows)


def measure(placement: Placement, cluster: Cluster, cost: CostModel) -> Metrics:
    """All metrics of a placement under a cost model whose `num_heads` is the placement's."""
    load = rank_loads(placement, cost)
    bound = lower_bound(placement.sequences, cluster, cost)
    makespan = int(load.max())
    traffic = attention_traffic(placement)
    all_rows = 4 * placement.num_heads * placement.sequences.num_tokens
    crosses = traffic.source != traffic.target
    crosses_nodes = cluster.node_of[traffic.source] != cluster.node_of[traffic.target]
    tokens = placement.token_shards
    routed = tokens.count[tokens.rank != placement.sequences.home[tokens.seq]].sum()
    return Metrics(
        time_imbalance=imbalance(load),
        token_imbalance=imbalance(placement.tokens()),
        attention_imbalance=imbalance(placement.area()),
        gap=makespan / bound - 1 if bound else 0.0,
        split_traffic=_share(traffic.rows[crosses].sum(), all_rows),
        cross_node_traffic=_share(traffic.rows[crosses_nodes].sum(), all_rows),
        routed_fraction=_share(routed, placement.sequences.num_tokens),
        split_sequences=int(placement.split.sum()),
        makespan=makespan / TICKS_PER_SECOND,
        lower_bound=bound / TICKS_PER_SECOND,
    )


def rank_loads(placement: Placement, cost: CostModel) -> Int64Array:
    """(world_size,) load of each rank [tick]."""
    return cost.load(placement.tokens(), placement.area(), placement.num_shards())


def imbalance(amount: Int64Array) -> float:
    """Largest over mean; 1.0 where there is nothing to do."""
    total = exact_sum(amount)
    return float(int(amount.max()) * len(amount) / total) if total else 1.0


def lower_bound(sequences: Sequences, cluster: Cluster, cost: CostModel) -> int:
    """Makespan that no placement can beat [tick]: the mean load, or one indivisible token or row if that is more.

    Each sequence's constant is counted once, although a split sequence pays it on every rank that has tokens of it.
    """
    if not len(sequences):
        return 0
    mean = -(-exact_sum(cost.work(sequences.length)) // cluster.world_size)
    indivisible = max(cost.token + cost.sequence, cost.row_key * int(sequences.length.max()))
    return max(mean, indivisible)


def attention_traffic(placement: Placement) -> Traffic:
    """Query and key rows between every attention shard and every token shard of the split sequences."""
    shard, token = split_pairs(placement)
    rows, tokens = placement.attention_shards, placement.token_shards
    length = placement.sequences.length[rows.seq[shard]]
    first, stop = tokens.start[token], tokens.stop[token]

    def rows_of_tokens_before(row: Int64Array) -> Int64Array:  # rows below `row` whose query lies in [first, stop)
        head, query = np.divmod(row, length)
        return head * (stop - first) + np.clip(query - first, 0, stop - first)

    heads = (rows.stop[shard] - 1) // length - rows.start[shard] // length + 1
    return Traffic(
        source=tokens.rank[token],
        target=rows.rank[shard],
        q_rows=rows_of_tokens_before(rows.stop[shard]) - rows_of_tokens_before(rows.start[shard]),
        kv_rows=heads * (stop - first),
    )


def _share(part: Any, whole: int) -> float:
    return float(int(part) / whole) if whole else 0.0
