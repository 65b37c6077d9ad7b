"""Names of equal ranks: as many tokens as possible are where they already were.

Ranks of a node, and nodes of one size, are alike, so a plan stays as good when they change places. Greedily, the pair
(place in the plan, rank) with most tokens in common is fixed first.
"""

import numpy as np

from knapformer.plan.arrays import Int64Array, exclusive_cumsum
from knapformer.plan.cluster import Cluster

MOST = 64
"""Nodes, and ranks of a node, up to which labels are sought; the tables grow with the square."""


def relabel(cluster: Cluster, home: Int64Array, rank: Int64Array, tokens: Int64Array) -> Int64Array:
    """(W,) new name of each rank, from shards of `tokens` on `rank` whose sequences have `home`."""
    names = np.arange(cluster.world_size)
    if cluster.speeds:
        return names
    sizes = np.array(cluster.node_sizes)
    first, node = exclusive_cumsum(sizes), cluster.node_of
    num_nodes, width = len(sizes), int(sizes.max())
    if 1 < num_nodes <= MOST and cluster.nodes_per_domain is None and len(set(cluster.node_sizes)) == 1:
        common = _table(node[rank] * num_nodes + node[home], tokens, (1, num_nodes, num_nodes))
        names = first[_assign(common)[0]][node] + names - first[node]
    if width > MOST:
        return names
    rank = names[rank]
    here = np.flatnonzero(node[rank] == node[home])
    rank, home = rank[here], home[here]
    place = (node[rank] * width + rank - first[node[rank]]) * width + home - first[node[home]]
    common = _table(place, tokens[here], (num_nodes, width, width))
    wide = np.arange(width) >= sizes[:, None]
    common[wide[:, :, None] | wide[:, None, :]] = -1
    at = node[names]
    return first[at] + _assign(common)[at, names - first[at]]


def _table(place: Int64Array, tokens: Int64Array, shape: tuple[int, int, int]) -> Int64Array:
    table = np.zeros(shape[0] * shape[1] * shape[2], dtype=np.int64)
    np.add.at(table, place, tokens)
    return table.reshape(shape)


def _assign(common: Int64Array) -> Int64Array:
    """(N, R) column given to each row of each (R, R) table, largest entries first; -1 entries are taken last."""
    num, width = common.shape[:2]
    common = common.copy()
    flat = common.reshape(num, -1)
    index = np.arange(num)
    result = np.zeros((num, width), dtype=np.int64)
    for _ in range(width):
        row, column = np.divmod(flat.argmax(axis=1), width)
        result[index, row] = column
        common[index, row, :] = -2
        common[index, :, column] = -2
    return result
