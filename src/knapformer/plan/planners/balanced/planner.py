"""The default planner: whole where possible, split where needed, level where it counts.

A step is a scheduling problem with two divisible resources, tokens and attention rows, and a reward for keeping both
of a sequence together: a sequence that is whole costs no communication.

    cluster -> groups of nodes   equal predicted time, by whole sequences (`nodes`): links between nodes are slow
    group -> ranks               equal tokens *and* equal area (`ranks`): then neither memory nor either phase of a
                                 layer waits, whatever the two prices are

A group is a node, or several that share a sequence which no node can hold. There are a few `WAYS` to share such a
sequence; the timeline decides. Where all sequences are small, moving a few of them is enough (`moves`).

Everything is integers, so plans are the same on every machine.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from knapformer.errors import PlanError, PlanInvariantError, SpecError
from knapformer.plan.arrays import Int64Array, exact_sum
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.placement import Placement, Shards
from knapformer.plan.planners.balanced.moves import few_moves
from knapformer.plan.planners.balanced.nodes import Groups, assign_groups
from knapformer.plan.planners.balanced.ranks import Cuts, Line, Shares, apportion, share, spread
from knapformer.plan.planners.base import Limits
from knapformer.plan.sequences import Sequences
from knapformer.plan.timeline import timeline

Level = Literal["both", "time"]

MAX_AREA = 1 << 62
"""Most attention area of a step, so that sums over the cluster fit 64 bits."""

MOST_LABELS = 64
"""Ranks of a node up to which they are relabelled; the table grows with the square."""


class Way(NamedTuple):
    """How to share sequences that no node can hold.

    Attributes:
        room: part of the room of its nodes that such a sequence takes at most, as a fraction.
        evenly: over the ranks of its nodes; else it fills a stretch of the line, like other split sequences.
    """

    room: tuple[int, int]
    evenly: bool


WAYS = Way((3, 4), evenly=False), Way((3, 4), evenly=True), Way((1, 3), evenly=True)
"""The first is always possible, the others need budgets that hold even shares."""

MOST_COMPARED = 512
"""Ranks up to which ways are compared; beyond it the first is taken."""


@dataclass(frozen=True, slots=True)
class BalancedPlanner:
    """Places tokens and attention rows of every sequence so that the last rank's timeline ends early.

    Attributes:
        level: what is level across nodes: "time" (predicted time) or "both" (tokens and area, no prices needed);
            None for "time" where the cost model has prices for both kinds of work, else "both".
        tolerance: a step whose ranks are level to within this before balancing is left alone [per mille].
        name: "balanced".
    """

    level: Level | None = None
    tolerance: int = 1
    name: str = "balanced"

    def __post_init__(self) -> None:
        if self.level not in (None, "both", "time"):
            raise SpecError(f"level is {self.level!r}; allowed are 'time', 'both' and None")
        if self.tolerance < 0:
            raise SpecError(f"tolerance is {self.tolerance} per mille; it must be 0 or more")

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        """Raises `PlanError` if no placement keeps the limits; the message names the smallest cap that one does."""
        sequences.check_world(cluster.world_size)
        cap = None if limits is None else limits.max_tokens_per_rank
        _check(sequences, cluster, cost, cap)
        work = cost.work(sequences.length)
        total = exact_sum(work)
        placement = self._skip(sequences, cluster, cost, work, total, cap)
        if placement is None and cap is None and not self._levels_both(cost):
            placement = few_moves(sequences, cluster, cost, work, self.name)
        if placement is None:
            placement = self._best_way(sequences, cluster, cost, work, total, cap)
        if cap is not None and int(placement.tokens().max()) > cap:
            raise PlanInvariantError(f"planner 'balanced' exceeds max_tokens_per_rank {cap}; please report the lengths")
        return placement

    def _levels_both(self, cost: CostModel) -> bool:
        if self.level is None:
            return cost.token == 0 or cost.per_qk_pair == 0
        return self.level == "both"

    def _skip(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, work: Int64Array, total: int, cap: int | None
    ) -> Placement | None:
        """The identity, if it is good enough."""
        load = np.zeros(cluster.world_size, dtype=np.int64)
        np.add.at(load, sequences.home, work)
        worst, mean = int(cluster.time(load).max()), cluster.mean_time(total)
        if cluster.world_size == 1 or not len(sequences):
            reason = "there is nothing to balance"
        elif worst * 1000 <= mean * (1000 + self.tolerance):
            reason = f"ranks are level to {self.tolerance} per mille at home"
        else:
            return None
        if cap is not None and int(sequences.tokens_at_home(cluster.world_size).max()) > cap:
            return None
        return Placement.whole(
            sequences,
            sequences.home,
            world_size=cluster.world_size,
            num_heads=cost.num_heads,
            planner=self.name,
            skip_reason=reason,
        )

    def _best_way(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, work: Int64Array, total: int, cap: int | None
    ) -> Placement:
        """Share all sequences; where several nodes share one, in the way whose timeline ends first."""
        trials: list[Placement] = []
        for way in WAYS:
            groups = assign_groups(sequences, cluster, work, total, way.room)
            trial = self._place(sequences, cluster, cost, groups, cap, evenly=way.evenly)
            if trial is not None:
                trials.append(trial)
            if not groups.beyond or self._levels_both(cost) or cluster.world_size > MOST_COMPARED:
                return trials[0]
        return min(trials, key=lambda trial: timeline(trial, cluster, cost).step)

    def _place(
        self,
        sequences: Sequences,
        cluster: Cluster,
        cost: CostModel,
        groups: Groups,
        cap: int | None,
        *,
        evenly: bool,
    ) -> Placement | None:
        """Share sequences among the ranks of their groups; None if a rank's budget does not hold its even shares."""
        length, group = sequences.length, groups.of_sequence
        line = _line(sequences, cluster, cost, groups, cap, both=self._levels_both(cost))
        even: list[tuple[int, tuple[Cuts, Cuts]]] = []
        for seq in groups.beyond if evenly else ():
            first, stop = line.first[group[seq] : group[seq] + 2].tolist()
            places = np.arange(first, stop)
            cuts = spread(int(length[seq]), cost.num_heads, places, cluster.speed[line.rank[places]])
            for budget, each, unit in zip(line.budget, cuts, (1, int(length[seq])), strict=True):
                budget[each.place] -= each.num * unit
            even.append((seq, cuts))
        if int(line.budget.min()) < 0:
            return None
        seqs = np.lexsort((-length, group))
        seqs = seqs[~np.isin(seqs, [seq for seq, _ in even])] if even else seqs
        place = np.empty_like(line.rank)
        place[line.rank] = np.arange(len(place))
        shares = share(length[seqs], cost.num_heads, group[seqs], place[sequences.home[seqs]], line)
        return _placement(sequences, cluster, cost, line, seqs, shares, even, self.name)


def _check(sequences: Sequences, cluster: Cluster, cost: CostModel, cap: int | None) -> None:
    """Raise `PlanError` for what cannot be planned."""
    total = sequences.num_tokens
    least = -(-total // cluster.world_size)
    if cap is not None and cap < least:
        raise PlanError(
            f"max_tokens_per_rank {cap} cannot hold {total} tokens on {cluster.world_size} ranks; the smallest "
            f"feasible cap is {least}; raise it, or give each step fewer tokens"
        )
    longest = int(sequences.length.max(initial=0))
    area = longest * longest * cost.num_heads
    too_much = area * max(1, cost.per_qk_pair) * 2 >= MAX_AREA
    if area * len(sequences) >= MAX_AREA:  # perhaps not all are that long
        too_much |= exact_sum(sequences.length * sequences.length) * cost.num_heads >= MAX_AREA
    if too_much:
        raise PlanError(
            f"sequences of up to {longest} tokens with {cost.num_heads} heads have more attention work than 64 bits "
            "can count; the planner takes steps of at most 2**62 rows times keys, or ticks for one sequence"
        )


def _line(
    sequences: Sequences, cluster: Cluster, cost: CostModel, groups: Groups, cap: int | None, *, both: bool
) -> Line:
    """The ranks by group. Each shall hold its share, by speed, of its group's tokens and area (of all if `both`)."""
    group = groups.of_node[cluster.node_of]
    rank = group.argsort(kind="stable")
    group = group[rank]
    first = group.searchsorted(np.arange(int(group[-1]) + 2))
    levelled, of_sequence = (0 * group, 0 * groups.of_sequence) if both else (group, groups.of_sequence)
    total = np.zeros((2, int(levelled[-1]) + 1), dtype=np.int64)
    np.add.at(total[0], of_sequence, sequences.length)
    np.add.at(total[1], of_sequence, sequences.length * sequences.length * cost.num_heads)
    budget = np.array([apportion(each, cluster.speed[rank], levelled) for each in total])
    if cap is not None:
        budget[0] = _capped(budget[0], cap)
    return Line(rank, group, first, budget)


def _capped(tokens: Int64Array, cap: int) -> Int64Array:
    """Budgets of at most `cap` with the same sum: what is above goes to the others, level by level."""
    budget, excess = np.minimum(tokens, cap), int(np.maximum(tokens - cap, 0).sum())
    while excess:
        below = np.flatnonzero(budget < cap)
        each, rest = divmod(excess, len(below))
        more = np.full(len(below), each, dtype=np.int64)
        more[:rest] += 1
        more = np.minimum(more, cap - budget[below])
        budget[below] += more
        excess -= int(more.sum())
    return budget


def _placement(
    sequences: Sequences,
    cluster: Cluster,
    cost: CostModel,
    line: Line,
    seqs: Int64Array,
    shares: Shares,
    even: list[tuple[int, tuple[Cuts, Cuts]]],
    name: str,
) -> Placement:
    """The shares of `seqs`, and `even` ones of other sequences, as shards on relabelled ranks."""
    whole = (shares.whole >= 0).nonzero()[0]
    length, place, zero = sequences.length[seqs[whole]], shares.whole[whole], np.zeros_like(whole)

    def table(kind: int, cuts: Cuts, per_token: int) -> tuple[Int64Array, ...]:
        """Sequence, rank, start and stop of shards; kind 0 of tokens, 1 of rows."""
        ranges = [(seqs[whole], place, zero, length * per_token), (seqs[cuts.item], *cuts[1:])]
        ranges += [(each[kind].item + seq, *each[kind][1:]) for seq, each in even]
        seq, at, start, num = (np.concatenate(column) for column in zip(*ranges, strict=True))
        return seq, line.rank[at], start, start + num

    tokens, rows = table(0, shares.tokens, 1), table(1, shares.rows, cost.num_heads)
    names = relabel(cluster, sequences.home[tokens[0]], tokens[1], tokens[3] - tokens[2])
    shards = [Shards.sorted(seq, names[rank], start, stop) for seq, rank, start, stop in (tokens, rows)]
    return Placement(sequences, cluster.world_size, cost.num_heads, shards[0], shards[1], name)


def relabel(cluster: Cluster, home: Int64Array, rank: Int64Array, tokens: Int64Array) -> Int64Array:
    """Relabel the ranks of each node so that most tokens stay on their home rank; ranks of a node are alike.

    Greedily: the pair (rank in the plan, home rank) with most tokens in common is fixed first.

    Args:
        cluster: whose nodes keep their ranks.
        home, rank, tokens: (N,) home rank, rank in the plan and tokens of each shard.

    Returns:
        (W,) new name of each rank.
    """
    world_size, width = cluster.world_size, max(cluster.node_sizes)
    if cluster.speeds or width > MOST_LABELS:
        return np.arange(world_size)
    sizes, node = np.array(cluster.node_sizes), cluster.node_of
    base = (sizes.cumsum() - sizes)[node]  # first rank of each rank's node
    here = (node[rank] == node[home]).nonzero()[0]
    place, table = rank[here], np.zeros(world_size * width, dtype=np.int64)
    np.add.at(table, place * width + home[here] - base[place], tokens[here])
    entries = table.nonzero()[0]
    entries = entries[(-table[entries]).argsort(kind="stable")]
    places = entries // width
    labels = entries - places * width + base[places]
    chosen, free = [-1] * world_size, [True] * world_size
    for at, name in zip(places.tolist(), labels.tolist(), strict=True):
        if free[name] and chosen[at] < 0:
            chosen[at] = name
            free[name] = False
    names = np.array(chosen)
    names[names < 0] = np.array(free).nonzero()[0]  # both rise, and a node has as many of one as of the other
    return names
