"""How a step's samples get onto ranks today, and with balancing; each as steps that the simulator can time.

    random          each rank draws `batch` samples, whatever their size
    same bucket     all ranks draw from one bucket, which changes from step to step
    bucket by rank  each rank draws a full batch of a bucket of its own
    fixed degree    groups of g ranks share every sample: sequence parallelism of one degree
    balanced        the steps of `random`, planned
    balanced-more   the same with as many samples as all ranks together surely hold

All keep samples at their own size and use each equally often in the long run: a bucket comes up as often as it has
batches. Steps are drawn by counter-based random numbers; a step depends on its number and the seed only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from knapformer.data import Trace
from knapformer.data.draws import fractions
from knapformer.errors import PlanError
from knapformer.plan import Limits, Planner, Sequences, make_planner
from knapformer.plan.arrays import Int64Array
from knapformer.tools.advise.buckets import Buckets
from knapformer.tools.advise.histogram import Histogram
from knapformer.tools.advise.memory import TokenMemory, chance_above
from knapformer.tools.simulate.scenario import Scenario

Steps = Callable[[int], Sequences]
"""The sequences of a step by its number."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to fill steps.

    Attributes:
        name, text: its key, and what it does in words.
        steps: its steps.
        planner: where their sequences go.
        worst_tokens: most tokens that a legal step can put on a rank [tokens].
        overflow: chance a step that some rank passes the token limit.
        split: whether sequences may be split, which takes more memory.
        dropped: share of samples left over at the end of an epoch.
        options: of the simulated step.
        limits: that its placements keep to.
        trace: of recorded steps, which are only so many.
    """

    name: str
    text: str
    steps: Steps
    planner: Planner
    worst_tokens: int
    overflow: float
    split: bool = False
    dropped: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    trace: Trace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A policy's simulated steps, (S,) each.

    Attributes:
        policy: which.
        seconds: of a step [s].
        computing, traffic: mean over ranks of the time spent computing, and waiting for bytes [s].
        tokens, samples: of all ranks.
        rank_tokens: of the rank with most [tokens].
        memory: estimated peak of the fullest rank [byte].
        refused: steps that no placement within the token limit exists for; they are in none of the above.
    """

    policy: Policy
    seconds: np.ndarray
    computing: np.ndarray
    traffic: np.ndarray
    tokens: np.ndarray
    samples: np.ndarray
    rank_tokens: np.ndarray
    memory: np.ndarray
    refused: int

    @property
    def efficiency(self) -> float:
        """Share of rank time spent computing."""
        return float(self.computing.sum() / self.seconds.sum())


def run_policy(policy: Policy, scenario: Scenario, num_steps: int) -> Outcome:
    """Plan and simulate a policy's first steps. Raises `PlanError` if none of them can be planned within the limits."""
    cost, rows, refusal = scenario.cost_model(), [], None
    if policy.trace is not None:
        num_steps = min(num_steps, policy.trace.num_steps)
    for step in range(num_steps):
        sequences = policy.steps(step)
        try:
            placement = policy.planner(sequences, scenario.cluster, cost, policy.limits)
        except PlanError as error:
            refusal = error
            continue
        timed = scenario.time(placement, **policy.options)
        traffic = sum((exposed.mean() for exposed in timed.exposed.values()), 0.0)
        memory, held = scenario.memory(placement).max(), placement.tokens()
        rows.append((timed.seconds, timed.busy.mean(), traffic, held.sum(), len(sequences), held.max(), memory))
    if not rows and refusal is not None:
        raise PlanError(f"no step of these fits the cluster, even balanced: {refusal}") from refusal
    return Outcome(policy, *np.array(rows, dtype=np.float64).T, refused=num_steps - len(rows))


@dataclass(frozen=True, slots=True)
class Policies:
    """Makes the policies for a data set on a cluster.

    Attributes:
        histogram: lengths of the data set.
        scenario: model and cluster.
        room: memory of a rank.
        seed: of the drawing.
    """

    histogram: Histogram
    scenario: Scenario
    room: TokenMemory
    seed: int = 0

    @property
    def ranks(self) -> int:
        return self.scenario.cluster.world_size

    def random(self, batch: int) -> Policy:
        limit = self.room.limit(split=False)
        return Policy(
            "random",
            f"each rank draws {batch} {'sample' if batch == 1 else 'samples'} at random",
            self._random_steps(self.ranks, batch),
            make_planner("local"),
            batch * self.histogram.longest,
            _any_of(self.ranks, self._chance_above(limit, batch)),
        )

    def recorded(self, trace: Trace) -> Policy:
        """The steps of a trace as they were; worst tokens and chance are those of its steps."""
        held = np.array([[int(row.sum()) for row in step.seq_lens] for step in trace.steps]).max(axis=1)
        above = float((held > self.room.limit(split=False)).mean())
        local = make_planner("local")
        return Policy("recorded", "as recorded", trace.sequences, local, int(held.max()), above, trace=trace)

    def bucketed(self, buckets: Buckets) -> Iterator[Policy]:
        """One bucket for all ranks of a step, and one for each rank."""
        limit = self.room.limit(split=False)
        start = np.searchsorted(self.histogram.cumulative, buckets.first, side="right")
        stop = np.searchsorted(self.histogram.cumulative, buckets.first + buckets.count, side="left") + 1
        over = np.array([
            self._chance_above(limit, int(n), slice(a, b)) for n, a, b in zip(buckets.batch, start, stop, strict=True)
        ])  # fmt: skip
        often = buckets.count / buckets.batch
        for name, text, one_for_all in (
            ("same-bucket", "all ranks draw from one bucket a step, its batch tuned by hand", True),
            ("bucket-by-rank", "each rank draws a batch of its own bucket, batches tuned by hand", False),
        ):
            chance = [_any_of(self.ranks, p) for p in over] if one_for_all else over
            mean = float(np.dot(often, chance) / often.sum())
            yield Policy(
                name,
                text,
                self._bucket_steps(buckets, one_for_all=one_for_all),
                make_planner("local"),
                int((buckets.batch * buckets.longest).max()),
                mean if one_for_all else _any_of(self.ranks, mean),
                dropped=buckets.dropped(self.ranks if one_for_all else 1),
            )

    def fixed_degree(self, degree: int, batch: int) -> Policy:
        """Sequence parallelism of one degree over all samples; traffic is not hidden, as usual there."""
        groups, limit = self.ranks // degree, self.room.limit(split=True)
        return Policy(
            "fixed-degree",
            f"groups of {degree} ranks share every sample (sequence parallelism)",
            self._random_steps(groups, batch * degree, apart=degree),
            make_planner("bags", f"g{degree}n1"),
            batch * self.histogram.longest + batch * degree,  # a rank has at most one token more of each
            _any_of(groups, self._chance_above(limit * degree, batch * degree)),
            split=True,
            options={"overlap": False, "route_bytes": 0.0},
        )

    def balanced(self, unbalanced: Policy, batch: int, *, more: bool = False) -> Policy:
        """The steps of another policy, each planned online. What all ranks together cannot hold is refused."""
        limit = self.room.limit(split=True)
        all_hold = limit * self.ranks
        if unbalanced.trace is None:
            overflow = self._chance_above(all_hold, batch * self.ranks)
        else:
            overflow = float(np.mean([step.num_tokens > all_hold for step in unbalanced.trace.steps]))
        return Policy(
            "balanced-more" if more else "balanced",
            f"{batch} samples a rank, balanced online" if more else "the same samples, balanced online",
            unbalanced.steps,
            make_planner("balanced"),
            min(limit, batch * self.histogram.longest),
            overflow,
            split=True,
            limits=Limits(limit),
            trace=unbalanced.trace,
        )

    def _random_steps(self, groups: int, batch: int, *, apart: int = 1) -> Steps:
        """Steps in which each of `groups` home ranks, `apart` ranks from each other, draws `batch` samples."""

        def step(index: int) -> Sequences:
            fraction = fractions(groups * batch, seed=self.seed, stream="advise.random", index=index)
            return self._sequences(self.histogram.entries(fraction), np.repeat(np.arange(groups) * apart, batch))

        return step

    def _bucket_steps(self, buckets: Buckets, *, one_for_all: bool) -> Steps:
        def step(index: int) -> Sequences:
            drawn = fractions(1 if one_for_all else self.ranks, seed=self.seed, stream="advise.buckets", index=index)
            bucket = np.broadcast_to(buckets.draw(drawn), self.ranks)
            home = np.repeat(np.arange(self.ranks), buckets.batch[bucket])
            fraction = fractions(len(home), seed=self.seed, stream="advise.in-bucket", index=index)
            inside = bucket[home]
            entries = self.histogram.entries(fraction, buckets.first[inside], buckets.count[inside])
            return self._sequences(entries, home)

        return step

    def _sequences(self, entries: Int64Array, home: Int64Array) -> Sequences:
        return Sequences(self.histogram.length[entries], home, self.histogram.text[entries])

    def _chance_above(self, limit: float, draws: int, entries: slice = slice(None)) -> float:
        return chance_above(limit, draws, self.histogram.length[entries], self.histogram.count[entries])


def _any_of(ranks: int, chance: float) -> float:
    """Chance that it happens on any of `ranks` ranks."""
    return float(-np.expm1(ranks * np.log1p(-chance))) if chance < 1 else 1.0
