"""The cluster a planner places on: ranks, the nodes they share fast links in, and what the links carry.

    node 0        node 1                 a node is a group of consecutive ranks;
    [0 1 2 3]     [4 5 6 7]   [8 9]      nodes may have different sizes
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from knapformer.errors import SpecError
from knapformer.plan.arrays import Int64Array, column


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth of a rank's links, one direction [byte/s], and the width of what is exchanged.

    The defaults are those of an 8-GPU NVLink node with one 400 Gb/s adapter per GPU and bf16 activations.
    """

    intra_node: float = 300e9
    inter_node: float = 40e9
    element_bytes: int = 2

    def __post_init__(self) -> None:
        if not (self.intra_node > 0 and self.inter_node > 0 and self.element_bytes > 0):
            raise SpecError(f"links must have positive bandwidth [byte/s] and element size, got {self}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks in nodes.

    Attributes:
        world_size: number of ranks.
        ranks_per_node: ranks that share a node; the last node may be smaller. Default: all ranks in one node.
        links: bandwidths, used to price traffic.
        node_sizes: explicit sizes of consecutive nodes, for ragged clusters; overrides `ranks_per_node`.
        node_of: (world_size,) node of each rank (derived).
    """

    world_size: int
    ranks_per_node: int | None = None
    links: Links = field(default_factory=Links)
    node_sizes: tuple[int, ...] = ()
    node_of: Int64Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise SpecError(f"world_size is {self.world_size}; a cluster needs at least one rank")
        if not self.node_sizes:
            per_node = self.world_size if self.ranks_per_node is None else self.ranks_per_node
            if per_node < 1:
                raise SpecError(f"ranks_per_node is {per_node}; a node needs at least one rank")
            full, rest = divmod(self.world_size, per_node)
            object.__setattr__(self, "node_sizes", (per_node,) * full + ((rest,) if rest else ()))
        sizes = column(self.node_sizes, "node_sizes")
        if sizes.min() < 1 or int(sizes.sum()) != self.world_size:
            raise SpecError(
                f"node_sizes {self.node_sizes} must be positive and add up to world_size {self.world_size}, "
                f"they add up to {int(sizes.sum())}"
            )
        object.__setattr__(self, "node_of", column(np.repeat(np.arange(len(sizes)), sizes), "node_of"))

    @property
    def num_nodes(self) -> int:
        return len(self.node_sizes)

    def node_ranks(self) -> list[range]:
        """The consecutive ranks of each node."""
        stops = np.cumsum(self.node_sizes)
        return [range(int(stop) - size, int(stop)) for stop, size in zip(stops, self.node_sizes, strict=True)]

    @classmethod
    def single_node(cls, world_size: int) -> Self:
        """All ranks share fast links."""
        return cls(world_size)
