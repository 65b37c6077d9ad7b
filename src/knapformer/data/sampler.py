"""Which samples make the global batch of a step, and which rank loads them.

The global batch depends on (seed, step) only, not on the number of ranks: *loaders* draw samples, and ranks host
loaders. A run of 8 ranks can be stopped and resumed on 3, and every sample still comes exactly once per epoch. Each
source is an endless line of epochs, each a fresh permutation; step t takes the next n samples of the line, also
across the end of an epoch, so that no remainder is ever dropped and no batch is ever short. There is no state beyond
(seed, step).

    loaders 0 1 2 3 on 2 ranks: 0 0 1 1;  on 8 ranks: 0 2 4 6, the others load nothing (balancing gives them work)
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from knapformer.data.draws import EpochOrders, check_state
from knapformer.errors import SpecError


@dataclass(frozen=True, slots=True)
class LoaderGroup:
    """Loaders that draw from one source.

    Attributes:
        source: name of the source, as in the manifest.
        num_loaders: how many there are.
        batch: samples that each of them loads per step.
    """

    source: str
    num_loaders: int
    batch: int

    def __post_init__(self) -> None:
        for name in ("num_loaders", "batch"):
            if getattr(self, name) < 1:
                raise SpecError(f"loader group {self.source!r}: {name} is {getattr(self, name)}; it must be at least 1")


def loader_ranks(num_loaders: int, world_size: int) -> NDArray[np.int64]:
    """(num_loaders,) the rank that hosts each loader: neighbours together on few ranks, spread evenly over many."""
    if world_size < 1:
        raise SpecError(f"world_size is {world_size}; it must be at least 1")
    return np.arange(num_loaders, dtype=np.int64) * world_size // num_loaders


class GroupSampler:
    """The order of samples of a training run.

    Args:
        groups: the loaders, in order; several groups may draw from one source.
        ids: the sample ids of each source, e.g. `manifest.ids_by_source()`.
        seed: of the order.

    Raises:
        SpecError: if there are no groups, or one names a source that is not there or has no samples.
    """

    def __init__(self, groups: Sequence[LoaderGroup], ids: Mapping[str, ArrayLike], *, seed: int = 0) -> None:
        if not groups:
            raise SpecError("a sampler needs at least one LoaderGroup")
        self.groups = tuple(groups)
        self.seed = seed
        self.step = 0
        self._ids = {name: np.asarray(values, dtype=np.int64).reshape(-1) for name, values in ids.items()}
        self._per_step = {name: 0 for name in self._ids}
        for group in self.groups:
            if not len(self._ids.get(group.source, ())):
                have = {name: len(values) for name, values in sorted(self._ids.items())}
                raise SpecError(f"loader group {group.source!r}: no samples of that source; the data set has {have}")
            self._per_step[group.source] += group.num_loaders * group.batch
        self._orders = {name: EpochOrders(len(ids), f"samples of {name}") for name, ids in self._ids.items()}

    @property
    def num_loaders(self) -> int:
        """Loaders of all groups."""
        return sum(group.num_loaders for group in self.groups)

    def batch(self, step: int) -> list[list[int]]:
        """The global batch of a step: the sample ids of each loader."""
        if step < 0:
            raise SpecError(f"step is {step}; it must be 0 or more")
        taken = {source: step * count for source, count in self._per_step.items()}
        loads: list[list[int]] = []
        for group in self.groups:
            for _ in range(group.num_loaders):
                loads.append(self._draw(group.source, taken[group.source], group.batch))
                taken[group.source] += group.batch
        return loads

    def local(self, step: int, rank: int, world_size: int) -> list[int]:
        """The sample ids that one rank loads in a step: those of the loaders it hosts, in order; may be none."""
        if not 0 <= rank < world_size:
            raise SpecError(f"rank {rank} is not in a world of {world_size} ranks")
        loads = self.batch(step)
        hosts = loader_ranks(len(loads), world_size)
        return [id for host, load in zip(hosts, loads, strict=True) if host == rank for id in load]

    def advance(self) -> int:
        """The current step, then move on to the next: `step = sampler.advance()` heads a training loop."""
        self.step += 1
        return self.step - 1

    def state_dict(self) -> dict[str, int]:
        """All there is to save: the seed and the next step. The same for every number of ranks."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, on any number of ranks. Raises `DataError` if it is not such a state."""
        check_state(state, step=None)
        self.seed, self.step = state["seed"], state["step"]

    def fingerprint(self) -> str:
        """A short digest of groups, seed, sources and sample ids: ranks or runs with another digest see other data."""
        digest = hashlib.blake2b(repr((self.groups, self.seed)).encode(), digest_size=8)
        for name, values in sorted(self._ids.items()):
            digest.update(repr((name, len(values))).encode() + values.astype("<i8").tobytes())
        return digest.hexdigest()

    def _draw(self, source: str, start: int, count: int) -> list[int]:
        ids = self._ids[source]
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, at = divmod(start + len(drawn), len(ids))
            piece = self._orders[source].order(self.seed, epoch)[at : at + count - len(drawn)]
            drawn += ids[piece].tolist()
        return drawn
