"""The offline oracle: a mixed-integer program for the least predicted step, solved by HiGHS. For small cases only.

For sequence i of L tokens and H heads, and rank r (tokens and rows below are shares of L):

    z_irh in {0, 1}   r touches h heads of i, h = 0..H              sum_h z_irh = 1
    t_irh >= 0        tokens of i on r if it touches h heads        t_irh <= z_irh,   sum_rh t_irh = 1
    a_ir >= 0         rows / L of i on r, cut anywhere              a_ir <= sum_h h z_irh,   sum_r a_ir = H
    o_ir >= 0         rows / L computed where their query lies      o_ir <= a_ir,   o_ir <= sum_h h t_irh

A touched head needs all keys and values. Products of heads and tokens are linear by the choice of h, so the rows of q,
k, v and outputs that r moves are

    received_ir = 2 sum_h h (z_irh - t_irh) + (a_ir - o_ir) + (H t_ir - o_ir)
    sent_ir     = 2 sum_h (H - h + e_i) t_irh + (H t_ir - o_ir) + (a_ir - o_ir)        e_i = sum_rh h z_irh - H

    minimise  max_r  (token-wise + attention)_r / speed_r + row price * max(sent_r, received_r),   tokens_r <= cap

then, at that step, the least traffic and (with a thousandth of its weight) the fewest routed tokens. Rows that leave a
node cost more; they follow the same equations, with the tokens and heads of the node in place of the rank's.

Where ranks share a head, o_ir may promise more than any cut achieves: no placement is below the program's optimum
(`ExactPlan.bound`), but the one it stands for may be above. So the program is solved again with whole heads only
(a_ir = sum_h h z_irh), for which all of this is exact, and the better placement is returned. Lengths up to
`WHOLE_NUMBERS` are solved in whole tokens and rows, longer ones in shares that are rounded afterwards.
"""

import itertools
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
from benchmarks.reference_planners.milp import minimise, new_program, require_highspy
from numpy.typing import NDArray

from knapformer.errors import PlanError
from knapformer.plan.arrays import Int64Array
from knapformer.plan.cluster import NOMINAL_SPEED, Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.metrics import lower_bound
from knapformer.plan.placement import Placement, Shards
from knapformer.plan.planners.base import Limits
from knapformer.plan.predict import predict, row_prices
from knapformer.plan.sequences import Sequences

MAX_CHOICES = 20_000
"""Largest case: sequences * ranks * (heads + 1)."""

WHOLE_NUMBERS = 64
"""Longest sequence solved in whole tokens and rows [tokens]; rounding longer ones costs less than a percent of one."""

MAX_PERMUTED = 5
"""Ranks of a sequence whose order is tried in full."""

SAME_STEP = 1e-6
"""Steps that differ by less (relative) are equal when traffic is minimised."""

Expression = Any
"""A variable or a linear sum of highspy."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """What the oracle found.

    Attributes:
        placement: the best placement found.
        step: its predicted step [tick].
        bound: predicted step that no placement can beat [tick]; `placement` is proven optimal where both are equal.
    """

    placement: Placement
    step: int
    bound: int

    @property
    def gap(self) -> float:
        """How far the placement may be from the optimum (relative)."""
        return self.step / self.bound - 1 if self.bound else 0.0


@dataclass(frozen=True, slots=True)
class ExactPlanner:
    """Least predicted step, then least split traffic, then fewest routed tokens.

    Attributes:
        time_limit: for all solves together [s]; the best placement so far is returned when it is up.
        name: "exact".
    """

    time_limit: float = 60.0
    name: str = "exact"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        """Raises `PlanError` if the token limit cannot be met or the case is too large, `BackendUnavailableError`."""
        return self.solve(sequences, cluster, cost, limits).placement

    def solve(self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None) -> ExactPlan:
        """Plan, with the bound that was proven. Raises like calling the planner."""
        require_highspy()
        sequences.check_world(cluster.world_size)
        _check_cap(sequences, cluster, limits)
        _check_size(sequences, cluster, cost)
        if not len(sequences):
            return ExactPlan(_at_home(sequences, cluster, cost), 0, 0)
        stop = time.monotonic() + self.time_limit
        program = _Program(sequences, cluster, cost, limits, whole_heads=False)
        solution = minimise(program.highs, program.step, time_limit=0.4 * self.time_limit)
        rounding = 1 if cluster.speeds else 0  # times at a rank's own speed are rounded down
        proven = ceil(max(0.0, solution.bound) * program.unit * (1 - SAME_STEP)) - rounding
        bound = max(proven, lower_bound(sequences, cluster, cost))
        best, step = program.placement(solution.values, self.name)
        if step > bound * (1 + 3 * SAME_STEP):  # shared heads cost more than the program knows; whole heads do not
            whole = _Program(sequences, cluster, cost, limits, whole_heads=True)
            whole.highs.addConstr(whole.step <= step / whole.unit)
            with suppress(PlanError):  # none is as good, or none was found in time
                other = minimise(whole.highs, whole.step, time_limit=0.4 * self.time_limit)
                placement, other_step = whole.placement(other.values, self.name)
                if other_step < step:
                    best, step, program, solution = placement, other_step, whole, other
        program.highs.addConstr(program.step <= solution.objective * (1 + SAME_STEP))
        with suppress(PlanError):
            left = stop - time.monotonic()
            second = minimise(program.highs, program.traffic_then_routed(), time_limit=left, start=solution.values)
            placement, other_step = program.placement(second.values, self.name)
            if other_step <= step * (1 + 3 * SAME_STEP):
                best, step = placement, other_step
        if step > bound * (1 + 1e-3):
            _log.info("exact: step %d, proven bound %d: optimal within %.2f %%", step, bound, 100 * (step / bound - 1))
        return ExactPlan(best.validate(), step, bound)


def _check_cap(sequences: Sequences, cluster: Cluster, limits: Limits | None) -> None:
    cap = None if limits is None else limits.max_tokens_per_rank
    if cap is not None and sequences.num_tokens > cap * cluster.world_size:
        raise PlanError(
            f"max_tokens_per_rank {cap} on {cluster.world_size} ranks holds {cap * cluster.world_size} tokens, but the "
            f"step has {sequences.num_tokens}; the smallest feasible max_tokens_per_rank is "
            f"{ceil(sequences.num_tokens / cluster.world_size)}"
        )


def _check_size(sequences: Sequences, cluster: Cluster, cost: CostModel) -> None:
    per_sequence = cluster.world_size * (cost.num_heads + 1)
    choices = len(sequences) * per_sequence
    if choices > MAX_CHOICES:
        raise PlanError(
            f"{len(sequences)} sequences on {cluster.world_size} ranks with {cost.num_heads} heads are {choices} "
            f"choices, too many for the exact planner; allowed are {MAX_CHOICES} = sequences * ranks * (heads + 1), "
            f"here {MAX_CHOICES // per_sequence} sequences; plan fewer, or use planner 'balanced'"
        )


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's share of one sequence: shares of its tokens, and rows / L. All are expressions.

    Attributes:
        touches: the binaries z_h of the heads the rank touches.
        slow_received, slow_sent: rows that come from, or go to, other nodes.
    """

    touches: list[Expression]
    tokens: Expression
    rows: Expression
    heads: Expression
    received: Expression
    sent: Expression
    slow_received: Expression = 0.0
    slow_sent: Expression = 0.0


class _Program:
    """The mixed-integer program of one step. Times are in units of `unit` ticks, the mean load, so they are near 1."""

    def __init__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None, *, whole_heads: bool
    ) -> None:
        self.sequences, self.cluster, self.cost, self.whole_heads = sequences, cluster, cost, whole_heads
        self.unit = max(1, predict(_at_home(sequences, cluster, cost), cluster, cost).ideal)
        self.lengths = [int(length) for length in sequences.length]
        self.cap = None if limits is None else limits.max_tokens_per_rank
        self.highs = new_program()
        self.sum = self.highs.qsum
        self.step = self.highs.addVariable()
        self.shares = [self._shares(length) for length in self.lengths]
        for rank in range(cluster.world_size):
            self._rank(rank)
            if self.cap is not None:
                self.highs.addConstr(self._sum("tokens", rank) <= self.cap)

    def _sum(self, amount: str, rank: int) -> Expression:
        """Tokens or rows of all sequences of a rank."""
        shares = zip(self.shares, self.lengths, strict=True)
        return self.sum(getattr(of[rank], amount) * float(length) for of, length in shares)

    def _one_of(self, number: int) -> tuple[list[Expression], Expression]:
        """Binaries of which exactly one is 1, and its index."""
        choices = [self.highs.addBinary() for _ in range(number)]
        self.highs.addConstr(self.sum(choices) == 1)
        return choices, self.sum(choice * float(index) for index, choice in enumerate(choices))

    def _shares(self, length: int) -> list[_Share]:
        """Variables of one sequence's shares on all ranks, and the equations that hold between them."""
        shares = [self._share(length) for _ in range(self.cluster.world_size)]
        self.highs.addConstr(self.sum(share.tokens for share in shares) == 1)
        self.highs.addConstr(self.sum(share.rows for share in shares) == self.cost.num_heads)
        if not self.whole_heads:
            shares = self._with_keys_sent_again(shares)
        if self.cluster.num_nodes > 1:
            for ranks in self.cluster.node_ranks():
                shares[ranks.start : ranks.stop] = self._with_slow_rows(shares[ranks.start : ranks.stop])
        return shares

    def _share(self, length: int) -> _Share:
        highs, heads = self.highs, self.cost.num_heads
        units = length if length <= WHOLE_NUMBERS else 1
        number = highs.addIntegral if length <= WHOLE_NUMBERS else highs.addVariable
        touches, touched = self._one_of(heads + 1)
        amounts = [number(0, units) for _ in touches]  # tokens by heads touched; `units` are the whole sequence
        for touch, amount in zip(touches, amounts, strict=True):
            highs.addConstr(amount <= touch * units)
        tokens = self.sum(amounts) * (1 / units)
        own = at_touched = self.sum(amount * (h / units) for h, amount in enumerate(amounts))
        rows = touched
        if not self.whole_heads:
            rows = number(0, heads * units) * (1 / units)
            highs.addConstr(rows <= touched)
            own = self._least(rows, at_touched)
        queries = rows + tokens * heads - own * 2  # q one way, outputs the other way
        received = queries + touched * 2 - at_touched * 2
        sent = queries + tokens * (2 * heads) - at_touched * 2
        return _Share(touches, tokens, rows, touched, received, sent)

    def _least(self, *amounts: Expression) -> Expression:
        """A variable that is at most each of `amounts`; the objective pushes it up."""
        least = self.highs.addVariable()
        for amount in amounts:
            self.highs.addConstr(least <= amount)
        return least

    def _product(self, choices: list[Expression], amount: Expression) -> Expression:
        """`amount`, at most 1, times the index of the one of `choices` that is 1."""
        products = [self.highs.addVariable(0, 1) for _ in choices]
        for product, choice in zip(products, choices, strict=True):
            self.highs.addConstr(product <= choice)
        self.highs.addConstr(self.sum(products) == amount)
        return self.sum(product * float(index) for index, product in enumerate(products))

    def _with_keys_sent_again(self, shares: list[_Share]) -> list[_Share]:
        """Keys and values of a head that several ranks share leave once for each: e = sum of heads touched - H more."""
        again, count = self._one_of(len(shares))  # e = 0, 1, ..., ranks - 1 or more
        heads = self.cost.num_heads
        many = again[-1] * float(heads * len(shares) - len(shares) + 1)
        self.highs.addConstr(self.sum(share.heads for share in shares) <= count + many + heads)
        return [replace(share, sent=share.sent + self._product(again, share.tokens) * 2) for share in shares]

    def _with_slow_rows(self, shares: list[_Share]) -> list[_Share]:
        """Rows that pass between these ranks, which are a node, and other nodes.

        As in the module, with the node's tokens in place of the rank's own for what is received, and the node's heads
        in place of its own for what is sent.
        """
        heads = self.cost.num_heads
        on_node, node_heads = self._one_of(heads + 1)
        self.highs.addConstr(node_heads <= self.sum(share.heads for share in shares))
        node_tokens = self.sum(share.tokens for share in shares)
        result = []
        for share in shares:
            keys_here = self._product(share.touches, node_tokens)  # heads of the rank * tokens of the node
            sent_here = self._product(on_node, share.tokens)  # tokens of the rank * heads of the node
            own = keys_here if self.whole_heads else self._least(share.rows, keys_here)
            queries = share.rows + share.tokens * heads - sent_here - own
            received = queries + share.heads * 2 - keys_here * 2
            sent = queries + share.tokens * (2 * heads) - sent_here * 2
            result.append(replace(share, slow_received=received, slow_sent=sent))
        return result

    def _rank(self, rank: int) -> None:
        """The step is at least this rank's time, with what it receives and with what it sends."""
        cost, speed = self.cost, int(self.cluster.speed[rank]) / NOMINAL_SPEED
        in_node, between = row_prices(self.cluster, cost)
        work = []
        for shares, length in zip(self.shares, self.lengths, strict=True):
            share = shares[rank]
            work += [share.tokens * (cost.token * length), share.rows * (cost.per_qk_pair * length * length)]
            if cost.sequence:
                there = self.highs.addBinary()
                self.highs.addConstr(share.tokens <= there)
                work.append(there * cost.sequence)
        compute = self.sum(work) * (1 / (speed * self.unit))
        for way in ("received", "sent"):
            traffic = self._sum(way, rank) * (in_node / self.unit)
            if self.cluster.num_nodes > 1:
                traffic += self._sum(f"slow_{way}", rank) * ((between - in_node) / self.unit)
            self.highs.addConstr(compute + traffic <= self.step)

    def traffic_then_routed(self) -> Expression:
        """Rows received (twice if from another node), plus a thousandth of the tokens that leave home."""
        tokens = self.sequences.num_tokens
        sums = []
        for shares, home, length in zip(self.shares, self.sequences.home.tolist(), self.lengths, strict=True):
            of_rows = length / (self.cost.num_heads * tokens)
            sums += [(share.received + share.slow_received) * of_rows for share in shares]
            sums.append(shares[home].tokens * (-1e-3 * length / tokens))
        return self.sum(sums)

    def placement(self, values: NDArray[np.float64], name: str) -> tuple[Placement, int]:
        """Whole tokens and rows from a solution, cut in the order of ranks that is predicted fastest; and its step."""
        tokens = np.array([[share.tokens.evaluate(values) for share in shares] for shares in self.shares])
        rows = np.array([[share.rows.evaluate(values) for share in shares] for shares in self.shares])
        whole_tokens = np.stack(
            [_round(share * total, total) for share, total in zip(tokens, self.lengths, strict=True)]
        )
        whole_rows = np.stack(
            [
                _round(share * total, total * self.cost.num_heads, snap=total)
                for share, total in zip(rows, self.lengths, strict=True)
            ]
        )
        if self.cap is not None:
            _meet_cap(whole_tokens, self.cap)
        placement = self._cut_in_best_order(whole_tokens, whole_rows, name)
        return placement, predict(placement, self.cluster, self.cost).step

    def _cut_in_best_order(self, tokens: Int64Array, rows: Int64Array, name: str) -> Placement:
        """Which neighbours share a head changes traffic: try all orders for sequences on few ranks, one by one."""
        ranks = range(self.cluster.world_size)
        order = [list(ranks) for _ in self.lengths]
        best = _cut(self, tokens, rows, order, name)
        for seq in np.flatnonzero(best.split).tolist():
            used = [r for r in ranks if tokens[seq, r] or rows[seq, r]]
            if np.all(rows[seq] % self.lengths[seq] == 0) or len(used) > MAX_PERMUTED:
                continue
            idle = [r for r in ranks if r not in used]
            for permuted in itertools.permutations(used):
                trial = _cut(self, tokens, rows, [*order[:seq], [*permuted, *idle], *order[seq + 1 :]], name)
                if self._rank_of(trial) < self._rank_of(best):
                    best, order[seq] = trial, [*permuted, *idle]
        return best

    def _rank_of(self, placement: Placement) -> tuple[int, int]:
        prediction = predict(placement, self.cluster, self.cost)
        return prediction.step, int(prediction.traffic.sum())


def _cut(program: _Program, tokens: Int64Array, rows: Int64Array, order: list[list[int]], name: str) -> Placement:
    """Lay each sequence's shares end to end, ranks in the order given for it."""

    def table(amount: Int64Array) -> Shards:
        rank = np.array(order, dtype=np.int64)
        count = np.take_along_axis(amount, rank, axis=1)
        stop = np.cumsum(count, axis=1)
        seq = np.repeat(np.arange(len(rank)), rank.shape[1])
        return Shards.sorted(seq, rank.ravel(), (stop - count).ravel(), stop.ravel())

    world_size, heads = program.cluster.world_size, program.cost.num_heads
    return Placement(program.sequences, world_size, heads, table(tokens), table(rows), name)


def _round(share: NDArray[np.float64], total: int, snap: int = 1) -> Int64Array:
    """Whole numbers that add up to `total`, each within 1 of its share; near multiples of `snap` become such."""
    nearest = np.round(share / snap) * snap
    share = np.where(np.abs(share - nearest) <= 1e-6 * total, nearest, share)
    whole = np.floor(share + 1e-9).astype(np.int64)
    while (missing := total - int(whole.sum())) != 0:  # at most one round, but for errors of the solver's tolerance
        by_rest = np.argsort(whole - share if missing > 0 else share - whole, kind="stable")
        by_rest = by_rest[share[by_rest] > 0] if missing > 0 else by_rest[whole[by_rest] > 0]
        whole[by_rest[: abs(missing)]] += 1 if missing > 0 else -1
    return whole


def _meet_cap(tokens: Int64Array, cap: int) -> None:
    """Undo in place what rounding put above the cap: move single tokens, of sequences that both ranks share if any."""
    held = tokens.sum(axis=0)
    while (source := int(held.argmax()), int(held.max()))[1] > cap:
        target = max(
            np.flatnonzero(held < cap).tolist(), key=lambda r: int(((tokens[:, source] > 0) & (tokens[:, r] > 0)).sum())
        )
        seq = int(np.argmax((tokens[:, source] > 0) * (1 + (tokens[:, target] > 0))))
        tokens[seq, source] -= 1
        tokens[seq, target] += 1
        held[source] -= 1
        held[target] += 1


def _at_home(sequences: Sequences, cluster: Cluster, cost: CostModel) -> Placement:
    return Placement.whole(
        sequences, sequences.home, world_size=cluster.world_size, num_heads=cost.num_heads, planner="exact"
    )
