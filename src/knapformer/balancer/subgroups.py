"""Who balances with whom, and who shares attention: the balancing group of this rank, and its subgroups.

    process group      [ 0 1 2 3 4 5 6 7 ]
    balancing groups   [ 0 1 2 3 | 4 5 6 7 ]          a bag spec of 4 ranks, twice; else one group of all
    subgroups          [ 0 | 1 | 2 3 | 4 | 5 | 6 7 ]  compute bags, or nodes

All groups are made once, in one order on every rank. The attention of a step needs one all-to-all inside a subgroup,
or inside the whole balancing group where a sequence is shared by several subgroups.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch.distributed as dist

from knapformer.comm import RankGroup, partition
from knapformer.plan import BagSpec, Cluster, Placement
from knapformer.plan.arrays import Int64Array


@dataclass(frozen=True, slots=True)
class BalancingGroup:
    """The balancing group of this rank and this rank's subgroup of it.

    Attributes:
        group: the balancing group.
        cluster: its ranks and their nodes.
        subgroup_of: (group size,) number of each rank's subgroup, counted within the balancing group.
        subgroup_ranks: ranks of this rank's subgroup, counted within the balancing group.
        subgroup: their process group.
    """

    group: RankGroup
    cluster: Cluster
    subgroup_of: Int64Array
    subgroup_ranks: range
    subgroup: RankGroup

    @classmethod
    def of(cls, base: RankGroup, cluster: Cluster, spec: BagSpec | None) -> Self:
        """Make all groups of `base`. Collective over the world.

        Args:
            base: the process group to balance over.
            cluster: its nodes, which are the subgroups where there is no spec.
            spec: bags of one balancing group; groups repeat where `base` is a multiple of it.

        Raises:
            SpecError: on every rank, if the spec does not divide the process group.
        """
        num_groups = 1 if spec is None else spec.num_groups(base.size)
        size = base.size // num_groups
        group = partition(base, [size] * num_groups)
        first = base.ranks.index(group.ranks[0])
        sizes = list(cluster.node_sizes) if spec is None else [len(bag) for bag in spec.bags()]
        subgroup_of = np.repeat(np.arange(len(sizes)), sizes)
        if base.handle is not None and base.size != dist.get_world_size():
            # Ranks outside of `base` would have to take part in making smaller groups; the whole group serves as well.
            return cls(group, _slice(cluster, first, size), np.zeros(size, dtype=np.int64), range(size), group)
        subgroup = partition(base, sizes * num_groups)
        start = group.ranks.index(subgroup.ranks[0])
        return cls(group, _slice(cluster, first, size), subgroup_of, range(start, start + subgroup.size), subgroup)

    def sharing_attention(self, placement: Placement) -> tuple[range, RankGroup]:
        """The ranks whose split attention is exchanged together, this one among them, and their process group."""
        if crosses_subgroups(placement, self.subgroup_of):
            return range(self.group.size), self.group
        return self.subgroup_ranks, self.subgroup


def crosses_subgroups(placement: Placement, subgroup_of: Int64Array) -> bool:
    """Whether ranks of several subgroups share a sequence: its tokens, or its attention."""
    tokens, rows = placement.token_shards, placement.attention_shards
    of_sequence = np.zeros(len(placement.sequences), dtype=np.int64)
    of_sequence[tokens.seq] = subgroup_of[tokens.rank]
    return any(np.any(of_sequence[shards.seq] != subgroup_of[shards.rank]) for shards in (tokens, rows))


def _slice(cluster: Cluster, first: int, size: int) -> Cluster:
    """The ranks `first` to `first + size` of a cluster, as a cluster of their own."""
    if size == cluster.world_size:
        return cluster
    node_sizes = np.unique(cluster.node_of[first : first + size], return_counts=True)[1]
    return replace(
        cluster,
        world_size=size,
        ranks_per_node=None,
        node_sizes=tuple(node_sizes.tolist()),
        speeds=cluster.speeds[first : first + size],
    )
