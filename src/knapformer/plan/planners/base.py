"""What every planner takes and gives."""

from dataclasses import dataclass
from typing import Protocol

from knapformer.errors import SpecError
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.placement import Placement
from knapformer.plan.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard limits on a placement.

    Attributes:
        max_tokens_per_rank: most tokens a rank may hold, from its memory [tokens]; None for no limit.
    """

    max_tokens_per_rank: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens_per_rank is not None and self.max_tokens_per_rank < 1:
            raise SpecError(f"max_tokens_per_rank is {self.max_tokens_per_rank}; it must be at least 1, or None")


class Planner(Protocol):
    """A pure function from lengths to a placement, with a name for records."""

    @property
    def name(self) -> str: ...

    def __call__(self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits = ...) -> Placement: ...
