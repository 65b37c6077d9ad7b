"""Means over seeds with their 95 % confidence interval, Student's t over the seeds' own means.

Steps of one seed are not independent draws of what a planner does on another data order, so a seed counts once. With
one seed there is no interval. Standard library only: quantiles of t up to 30 degrees of freedom are tabulated, beyond
that they follow from the normal one by the first terms of their expansion in 1 / df.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom, from any table of it.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: of the seeds' means.
        half: half the width of its 95 % confidence interval; None for one seed.
        least, most: of the seeds' means.
    """

    mean: float
    half: float | None
    least: float
    most: float

    @classmethod
    def of(cls, seeds: Sequence[float]) -> "Estimate":
        """From one value of each seed."""
        half = None if len(seeds) < 2 else t_quantile(len(seeds) - 1) * stdev(seeds) / sqrt(len(seeds))
        return cls(fmean(seeds), half, min(seeds), max(seeds))

    @classmethod
    def largest(cls, seeds: Sequence[float]) -> "Estimate":
        """The largest of all seeds, which has no interval."""
        return cls(max(seeds), None, min(seeds), max(seeds))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
