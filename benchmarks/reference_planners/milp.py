"""A mixed-integer linear program in columns and rows, solved by HiGHS (optional extra `exact`).

Just enough of a modelling layer that planners can state sums as `{variable: coefficient}` and get values back with a
proven bound. One thread and a fixed seed: the same program gives the same answer unless the time limit cuts it short.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knapformer.errors import BackendUnavailableError, PlanError

Terms = Mapping[int, float]
"""A linear sum: variable -> coefficient."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of all variables, the objective, what no solution can beat, and whether that is proven equal."""

    values: NDArray[np.float64]
    objective: float
    bound: float
    optimal: bool


@dataclass(slots=True)
class Milp:
    """Minimise a linear sum. Variables and rows are added one by one; `solve` may be called several times."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[Terms, float, float]] = field(default_factory=list)

    def variable(self, low: float = 0.0, high: float = inf, *, integer: bool = False) -> int:
        """Add a variable; return its number."""
        self.low.append(low)
        self.high.append(high)
        self.integer.append(integer)
        return len(self.low) - 1

    def row(self, terms: Terms, low: float = -inf, high: float = inf) -> None:
        """Add `low <= terms <= high`."""
        self.rows.append((terms, low, high))

    def solve(
        self,
        objective: Terms,
        *,
        time_limit: float,
        gap: float = 1e-7,
        tolerance: float = 1e-9,
        presolve: bool = True,
        start: NDArray[np.float64] | None = None,
    ) -> Solution:
        """Minimise `objective`.

        Args:
            time_limit: stop after this long with the best solution found [s].
            gap: stop when the solution is proven to be this close to the optimum (relative).
            tolerance: by how much rows and whole numbers may be missed.
            presolve: whether to simplify first; HiGHS 1.16 did not return from it for some assignment programs.
            start: values of all variables to begin with, for example an earlier solution.

        Raises:
            BackendUnavailableError: if highspy is not installed.
            PlanError: if no solution exists, or none was found in time.
        """
        highspy = require_highspy()
        # The base class of highspy's own: the latter prints a banner on stdout before it can be silenced.
        solver = highspy.Highs.__bases__[0]()
        for name, value in (
            ("output_flag", False),
            ("presolve", "choose" if presolve else "off"),
            ("threads", 1),
            ("random_seed", 0),
            ("time_limit", max(time_limit, 0.1)),
            ("mip_rel_gap", gap),
            ("mip_feasibility_tolerance", tolerance),
            ("primal_feasibility_tolerance", tolerance),
        ):
            solver.setOptionValue(name, value)
        solver.passModel(self._lp(highspy, objective))
        if start is not None:
            guess = highspy.HighsSolution()
            guess.col_value = start.tolist()
            solver.setSolution(guess)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise PlanError(
                f"HiGHS found no solution within {time_limit:g} s (status: {solver.modelStatusToString(status)}); "
                "allow more time or plan a smaller case"
            )
        optimal = status == highspy.HighsModelStatus.kOptimal
        bound = info.mip_dual_bound if any(self.integer) else (info.objective_function_value if optimal else -inf)
        return Solution(np.array(solver.getSolution().col_value), info.objective_function_value, bound, optimal)

    def _lp(self, highspy: Any, objective: Terms) -> Any:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.low), len(self.rows)
        cost = np.zeros(len(self.low))
        for variable, coefficient in objective.items():
            cost[variable] = coefficient
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.array(self.low), np.array(self.high)
        lp.row_lower_ = np.array([low for _, low, _ in self.rows])
        lp.row_upper_ = np.array([high for _, _, high in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(terms) for terms, _, _ in self.rows)]).astype(np.int32)
        lp.a_matrix_.index_ = np.array([v for terms, _, _ in self.rows for v in terms], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([c for terms, _, _ in self.rows for c in terms.values()], dtype=np.float64)
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if integer else kinds.kContinuous for integer in self.integer]
        return lp


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


def add(*sums: Terms) -> dict[int, float]:
    """The sum of several linear sums."""
    total: dict[int, float] = {}
    for terms in sums:
        for variable, coefficient in terms.items():
            total[variable] = total.get(variable, 0.0) + coefficient
    return total


def scale(terms: Terms, factor: float) -> dict[int, float]:
    """A linear sum times a number."""
    return {variable: coefficient * factor for variable, coefficient in terms.items()}
