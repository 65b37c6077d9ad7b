"""Predicted step time of a placement: per rank token-wise work + attention + the traffic of split attention.

For one layer's forward pass (the backward pass scales both parts alike), in whole ticks so that planners may compare:

    step         = max over ranks of  token-wise + attention + traffic                    nothing hidden
    step_overlap = max over ranks of  token-wise + attention + exposed traffic            hidden as the executor does
    ideal        = all work / all ranks (by speed)

A rank's traffic time is the larger of what it sends and what it receives over the whole pass: q, k, v of its split
tokens out, those of its attention rows in, outputs the other way. Each row is priced by the slowest link it crosses
(inside a node or between nodes); the prices of all of a rank's rows add up, as one rank's links are
not assumed to work at the same time.

With overlap, q, k and v travel while a first part of the whole sequences' attention runs, and outputs return while the
rest does. Where that is too little, split attention runs in n parts of every shard's heads, one in flight while another
computes, so only the first part's arrival and the last one's return need whole work to hide behind:

    exposed = max(0,  (in + out) / n - whole,  in + out - whole - split * (n - 1) / n)

and never more than the traffic with nothing hidden. n is the same on all ranks, and no more than gains something.

What it does not model: latency per message, contention beyond a rank's own links, kernels that slow down beside a copy.
"""

from dataclasses import dataclass

import numpy as np

from knapformer.plan.arrays import Int64Array, exact_sum
from knapformer.plan.attention import split_pairs
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import TICKS_PER_SECOND, CostModel
from knapformer.plan.placement import Placement, per_rank

PARTS = (1, 2, 4)
"""Numbers of parts that split attention may run in."""
GAIN = 1000
"""A larger number of parts must shorten the step by more than one part in so many: it costs messages and kernels."""


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
    """Predicted times of one layer's forward pass [tick].

    Attributes:
        compute: (world_size,) token-wise work and attention of each rank.
        traffic: (world_size,) time of each rank's traffic, the larger of both directions.
        exposed: (world_size,) part of it that is not hidden behind attention when overlapped.
        num_parts: parts that split attention then runs in.
        total_work: work of all ranks at nominal speed.
        ideal: mean compute over ranks, each by its speed; the same for every placement that splits nothing.
    """

    compute: Int64Array
    traffic: Int64Array
    exposed: Int64Array
    num_parts: int
    total_work: int
    ideal: int

    @property
    def step(self) -> int:
        """Slowest rank with no traffic hidden."""
        return int((self.compute + self.traffic).max())

    @property
    def step_overlap(self) -> int:
        """Slowest rank with traffic hidden behind attention."""
        return int((self.compute + self.exposed).max())

    @property
    def step_over_ideal(self) -> float:
        return self.step / self.ideal if self.ideal else 1.0

    @property
    def step_over_ideal_overlap(self) -> float:
        return self.step_overlap / self.ideal if self.ideal else 1.0


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
    traffic = attention_traffic(placement) if traffic is None else traffic
    shards, world_size = placement.attention_shards, placement.world_size
    here = np.flatnonzero(placement.split[shards.seq])
    seq, rank = shards.seq[here], shards.rank[here]
    length = placement.sequences.length[seq]
    split_area = per_rank(rank, shards.count[here] * length, world_size)
    heads = per_rank(rank, (shards.stop[here] - 1) // length - shards.start[here] // length + 1, world_size)
    work = cost.load(placement.tokens(), placement.area(), placement.num_shards())
    total = exact_sum(work)
    padding = padding_tokens(placement, token_grid)
    work = work + cost.load(padding, padding * padding * placement.num_heads)
    source, target, qkv, out = _priced(traffic, cluster, cost)
    incoming = np.maximum(per_rank(source, qkv, world_size), per_rank(target, qkv, world_size))
    outgoing = np.maximum(per_rank(target, out, world_size), per_rank(source, out, world_size))
    both = traffic_time(traffic, cluster, cost)
    whole, split = (cluster.time(cost.per_qk_pair * area) for area in (placement.area() - split_area, split_area))
    compute, num_parts = cluster.time(work), 1
    exposed = np.zeros_like(both)
    shortest: int | None = None
    for parts in PARTS if len(here) else ():
        left = np.minimum(exposed_traffic(incoming + outgoing, whole, split, np.clip(heads, 1, parts)), both)
        step = int((compute + left).max())
        if shortest is None or step + step // GAIN < shortest:
            exposed, num_parts, shortest = left, parts, step
    return Prediction(compute, both, exposed, num_parts, total, cluster.mean_time(total))


def padding_tokens(placement: Placement, token_grid: int) -> Int64Array:
    """(world_size,) rows of padding of each rank, whose tokens are padded to a multiple of `token_grid`."""
    return -placement.tokens() % token_grid


def exposed_traffic(traffic: Int64Array, whole: Int64Array, split: Int64Array, groups: Int64Array) -> Int64Array:
    """Traffic time that attention of whole and split sequences does not hide (the formula of the module) [tick]."""
    unhidden = np.maximum(-(-traffic // groups) - whole, traffic - whole - split // groups * (groups - 1))
    return np.maximum(unhidden, 0)


def row_prices(cluster: Cluster, cost: CostModel) -> tuple[int, int]:
    """Time to move one row (one head of one token of q, k, v or o) inside a node, and between nodes [tick]."""
    row_bytes = cost.head_dim * cluster.links.element_bytes * TICKS_PER_SECOND
    return round(row_bytes / cluster.links.intra_node), round(row_bytes / cluster.links.inter_node)


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


def traffic_time(
    traffic: Traffic,
    cluster: Cluster,
    cost: CostModel,
    *,
    rank: Int64Array | None = None,
    inside_nodes: bool = False,
) -> Int64Array:
    """Time of each rank's traffic, the larger of sent and received over the whole pass [tick].

    Callers that compare placements may count ranks of several side by side; `rank` is then which one each is. They may
    know that all traffic is `inside_nodes`.
    """
    source, target, qkv, out = _priced(traffic, cluster, cost, rank, inside_nodes=inside_nodes)
    num_ranks = cluster.world_size if rank is None else len(rank)
    sent, received = per_rank(source, qkv, num_ranks), per_rank(target, qkv, num_ranks)
    np.add.at(sent, target, out)
    np.add.at(received, source, out)
    return np.maximum(sent, received)


def _priced(
    traffic: Traffic,
    cluster: Cluster,
    cost: CostModel,
    rank: Int64Array | None = None,
    *,
    inside_nodes: bool = False,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Source, target, time of q, k, v and time of o of all traffic that crosses ranks."""
    crosses = (traffic.source != traffic.target).nonzero()[0]
    source, target = traffic.source[crosses], traffic.target[crosses]
    in_node, between = row_prices(cluster, cost)
    price: Int64Array | int = in_node
    if cluster.num_nodes > 1 and not inside_nodes:
        a, b = (source, target) if rank is None else (rank[source], rank[target])
        price = np.where(cluster.node_of[a] == cluster.node_of[b], in_node, between)
    out = traffic.q_rows[crosses] * price
    return source, target, out + traffic.kv_rows[crosses] * (2 * price), out
