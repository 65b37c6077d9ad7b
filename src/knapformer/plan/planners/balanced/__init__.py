"""The default planner; see `planner` for what it does, and `nodes`, `ranks`, `fill` for how."""

from knapformer.plan.planners.balanced.planner import BalancedPlanner

__all__ = ["BalancedPlanner"]
