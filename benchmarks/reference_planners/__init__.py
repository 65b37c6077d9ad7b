"""Planners that others published, written from their descriptions, to compare with. Not part of the library.

Each is a callable with the `Planner` protocol. Where a description leaves something open, or restricts a scheme in a
way that is not essential to it, we choose what is better for it; each module says what it assumed. All of them see the
same prices as ours, run on the same executor, choose their own setting for every step by its timeline, and may take
longer than a step allows. None knows ranks of unequal speed.
"""

from knapformer.plan import Planner

from .flexsp import FlexSPPlanner
from .karmarkar_karp import KarmarkarKarpPlanner
from .lpt import LPTPlanner
from .nested_groups import NestedGroupsPlanner
from .ulysses import UlyssesPlanner
from .zellige import ZelligePlanner

REFERENCE_PLANNERS: dict[str, Planner] = {
    planner.name: planner
    for planner in (
        LPTPlanner(),
        KarmarkarKarpPlanner(),
        UlyssesPlanner(),
        NestedGroupsPlanner(),
        FlexSPPlanner(),
        ZelligePlanner(),
    )
}

__all__ = [
    "REFERENCE_PLANNERS",
    "FlexSPPlanner",
    "KarmarkarKarpPlanner",
    "LPTPlanner",
    "NestedGroupsPlanner",
    "UlyssesPlanner",
    "ZelligePlanner",
]
