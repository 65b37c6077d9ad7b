"""Overlapping sets of ranks with profiled prices, as Zellige (arXiv 2608.01150) describes.

Every sequence gets a set of ranks of any size, in equal shares; sets may overlap, so short sequences fill what long
ones leave free. The slowest rank's time, at profiled prices with communication, is minimised by integer programming
under a time limit. Code and details are not public. Here, in its favour: sets may be any ranks of a node, or any whole
nodes; rows are equal where heads do not divide; prices are those that plans are judged by.

One variable per (sequence, set) would be far too many, so a pool of sets comes first, by construction and local search
for several degree thresholds and from the plans of the nested and of the disjoint groups beside this file; HiGHS then
chooses one set of the pool for each of the longest sequences, beginning with the best plan found.
"""

import bisect
import itertools
import random
from dataclasses import dataclass, field

import numpy as np
from benchmarks.reference_planners.milp import minimise, new_program
from numpy.typing import NDArray

from knapformer.errors import PlanError
from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences

from .flexsp import greedy_sets
from .nested_groups import nested_sets
from .rank_sets import Prices, RankSet, best, by_falling_work, check_cap, place

THRESHOLDS = (0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.05)
"""Largest share of a sequence on a rank, as a multiple of the mean time per rank, that construction allows."""

MOVES = 20_000
"""Moves of the local search."""

STEEPNESS = 40
"""The local search minimises the sum of loads to this power: nearly the largest load, but with a slope everywhere."""


@dataclass(frozen=True, slots=True)
class ZelligePlanner:
    """Every sequence on a set of ranks of its own.

    Attributes:
        time_limit: for the solver [s].
        max_solved: number of longest sequences whose sets the solver chooses.
        searches: local searches from each plan constructed.
        name: "zellige".
    """

    time_limit: float = 3.0
    max_solved: int = 60
    searches: int = 2
    name: str = "zellige"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        plans = [_Plan(sequences, cluster, cost) for _ in THRESHOLDS]
        for plan, threshold in zip(plans, THRESHOLDS, strict=True):
            plan.construct(threshold)
        for others in (nested_sets, greedy_sets):
            plans.append(_Plan(sequences, cluster, cost))
            plans[-1].set_all(others(sequences, cluster, cost))
        plans += [plan.searched(seed) for plan in _different(plans) for seed in range(self.searches)]
        plans.sort(key=lambda plan: float(plan.load.max()))
        found = [plan.sets for plan in plans[:4]]
        if len(sequences):
            found.append(self._solve(sequences, plans))
        placements = [place(sequences, cluster, cost, sets, self.name, equal_rows=True) for sets in found]
        return check_cap(best(placements, cluster, cost), limits)

    def _solve(self, sequences: Sequences, plans: list["_Plan"]) -> list[RankSet]:
        """For each of the longest sequences a set that any plan used; the others stay where the best plan has them."""
        first = plans[0]
        chosen = by_falling_work(sequences)[: self.max_solved]
        unit = float(first.load.max())
        fixed = first.load.copy()
        for seq in chosen:
            fixed[list(first.sets[seq])] -= first.time(seq, len(first.sets[seq]))
        program = new_program()
        slowest = program.addVariable(0, 1 + 1e-6)
        load = [program.expr(max(float(time) / unit, 0.0)) for time in fixed]
        choices: list[dict[int, RankSet]] = []
        guess = [1.0]
        for seq in chosen:
            pool = sorted({plan.sets[seq] for plan in plans})
            variables = [program.addBinary() for _ in pool]
            program.addConstr(program.qsum(variables) == 1)
            for variable, ranks in zip(variables, pool, strict=True):
                for rank in ranks:
                    load[rank] += variable * (first.time(seq, len(ranks)) / unit)
                guess.append(float(ranks == first.sets[seq]))
            choices.append({variable.index: ranks for variable, ranks in zip(variables, pool, strict=True)})
        for time in load:
            program.addConstr(time <= slowest)
        sets = list(first.sets)
        limits = {"time_limit": self.time_limit, "gap": 1e-4, "tolerance": 1e-7}
        try:
            values = minimise(program, slowest, **limits, presolve=False, start=np.array(guess)).values
        except PlanError:
            return sets
        for seq, of_seq in zip(chosen, choices, strict=True):
            sets[seq] = next(ranks for variable, ranks in of_seq.items() if values[variable] > 0.5)
        return sets


def _different(plans: list["_Plan"]) -> list["_Plan"]:
    return list({tuple(plan.sets): plan for plan in plans}.values())


@dataclass(slots=True)
class _Plan:
    """Sets of ranks and the load they make [tick]."""

    sequences: Sequences
    cluster: Cluster
    cost: CostModel
    load: NDArray[np.float64] = field(init=False)
    sets: list[RankSet] = field(init=False)
    times: NDArray[np.float64] = field(init=False)  # (degree - 1, S): time of a sequence on each of `degree` ranks

    def __post_init__(self) -> None:
        prices, length = Prices(self.cluster, self.cost, equal_rows=True), self.sequences.length
        self.load = np.zeros(self.cluster.world_size)
        self.sets = [()] * len(length)
        self.times = np.stack([prices.share(length, g) for g in range(1, self.cluster.world_size + 1)])

    def time(self, seq: int, degree: int) -> float:
        return float(self.times[degree - 1, seq])

    def construct(self, threshold: float) -> None:
        """Largest shares first: the fewest ranks that meet the threshold, those that are then ready earliest."""
        most = threshold * self.times[0].sum() / self.cluster.world_size
        allowed = np.array(self._degrees())
        fits = self.times[allowed - 1] <= most
        at_least = np.where(fits.any(axis=0), fits.argmax(axis=0), len(allowed) - 1)
        degree = allowed[at_least]
        share = self.times[degree - 1, np.arange(len(self.sets))]
        for seq in np.lexsort((np.arange(len(share)), -share)).tolist():
            self._put(seq, self._options(seq, [int(degree[seq])])[1])

    def searched(self, seed: int) -> "_Plan":
        """The best of many plans that differ by one set from one to the next, accepting ever less that is worse."""
        plan = _Plan(self.sequences, self.cluster, self.cost)
        plan.sets, plan.load = list(self.sets), self.load.copy()
        rng = random.Random(seed)
        mean = float(self.load.mean())
        load = (self.load / mean).tolist()
        best, best_sets = max(load), list(self.sets)
        level = 1.0002 * float(self.times[0].sum()) / len(load) / mean  # no traffic, all ranks equal
        energy = sum(x**STEEPNESS for x in load)
        nodes = [list(ranks) for ranks in self.cluster.node_ranks()]
        node_of = self.cluster.node_of.tolist()
        degrees = self._degrees()
        times = (self.times / mean).T.tolist()
        weights = list(itertools.accumulate(self.times[0].tolist()))
        for move in range(MOVES):
            slack = 1 + (1.0 if seed % 2 else 0.2) * (1 - move / MOVES) ** 2
            if rng.random() < 0.5:
                slowest = max(range(len(load)), key=load.__getitem__)
                seq = rng.choice([s for s, ranks in enumerate(plan.sets) if slowest in ranks])
            else:
                seq = rng.choices(range(len(plan.sets)), cum_weights=weights)[0]
            old = plan.sets[seq]
            before = times[seq][len(old) - 1]
            changed = dict.fromkeys(old, -before)
            node = nodes[node_of[old[0]] if rng.random() < 0.5 else rng.randrange(len(nodes))]
            at = bisect.bisect_left(degrees, len(old)) + rng.choice((-1, 0, 0, 1))
            degree = degrees[min(max(at, 0), len(degrees) - 1)]
            if degree > len(node):
                continue
            noise = 0.02 if rng.random() < 0.3 else 0.0
            ready = sorted(node, key=lambda r: load[r] + changed.get(r, 0.0) + noise * rng.random())
            new = tuple(sorted(ready[:degree]))
            after = times[seq][degree - 1]
            for rank in new:
                changed[rank] = changed.get(rank, 0.0) + after
            difference = sum((load[r] + d) ** STEEPNESS - load[r] ** STEEPNESS for r, d in changed.items())
            if new == old or energy + difference > energy * slack:
                continue
            energy += difference
            for rank, d in changed.items():
                load[rank] += d
            plan.sets[seq] = new
            if max(load) < best:
                best, best_sets = max(load), list(plan.sets)
            if best < level:
                break
        plan.set_all(best_sets)
        return plan

    def set_all(self, sets: list[RankSet]) -> None:
        """Use these sets."""
        self.sets, self.load = list(sets), np.zeros(self.cluster.world_size)
        for seq, ranks in enumerate(sets):
            self.load[list(ranks)] += self.time(seq, len(ranks))

    def _degrees(self) -> list[int]:
        """Any number of ranks of a node, or whole nodes."""
        node = max(self.cluster.node_sizes)
        return [*range(1, node + 1), *range(2 * node, self.cluster.world_size + 1, node)]

    def _options(self, seq: int, degrees: list[int]) -> tuple[float, RankSet]:
        """The set of one of these sizes that finishes the sequence earliest; of equal ones the smallest."""
        nodes = self.cluster.node_ranks()
        options = []
        ordered = [sorted(ranks, key=lambda r: self.load[r]) for ranks in nodes]
        by_load = sorted(range(len(nodes)), key=lambda n: self.load[ordered[n][-1]])
        for degree in degrees:
            time = self.time(seq, degree)
            sets = [tuple(ranks[:degree]) for ranks in ordered if len(ranks) >= degree]
            if degree > max(self.cluster.node_sizes):
                sets = [tuple(r for n in by_load[: degree // len(nodes[0])] for r in nodes[n])]
            options += [(self.load[ranks[-1]] + time, len(ranks), tuple(sorted(ranks))) for ranks in sets]
        finish, _, ranks = min(options)
        return float(finish), ranks

    def _put(self, seq: int, ranks: RankSet) -> None:
        self.load[list(ranks)] += self.time(seq, len(ranks))
        self.sets[seq] = ranks
