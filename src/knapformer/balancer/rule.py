"""What a balancer plans by: planner, prices and limits. Pure, and the same on every rank.

One meaning of `gamma`: the time of an attention FLOP over that of a token-wise FLOP, in `CostModel.from_shapes`. Bags
price work exactly as the command line does; only how many heads they cut attention into depends on the bag sizes.
"""

import os
from dataclasses import dataclass, replace
from math import lcm
from typing import Self

from knapformer.data import Profile
from knapformer.errors import CalibrationError, SpecError
from knapformer.plan import BagSpec, Cluster, CostModel, Limits, Placement, Planner, Sequences, make_planner
from knapformer.plan.planners import BagsPlanner, default_gamma


@dataclass(frozen=True, slots=True)
class PlanRule:
    """From lengths to a placement.

    Attributes:
        planner: who decides.
        limits: hard limits, cut to what padding to the token grid keeps.
        gamma: for prices from shapes; None for the planner's default.
        fixed_cost: prices that were given; None to take them from shapes.
    """

    planner: Planner
    limits: Limits
    gamma: float | None = None
    fixed_cost: CostModel | None = None

    @classmethod
    def of(
        cls,
        bag_specs: str | BagSpec = "auto",
        gamma: float | None = None,
        *,
        cost: CostModel | None = None,
        planner: Planner | str | None = None,
        limits: Limits | None = None,
        token_grid: int = 1,
    ) -> Self:
        """From the arguments of `SequenceBalancer`. Raises `SpecError` for what cannot be read or combined."""
        if planner is None or isinstance(planner, str):
            is_auto = isinstance(bag_specs, str) and bag_specs == "auto"
            planner = make_planner(planner or ("balanced" if is_auto else "bags"), None if is_auto else bag_specs)
        return cls(planner, _on_grid(limits or Limits(), token_grid), gamma, cost)

    @property
    def spec(self) -> BagSpec | None:
        """The bag spec, of planners that have one."""
        return self.planner.spec if isinstance(self.planner, BagsPlanner) else None

    def cost(self, token_dim: int | None = None) -> CostModel:
        """The prices of tokens that are `token_dim` wide, by default 3,072 as in FLUX."""
        if self.fixed_cost is not None:
            return self.fixed_cost
        gamma = default_gamma(self.planner) if self.gamma is None else self.gamma
        width = {} if token_dim is None else {"d_model": token_dim}
        return CostModel.from_shapes(**width, gamma=gamma)

    def place(
        self, sequences: Sequences, cluster: Cluster, token_dim: int | None = None
    ) -> tuple[Placement, CostModel]:
        """The placement, checked, and its prices: those of `cost`, for the number of heads it cuts attention into."""
        cost, planner = self.cost(token_dim), self.planner
        if self.fixed_cost is None and isinstance(planner, BagsPlanner):
            # Nobody has told the model's heads yet. Any number that every bag divides cuts them into whole heads.
            planner = replace(planner, num_heads=lcm(*(size for size, _ in planner.spec.terms)))
        placement = planner(sequences, cluster, cost, self.limits).validate()
        return placement, cost.with_num_heads(placement.num_heads)


def read_cost(cost: CostModel | str | os.PathLike[str] | None) -> CostModel | CalibrationError | None:
    """Prices, read from a profile if need be. What is wrong with it is returned, to be raised once ranks agree."""
    if cost is None or isinstance(cost, CostModel):
        return cost
    try:
        return Profile.load(cost).cost_model()
    except CalibrationError as error:
        return error


def _on_grid(limits: Limits, token_grid: int) -> Limits:
    """Limits that padding keeps: tokens per rank are cut to a multiple of the grid."""
    cap = limits.max_tokens_per_rank
    if token_grid < 1 or (cap is not None and cap < token_grid):
        raise SpecError(
            f"token_grid is {token_grid}; it must be at least 1 and at most max_tokens_per_rank, which is {cap}"
        )
    return limits if cap is None else replace(limits, max_tokens_per_rank=cap // token_grid * token_grid)
