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


def run_policy(policy: Policy, scenario: Scenario, num_steps: int, limits: Limits | None = None) -> Outcome:
    """Plan and simulate a policy's first steps. Raises `PlanError` if none of them can be planned within the limits."""
    cost, rows, refusal = scenario.cost_model(), [], None
    for step in range(num_steps):
        sequences = policy.steps(step)
        try:
            placement = policy.planner(sequences, scenario.cluster, cost, limits or Limits())
        except PlanError as error:
            refusal = error
            continue
        timeline = scenario.time(placement, **policy.options)
        traffic = sum((exposed.mean() for exposed in timeline.exposed.values()), 0.0)
        memory, held = scenario.memory(placement).max(), placement.tokens()
        rows.append((timeline.end.max(), timeline.busy.mean(), traffic, held.sum(), len(sequences), held.max(), memory))
    if not rows and refusal is not None:
        raise PlanError(f"no step of these fits the cluster, even balanced: {refusal}") from refusal
    return Outcome(policy, *np.array(rows, dtype=np.float64).T, refused=num_steps - len(rows))


def todays_policies(
    histogram: Histogram, buckets: Buckets, scenario: Scenario, *, batch: int, room: TokenMemory, seed: int
) -> Iterator[Policy]:
    """The policies of today but the fixed degrees; `room` is the memory of a rank."""
    ranks, limit = scenario.cluster.world_size, room.limit(split=False)
    local = make_planner("local")
    yield Policy(
        "random",
        f"each rank draws {batch} {'sample' if batch == 1 else 'samples'} at random",
        random_steps(histogram, ranks, batch, seed=seed),
        local,
        batch * histogram.longest,
        _any_of(ranks, chance_above(limit, batch, histogram.length, histogram.count)),
    )
    over = np.array([
        chance_above(limit, int(n), histogram.length[a:b], histogram.count[a:b])
        for n, a, b in zip(buckets.batch, *_bounds(histogram, buckets), strict=True)
    ])  # fmt: skip
    often = buckets.count / buckets.batch
    worst = int((buckets.batch * buckets.longest).max())
    for name, text, one_for_all in (
        ("same-bucket", "all ranks draw from one bucket a step, its batch tuned by hand", True),
        ("bucket-by-rank", "each rank draws a batch of its own bucket, batches tuned by hand", False),
    ):
        chance = [_any_of(ranks, p) for p in over] if one_for_all else over
        mean = float(np.dot(often, chance) / often.sum())
        yield Policy(
            name,
            text,
            _bucket_steps(histogram, buckets, ranks, one_for_all=one_for_all, seed=seed),
            local,
            worst,
            mean if one_for_all else _any_of(ranks, mean),
            dropped=buckets.dropped(ranks if one_for_all else 1),
        )


def fixed_degree(
    histogram: Histogram, scenario: Scenario, degree: int, *, batch: int, room: TokenMemory, seed: int
) -> Policy:
    """Sequence parallelism of one degree over all samples; traffic is not hidden, as usual there."""
    groups, limit = scenario.cluster.world_size // degree, room.limit(split=True)
    return Policy(
        "fixed-degree",
        f"groups of {degree} ranks share every sample (sequence parallelism)",
        random_steps(histogram, groups, batch * degree, seed=seed, apart=degree),
        make_planner("bags", f"g{degree}n1"),
        batch * histogram.longest + batch * degree,  # a rank has at most one token more of each
        _any_of(groups, chance_above(limit * degree, batch * degree, histogram.length, histogram.count)),
        split=True,
        options={"overlap": False, "route_bytes": 0.0},
    )


def balanced(
    histogram: Histogram, steps: Steps, scenario: Scenario, *, batch: int, room: TokenMemory, more: bool = False
) -> Policy:
    """The given steps, each planned online. What all ranks together cannot hold is refused before it is tried."""
    ranks, limit = scenario.cluster.world_size, room.limit(split=True)
    return Policy(
        "balanced-more" if more else "balanced",
        f"{batch} samples a rank, balanced online" if more else "the same samples, balanced online",
        steps,
        make_planner("balanced"),
        min(limit, batch * histogram.longest),
        chance_above(limit * ranks, batch * ranks, histogram.length, histogram.count),
        split=True,
    )


def random_steps(histogram: Histogram, groups: int, batch: int, *, seed: int, apart: int = 1) -> Steps:
    """Steps in which each of `groups` homes, `apart` ranks from each other, draws `batch` samples."""

    def step(index: int) -> Sequences:
        chosen = histogram.entries(fractions(groups * batch, seed=seed, stream="advise.random", index=index))
        return _sequences(histogram, chosen, np.repeat(np.arange(groups) * apart, batch))

    return step


def recorded(trace: Trace, room: TokenMemory) -> Policy:
    """The steps of a trace as they were; worst tokens and chance are those of its steps."""
    held = np.array([[int(row.sum()) for row in step.seq_lens] for step in trace.steps]).max(axis=1)
    above = float((held > room.limit(split=False)).mean())
    return Policy("recorded", "as recorded", trace.sequences, make_planner("local"), int(held.max()), above)


def too_large(trace: Trace, room: TokenMemory) -> float:
    """Share of a trace's steps that all ranks together cannot hold."""
    most = room.limit(split=True) * trace.world_size
    return float(np.mean([step.num_tokens > most for step in trace.steps]))


def _bucket_steps(histogram: Histogram, buckets: Buckets, ranks: int, *, one_for_all: bool, seed: int) -> Steps:
    def step(index: int) -> Sequences:
        drawn = fractions(1 if one_for_all else ranks, seed=seed, stream="advise.buckets", index=index)
        bucket = np.broadcast_to(buckets.draw(drawn), ranks)
        home = np.repeat(np.arange(ranks), buckets.batch[bucket])
        fraction = fractions(len(home), seed=seed, stream="advise.in-bucket", index=index)
        inside = bucket[home]
        return _sequences(histogram, histogram.entries(fraction, buckets.first[inside], buckets.count[inside]), home)

    return step


def _sequences(histogram: Histogram, entries: Int64Array, home: Int64Array) -> Sequences:
    return Sequences(histogram.length[entries], home, histogram.text[entries])


def _bounds(histogram: Histogram, buckets: Buckets) -> tuple[Int64Array, Int64Array]:
    """First entry of each bucket, and the one after its last."""
    start = np.searchsorted(histogram.cumulative, buckets.first, side="right")
    return start, np.searchsorted(histogram.cumulative, buckets.first + buckets.count, side="left") + 1


def _any_of(ranks: int, chance: float) -> float:
    """Chance that it happens on any of `ranks` ranks."""
    return float(-np.expm1(ranks * np.log1p(-chance))) if chance < 1 else 1.0
