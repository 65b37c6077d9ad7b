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
    if 1 < num_nodes <= MOST and cluster.nodes_per_domain is None and int(sizes.min()) == width:
        chosen = _assign(node[rank], node[home], tokens, np.zeros_like(sizes), num_nodes)
        names = (first[chosen][:, None] + np.arange(width)).ravel()
    if width > MOST:
        return names
    rank = names[rank]
    here = (node[rank] == node[home]).nonzero()[0]
    return _assign(rank[here], home[here], tokens[here], first[node], width)[names]


def _assign(place: Int64Array, label: Int64Array, tokens: Int64Array, base: Int64Array, width: int) -> Int64Array:
    """A label for each place, those with most `tokens` in common first.

    `base` (M,) is the first label of each place's group; a group's labels are those of its `width` places at most.
    """
    table = np.zeros(len(base) * width, dtype=np.int64)
    np.add.at(table, place * width + label - base[place], tokens)
    entries = table.nonzero()[0]
    entries = entries[(-table[entries]).argsort(kind="stable")]
    places = entries // width
    labels = entries - places * width + base[places]
    chosen, free = [-1] * len(base), [True] * len(base)
    for at, name in zip(places.tolist(), labels.tolist(), strict=True):
        if free[name] and chosen[at] < 0:
            chosen[at] = name
            free[name] = False
    result = np.array(chosen)
    result[result < 0] = np.array(free).nonzero()[0]  # both rise, and a group has as many of one as of the other
    return result
