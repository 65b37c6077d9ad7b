"""Re-calibration while training: from what ranks computed and how long it took, their speeds, and drift of prices.

A rank that held `tokens` and attention `area` in a step was busy (computing, not waiting for others) for about

    busy = (constant + token * tokens + per_qk_pair * area) / speed of the rank

The prices are fitted over the last steps of all ranks by least squares in relative error, in which runs far off count
less (Huber's weights); a rank's speed is the median over its steps of predicted over measured time, the median rank
being 1. The two are repeated until they settle. One slow step moves neither.

The core is NumPy alone and deterministic. What is done with an estimate must be the same on every rank: let one rank's
estimate count (`Trainer` does).
"""

import warnings
from collections import deque
from dataclasses import dataclass

import numpy as np

from knapformer.errors import KnapFormerWarning, SpecError
from knapformer.plan.arrays import Int64Array
from knapformer.plan.cluster import MAX_SPEED, NOMINAL_SPEED
from knapformer.plan.cost import CostModel
from knapformer.train.least_squares import Floats, non_negative

HUBER = 0.1
"""Relative deviation from which a run counts less."""
ROUNDS = 8
SEPARABLE = 30.0
"""Ratio of singular values of (tokens, area) above which steps do not tell the two prices apart."""


@dataclass(frozen=True, slots=True)
class Recalibration:
    """What the last steps say.

    Attributes:
        speeds: of each rank, per mille of the median rank; within the tolerance exactly nominal.
        straggler: the slowest rank, if it is slower than the tolerance allows.
        pair_over_token: price of a query-key pair over that of a token, relative to the cost model's; None where the
            steps do not tell the two apart (balanced ones do not, and need not).
        steps: how many they are.
    """

    speeds: tuple[int, ...]
    straggler: int | None
    pair_over_token: float | None
    steps: int


class StepMeter:
    """Collects what ranks did in the last steps and estimates their speeds.

    Args:
        world_size: number of ranks.
        window: steps that count.
        tolerance: relative deviation of a speed that is taken for noise.
        drift: relative deviation of the ratio of prices that is warned of.
    """

    def __init__(self, world_size: int, *, window: int = 32, tolerance: float = 0.05, drift: float = 0.25) -> None:
        if world_size < 1 or window < 4 or not 0 <= tolerance < 1 or not drift > 0:
            raise SpecError(
                f"a meter needs a rank, a window of at least 4 steps, a tolerance from 0 to below 1 and a positive "
                f"drift, got world_size={world_size}, window={window}, tolerance={tolerance}, drift={drift}"
            )
        self.world_size, self.tolerance, self.drift = world_size, tolerance, drift
        self._steps: deque[Int64Array] = deque(maxlen=window)
        self._warned: set[object] = set()

    def add(self, tokens: Int64Array, area: Int64Array, busy: Int64Array) -> None:
        """One step: (world_size,) tokens and attention area that each rank had, and its busy time [ns]."""
        step = np.stack([tokens, area, busy]).astype(np.int64)
        if step.shape != (3, self.world_size):
            raise SpecError(f"a step has figures of {step.shape[1:]} ranks; this meter is for {self.world_size}")
        self._steps.append(step)

    def estimate(self, cost: CostModel) -> Recalibration | None:
        """Speeds and the drift of `cost`; None before there are steps enough. Repeatable: changes nothing."""
        if len(self._steps) < 4:
            return None
        tokens, area, busy = np.stack(self._steps, axis=1).astype(np.float64)  # (steps, ranks) each
        if not (busy > 0).all():
            return None  # a clock that stands still says nothing
        columns = np.stack([np.ones_like(tokens), tokens, area], axis=-1)
        prices = _robust_prices(columns, busy)
        speed = np.ones(self.world_size)
        for _ in range(ROUNDS):
            speed = np.median(columns @ prices / busy, axis=0)
            speed /= np.median(speed)
            prices = _robust_prices(columns, busy * speed)
        ratio = columns @ prices / busy
        # The median of n runs is uncertain by about 1.25 deviations over the root of n.
        noise = 1.25 * 1.4826 * np.median(np.abs(ratio / np.median(ratio, axis=0) - 1), axis=0) / len(busy) ** 0.5
        changed = np.abs(speed - 1) > np.maximum(self.tolerance, 3 * noise)
        speeds = np.where(changed, np.rint(NOMINAL_SPEED * speed), NOMINAL_SPEED).clip(1, MAX_SPEED).astype(int)
        slowest = int(speeds.argmin())
        return Recalibration(
            speeds=tuple(speeds.tolist()),
            straggler=slowest if speeds[slowest] < NOMINAL_SPEED else None,
            pair_over_token=_ratio_of_prices(columns, prices, cost),
            steps=len(self._steps),
        )

    def warn(self, estimate: Recalibration) -> None:
        """A `KnapFormerWarning` for a straggler and for prices that drifted, once each."""
        slow = estimate.straggler
        if slow is not None and slow not in self._warned:
            self._warned.add(slow)
            warnings.warn(
                f"rank {slow} computes at {estimate.speeds[slow] / NOMINAL_SPEED:.2f} of the median rank's speed over "
                f"the last {estimate.steps} steps; check its device for heat, other programs and clocks",
                KnapFormerWarning,
                stacklevel=2,
            )
        ratio = estimate.pair_over_token
        if ratio is not None and abs(np.log(max(ratio, 1e-9))) > np.log1p(self.drift) and "prices" not in self._warned:
            self._warned.add("prices")
            warnings.warn(
                f"attention costs {ratio:.2f} times what the cost model says, relative to token-wise work; measure "
                "this device with `knapformer calibrate` and give the profile as cost",
                KnapFormerWarning,
                stacklevel=2,
            )


def _robust_prices(columns: Floats, seconds: Floats) -> Floats:
    """Non-negative prices in relative error, by Huber's weights."""
    relative = (columns / seconds[..., None]).reshape(-1, columns.shape[-1])
    ones = np.ones(len(relative))
    prices = non_negative(relative, ones)
    for _ in range(ROUNDS):
        deviation = np.abs(relative @ prices - 1)
        root = np.sqrt(HUBER / np.maximum(deviation, HUBER))
        prices = non_negative(relative * root[:, None], root)
    return prices


def _ratio_of_prices(columns: Floats, prices: Floats, cost: CostModel) -> float | None:
    """Fitted price of a query-key pair over a token's, relative to the cost model's; None if steps do not tell."""
    used = columns.reshape(-1, 3)
    scaled = used / np.linalg.norm(used, axis=0).clip(1e-300)
    singular = np.linalg.svd(scaled, compute_uv=False)
    if not (prices[1] and prices[2] and cost.token and cost.per_qk_pair) or singular[0] > SEPARABLE * singular[-1]:
        return None
    return float(prices[2] / prices[1] * cost.token / cost.per_qk_pair)
