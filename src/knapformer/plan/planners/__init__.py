"""Planners: callables `(sequences, cluster, cost, limits) -> Placement`, pure functions of their arguments.

One visible registry; a planner is added by writing such a callable and naming it here or in `make_planner`'s caller.
"""

from collections.abc import Callable

from knapformer.errors import SpecError
from knapformer.plan.bagspec import BagSpec
from knapformer.plan.planners.bags import BagsPlanner
from knapformer.plan.planners.balanced import BalancedPlanner
from knapformer.plan.planners.base import Limits, Planner
from knapformer.plan.planners.local import LocalPlanner

PLANNERS: dict[str, Callable[..., Planner]] = {
    "local": LocalPlanner,
    "bags": BagsPlanner,
    "balanced": BalancedPlanner,
}
"""Name -> constructor. `bags` takes the bag spec; the others take keyword options only."""


def make_planner(name: str, topology: str | BagSpec | None = None) -> Planner:
    """A planner by name. Raises `SpecError` for an unknown name, or a topology that is missing or out of place."""
    if name not in PLANNERS:
        raise SpecError(f"unknown planner {name!r}; known planners are {', '.join(sorted(PLANNERS))}")
    if name == "bags":
        if topology is None:
            raise SpecError("planner 'bags' needs a topology such as 'g4n8' (8 bags of 4 ranks)")
        return BagsPlanner(BagSpec.parse(topology) if isinstance(topology, str) else topology)
    if topology is not None:
        raise SpecError(f"planner {name!r} takes no topology, got '{topology}'; only 'bags' does")
    return PLANNERS[name]()


def default_gamma(planner: Planner) -> float:
    """1.0 for bags, as published; 1.25 otherwise: attention at 400 TFLOP/s where token-wise work runs at 500."""
    return 1.0 if isinstance(planner, BagsPlanner) else 1.25


__all__ = [
    "PLANNERS",
    "BagsPlanner",
    "BalancedPlanner",
    "Limits",
    "LocalPlanner",
    "Planner",
    "default_gamma",
    "make_planner",
]
