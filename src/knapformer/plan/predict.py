"""Loads and traffic of a placement, and the step if no traffic were hidden. `timeline` says what hides.

For one pass of a layer, in whole ticks so that planners may compare:

    step  = max over ranks of  token-wise work + attention + traffic
    ideal = all work / all ranks (by speed)

A rank's traffic time is the larger of what it sends and what it receives over the whole pass: q, k, v of its split
tokens out, those of its attention rows in, outputs the other way. Each row is priced by the slowest link it crosses
(inside a node or between nodes); the prices of all of a rank's rows add up, as one rank's links are not assumed to work
at the same time.
"""

from dataclasses import dataclass

import numpy as np

from knapformer.plan.arrays import Int64Array, exact_sum
from knapformer.plan.attention import split_pairs
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import TICKS_PER_SECOND, CostModel
from knapformer.plan.placement import Placement, per_rank


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


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Times of one pass of a layer, nothing hidden [tick].

    Attributes:
        compute: (world_size,) token-wise work and attention of each rank.
        traffic: (world_size,) time of each rank's traffic, the larger of both directions.
        ideal: mean compute over ranks, each by its speed; the same for every placement that splits nothing.
    """

    compute: Int64Array
    traffic: Int64Array
    ideal: int

    @property
    def step(self) -> int:
        """Slowest rank."""
        return int((self.compute + self.traffic).max())

    @property
    def step_over_ideal(self) -> float:
        return self.step / self.ideal if self.ideal else 1.0


def predict(
    placement: Placement,
    cluster: Cluster,
    cost: CostModel,
    traffic: Traffic | None = None,
    *,
    token_grid: int = 1,
) -> Prediction:
    """Predict the step of a placement. A caller that has `attention_traffic(placement)` already may pass it.

    Where ranks pad their tokens to a multiple of `token_grid`, padding is computed, but is no part of the ideal.
    """
    work = rank_loads(placement, cost)
    total = exact_sum(work)
    padding = padding_tokens(placement, token_grid)
    work = work + cost.load(padding, padding * padding * placement.num_heads)
    traffic = attention_traffic(placement) if traffic is None else traffic
    return Prediction(cluster.time(work), traffic_time(traffic, cluster, cost), cluster.mean_time(total))


def padding_tokens(placement: Placement, token_grid: int) -> Int64Array:
    """(world_size,) rows of padding of each rank, whose tokens are padded to a multiple of `token_grid`."""
    return -placement.tokens() % token_grid


def row_prices(cluster: Cluster, cost: CostModel) -> tuple[int, int]:
    """Time to move one row (one head of one token of q, k, v or o) inside a node, and between nodes [tick]."""
    row_bytes = cost.head_dim * cluster.links.element_bytes * TICKS_PER_SECOND
    return round(row_bytes / cluster.links.intra_node), round(row_bytes / cluster.links.inter_node)


def prices_between(source: Int64Array, target: Int64Array, cluster: Cluster, cost: CostModel) -> Int64Array:
    """(N,) time to move one row from rank `source` to rank `target` [tick]."""
    in_node, between = row_prices(cluster, cost)
    return np.where(cluster.node_of[source] == cluster.node_of[target], in_node, between)


def rank_loads(placement: Placement, cost: CostModel, cluster: Cluster | None = None) -> Int64Array:
    """(world_size,) load of each rank [tick]; at its own speed where a cluster is given, else at nominal speed."""
    load = cost.load(placement.tokens(), placement.area(), placement.num_shards())
    return load if cluster is None else cluster.time(load)


def attention_traffic(placement: Placement) -> Traffic:
    """Query and key rows between every attention shard and every token shard of the split sequences."""
    shard, token = split_pairs(placement)
    rows, tokens = placement.attention_shards, placement.token_shards
    length = placement.sequences.length[rows.seq[shard]]
    first, stop = tokens.start[token], tokens.stop[token]
    before = [queries_before(row[shard], length, first, stop) for row in (rows.start, rows.stop)]
    heads = (rows.stop[shard] - 1) // length - rows.start[shard] // length + 1
    return Traffic(tokens.rank[token], rows.rank[shard], before[1] - before[0], heads * (stop - first))


def queries_before(row: Int64Array, length: Int64Array, first: Int64Array, stop: Int64Array) -> Int64Array:
    """Attention rows below `row` of sequences of `length` tokens whose query lies in [first, stop)."""
    head, query = np.divmod(row, length)
    return head * (stop - first) + np.clip(query - first, 0, stop - first)


def traffic_time(traffic: Traffic, cluster: Cluster, cost: CostModel) -> Int64Array:
    """(world_size,) time of each rank's traffic, the larger of sent and received over the whole pass [tick]."""
    crosses = traffic.source != traffic.target
    source, target = traffic.source[crosses], traffic.target[crosses]
    price = prices_between(source, target, cluster, cost)
    out = traffic.q_rows[crosses] * price
    qkv = out + 2 * traffic.kv_rows[crosses] * price
    sent, received = (per_rank(rank, qkv, cluster.world_size) for rank in (source, target))
    np.add.at(sent, target, out)
    np.add.at(received, source, out)
    return np.maximum(sent, received)
