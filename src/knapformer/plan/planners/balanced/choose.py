"""Several ways to share each node, evaluated by their traffic; the best one is refined and kept.

The step waits for the rank whose load and traffic together are longest. Loads are level, traffic is not quite. So the
last step takes a little load off the ranks with most traffic and gives it to the others, never more than `GAIN` above
the mean, and a variant is judged by what its slowest rank is *after* that:

    load + traffic    .  :  .  |            load + traffic   .  .  .  :
                      |  |  |  |    ->                       |  |  |  |
"""

from typing import NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.planners.balanced.batch import Batch, Layout, Shares
from knapformer.plan.planners.balanced.fill import UNIT, raised_level
from knapformer.plan.planners.balanced.ranks import RankSharing, Variants
from knapformer.plan.predict import Traffic, traffic_time

VARIANTS = (
    (10, True, 0, 0),
    (64, False, 11, 0),
    (0, False, 14, 2),
    (32, True, 7, 1),
    (0, False, 9, 1),
    (32, True, 14, 2),
    (0, False, 11, 0),
    (64, True, 0, 1),
    (10, True, 12, 0),
    (64, False, 5, 1),
)
"""Blend, snap, seed and avoid of each variant (`ranks.Variants`), in order of usefulness."""

MOST_RANKS = 4096
"""Ranks, each counted once for every variant, that are evaluated at most when all nodes are tried."""

VARIED = 5
"""Most variants that are tried for every node."""

MANY, PART, MORE = 16, 16, 4
"""From `MANY` nodes on, the worst 1 in `PART` are tried with `MORE` variants more: the step waits for the worst."""

REFINED, ROUNDS = (64, 2048), 2
"""Least and most ranks of the worlds in which loads are changed in several rounds, each for the traffic of the last."""

GAIN = UNIT * 90 // 100_000
"""Most that a rank's budgets rise above the mean, so that tokens and area stay level to 1 per mille."""


def share_best(
    batch: Batch, cluster: Cluster, cost: CostModel, *, independent: bool, refine: bool
) -> tuple[Shares, int]:
    """Share all pieces of the cluster; also return the longest traffic time of a rank, before loads are changed [tick].

    `independent` says that every node's budgets are those of its own pieces, so that each may have another variant.
    """
    num_nodes, world_size, line = cluster.num_nodes, cluster.world_size, batch.line
    load = cluster.time(cost.load(*line.budget))
    limit = (load >> 20) * GAIN if refine else np.zeros_like(load)
    num = max(1, min(VARIED, MOST_RANKS // world_size))
    nodes = np.arange(num_nodes)
    tries = _Tries(batch, cluster, cost, load, limit)
    tried = tries.run(np.concatenate((nodes,) * num), VARIANTS[:num])
    level = tried.level.reshape(num, num_nodes)
    if not independent:
        level = level.max(axis=1, keepdims=True).repeat(num_nodes, axis=1)
    best = level.argmin(axis=0)
    level = level[best, nodes]
    layout, traffic = tried.taken(batch.nothing(), np.zeros(world_size, dtype=np.int64), best * num_nodes + nodes)
    if num_nodes >= MANY and independent and not batch.pieces.senders.any():
        worst = (-level).argsort(kind="stable")[: num_nodes // PART]
        tried = tries.run(np.concatenate((worst,) * MORE), VARIANTS[num : num + MORE])
        levels = tried.level.reshape(MORE, len(worst))
        best = levels.argmin(axis=0)
        better = (levels.min(axis=0) < level[worst]).nonzero()[0]
        layout, traffic = tried.taken(layout, traffic, best[better] * len(worst) + better)
    longest = int(traffic.max())
    if refine and longest:
        layout = tries.refined(layout, traffic)
    return layout.shares(batch), longest


class _Tried(NamedTuple):
    """Nodes shared in some ways: the level each reaches after refinement, and traffic of all their ranks [tick]."""

    batch: Batch
    layout: Layout
    level: Int64Array
    traffic: Int64Array

    def taken(self, layout: Layout, traffic: Int64Array, entries: Int64Array) -> tuple[Layout, Int64Array]:
        """`layout` and `traffic` of the cluster with some nodes as they are here."""
        mask = np.zeros(len(self.level), dtype=bool)
        mask[entries] = True
        here = mask[self.batch.line.node]
        traffic[self.batch.rank[here]] = self.traffic[here]
        return layout.updated(self.batch, self.layout, entries), traffic


class _Tries(NamedTuple):
    """What trials have in common.

    Attributes:
        batch: the whole cluster once.
        load: (W,) time of each rank's budgets [tick].
        limit: (W,) most that is added to it for the traffic of others [tick].
    """

    batch: Batch
    cluster: Cluster
    cost: CostModel
    load: Int64Array
    limit: Int64Array

    def run(self, nodes: Int64Array, variants: tuple[tuple[int, bool, int, int], ...]) -> _Tried:
        """Share `nodes`, as many for each of `variants`."""
        batch, each = self.batch.repeated(nodes), len(nodes) // len(variants)
        blend, snap, seed, avoid = np.array(variants, dtype=np.int64).T.repeat(each, axis=1)
        layout = RankSharing(batch, Variants(blend, snap > 0, seed, avoid)).pack()
        traffic = _traffic(layout.shares(batch), batch, np.arange(len(nodes)) // each, self.cluster, self.cost)
        time, limit = self.load[batch.rank] + traffic, self.limit[batch.rank]
        if limit.any():
            level = raised_level(time, limit, batch.line.first)
        else:
            level = np.maximum.reduceat(time, batch.line.first[:-1])
        return _Tried(batch, layout, level, traffic)

    def refined(self, layout: Layout, traffic: Int64Array) -> Layout:
        """With less load on ranks that have most traffic; where there are several rounds, each node's best one."""
        batch, line, load = self.batch, self.batch.line, self.load
        change = self._change(traffic)
        if not REFINED[0] <= len(load) <= REFINED[1]:
            return layout.changed(line, change)
        unit, first = np.maximum(load >> 20, 1), line.first[:-1]
        best_change, best = np.zeros_like(load), np.maximum.reduceat(load + traffic, first)
        for _ in range(ROUNDS):
            shares = layout.changed(line, change).shares(batch)
            traffic = _traffic(shares, batch, np.zeros_like(first), self.cluster, self.cost)
            time = np.maximum.reduceat(load + change * unit + traffic, first)
            best_change = np.where((time < best)[line.node], change, best_change)
            best = np.minimum(best, time)
            change = self._change(traffic)
        return layout.changed(line, best_change)

    def _change(self, traffic: Int64Array) -> Int64Array:
        """(W,) what levels load and traffic inside nodes, in parts of `UNIT` of the load."""
        line, load = self.batch.line, self.load
        goal = raised_level(load + traffic, self.limit, line.first).repeat(line.sizes)
        return np.minimum(goal - load - traffic, self.limit) // np.maximum(load >> 20, 1)


def _traffic(shares: Shares, batch: Batch, copy: Int64Array, cluster: Cluster, cost: CostModel) -> Int64Array:
    """(W,) traffic time of each rank of a batch; `copy` says which nodes are of one copy of the cluster [tick]."""
    pieces, (_, tokens, rows) = batch.pieces, shares
    token_key, row_key = tokens.item, rows.item
    cuts = bool(pieces.senders.any())
    if cuts:  # parts of one sequence in different nodes
        keys = pieces.seq + copy[pieces.node] * (1 << 40)
        token_key, row_key = keys[token_key], keys[row_key]
    order = token_key.argsort(kind="stable")
    token_key = token_key[order]
    first = token_key.searchsorted(row_key)
    count = token_key.searchsorted(row_key, side="right") - first
    count[rows.num == 0] = 0
    row = np.arange(len(row_key)).repeat(count)
    stop = count.cumsum()
    token = order[np.arange(len(row)) + (first - stop + count).repeat(count)]
    length, num_tokens = batch.length[rows.item][row], tokens.num[token]
    start = (pieces.token[tokens.item] + tokens.start)[token]
    begin = pieces.row[rows.item] + rows.start
    begin, stop = begin[row], (begin + rows.num)[row]
    head, last = begin // length, stop // length
    queries = last * num_tokens + np.minimum(np.maximum(stop - last * length - start, 0), num_tokens)
    queries -= head * num_tokens + np.minimum(np.maximum(begin - head * length - start, 0), num_tokens)
    heads = (stop - 1) // length - head + 1
    traffic = Traffic(tokens.bin[token], rows.bin[row], queries, heads * num_tokens)
    return traffic_time(traffic, cluster, cost, rank=batch.rank, inside_nodes=not cuts)
