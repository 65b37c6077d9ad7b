"""Process groups as the library sees them: a handle, this process' rank in it, and its global ranks.

Sub-groups are created once, at start, for every part of a partition and in one order on every rank, never per plan:
creating a group is itself collective, and gloo opens threads and sockets for each. Uneven all-to-alls with zero
splits carry whatever a plan needs inside them.

torch keeps process groups alive until `destroy_process_group`; a reference that outlives it (a balancer, a step or an
autograd graph at the top level of a script) makes gloo abort the interpreter at exit. So this module only refers.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist

from knapformer.comm.message import BufferPool
from knapformer.errors import RankMismatchError, SpecError


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """A process group, or a single process where torch.distributed is not initialised.

    Attributes:
        rank: this process' rank in the group.
        ranks: global rank of each member.
        reference: weak reference to the torch process group; None for a single process.
        buffers: messages kept for the group's next exchange.
    """

    rank: int
    ranks: tuple[int, ...]
    reference: "weakref.ref[Any] | None" = None
    buffers: BufferPool = field(default_factory=BufferPool, repr=False)

    @property
    def handle(self) -> Any:
        """The torch process group; None for a single process. Raises `RankMismatchError` if it has been destroyed."""
        if self.reference is None:
            return None
        group = self.reference()
        if group is None:
            raise RankMismatchError("the process group of this balancer has been destroyed; make a new balancer")
        return group

    @classmethod
    def of(cls, group: Any = None) -> Self:
        """Wrap a torch process group; None is the default group, or a single process without torch.distributed."""
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise SpecError(
                    "a process group was given but torch.distributed is not initialised; call init_process_group"
                )
            return cls(0, (0,))
        handle = dist.group.WORLD if group is None else group
        rank = dist.get_rank(handle)
        if rank < 0:
            raise SpecError(
                "this process is not a member of the group given to the balancer; pass a group it belongs to"
            )
        return cls(rank, tuple(dist.get_process_group_ranks(handle)), weakref.ref(handle))  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        """Where this group's collectives want their tensors."""
        handle = self.handle
        if handle is not None and "nccl" in str(dist.get_backend(handle)) and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def partition(group: RankGroup, sizes: Sequence[int]) -> RankGroup:
    """Cut a group into consecutive parts of `sizes` and return the part this process is in. Collective over all ranks.

    The trivial partition returns the group itself. Parts of one rank need no process group.

    Raises:
        SpecError: if the sizes do not add up, or `group` is not the default group, whose other ranks would have to take
            part in creating the sub-groups without knowing them.
    """
    if sum(sizes) != group.size or min(sizes) < 1:
        raise SpecError(f"cannot cut a group of {group.size} ranks into parts of {list(sizes)}")
    if len(sizes) == 1:
        return group
    if group.size != dist.get_world_size():
        raise SpecError(
            f"cannot create sub-groups of a group of {group.size} ranks in a world of {dist.get_world_size()}; "
            "give the balancer the default group, or a group of exactly one balancing group on one node"
        )
    mine: RankGroup | None = None
    first = 0
    for size in sizes:
        ranks = group.ranks[first : first + size]
        created = dist.new_group(list(ranks)) if size > 1 else None
        if first <= group.rank < first + size:
            mine = RankGroup(group.rank - first, ranks, None if created is None else weakref.ref(created))
        first += size
    if mine is None:
        raise SpecError(f"rank {group.rank} is in none of the parts {list(sizes)}")
    return mine


def side_group(group: RankGroup) -> RankGroup:
    """The same ranks with a group of their own for small CPU messages of another thread. Collective over `group`.

    Collectives of two threads must not share a group: nothing would order them the same way on every rank. It is a
    gloo group also beside an NCCL one.

    Where `group` is a part of the world, its ranks must be members of equally many groups (`num_memberships`), from
    which torch makes the new group's name.

    Raises:
        SpecError: if the group's ranks are not in ascending order.
    """
    if group.handle is None or group.size == 1:
        return RankGroup(group.rank, group.ranks)
    if list(group.ranks) != sorted(group.ranks):
        raise SpecError(f"the ranks of the balancer's group must be in ascending order here, got {list(group.ranks)}")
    whole = group.size == dist.get_world_size()
    created = dist.new_group(list(group.ranks), backend="gloo", use_local_synchronization=not whole)
    return RankGroup(group.rank, group.ranks, weakref.ref(created))  # type: ignore[arg-type]


def num_memberships() -> int:
    """Process groups that this process is a member of."""
    return len(dist.distributed_c10d._world.pg_names) if dist.is_available() and dist.is_initialized() else 0
