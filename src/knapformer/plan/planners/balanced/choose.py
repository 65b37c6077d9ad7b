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
from knapformer.plan.planners.balanced.fill import UNIT, opens, raised_level
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
    (0, True, 3, 1),
    (32, False, 21, 0),
    (10, False, 17, 0),
)
"""Blend, snap, seed and avoid of each variant (`ranks.Variants`), in order of usefulness."""

MOST_RANKS = 4096
"""Ranks, each counted once for every variant, that are evaluated at most when all nodes are tried."""

VARIED, TRIED = 5, 20
"""Most variants that are tried for every node; more of them if that makes no more than `TRIED` in all."""

MANY, PART, MORE = 16, 16, 8
"""From `MANY` nodes on, the worst 1 in `PART` are tried with `MORE` variants more: the step waits for the worst."""

ROUNDS = 2
"""Rounds in which loads are changed, each for the traffic of the last, where a node keeps the best of them."""

GAIN = UNIT * 90 // 100_000
"""Most that a rank's budgets rise above the mean, so that tokens and area stay level to 1 per mille."""

GAIN_STEP = UNIT * 3 // 100
"""The same where only the step counts."""


def share_best(
    batch: Batch, cluster: Cluster, cost: CostModel, *, independent: bool, refine: bool
) -> tuple[Shares, int]:
    """Share all pieces of the cluster; also return the longest traffic time of a rank, before loads are changed [tick].

    `independent` says that every node's budgets are those of its own pieces, so that each may have another variant.
    """
    num_nodes, world_size, line = cluster.num_nodes, cluster.world_size, batch.line
    load = cluster.time(line.budget[0] if batch.is_work else cost.load(*line.budget))
    limit = (load >> 20) * (GAIN_STEP if batch.is_work else GAIN) if refine else np.zeros_like(load)
    num = max(1, min(max(VARIED, TRIED // num_nodes), MOST_RANKS // world_size, len(VARIANTS)))
    nodes = np.arange(num_nodes)
    tries = _Tries(batch, cluster, cost, load, limit)
    tried = tries.run(np.concatenate((nodes,) * num), VARIANTS[:num])
    level = tried.level.reshape(num, num_nodes)
    if not independent:
        level = level.max(axis=1, keepdims=True).repeat(num_nodes, axis=1)
    best = level.argmin(axis=0)
    layout, traffic = tried.taken(batch.nothing(), np.zeros(world_size, dtype=np.int64), best * num_nodes + nodes)
    longest = int(traffic.max())
    if not (refine and longest):
        return layout.shares(batch), longest
    if batch.is_work:
        return tries.refined(batch, layout, traffic, ROUNDS)[0].shares(batch), longest
    if num_nodes < MANY or not independent or batch.pieces.senders.any():
        return layout.changed(line, tries.change(batch, traffic)).shares(batch), longest
    layout, level = tries.refined(batch, layout, traffic, 1)
    worst = (-level).argsort(kind="stable")[: num_nodes // PART]
    tried = tries.run(np.concatenate((worst,) * MORE), VARIANTS[num : num + MORE])
    refined, levels = tries.refined(tried.batch, tried.layout, tried.traffic, ROUNDS)
    levels = levels.reshape(MORE, len(worst))
    best = levels.argmin(axis=0)
    better = (levels.min(axis=0) < level[worst]).nonzero()[0]
    layout = layout.updated(tried.batch, refined, best[better] * len(worst) + better)
    return layout.shares(batch), longest


class _Tried(NamedTuple):
    """Nodes shared in some ways: the level each should reach by refinement, and traffic of all their ranks [tick]."""

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

    def change(self, batch: Batch, traffic: Int64Array) -> Int64Array:
        """(W,) what levels load and `traffic` inside nodes, in parts of `UNIT` of the load."""
        line, load, limit = batch.line, self.load[batch.rank], self.limit[batch.rank]
        goal = raised_level(load + traffic, limit, line.first).repeat(line.sizes)
        return np.minimum(goal - load - traffic, limit) // np.maximum(load >> 20, 1)

    def refined(self, batch: Batch, layout: Layout, traffic: Int64Array, rounds: int) -> tuple[Layout, Int64Array]:
        """Each node of a batch without cut pieces with the best changes of its loads, if any, and its level [tick]."""
        line, load = batch.line, self.load[batch.rank]
        unit, first = np.maximum(load >> 20, 1), line.first[:-1]
        best_change, best = np.zeros_like(load), np.maximum.reduceat(load + traffic, first)
        for _ in range(rounds):
            change = self.change(batch, traffic)
            traffic = _traffic(layout.changed(line, change).shares(batch), batch, first, self.cluster, self.cost)
            time = np.maximum.reduceat(load + change * unit + traffic, first)
            best_change = np.where((time < best)[line.node], change, best_change)
            best = np.minimum(best, time)
        return layout.changed(line, best_change), best


def _traffic(shares: Shares, batch: Batch, copy: Int64Array, cluster: Cluster, cost: CostModel) -> Int64Array:
    """(W,) traffic time of each rank of a batch; `copy` says which nodes are of one copy of the cluster [tick]."""
    pieces, (_, tokens, rows) = batch.pieces, shares
    cuts = bool(pieces.senders.any())
    if cuts:  # parts of one sequence in different nodes
        keys = pieces.seq + copy[pieces.node] * (1 << 40)
        token_key, per_qk_pair = keys[tokens.item], keys[rows.item]
        order = token_key.argsort(kind="stable")
        first, stop = (token_key[order].searchsorted(per_qk_pair, side=side) for side in ("left", "right"))
        count = stop - first
    else:  # segments of one piece are adjacent
        order = np.arange(len(tokens.item))
        run = np.append(opens(tokens.item).nonzero()[0], len(order))
        of_piece = np.zeros((2, len(pieces.seq)), dtype=np.int64)
        of_piece[:, tokens.item[run[:-1]]] = run[:-1], run[1:] - run[:-1]
        first, count = of_piece[:, rows.item]
    count[rows.num == 0] = 0
    row = np.arange(len(rows.item)).repeat(count)
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
