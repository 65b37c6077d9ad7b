"""Several ways to share each node, evaluated by their traffic; the best one is refined and kept.

The step waits for the rank whose load and traffic together are longest. Loads are level, traffic is not quite. So the
last step takes a little load off the ranks with most traffic and gives it to the others, never more than `GAIN` above
the mean, and a variant is judged by what its slowest rank is *after* that:

    load + traffic    .  :  .  |            load + traffic   .  .  .  :
                      |  |  |  |    ->                       |  |  |  |
"""

import numpy as np

from knapformer.plan.arrays import Int64Array, exclusive_cumsum
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.planners.balanced.fill import Segments, raised_level
from knapformer.plan.planners.balanced.nodes import Pieces
from knapformer.plan.planners.balanced.ranks import UNIT, Line, RankSharing, Shares, Variants
from knapformer.plan.predict import Traffic, traffic_times

VARIANTS = (
    (10, True, 0, 0),
    (32, True, 7, 1),
    (0, True, 6, 2),
    (64, False, 5, 1),
    (0, False, 8, 2),
    (10, True, 12, 0),
    (10, True, 14, 1),
    (10, False, 16, 2),
    (64, True, 6, 1),
    (32, True, 1, 1),
    (64, True, 8, 0),
)
"""Blend, snap, seed and avoid of each variant (`ranks.Variants`), in order of usefulness."""

MOST_RANKS = 4096
"""Ranks, each counted once for every variant, that are evaluated at most; small worlds try all variants."""

GAIN = UNIT * 90 // 100_000
"""Most that a rank's budgets rise above the mean, so that tokens and area stay level to 1 per mille."""


def share_best(
    pieces: Pieces,
    length: Int64Array,
    line: Line,
    cluster: Cluster,
    cost: CostModel,
    *,
    independent: bool,
    refine: bool,
) -> tuple[Shares, int]:
    """Share all pieces; also return the longest traffic time of a rank, before its load is changed for it [tick].

    `independent` says that every node's budgets are those of its own pieces, so that each may have another variant.
    """
    num_nodes, world_size = cluster.num_nodes, cluster.world_size
    num = max(1, min(len(VARIANTS), MOST_RANKS // world_size, max(8, 128 // world_size)))
    copies = _copies(pieces, line, num)
    blend, snap, seed, avoid = np.array(VARIANTS[:num], dtype=np.int64).T.repeat(num_nodes, axis=1)
    variants = Variants(blend, snap > 0, seed, avoid)
    run = RankSharing(copies[0], np.concatenate([length] * num), copies[1], variants)
    run.pack()
    shares = run.shares()
    traffic = _traffic(shares, run, len(pieces.seq), cluster, cost)
    if not traffic.any():
        return _pick(shares, np.zeros(num_nodes, dtype=np.int64), pieces, world_size), 0
    load = np.concatenate([cluster.time(cost.load(line.tokens, line.area))] * num)
    limit = (load >> 20) * GAIN if refine else np.zeros_like(load)
    level = raised_level(load + traffic, limit, copies[1].first)
    if refine:
        change = np.minimum(np.repeat(level, copies[1].sizes) - load - traffic, limit)
        shares = run.shares(change // np.maximum(load >> 20, 1))
    else:
        level = np.maximum.reduceat(load + traffic, copies[1].first[:-1])
    level = level.reshape(num, num_nodes)
    if not independent:
        level = np.repeat(level.max(axis=1, keepdims=True), num_nodes, axis=1)
    best = level.argmin(axis=0)
    picked = (best[line.node] * world_size) + np.arange(world_size)
    return _pick(shares, best, pieces, world_size), int(traffic[picked].max())


def _copies(pieces: Pieces, line: Line, num: int) -> tuple[Pieces, Line]:
    """Pieces and line of a cluster that has every node `num` times."""
    if num == 1:
        return pieces, line
    num_nodes, world_size = len(line.first) - 1, len(line.node)
    times = np.arange(num)[:, None]
    columns = [np.concatenate([column] * num) for column in pieces]
    columns[1] = (pieces.node + times * num_nodes).ravel()
    first = np.append((line.first[:-1] + times * world_size).ravel(), num * world_size)
    node = (line.node + times * num_nodes).ravel()
    return Pieces(*columns), Line(node, first, np.concatenate([line.tokens] * num), np.concatenate([line.area] * num))


def _traffic(shares: Shares, run: RankSharing, num_pieces: int, cluster: Cluster, cost: CostModel) -> Int64Array:
    """(W,) traffic time of each rank of each copy [tick]."""
    pieces, world_size = run.pieces, cluster.world_size
    rows, tokens = shares.rows, shares.tokens
    cuts = bool(pieces.senders.any())
    keys = (pieces.seq + np.arange(len(pieces.seq)) // num_pieces * (1 << 40)) if cuts else np.arange(len(pieces.seq))
    token_key, row_key = keys[tokens.item], keys[rows.item]
    token_start, row_start = pieces.token[tokens.item] + tokens.start, pieces.row[rows.item] + rows.start
    order = np.argsort(token_key, kind="stable")
    token_key = token_key[order]
    first = np.searchsorted(token_key, row_key)
    count = np.searchsorted(token_key, row_key, side="right") - first
    count[rows.num == 0] = 0
    row = np.repeat(np.arange(len(row_key)), count)
    token = order[np.arange(len(row)) - np.repeat(exclusive_cumsum(count) - first, count)]
    length = run.length[rows.item[row]]
    start, num_tokens = token_start[token], tokens.num[token]
    begin = row_start[row]
    stop = begin + rows.num[row]
    head, query = np.divmod(np.stack((begin, stop)), length)
    before = head * num_tokens + np.minimum(np.maximum(query - start, 0), num_tokens)
    heads = (stop - 1) // length - head[0] + 1
    traffic = Traffic(tokens.bin[token], rows.bin[row], before[1] - before[0], heads * num_tokens)
    return traffic_times(traffic, cluster, cost, copies=len(run.line.node) // world_size)[2]


def _pick(shares: Shares, best: Int64Array, pieces: Pieces, world_size: int) -> Shares:
    """Each node's shares from its best copy."""
    num_pieces = len(pieces.seq)
    whole = shares.whole[best[pieces.node] * num_pieces + np.arange(num_pieces)]

    def kept(cuts: Segments) -> Segments:
        copy, item = np.divmod(cuts.item, num_pieces)
        keep = np.flatnonzero(best[pieces.node[item]] == copy)
        return Segments(item[keep], cuts.bin[keep] % world_size, cuts.start[keep], cuts.num[keep])

    return Shares(np.where(whole < 0, whole, whole % world_size), kept(shares.tokens), kept(shares.rows))
