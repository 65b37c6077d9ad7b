"""The default planner: whole where possible, split where needed, level where it counts.

A step is a scheduling problem with two divisible resources, tokens and attention rows, and a reward for keeping both
of a sequence together: a sequence that is whole costs no communication. Three levels, each with its own rule:

    cluster -> nodes   equal predicted time by whole sequences (`nodes`): links between nodes are slow
    node -> ranks      equal tokens *and* equal area (`ranks`): links are fast, and then neither memory nor either
                       phase of a layer waits, whatever the two prices are
    rank               whole sequences first; token and row shares of split ones fill what is free of each (`fill`)

With that, loads are level by construction, and what is left to minimise is the traffic of the busiest rank. A rank
with the same part 1/k of tokens and rows of a sequence sends and receives 4 (1 - 1/k) / k of it: so few split sequences
per rank, long ones on many ranks (`stretch`), several variants of packing (`pack`) and the best one (`choose`). Where
all sequences are small, moving a few is enough (`moves`). Everything is integers, so plans are the same on every
machine.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from knapformer.errors import PlanError, PlanInvariantError, SpecError
from knapformer.plan.arrays import Int64Array, exact_sum
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.metrics import certify
from knapformer.plan.placement import Placement, Shards
from knapformer.plan.planners.balanced.batch import Batch, Line, Shares
from knapformer.plan.planners.balanced.choose import share_best
from knapformer.plan.planners.balanced.fill import apportion
from knapformer.plan.planners.balanced.labels import relabel
from knapformer.plan.planners.balanced.moves import few_moves
from knapformer.plan.planners.balanced.nodes import Pieces, assign_nodes
from knapformer.plan.planners.base import Limits
from knapformer.plan.predict import attention_traffic, traffic_time
from knapformer.plan.sequences import Sequences

Level = Literal["both", "time", "step"]

MAX_AREA = 1 << 62
"""Most attention area of a step, so that sums over the cluster fit 64 bits."""


@dataclass(frozen=True, slots=True)
class BalancedPlanner:
    """Places tokens and attention rows of every sequence so that the slowest rank's predicted step is least.

    Attributes:
        level: what is level across nodes: "time" (predicted time) or "both" (tokens and area, no prices needed);
            None for "time" where the cost model has prices for both kinds of work, else "both". "step", for executors
            that hide no traffic, levels nothing for its own sake, not inside nodes either: ranks with more traffic get
            less work (no such steps, and no prices: as None).
        tolerance: a step whose ranks at home are level to within this is left alone [per mille].
        name: "balanced".
    """

    level: Level | None = None
    tolerance: int = 1
    name: str = "balanced"

    def __post_init__(self) -> None:
        if self.level not in (None, "both", "time", "step"):
            raise SpecError(f"level is {self.level!r}; allowed are 'time', 'both', 'step' and None")
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
        both = self._levels_both(cost)
        placement, traffic = self._skip(sequences, cluster, cost, work, total, cap), 0
        if placement is None and cap is None and not both:
            placement = few_moves(sequences, cluster, cost, work, self.name)
            if placement is not None:
                traffic = int(traffic_time(attention_traffic(placement), cluster, cost).max(initial=0))
        if placement is None:
            pieces = assign_nodes(sequences, cluster, cost, work, total)
            placement, traffic = self._place(sequences, cluster, cost, pieces, cap, exactly=both)
            if cap is not None and int(placement.tokens().max()) > cap:  # budgets were lowered here and raised there
                placement, traffic = self._place(sequences, cluster, cost, pieces, cap, exactly=True)
            if cap is not None and int(placement.tokens().max()) > cap:
                raise PlanInvariantError(
                    f"planner 'balanced' exceeds max_tokens_per_rank {cap}; please report the lengths"
                )
        certificate = certify(placement, cluster, cost, total_work=total, traffic=traffic, cap=cap)
        return placement.certified(certificate)

    def _place(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, pieces: Pieces, cap: int | None, *, exactly: bool
    ) -> tuple[Placement, int]:
        """The best shares and their traffic [tick]; `exactly` fills every rank to its budget, which keeps the cap."""
        length = sequences.length[pieces.seq]
        both, work = self._levels_both(cost), cost.work(length)
        is_work = self.level == "step" and not (both or exactly or pieces.senders.any()) and exact_sum(work) < MAX_AREA
        amount = np.array((work, work) if is_work else (pieces.num_tokens, pieces.num_rows * length))
        line = _budgets(pieces, amount, cluster, None if is_work else cap, both=both)
        most = 0 if is_work else int(line.budget[0].max())  # nobody knows yet: the caller tries again
        independent = not exactly and (cap is None or most < cap)
        refine = not exactly and (cap is None or most + (most >> 9) < cap)
        batch = Batch.of(pieces, length, amount, sequences.home[pieces.seq], line, is_work=is_work)
        shares, traffic = share_best(batch, cluster, cost, independent=independent, refine=refine)
        return _placement(sequences, cluster, cost, pieces, shares, self.name), traffic

    def _levels_both(self, cost: CostModel) -> bool:
        if self.level in (None, "step"):
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


def _budgets(pieces: Pieces, amount: Int64Array, cluster: Cluster, cap: int | None, *, both: bool) -> Line:
    """What each rank shall hold: its share, by speed, of its node's tokens and area (of the cluster's if `both`)."""
    sizes = np.array(cluster.node_sizes, dtype=np.int64)
    first = np.concatenate(([0], sizes.cumsum()))
    group, starts = (np.zeros_like(cluster.node_of), first[:1]) if both else (cluster.node_of, first[:-1])
    num_groups, piece_group = len(starts), 0 * pieces.node if both else pieces.node
    total = np.zeros(2 * num_groups, dtype=np.int64)  # tokens, then area
    np.add.at(total, np.concatenate((piece_group, piece_group + num_groups)), amount.ravel())
    group = np.concatenate((group, group + num_groups))
    starts = np.concatenate((starts, starts + cluster.world_size))
    speed = np.concatenate((cluster.speed,) * 2) if cluster.speeds else np.ones_like(group)
    budget = apportion(total, speed, group, starts).reshape(2, -1)
    if cap is not None:
        budget[0] = _capped(budget[0], cap)
    return Line(cluster.node_of, first, budget)


def _capped(tokens: Int64Array, cap: int) -> Int64Array:
    """Budgets of at most `cap` with the same sum: what is above goes to the others, level by level."""
    budget, excess = np.minimum(tokens, cap), int(np.maximum(tokens - cap, 0).sum())
    while excess:
        open_ranks = np.flatnonzero(budget < cap)
        each, rest = divmod(excess, len(open_ranks))
        more = np.full(len(open_ranks), each, dtype=np.int64)
        more[:rest] += 1
        more = np.minimum(more, cap - budget[open_ranks])
        budget[open_ranks] += more
        excess -= int(more.sum())
    return budget


def _placement(
    sequences: Sequences, cluster: Cluster, cost: CostModel, pieces: Pieces, shares: Shares, name: str
) -> Placement:
    tokens, rows = shares.tokens, shares.rows
    whole = (shares.whole >= 0).nonzero()[0]
    at, token_item = shares.whole[whole], np.concatenate((whole, tokens.item))
    seq, row_seq = pieces.seq[token_item], pieces.seq[np.concatenate((whole, rows.item))]
    rank, count = np.concatenate((at, tokens.bin)), np.concatenate((pieces.num_tokens[whole], tokens.num))
    names = relabel(cluster, sequences.home[seq], rank, count)
    token_start, row_start = pieces.token[tokens.item] + tokens.start, pieces.row[rows.item] + rows.start
    start = np.concatenate((pieces.token[whole], token_start, pieces.row[whole], row_start))
    both = Shards.sorted(  # both tables at once, attention shards behind all token shards
        np.concatenate((seq, row_seq + len(sequences))),
        names[np.concatenate((rank, at, rows.bin))],
        start,
        start + np.concatenate((count, pieces.num_rows[whole], rows.num)),
    )
    cut = int(both.seq.searchsorted(len(sequences)))
    token_shards = Shards(both.seq[:cut], both.rank[:cut], both.start[:cut], both.stop[:cut])
    attention = Shards(both.seq[cut:] - len(sequences), both.rank[cut:], both.start[cut:], both.stop[cut:])
    return Placement(sequences, cluster.world_size, cost.num_heads, token_shards, attention, name)
