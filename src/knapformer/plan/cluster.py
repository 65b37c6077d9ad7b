"""The cluster a planner places on: ranks, the nodes they share fast links in, and what the links carry.

    node 0        node 1                 a node is a group of consecutive ranks;
    [0 1 2 3]     [4 5 6 7]   [8 9]      nodes may have different sizes

Ranks may differ in speed; a rank's speed is a whole number, per mille of the nominal rank that prices are given for.
"""

from dataclasses import dataclass, field

import numpy as np

from knapformer.errors import SpecError
from knapformer.plan.arrays import Int64Array, column

NOMINAL_SPEED = 1000
"""Speed of the rank that prices are given for."""

MAX_SPEED = 1_000_000
"""Greatest speed accepted: a thousand nominal ranks."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth of a rank's links, one direction [byte/s], and the width of what is exchanged.

    The defaults are those of an 8-GPU NVLink node with one 400 Gb/s adapter per GPU and bf16 activations.
    """

    intra_node: float = 300e9
    inter_node: float = 40e9
    element_bytes: int = 2

    def __post_init__(self) -> None:
        if not (min(self.intra_node, self.inter_node) > 0 and self.element_bytes > 0):
            raise SpecError(f"links must have positive bandwidth [byte/s] and element size, got {self}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks in nodes.

    Attributes:
        world_size: number of ranks.
        ranks_per_node: ranks that share a node; the last node may be smaller. Default: all ranks in one node.
        links: bandwidths, used to price traffic.
        node_sizes: explicit sizes of consecutive nodes, for ragged clusters; overrides `ranks_per_node`.
        speeds: speed of each rank [per mille of nominal]; empty for equal ranks.
        node_of: (world_size,) node of each rank (derived).
    """

    world_size: int
    ranks_per_node: int | None = None
    links: Links = field(default_factory=Links)
    node_sizes: tuple[int, ...] = ()
    speeds: tuple[int, ...] = ()
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
        self._check_speeds()
        object.__setattr__(self, "node_of", column(np.repeat(np.arange(len(sizes)), sizes), "node_of"))

    def _check_speeds(self) -> None:
        if not self.speeds:
            return
        if len(self.speeds) != self.world_size:
            raise SpecError(f"speeds has {len(self.speeds)} entries; give one per rank ({self.world_size}), or none")
        for rank, speed in enumerate(self.speeds):
            if type(speed) is not int or not 1 <= speed <= MAX_SPEED:
                raise SpecError(
                    f"speed of rank {rank} is {speed!r}; it must be a whole number from 1 to {MAX_SPEED} "
                    f"(per mille: {NOMINAL_SPEED} is nominal)"
                )
        if set(self.speeds) == {NOMINAL_SPEED}:
            object.__setattr__(self, "speeds", ())  # one spelling of equal ranks

    @property
    def num_nodes(self) -> int:
        return len(self.node_sizes)

    def node_ranks(self) -> list[range]:
        """The consecutive ranks of each node."""
        stops = np.cumsum(self.node_sizes)
        return [range(int(stop) - size, int(stop)) for stop, size in zip(stops, self.node_sizes, strict=True)]

    @property
    def speed(self) -> Int64Array:
        """(world_size,) speed of each rank [per mille]."""
        return column(self.speeds or np.full(self.world_size, NOMINAL_SPEED, dtype=np.int64), "speeds")

    def time(self, load: Int64Array, rank: Int64Array | None = None) -> Int64Array:
        """Time that `rank` (N,) takes for `load` (N,) at nominal speed, rounded up [tick]. Default: one load a rank."""
        if not self.speeds:
            return load
        speed = self.speed if rank is None else self.speed[rank]
        whole, rest = np.divmod(load, speed)
        return whole * NOMINAL_SPEED - (-rest * NOMINAL_SPEED) // speed

    def mean_time(self, total_load: int) -> int:
        """Time of `total_load` when it is divided by speed over all ranks, rounded up [tick]."""
        speed = int(self.speed.sum()) if self.speeds else NOMINAL_SPEED * self.world_size
        return -(-total_load * NOMINAL_SPEED // speed)
