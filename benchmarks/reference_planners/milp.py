"""HiGHS as the reference planners use it (optional extra `exact`): silent, one thread, with a proven bound.

Programs are highspy expressions. A fixed seed: the same program gives the same answer unless time runs out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knapformer.errors import BackendUnavailableError, PlanError


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of all variables, the objective, and what no solution can beat."""

    values: NDArray[np.float64]
    objective: float
    bound: float


def require_highspy() -> Any:
    """The highspy module, or `BackendUnavailableError` with how to install it."""
    try:
        import highspy
    except ImportError as error:
        raise BackendUnavailableError(
            "this planner solves a mixed-integer program with HiGHS, but the package 'highspy' is not installed; "
            "install it with: pip install 'knapformer[exact]'"
        ) from error
    return highspy


def new_program() -> Any:
    """An empty `highspy.Highs` that prints nothing."""

    class Silent(require_highspy().Highs):
        def enableCallbacks(self) -> None:  # noqa: N802
            # The constructor's first call, and what prints a banner.
            self.silent()
            super().enableCallbacks()

    return Silent()


def minimise(
    program: Any,
    objective: Any,
    *,
    time_limit: float,
    gap: float = 1e-7,
    tolerance: float = 1e-9,
    presolve: bool = True,
    start: NDArray[np.float64] | None = None,
) -> Solution:
    """Solve `program`, which has whole-number variables, for the least `objective`; it may be changed and solved again.

    Args:
        program, objective: of highspy.
        time_limit: stop after this long with the best solution found [s].
        gap: stop when the solution is proven to be this close to the optimum (relative).
        tolerance: by how much constraints and whole numbers may be missed.
        presolve: whether to simplify first; HiGHS 1.16 did not return from it for some assignment programs.
        start: values of all variables to begin with, for example an earlier solution.

    Raises:
        PlanError: if no solution exists, or none was found in time.
    """
    highspy = require_highspy()
    for name, value in (
        ("presolve", "choose" if presolve else "off"),
        ("threads", 1),
        ("random_seed", 0),
        ("time_limit", program.getRunTime() + max(time_limit, 0.1)),
        ("mip_rel_gap", gap),
        ("mip_feasibility_tolerance", tolerance),
        ("primal_feasibility_tolerance", tolerance),
    ):
        program.setOptionValue(name, value)
    program.setObjective(objective, highspy.ObjSense.kMinimize)
    if start is not None:
        guess = highspy.HighsSolution()
        guess.col_value = start.tolist()
        program.setSolution(guess)
    program.solve()
    info = program.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        status = program.modelStatusToString(program.getModelStatus())
        raise PlanError(
            f"HiGHS found no solution within {time_limit:g} s (status: {status}); "
            "allow more time or plan a smaller case"
        )
    return Solution(np.array(program.getSolution().col_value), info.objective_function_value, info.mip_dual_bound)
