"""A mixed-integer program over sets of groups for every step, as FlexSP (arXiv 2412.01523), under a time limit.

The ranks are divided into disjoint groups of powers of two, and each sequence is shared by one group. With sequences in
Q buckets of similar length (cut by dynamic programming), virtual groups p of degree d_p, and A_qp sequences of bucket q
on group p:

    minimise C   where   sum_q A_qp time_q(d_p) <= C        sum_p A_qp = size of q
                         sum_p d_p m_p <= ranks              A_qp = 0 unless m_p = 1

Published: time_q is that of the longest sequence in a bucket; memory limits split a batch into micro-batches; SCIP as
the solver, seconds per step. Here, with HiGHS and in its favour: mean times per bucket, so totals are right; one
micro-batch, so nothing waits between micro-batches; the solver starts from the best uniform degree improved by
splitting and merging groups; and sequences are dealt to the groups found once more by their exact lengths.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from benchmarks.reference_planners.milp import minimise, new_program
from numpy.typing import NDArray

from knapformer.errors import PlanError
from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences

from .rank_sets import Prices, RankSet, best, by_falling_work, check_cap, place

Groups = Counter[int]
"""Degree -> number of groups."""


@dataclass(frozen=True, slots=True)
class FlexSPPlanner:
    """Disjoint groups of sizes chosen per step.

    Attributes:
        time_limit: for the solver [s].
        num_buckets: Q.
        name: "flexsp".
    """

    time_limit: float = 5.0
    num_buckets: int = 16
    name: str = "flexsp"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        if not len(sequences):
            return place(sequences, cluster, cost, [], self.name, equal_rows=False)
        world_size, prices = cluster.world_size, Prices(cluster, cost, equal_rows=False)
        degrees = [2**k for k in range(world_size.bit_length()) if 2**k <= world_size]
        times = {d: prices.share(sequences.length, d) for d in degrees}
        order = by_falling_work(sequences)
        greedy = _improve(times, order, world_size)
        solved = self._solve(sequences, times, greedy, world_size)
        found = [greedy, *(Counter({d: world_size // d}) for d in degrees)]
        if solved is not None:
            found.append(solved)
        dealt = [(_deal(times, order, groups)[1], groups) for groups in found]
        placements = [
            place(sequences, cluster, cost, _aligned(members, groups), self.name, equal_rows=False)
            for members, groups in dealt
        ]
        return check_cap(best(placements, cluster, cost), limits)

    def _solve(
        self, sequences: Sequences, times: dict[int, NDArray[np.float64]], start: Groups, world_size: int
    ) -> Groups | None:
        """The groups of the mixed-integer program's best solution, or None if it found nothing in time."""
        bucket = _buckets(sequences.length, self.num_buckets)
        size = np.bincount(bucket)
        unit = float(times[1].sum() / world_size)
        mean = {d: np.bincount(bucket, time) / size / unit for d, time in times.items()}
        groups = [d for d in times for _ in range(world_size // d)]
        program = new_program()
        slowest = program.addVariable()
        used = [program.addBinary() for _ in groups]
        amount = [[program.addIntegral(0, float(n)) for n in size] for _ in groups]
        program.addConstr(program.qsum(m * d for m, d in zip(used, groups, strict=True)) <= world_size)
        for q, n in enumerate(size.tolist()):
            program.addConstr(program.qsum(of_group[q] for of_group in amount) == n)
        for p, (m, of_group, degree) in enumerate(zip(used, amount, groups, strict=True)):
            load = program.qsum(a * float(mean[degree][q]) for q, a in enumerate(of_group))
            program.addConstr(load <= slowest)
            program.addConstr(program.qsum(of_group) <= m * float(size.sum()))
            if p and groups[p - 1] == degree:
                program.addConstr(used[p - 1] >= m)  # equal groups are used in order
        members = _deal(times, by_falling_work(sequences), start)[1]
        guess = np.zeros(program.numVariables)
        for p, of_group in _first_groups(groups, start, members):
            guess[used[p].index] = 1.0
            number = np.bincount(bucket[of_group], minlength=len(size))
            guess[[a.index for a in amount[p]]] = number
            guess[slowest.index] = max(guess[slowest.index], float(number @ mean[groups[p]]))
        limits = {"time_limit": self.time_limit, "gap": 1e-4, "tolerance": 1e-7}
        try:
            solution = minimise(program, slowest, **limits, presolve=False, start=guess)
        except PlanError:
            return None
        return Counter(d for m, d in zip(used, groups, strict=True) if solution.values[m.index] > 0.5)


def _first_groups(groups: list[int], start: Groups, members: list[list[int]]) -> list[tuple[int, list[int]]]:
    """The members of each group of `start`, given to the first of `groups` of that degree."""
    number = {d: [p for p, degree in enumerate(groups) if degree == d] for d in start}
    return [(number[d].pop(0), of_group) for d, of_group in zip(start.elements(), members, strict=True)]


def greedy_sets(sequences: Sequences, cluster: Cluster, cost: CostModel) -> list[RankSet]:
    """The group of each sequence before the solver improves on it."""
    degrees = [2**k for k in range(cluster.world_size.bit_length()) if 2**k <= cluster.world_size]
    times = {d: Prices(cluster, cost, equal_rows=False).share(sequences.length, d) for d in degrees}
    order = by_falling_work(sequences)
    groups = _improve(times, order, cluster.world_size)
    return _aligned(_deal(times, order, groups)[1], groups)


def _deal(times: dict[int, NDArray[np.float64]], order: list[int], groups: Groups) -> tuple[float, list[list[int]]]:
    """Longest sequences first, each to the group that finishes it earliest: the slowest group's time, the members."""
    degree = np.array(list(groups.elements()))
    by_group = np.stack([times[d] for d in degree.tolist()])
    load = np.zeros(len(degree))
    members: list[list[int]] = [[] for _ in degree]
    for seq in order:
        done = load + by_group[:, seq]
        chosen = int(done.argmin())
        load[chosen] = done[chosen]
        members[chosen].append(seq)
    return float(load.max()), members


def _improve(times: dict[int, NDArray[np.float64]], order: list[int], world_size: int) -> Groups:
    """The best uniform degree, then as long as it helps: split a group in two, or merge two of one size."""
    uniform = [Counter({d: world_size // d}) for d in times]
    score, current = min(((_deal(times, order, groups)[0], groups) for groups in uniform), key=lambda pair: pair[0])
    while True:
        neighbours = []
        for d in times:
            if current[d] and d > 1:
                neighbours.append(current + Counter({d // 2: 2}) - Counter({d: 1}))
            if current[d] > 1 and 2 * d in times:
                neighbours.append(current + Counter({2 * d: 1}) - Counter({d: 2}))
        scored = [(_deal(times, order, groups)[0], groups) for groups in neighbours]
        better = min(scored, key=lambda pair: pair[0], default=(score, current))
        if better[0] >= score * (1 - 1e-9):
            return current
        score, current = better


def _aligned(members: list[list[int]], groups: Groups) -> list[RankSet]:
    """Ranks for the groups, largest first, so that powers of two stay aligned; the set of each sequence."""
    sets: list[RankSet] = [()] * sum(len(seqs) for seqs in members)
    first = 0
    for degree, seqs in sorted(zip(groups.elements(), members, strict=True), key=lambda pair: -pair[0]):
        for seq in seqs:
            sets[seq] = tuple(range(first, first + degree))
        first += degree
    return sets


def _buckets(length: NDArray[np.int64], num_buckets: int) -> NDArray[np.int64]:
    """(S,) bucket of each sequence, cut so that lengths deviate least from the longest of their bucket, in total."""
    value, inverse, count = np.unique(length, return_inverse=True, return_counts=True)
    n = len(value)
    before, tokens = np.append(0, np.cumsum(count)), np.append(0, np.cumsum(count * value))
    cost = np.full(n + 1, np.inf)
    cost[0] = 0.0
    cuts = []
    for _ in range(min(num_buckets, n)):
        # Column j: the last bucket holds values i .. j-1 and pads them to value[j-1].
        padding = value[None, :] * (before[None, 1:] - before[:-1, None]) - (tokens[None, 1:] - tokens[:-1, None])
        total = cost[:-1, None] + np.where(np.tri(n, dtype=bool).T, padding, np.inf)
        cuts.append(total.argmin(axis=0))
        cost = np.append(np.inf, total.min(axis=0))
    bucket_of_value, stop = np.zeros(n, dtype=np.int64), n
    for number, cut in reversed(list(enumerate(cuts))):
        first = int(cut[stop - 1])
        bucket_of_value[first:stop] = number
        stop = first
    return bucket_of_value[inverse]
