"""Names of equal ranks: as many tokens as possible are where they already were.

Ranks of a node are alike, so a plan stays as good when they change places. Greedily, the pair (place in the plan,
rank) with most tokens in common is fixed first. Nodes keep their names: small sequences were sent home to them.
"""

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.cluster import Cluster

MOST = 64
"""Ranks of a node up to which labels are sought; the table grows with the square."""


def relabel(cluster: Cluster, home: Int64Array, rank: Int64Array, tokens: Int64Array) -> Int64Array:
    """(W,) new name of each rank, from shards of `tokens` on `rank` whose sequences have `home`."""
    world_size, width = cluster.world_size, max(cluster.node_sizes)
    if cluster.speeds or width > MOST:
        return np.arange(world_size)
    sizes, node = np.array(cluster.node_sizes), cluster.node_of
    base = (sizes.cumsum() - sizes)[node]  # first rank of each rank's node
    here = (node[rank] == node[home]).nonzero()[0]
    place, table = rank[here], np.zeros(world_size * width, dtype=np.int64)
    np.add.at(table, place * width + home[here] - base[place], tokens[here])
    entries = table.nonzero()[0]
    entries = entries[(-table[entries]).argsort(kind="stable")]
    places = entries // width
    labels = entries - places * width + base[places]
    chosen, free = [-1] * world_size, [True] * world_size
    for at, name in zip(places.tolist(), labels.tolist(), strict=True):
        if free[name] and chosen[at] < 0:
            chosen[at] = name
            free[name] = False
    names = np.array(chosen)
    names[names < 0] = np.array(free).nonzero()[0]  # both rise, and a node has as many of one as of the other
    return names
