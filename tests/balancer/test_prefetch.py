"""Prefetched steps are those of plan_routing, in order; whatever ends them ends them on every rank.

Functions that run on ranks catch what they expect and return it, so that a pool of ranks survives the test.
"""

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from knapformer import CostModel, SequenceBalancer
from knapformer.balancer import prefetch
from knapformer.balancer.side_stream import tensors_of
from knapformer.comm import DeviceExchange
from knapformer.errors import KnapFormerWarning, RankMismatchError, SpecError
from knapformer.plan import make_planner
from tests.planners import UnevenHeadsPlanner
from tests.ranks import run_ranks
from tests.side_by_side import SIDE_BY_SIDE

WORLDS = [1, 2, 3]
WAIT_S = 20.0
"""For events that must come; a test that waits this long fails."""


@dataclass
class Batch:
    number: int
    seq_lens: list
    text_lens: list | None = None
    x: torch.Tensor = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(1000 * self.number + sum(n for n in self.seq_lens if n > 0))
        tokens = sum(n for n in self.seq_lens if n > 0)
        self.x = torch.randn(tokens, 12, generator=generator, dtype=torch.float64)


def make_batch(rank, number):
    """Other lengths on every rank and in every batch; batch 2 gives rank 0 nothing."""
    lens = (
        []
        if rank == 0 and number == 2
        else [5 + rank + 3 * number, 40 * (number % 2) + 1, 3][: 1 + (rank + number) % 3]
    )
    return Batch(number, lens, [min(2, n) for n in lens])


def batches(rank, count, bad=None):
    for number in range(count):
        if bad is not None and number == bad:
            raise OSError(f"file {number} of rank {rank} cannot be read")
        yield make_batch(rank, number)


def balancer_of(world_size, **kwargs):
    return SequenceBalancer(cost=CostModel.from_shapes(12, 3), **(kwargs or {"bag_specs": f"g{world_size}n1"}))


def threads():
    return [t for t in threading.enumerate() if t.name == "knapformer-prefetch"]


def threads_left():
    """Prefetch threads that do not end, now that every rank has closed."""
    dist.barrier()
    for thread in threads():
        thread.join(WAIT_S)
    return len(threads())


def consume(iterator):
    """Numbers of the batches taken, and the error that came after them as (type, text)."""
    taken = []
    try:
        for batch, step in iterator:
            home = step.placement.sequences
            assert home.length[home.of_rank(step.rank)].tolist() == list(batch.seq_lens)
            taken.append(batch.number)
    except Exception as error:
        return taken, (type(error).__name__, "" if isinstance(error, WordlessError) else str(error))
    return taken, None


# ---- the same steps as without ----


def planned_twice(rank, world_size, shift=0):
    balancer = balancer_of(world_size)
    expected = [balancer.plan_routing(b.seq_lens, text_lens=b.text_lens) for b in batches(rank, 5 + shift)][shift:]
    same, latest, times = [], [], []
    iterator = balancer.prefetch(batches(rank, 5))
    for (batch, step), plain in zip(iterator, expected, strict=True):
        same.append(step.placement.digest() == plain.placement.digest())
        latest.append(balancer.latest is step)
        times.append(step.plan_seconds > 0 and iterator.wait_seconds >= 0)
        if not shift:
            assert torch.equal(step.route(batch.x)[1], plain.route(batch.x)[1])
            assert step.layout.seq_lens == plain.layout.seq_lens
    return same, latest, times, threads_left()


@pytest.mark.parametrize("world_size", WORLDS)
def test_steps_are_those_of_plan_routing_in_order(world_size):
    for same, latest, times, left in run_ranks(world_size, planned_twice):
        assert same == latest == times == [True] * 5
        assert left == 0


def test_comparing_with_another_batch_is_noticed():
    assert not any(any(same) for same, *_ in run_ranks(2, planned_twice, 1))


def test_without_torch_distributed():
    balancer = SequenceBalancer(cost=CostModel.from_shapes(12, 3))
    assert consume(balancer.prefetch(batches(1, 4))) == ([0, 1, 2, 3], None)
    assert not threads()


def two_balancing_groups(rank, world_size):
    """g2n1 on 4 ranks: both groups share one gather, so that a failure in one ends the other as well."""
    balancer = SequenceBalancer("g2n1", cost=CostModel.from_shapes(12, 3))
    plain = [balancer.plan_routing(b.seq_lens, text_lens=b.text_lens) for b in batches(rank, 3)]
    same = [
        step.placement.digest() == p.placement.digest()
        for (_, step), p in zip(balancer.prefetch(batches(rank, 3)), plain, strict=True)
    ]
    return same, plain[0].placement.digest(), consume(balancer.prefetch(batches(rank, 3, bad=1 if rank == 3 else None)))


def test_balancing_groups_side_by_side():
    results = run_ranks(4, two_balancing_groups)
    assert all(same == [True] * 3 for same, *_ in results)
    assert results[0][1] == results[1][1] != results[2][1]
    assert [end[0] for *_, end in results] == [[0]] * 4
    assert [end[1][0] for *_, end in results] == ["RankMismatchError"] * 3 + ["OSError"]


def a_part_of_the_world(rank, world_size):
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    mine = groups[rank % 2]
    balancer = SequenceBalancer(group=mine, cost=CostModel.from_shapes(12, 3))
    if rank == 1:
        return None
    return [step.placement.world_size for _, step in balancer.prefetch(batches(rank, 2))]


def test_a_group_that_is_a_part_of_the_world():
    assert run_ranks(3, a_part_of_the_world) == [[2, 2], None, [2, 2]]


# ---- gradients ----


def gradients(rank, world_size, prefetch, breaks=False, plan=None):
    """All batches are taken, and a newer one planned, before the first one's backward."""
    weight = torch.randn(12, 36, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    inputs, outputs = [], []
    if prefetch:
        balancer = balancer_of(world_size, **(plan or {"planner": UnevenHeadsPlanner()}))
        iterator = balancer.prefetch(batches(rank, 5))
        planned = [next(iterator) for _ in range(4)]
    else:
        balancer = balancer_of(world_size, planner="local")
        planned = [(b, balancer.plan_routing(b.seq_lens, text_lens=b.text_lens)) for b in batches(rank, 4)]
    for batch, step in planned:
        x = batch.x.requires_grad_()
        _, y, _ = step.route(x)
        q, k, v = (y @ weight).view(-1, 3, 3, 4).unbind(1)
        y = y + step.layout.attend(torch.sin(q), k, v).flatten(1)
        y = y.flip(0) if breaks and prefetch else y
        inputs.append(x)
        outputs.append(step.reverse_route(y)[1])
    for y in reversed(outputs):
        (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y).sin()).sum().backward()
    dist.all_reduce(weight.grad)
    return [weight.grad, *(x.grad for x in inputs), *(y.detach() for y in outputs)]


def largest_difference(rank, world_size, breaks=False, plan=None):
    pairs = zip(gradients(rank, world_size, False), gradients(rank, world_size, True, breaks, plan), strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs if a.numel())


@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_of_steps_used_after_later_ones_are_planned(world_size):
    assert max(run_ranks(world_size, largest_difference)) <= 1e-12


@pytest.mark.parametrize(("world_size", "spec"), SIDE_BY_SIDE)
def test_gradients_of_balancing_groups_side_by_side(world_size, spec):
    assert max(run_ranks(world_size, largest_difference, False, {"bag_specs": spec})) <= 1e-12


def test_the_comparison_of_gradients_can_fail():
    assert max(run_ranks(2, largest_difference, True)) > 0.01


# ---- ahead, but not too far ----


def ahead(rank, world_size):
    """While the training thread holds batch t, batch t + 2 is planned and t + 3 may be loaded, and no more."""
    loaded, planned = ([threading.Event() for _ in range(8)] for _ in range(2))

    def loader():
        for number in range(6):
            loaded[number].set()
            yield make_batch(rank, number)

    class Planner:
        name = "watched"
        calls = 0

        def __call__(self, *args):
            planned[self.calls].set()
            self.calls += 1
            return make_planner("local")(*args)

    balancer = balancer_of(world_size, planner=Planner())
    iterator = balancer.prefetch(loader())
    seen = []
    for batch, step in iterator:
        last = min(batch.number + 2, 5)
        seen.append(loaded[last].wait(WAIT_S) and planned[last].wait(WAIT_S) and balancer.latest is step)
        for _ in range(20):
            dist.barrier()  # time enough to go too far
        seen.append(not loaded[batch.number + 4].is_set() if last < 4 else True)
    return seen


def test_the_thread_is_three_batches_ahead_at_most():
    assert run_ranks(2, ahead) == [[True] * 12] * 2


def slow_loader(rank, world_size):
    """Rank 1 cannot make batch 3 before rank 0 has taken batch 0 and said so."""
    go = threading.Event()

    def loader():
        for number in range(5):
            if rank == 1 and number == 3 and not go.wait(WAIT_S):
                raise TimeoutError
            yield make_batch(rank, number)

    iterator = balancer_of(world_size).prefetch(loader())
    taken = [next(iterator)[0].number]
    dist.barrier()  # everyone has batch 0, though batch 3 is not there
    alive = len(threads())
    start = time.perf_counter()
    go.set()
    waits = []
    for batch, _ in iterator:
        taken.append(batch.number)
        waits.append(iterator.wait_seconds)
    return taken, alive, sum(waits) <= time.perf_counter() - start


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_slow_loader_on_one_rank_delays_no_batch_three_before_its_own(world_size):
    assert run_ranks(world_size, slow_loader) == [([0, 1, 2, 3, 4], 1, True)] * world_size


def tables(rank, world_size):
    """Routing and the first layer find everything made."""
    balancer = balancer_of(world_size, planner=UnevenHeadsPlanner())
    for batch, step in list(balancer.prefetch(batches(rank, 3))):
        with mock.patch.object(DeviceExchange, "of", side_effect=AssertionError("made too late")):
            _, y, _ = step.route(batch.x)
            q, k, v = y.view(-1, 3, 4).repeat(3, 1, 1, 1)
            step.reverse_route(step.layout.attend(q, k, v).flatten(1))
            step.deliver(torch.zeros(len(batch.seq_lens)))
        found = {id(tensor) for tensor in tensors_of(step)}
        tables = [step._to_shards, step._to_holders, step._to_home]
        tables += [table for split in step.split_attention._made.values() for table in (split.qkv, split.out)]
        sides = [side for table in tables for side in (*table.sources, *table.targets)]
        made = [index for side in sides for index in (side.array_row, side.message_row) if index is not None]
        made += [step.layout.sequence_index, step.layout.image_index]
        assert made and all(id(tensor) in found for tensor in made)
    return len(sides)


def test_tables_are_made_before_the_first_layer():
    assert min(run_ranks(2, tables)) > 3


# ---- the end of the data ----


def uneven(rank, world_size, counts, with_empty):
    balancer = balancer_of(world_size)
    tokens, iterator = (
        0,
        balancer.prefetch(batches(rank, counts[rank]), empty=(lambda: Batch(-1, [])) if with_empty else None),
    )
    taken = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, step in iterator:
            taken.append(batch.number)
            tokens += int(step.placement.sequences.length.sum())
        assert next(iterator, None) is None
    return taken, tokens, [(w.category, str(w.message), w.filename) for w in caught], threads_left()


def total_tokens(counts):
    return sum(sum(b.seq_lens) for rank, count in enumerate(counts) for b in batches(rank, count))


@pytest.mark.parametrize("counts", [[3], [2, 4], [4, 0], [1, 3, 2], [0, 0, 0], [2, 2, 2]])
def test_uneven_ends_lose_nothing_with_empty_batches(counts):
    longest = max(counts)
    for (taken, tokens, caught, left), count in zip(run_ranks(len(counts), uneven, counts, True), counts, strict=True):
        assert taken == [*range(count), *[-1] * (longest - count)]
        assert tokens == total_tokens(counts)
        assert (caught, left) == ([], 0)


@pytest.mark.parametrize(
    ("counts", "ended", "others"), [([2, 4], 1, 1), ([4, 0], 1, 1), ([1, 3, 2], 1, 2), ([1, 3, 1], 2, 1)]
)
def test_uneven_ends_stop_all_ranks_without_empty_batches(counts, ended, others):
    shortest = min(counts)
    for taken, tokens, caught, left in run_ranks(len(counts), uneven, counts, False):
        assert taken == [*range(shortest)]
        assert tokens == total_tokens([shortest] * len(counts))
        ((category, text, filename),) = caught
        assert (category, filename, left) == (KnapFormerWarning, __file__, 0)
        assert f"before batch {shortest}: the loaders of {ended} of {len(counts)} ranks ended, {others} still" in text
        assert "pass empty=" in text


@pytest.mark.parametrize("world_size", WORLDS)
def test_equal_ends_do_not_warn(world_size):
    counts = [3] * world_size
    assert [r[0::2] for r in run_ranks(world_size, uneven, counts, False)] == [([0, 1, 2], [])] * world_size


# ---- failures ----


class WordlessError(Exception):
    def __str__(self):
        raise ValueError


def throw(error):
    raise error


def failing(rank, world_size, where, number, bad_rank=1):
    """One rank fails at batch `number`. Afterwards the balancer works as before."""
    balancer = balancer_of(world_size)
    bad = number if rank == bad_rank else None
    source, options = batches(rank, 5), {}
    if where == "loader":
        source = batches(rank, 5, bad)
    if where == "iter":
        source = source if bad is None else 7
    if where == "lengths":
        options["lengths"] = lambda b: (b.seq_lens if b.number != bad else b.missing, b.text_lens)
    if where == "stop":
        options["lengths"] = lambda b: b.seq_lens if b.number != bad else next(iter(()))
    if where == "zero":
        options["lengths"] = lambda b: (
            [0] if b.number == bad else b.seq_lens,
            b.text_lens if b.number != bad else None,
        )
    if where == "text":
        options["lengths"] = lambda b: (b.seq_lens, [*b.text_lens, 1] if b.number == bad else b.text_lens)
    if where == "empty":
        options["empty"] = lambda: make_batch(rank, 1)
        source = batches(rank, 5 if bad is None else number)
    if where == "long":
        options["lengths"] = lambda b: b.seq_lens if b.number != bad else int("é" * 300)
    if where == "name":
        options["lengths"] = lambda b: b.seq_lens if b.number != bad else throw(OSError("file \udcff"))
    if where == "wordless":
        options["lengths"] = lambda b: b.seq_lens if b.number != bad else throw(WordlessError())
    iterator = balancer.prefetch(source, **options)
    result = consume(iterator)
    assert next(iterator, None) is None  # an iterator that has raised is over
    return *result, threads_left(), consume(balancer.prefetch(batches(rank, 2)))


FAILURES = [
    ("name", 1, "OSError", r"file \udcff"),
    ("wordless", 1, "WordlessError", "(no text)"),
    ("loader", 0, "OSError", "file 0 of rank 1 cannot be read"),
    ("loader", 3, "OSError", "file 3 of rank 1 cannot be read"),
    ("iter", 0, "TypeError", "'int' object is not iterable"),
    ("lengths", 0, "AttributeError", "'Batch' object has no attribute 'missing'"),
    ("lengths", 2, "AttributeError", "'Batch' object has no attribute 'missing'"),
    ("stop", 2, "RuntimeError", "`lengths` or `empty` raised StopIteration"),
    ("empty", 2, "PlanError", "`empty` must make batches without sequences; `lengths` of its batch gave"),
    ("long", 1, "ValueError", "invalid literal for int() with base 10: 'éé"),
]


@pytest.mark.parametrize(("where", "number", "kind", "text"), FAILURES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_failure_on_one_rank_is_one_error_on_each(world_size, where, number, kind, text):
    for rank, (taken, error, left, again) in enumerate(run_ranks(world_size, failing, where, number)):
        assert taken == [*range(number)]
        if rank == 1:
            assert error[0] == kind and (error[1].startswith(text) or where in ("name", "wordless"))
        else:
            assert error[0] == "RankMismatchError"
            assert error[1].startswith(f"rank 1: its loader or `lengths` failed at batch {number}: {kind}: {text}")
            assert len(error[1].encode()) < 500
        assert left == 0
        assert again == ([0, 1], None)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("zero", "rank 1: sequence 0 has length 0; allowed is 1 to 2147483647 tokens"),
        ("text", "rank 1: text_lens has "),
    ],
)
@pytest.mark.parametrize("number", [0, 2])
def test_bad_lengths_are_the_same_error_on_every_rank(where, text, number):
    results = run_ranks(3, failing, where, number)
    assert results == [results[0]] * 3
    taken, (kind, message), left, again = results[0]
    assert (taken, kind, left, again) == ([*range(number)], "PlanError", 0, ([0, 1], None))
    assert message.startswith(text)


def traced(rank, world_size):
    try:
        list(balancer_of(world_size).prefetch(batches(rank, 3, bad=rank or None)))
    except OSError as error:
        frames, trace = [], error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        return frames
    except RankMismatchError:
        return []


def test_a_ranks_own_error_has_its_traceback():
    others, own = run_ranks(2, traced)
    assert (others, own[0], own[-1]) == ([], "traced", "batches")


def failing_planner(rank, world_size, verify):
    class Planner:
        name = "failing"
        calls = 0

        def __call__(self, *args):
            self.calls += 1
            if rank == 1 and self.calls == 3:
                raise MemoryError("no memory for a plan")
            return make_planner("local")(*args)

    balancer = balancer_of(world_size, planner=Planner(), verify=verify)
    return *consume(balancer.prefetch(batches(rank, 5))), threads_left()


@pytest.mark.parametrize("verify", [True, False])
def test_a_planner_that_fails_on_one_rank_stops_all(verify):
    results = run_ranks(3, failing_planner, verify)
    assert [taken for taken, *_ in results] == [[0, 1]] * 3
    assert [error[0] for _, error, _ in results] == ["RankMismatchError", "MemoryError", "RankMismatchError"]
    assert [left for *_, left in results] == [0] * 3


def two_failures(rank, world_size):
    return consume(balancer_of(world_size).prefetch(batches(rank, 3, bad=1 if rank else None)))


def test_two_ranks_that_fail_get_their_own_errors():
    errors = [error for _, error in run_ranks(3, two_failures)]
    assert [kind for kind, _ in errors] == ["RankMismatchError", "OSError", "OSError"]
    assert "rank 2" in errors[2][1] and errors[0][1].startswith("rank 1: ")


def without_lengths(rank, world_size):
    return consume(balancer_of(world_size).prefetch([[3, 4]]))


def pairs(rank, world_size):
    """Every form that `lengths` may return."""
    forms = [
        (5, 7),
        [5, 7],
        torch.tensor([5, 7]),
        ([5, 7], None),
        (torch.tensor([5, 7]), [1, 2]),
        ((5, 7), (1, 2)),
        ([], []),
    ]
    return [
        (step.placement.sequences.length.tolist(), step.placement.sequences.text_length.tolist())
        for _, step in balancer_of(world_size).prefetch(forms, lengths=lambda form: form)
    ]


def test_what_lengths_may_return():
    ((taken, (kind, text)),) = run_ranks(1, without_lengths)
    assert (taken, kind) == ([], "PlanError") and "type list has no attribute seq_lens; pass lengths=" in text
    plain, both = ([5, 7], [0, 0]), ([5, 7], [1, 2])
    assert run_ranks(1, pairs) == [[plain, plain, plain, plain, both, both, ([], [])]]


# ---- closing early ----


def leave(rank, world_size, after, how):
    """Each rank leaves after its own number of batches; one that is left alone gets an error."""
    balancer = balancer_of(world_size)
    iterator = balancer.prefetch(batches(rank, 9))
    taken, error = [], None
    try:
        for batch, _ in iterator:
            taken.append(batch.number)
            if len(taken) == after[rank]:
                if how == "raise":
                    raise ArithmeticError("loss is NaN")
                break
    except (ArithmeticError, RankMismatchError) as caught:
        error = str(caught)
    if how == "close":
        iterator.close()
        iterator.close()
        assert next(iterator, None) is None
    elif how == "cycle":
        iterator.itself = iterator
    del iterator
    gc.collect()
    return taken, error, threads_left(), consume(balancer.prefetch(batches(rank, 2)))


@pytest.mark.parametrize("how", ["drop", "close", "cycle", "raise"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_leaving_at_the_same_batch_stops_the_threads(world_size, how):
    expected = "loss is NaN" if how == "raise" else None
    for taken, error, left, again in run_ranks(world_size, leave, [2] * world_size, how):
        assert (taken, error, left, again) == ([0, 1], expected, 0, ([0, 1], None))


@pytest.mark.parametrize("after", [[2, 99], [99, 1], [2, 99, 99], [3, 1, 99], [1, 2], [99, 5, 4]])
def test_a_rank_that_leaves_alone_is_an_error_for_those_that_go_on(after):
    first = min(after)
    for rank, (taken, error, left, again) in enumerate(run_ranks(len(after), leave, after, "drop")):
        assert taken == [*range(len(taken))]
        assert first <= len(taken) <= first + 2  # the batches that all ranks have gathered may still come
        if len(taken) < after[rank]:
            closers = error.split(" closed the prefetch iterator and will not take batch ")[0]
            assert str(after.index(first)) in closers and str(rank) not in closers
        else:
            assert error is None
        assert (left, again) == (0, ([0, 1], None))


def ends_and_leaves(rank, world_size, with_empty):
    """Rank 1 leaves after the last batch of rank 0, which then only finds that it has no more."""
    iterator = balancer_of(world_size).prefetch(
        batches(rank, 9 if rank else 2), empty=(lambda: Batch(-1, [])) if with_empty else None
    )
    return [batch.number for _, (batch, _) in zip(range(2), iterator, strict=False)] if rank else consume(iterator)


def test_leaving_after_the_others_last_batch_is_no_error():
    assert run_ranks(2, ends_and_leaves, True)[1] == run_ranks(2, ends_and_leaves, False)[1] == [0, 1]


def never_taken(rank, world_size):
    iterator = balancer_of(world_size).prefetch(batches(rank, 3))
    iterator.close()
    return threads_left()


def test_closing_before_the_first_batch():
    assert run_ranks(2, never_taken) == [0, 0]


def inside_the_loader(rank, world_size):
    """The iterator is closed while the loader makes a batch: closing waits for that, and the batch is dropped."""
    entered, go, done = threading.Event(), threading.Event(), threading.Event()

    def loader():
        yield make_batch(rank, 0)
        entered.set()
        go.wait(WAIT_S)
        done.set()
        yield make_batch(rank, 1)

    iterator = balancer_of(world_size).prefetch(loader())
    next(iterator)
    assert entered.wait(WAIT_S)
    threading.Timer(0.05, go.set).start()
    iterator.close()
    return done.is_set(), threads_left()


def test_closing_waits_for_the_loader():
    assert run_ranks(2, inside_the_loader) == [(True, 0)] * 2


def stuck_in_the_loader(rank, world_size):
    """Closing does not wait for ever; the next iterator begins when the old thread has ended."""
    entered, go = threading.Event(), threading.Event()

    def loader():
        yield make_batch(rank, 0)
        entered.set()
        if rank == 1:
            go.wait(WAIT_S)

    balancer = balancer_of(world_size)
    with mock.patch.object(prefetch, "LOADER_GRACE_S", 0.0):
        iterator = balancer.prefetch(loader())
        next(iterator)
        entered.wait(WAIT_S)
        iterator.close()
    again = balancer.prefetch(batches(rank, 3))
    for _ in range(20):
        dist.barrier()  # time enough to begin too early
    go.set()
    return consume(again), threads_left()


def test_a_loader_that_hangs_does_not_keep_closing_waiting():
    assert run_ranks(2, stuck_in_the_loader) == [(([0, 1, 2], None), 0)] * 2


# ---- calls ----


def wrong_calls(rank, world_size):
    errors = []

    def attempt(balancer, kind, **kwargs):
        with pytest.raises(kind) as caught:
            balancer.prefetch(batches(rank, 3), **kwargs)
        errors.append(str(caught.value))

    balancer = balancer_of(world_size)
    attempt(balancer, RankMismatchError, token_dim=rank)
    attempt(balancer, RankMismatchError, empty=list if rank else None)
    iterator = balancer.prefetch(batches(rank, 3))
    attempt(balancer, SpecError)
    return errors, consume(iterator), consume(balancer.prefetch(batches(rank, 2)))


def test_arguments_are_compared_and_checked_on_every_rank():
    results = run_ranks(2, wrong_calls)
    assert results[0] == results[1]
    errors, first, second = results[0]
    assert (first, second) == (([0, 1, 2], None), ([0, 1], None))
    for error, text in zip(
        errors,
        [
            "ranks disagree on token_dim",
            "ranks disagree on whether `empty` is given",
            "an earlier prefetch iterator of this balancer is still open; close it first",
        ],
        strict=True,
    ):
        assert text in error


def beside_inline(rank, world_size):
    """plan_routing and collectives of the training thread between prefetched batches; the latest step is as yielded."""
    balancer = balancer_of(world_size)
    seen = []
    for batch, step in balancer.prefetch(batches(rank, 6)):
        assert balancer.latest is step
        other = balancer.plan_routing([7 + rank])
        assert balancer.latest is other
        total = torch.ones(1)
        dist.all_reduce(total)
        seen.append(int(total) == world_size and torch.equal(step.reverse_route(step.route(batch.x)[1])[1], batch.x))
    return seen


def test_the_training_threads_collectives_do_not_mix_with_the_threads():
    assert run_ranks(3, beside_inline) == [[True] * 6] * 3


# ---- the exit of a rank that failed alone ----

SCRIPT = """
import sys, threading, time, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from knapformer import SequenceBalancer
from knapformer.plan import make_planner

class Planner:
    name, calls, third = "watched", 0, threading.Event()

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 3:
            self.third.set()
        return make_planner("local")(*args)

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=30)
)
try:
    balancer = SequenceBalancer(planner=Planner())
    for batch, step in balancer.prefetch(range(9), lengths=lambda number: [number + 1 + rank]):
        if rank == 1 and batch == 1:
            Planner.third.wait(20)  # so that this rank can say that it closes only in the next gather
            raise ArithmeticError("loss is NaN")
        for _ in range(2500):  # the step that rank 1 leaves, which must not need this rank's help
            if batch == 0 or (folder / "leaving").exists():
                break
            time.sleep(0.01)
finally:
    dist.destroy_process_group()
    (folder / "leaving").touch()
"""


def test_a_rank_that_fails_alone_exits_at_once(tmp_path):
    """Its thread waits for the other rank, which is busy, and comes to the next batch while this rank exits."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    start = time.monotonic()
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert time.monotonic() - start < 20
    assert [process.returncode for process in processes] == [1, 1], errors  # an abort would be -6
    assert "ArithmeticError: loss is NaN" in errors[1]
    assert "lost contact with another rank" in errors[0] or "closed the prefetch iterator" in errors[0]
