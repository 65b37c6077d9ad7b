"""What a rank made of gathered lengths, and whether all ranks made the same of them, before any of them acts on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from knapformer.balancer.step import RoutingStep
from knapformer.comm.gather import check_equal
from knapformer.errors import RankMismatchError

_ADVICE = "a planner must be a pure function of the gathered lengths; check custom planners and versions"


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A step, or the error that making it raised."""

    step: RoutingStep | None
    error: Exception | None = None

    @classmethod
    def of(cls, make: Callable[[], RoutingStep]) -> Self:
        """Of calling `make`. Raises nothing: the other ranks must hear of an error first."""
        try:
            return cls(make())
        except Exception as error:
            return cls(None, error)

    @property
    def verdict(self) -> tuple[int, int]:
        """What the other ranks hear of it: whether it failed, and the digest of the plan."""
        return (1, 0) if self.step is None else (0, self.step.placement.digest())

    def settle(self, verdicts: np.ndarray, ranks: tuple[int, ...], group_size: int) -> RoutingStep:
        """The step, if all ranks made one and each balancing group the same one.

        Args:
            verdicts: (R, 2) verdicts of all ranks, this one among them.
            ranks: global ranks of them, balancing group by balancing group.
            group_size: ranks of a balancing group.

        Raises:
            RankMismatchError: if another rank failed, or made another plan.
            Exception: this rank's own error.
        """
        failed = [ranks[row] for row in np.flatnonzero(verdicts[:, 0])]
        if self.error is not None:
            raise self.error
        if failed:
            raise RankMismatchError(f"planning failed on rank {failed[0]} but not here; its own error says why")
        for first in range(0, len(ranks), group_size):
            group = slice(first, first + group_size)
            check_equal(ranks[group], verdicts[group, 1:], ["the plan"], _ADVICE)
        if self.step is None:
            raise RankMismatchError("there is neither a step nor an error")
        return self.step
