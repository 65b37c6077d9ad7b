"""One timeline of a layer: what every rank does when, what is under way meanwhile, and who waits for whom.

Forward; backward is the same in reverse (`LayerWork.mirrored`):

    rank   | before | whole, first run | split 0 | split 1 | whole, second run |..| after |
    links           | q, k, v 0 | q, k, v 1 |    | outputs 0 | outputs 1          |

"before" and "after" are token-wise work, "whole" and "split" the attention of whole and of split sequences, the latter
in stages. This module is the only place that says so. The executor (`knapformer.attention`) takes from it the `order`
of its work, the number of stages and the first run of whole sequences; planners and metrics take from it when the last
rank is done; the simulator adds what lies between layers.

Rules, all in whole ticks:

* A rank does one thing after another. It waits only for an exchange, and then until all its part of it has ended.
* A rank's exchanges follow each other in the order in which it started them.
* A message from a to b begins when both have started the exchange and are done with those before. It takes as long as
  a's links need for all that a sends in the exchange, or b's for all that b receives, whichever is longer.
* So a rank whose links or work take longer holds up all it shares a sequence with, and nobody else.

Not modelled: latency per message, contention beyond a rank's own links, kernels that slow down beside a copy. Prices
are those of one pass; a pass backward takes longer for the same bytes, so there more is hidden than this says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array, exact_sum, exclusive_cumsum, starts_within
from knapformer.plan.attention import head_group, split_pairs
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.placement import Placement, per_rank
from knapformer.plan.predict import padding_tokens, prices_between, queries_before, rank_loads

STAGES = (1, 2, 3, 4)
"""Numbers of stages that split attention may run in."""

GAIN = 1000
"""More stages are used only where the step shrinks by over 1/GAIN: they cost messages and kernels."""

BEFORE_ATTENTION = 2, 5
"""Share of a layer's token-wise work that lies before attention: 6 of 24 matrix products in a block of two streams, 14
of 24 in one of a single stream, 0.47 over FLUX's blocks. Only waits inside a layer depend on it."""

FIRST_RUN = 3, 4
"""Share of the whole sequences' attention area in the first run: q, k and v are three times the traffic of outputs."""


class Action(NamedTuple):
    """One entry of the `order`: compute a phase, start an exchange, or wait for one. `stage` is -1 where there is none.

    Phases are "before", "first", "split", "second" and "after"; exchanges are "qkv" and "out".
    """

    kind: Literal["compute", "start", "wait"]
    what: str
    stage: int = -1


def order(num_stages: int) -> Iterator[Action]:
    """What a rank does in the forward pass of a layer, in order; backward it does the same with `mirrored` work."""
    stages = range(num_stages)
    yield Action("compute", "before")
    yield from (Action("start", "qkv", stage) for stage in stages)
    yield Action("compute", "first")
    for stage in stages:
        yield Action("wait", "qkv", stage)
        yield Action("compute", "split", stage)
        yield Action("start", "out", stage)
    yield Action("compute", "second")
    yield from (Action("wait", "out", stage) for stage in stages)
    yield Action("compute", "after")


def first_runs(time: Int64Array, rank: Int64Array, there: Int64Array, back: Int64Array) -> Int64Array:
    """How many of its whole sequences each rank computes before split attention; the others follow it.

    As many as leave least exposed of the first exchange of q, k, v and of the last one of outputs; of several such
    numbers the one that comes nearest to `FIRST_RUN` of the attention.

    Args:
        time: (N,) attention of each whole sequence, in packed order; padding counts as one [tick].
        rank: (N,) its rank, never decreasing.
        there, back: (R,) time to hide of the two exchanges [tick].

    Returns:
        (R,) numbers.
    """
    world_size = len(there)
    count = np.bincount(rank, minlength=world_size)
    total = per_rank(rank, time, world_size)
    # All ways to cut: before the first sequence of each rank, and behind each.
    of_rank = np.concatenate((np.arange(world_size), rank))
    first = np.concatenate((np.zeros_like(total), starts_within(rank, time) + time))
    number = np.concatenate((np.zeros_like(count), np.arange(1, len(rank) + 1) - exclusive_cumsum(count)[rank]))
    second = total[of_rank] - first
    exposed = np.maximum(there[of_rank] - first, 0) + np.maximum(back[of_rank] - second, 0)
    distance = np.abs(first - total[of_rank] // FIRST_RUN[1] * FIRST_RUN[0])
    best = np.lexsort((number, distance, exposed, of_rank))
    return number[best[of_rank[best].searchsorted(np.arange(world_size))]]


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """All messages of an exchange, stage by stage.

    Attributes:
        source, target: (M,) ranks.
        time: (num_stages, M) time on the link [tick]; 0 where nothing is sent.
    """

    source: Int64Array
    target: Int64Array
    time: Int64Array

    def reversed(self) -> "Messages":
        """The gradients: the last stage first, from target to source."""
        return Messages(self.target, self.source, self.time[::-1])

    def end(self, stage: int, ready: Int64Array) -> Int64Array:
        """(R,) when each rank is done with the exchange of a stage that it is `ready` (R,) for [tick]."""
        time = self.time[stage]
        sent, received = (per_rank(rank, time, len(ready)) for rank in (self.source, self.target))
        used = time.nonzero()[0]
        source, target = self.source[used], self.target[used]
        end = np.maximum(ready[source], ready[target]) + np.maximum(sent[source], received[target])
        done = ready.copy()
        np.maximum.at(done, source, end)
        np.maximum.at(done, target, end)
        return done


@dataclass(frozen=True, slots=True, eq=False)
class LayerWork:
    """What each rank computes and sends in one pass of a layer [tick].

    Attributes:
        before, after: (R,) token-wise work before and after attention.
        first, second: (R,) attention of the two runs of whole sequences.
        split: (num_stages, R) split attention of each stage.
        qkv, out: messages to the ranks that attend, and back.
        num_first: (R,) whole sequences of the first run.
    """

    before: Int64Array
    first: Int64Array
    split: Int64Array
    second: Int64Array
    after: Int64Array
    qkv: Messages
    out: Messages
    num_first: Int64Array

    @property
    def num_stages(self) -> int:
        return len(self.split)

    @property
    def total(self) -> Int64Array:
        """(R,) all work of each rank."""
        return self.before + self.first + self.split.sum(axis=0) + self.second + self.after

    def mirrored(self) -> "LayerWork":
        """Everything in reverse order: the backward pass, as far as a pass backward costs what one forward does."""
        return LayerWork(
            before=self.after,
            first=self.second,
            split=self.split[::-1],
            second=self.first,
            after=self.before,
            qkv=self.out.reversed(),
            out=self.qkv.reversed(),
            num_first=self.num_first,
        )


class Span(NamedTuple):
    """When each rank computes a phase, or an exchange is under way on it: (R,) begin and end [tick]."""

    what: str
    stage: int
    begin: Int64Array
    end: Int64Array


def run(work: LayerWork, start: Int64Array) -> list[Span]:
    """Run one pass of a layer that each rank begins at `start` (R,); the last span ends it."""
    now = links_free = start
    spans: list[Span] = []
    ends: dict[tuple[str, int], Int64Array] = {}
    for kind, what, stage in order(work.num_stages):
        if kind == "compute":
            phase = work.split[stage] if what == "split" else getattr(work, what)
            begin, now = now, now + phase
            spans.append(Span(what, stage, begin, now))
        elif kind == "start":
            begin = np.maximum(now, links_free)
            links_free = ends[what, stage] = getattr(work, what).end(stage, begin)
            spans.append(Span(what, stage, begin, links_free))
        else:
            now = np.maximum(now, ends[what, stage])
    return spans


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One layer, forward and then backward, from a start that all ranks make together.

    Attributes:
        work: of the forward pass; backward it is `mirrored`.
        forward, backward: what happens when [tick].
        ideal: when all ranks would be done if they were level, each by its speed, without padding or waits [tick].
    """

    work: LayerWork
    forward: list[Span]
    backward: list[Span]
    ideal: int

    @property
    def num_stages(self) -> int:
        """Stages in which split attention runs, the same on all ranks."""
        return self.work.num_stages

    @property
    def end(self) -> Int64Array:
        """(R,) when each rank is done [tick]."""
        return self.backward[-1].end

    @property
    def waited(self) -> Int64Array:
        """(R,) time that each rank waits, for other ranks or for bytes [tick]."""
        return self.end - 2 * self.work.total

    @property
    def step(self) -> int:
        """When the last rank is done [tick]."""
        return int(self.end.max())

    @property
    def step_over_ideal(self) -> float:
        return self.step / self.ideal if self.ideal else 1.0


def timeline(
    placement: Placement, cluster: Cluster, cost: CostModel, *, num_stages: int | None = None, token_grid: int = 1
) -> Timeline:
    """The timeline of a placement. If no number of stages is given, it has the fewest that are worth it.

    Where ranks pad their tokens to a multiple of `token_grid`, padding is computed, but is no part of the ideal.
    """
    layer = _Layer(placement, cluster, cost, token_grid)
    ideal = cluster.mean_time(2 * exact_sum(rank_loads(placement, cost)))
    to_try = STAGES if placement.split.any() else (1,)
    best, *others = (_run_both(layer.work(n), ideal) for n in (to_try if num_stages is None else (num_stages,)))
    for trial in others:
        if trial.step + trial.step // GAIN < best.step:
            best = trial
    return best


def _run_both(work: LayerWork, ideal: int) -> Timeline:
    forward = run(work, np.zeros_like(work.before))
    return Timeline(work, forward, run(work.mirrored(), forward[-1].end), ideal)


def layer_work(
    placement: Placement, cluster: Cluster, cost: CostModel, num_stages: int = 1, *, token_grid: int = 1
) -> LayerWork:
    """What each rank computes and sends in the forward pass of a layer, split attention in `num_stages`."""
    return _Layer(placement, cluster, cost, token_grid).work(num_stages)


class _Layer:
    """A placement, priced; what does not depend on the number of stages is priced once."""

    def __init__(self, placement: Placement, cluster: Cluster, cost: CostModel, token_grid: int) -> None:
        self.placement, self.cluster, self.cost = placement, cluster, cost
        tokens, padding = placement.tokens(), padding_tokens(placement, token_grid)
        token_work = cluster.time(cost.load(tokens + padding, np.zeros_like(tokens), placement.num_shards()))
        self.before = token_work * BEFORE_ATTENTION[0] // BEFORE_ATTENTION[1]
        self.after = token_work - self.before
        self.whole_rank, self.whole_time = self._whole(padding)
        self.shard = placement.split[placement.attention_shards.seq].nonzero()[0]

    def _whole(self, padding: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Rank and attention time of all whole sequences, in packed order; padding follows those of its rank."""
        shards, length = self.placement.attention_shards, self.placement.sequences.length
        whole = ~self.placement.split[shards.seq]
        padded = padding.nonzero()[0]
        rank = np.concatenate((shards.rank[whole], padded))
        lens = np.concatenate((length[shards.seq[whole]], padding[padded]))
        packed = rank.argsort(kind="stable")
        rank, lens = rank[packed], lens[packed]
        return rank, self.cluster.time(self.cost.per_qk_pair * self.placement.num_heads * lens * lens, rank)

    def work(self, num_stages: int) -> LayerWork:
        """The work of a pass, split attention in `num_stages` as `attention_exchange` cuts it."""
        placement, shards = self.placement, self.placement.attention_shards
        seq, rank = shards.seq[self.shard], shards.rank[self.shard]
        start, stop = shards.start[self.shard], shards.stop[self.shard]
        length = placement.sequences.length[seq]
        heads = head_group(placement, num_stages)  # which travel together
        rows = heads * length
        first = start // rows
        groups = (stop - 1) // rows - first + 1
        stages = np.arange(num_stages + 1)[:, None]
        cut = -(-stages * groups // num_stages)  # (stages + 1, shards): the first group of each stage, in the shard
        cut_row = np.clip((first + cut) * rows, start, stop)
        area = np.diff(cut_row, axis=0) * length
        split = [self.cluster.time(self.cost.per_qk_pair * per_rank(rank, x, placement.world_size)) for x in area]
        qkv, out = self._messages(cut_row, np.diff(cut, axis=0) * heads)
        number = self._num_first(qkv, out)
        turn = np.arange(len(self.whole_rank)) - self.whole_rank.searchsorted(self.whole_rank)
        in_first = turn < number[self.whole_rank]
        first, second = (
            per_rank(self.whole_rank[run], self.whole_time[run], placement.world_size) for run in (in_first, ~in_first)
        )
        return LayerWork(self.before, first, np.array(split), second, self.after, qkv, out, number)

    def _num_first(self, qkv: Messages, out: Messages) -> Int64Array:
        """(R,) whole sequences of the first run."""
        there = qkv.end(0, self.before) - self.before
        back = out.end(len(out.time) - 1, np.zeros_like(there))
        return first_runs(self.whole_time, self.whole_rank, there, back)

    def _messages(self, cut_row: Int64Array, num_heads: Int64Array) -> tuple[Messages, Messages]:
        """Messages of the split attention.

        Args:
            cut_row: (stages + 1, shards) first row of each stage in the shards `self.shard`, and the end of the last.
            num_heads: (stages, shards) heads touched.
        """
        tokens, length = self.placement.token_shards, self.placement.sequences.length
        shard, token = split_pairs(self.placement)
        source, target = tokens.rank[token], self.placement.attention_shards.rank[shard]
        crosses = (source != target).nonzero()[0]
        shard, token, source, target = shard[crosses], token[crosses], source[crosses], target[crosses]
        at = self.shard.searchsorted(shard)
        before = queries_before(cut_row[:, at], length[tokens.seq[token]], tokens.start[token], tokens.stop[token])
        queries = np.diff(before, axis=0)
        price = prices_between(source, target, self.cluster, self.cost)
        keys = num_heads[:, at] * tokens.count[token]
        qkv = Messages(source, target, (queries + 2 * keys) * price)
        return qkv, Messages(target, source, queries * price)
