"""The two executors of a program: by hand, against each other, and what each alone must do."""

import numpy as np
import pytest

from knapformer.data.profile import Terms
from knapformer.errors import SpecError
from knapformer.plan import Cluster, Sequences, make_planner
from knapformer.tools.simulate.clock import run
from knapformer.tools.simulate.cores import run_on_cores
from knapformer.tools.simulate.presets import ModelShape
from knapformer.tools.simulate.program import Compute, Launch, Meeting, Op, Wait
from knapformer.tools.simulate.step import StepOptions, step_program
from knapformer.tools.simulate.work import Prices, step_work

EVERYONE = Meeting.groups(np.zeros(2, dtype=np.int64))


def _seconds(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def _gather(key: str, seconds: float, stream: str = "gather") -> Launch:
    return Launch(key, "parameters", _seconds(seconds, seconds), EVERYONE, stream)


def test_groups_and_pairs_give_the_latest_of_those_that_meet() -> None:
    random = np.random.default_rng(0)
    times, group = random.random(13), random.integers(0, 4, 13)
    groups = Meeting.groups(group)
    a, b = random.integers(0, 13, 9), random.integers(0, 13, 9)
    pairs = Meeting.pairs(a, b, 13)
    for rank in range(13):
        together = np.flatnonzero(group == group[rank])
        assert groups.latest(times)[rank] == times[together].max()
        assert groups.partners()[rank] == together.tolist()
        met = sorted({rank, *b[a == rank].tolist(), *a[b == rank].tolist()})
        assert pairs.latest(times)[rank] == times[met].max()
        assert pairs.partners()[rank] == met


def test_a_rank_waits_for_others_and_then_for_bytes() -> None:
    timeline = run([Compute("a", _seconds(1, 3)), _gather("g", 2), Wait("g")], 2)
    assert timeline.end.tolist() == [5, 5]
    assert timeline.busy.tolist() == [1, 3]
    assert timeline.waiting["parameters"].tolist() == [2, 0]
    assert timeline.exposed["parameters"].tolist() == [2, 2]


def test_a_transfer_travels_behind_work_that_follows_its_launch() -> None:
    timeline = run([_gather("g", 2), Compute("a", _seconds(1.5, 1.5)), Wait("g")], 2)
    assert timeline.end.tolist() == [2, 2]
    assert timeline.exposed["parameters"].tolist() == [0.5, 0.5]


def test_transfers_of_a_stream_follow_each_other_and_those_of_two_streams_share_the_link() -> None:
    one = run([_gather("a", 2), _gather("b", 3), Wait("a"), Wait("b")], 2)
    two = run([_gather("a", 2), _gather("b", 3, "other"), Wait("b")], 2)
    assert one.end.tolist() == two.end.tolist() == [5, 5]
    apart = Launch("b", "parameters", _seconds(3, 3), EVERYONE, "other", ("inter",))
    assert run([_gather("a", 2), apart, Wait("a"), Wait("b")], 2).end.tolist() == [3, 3]


def test_ranks_without_bytes_take_no_part() -> None:
    pairs = Meeting.pairs(np.array([0]), np.array([1]), 3)
    program: list[Op] = [
        Compute("a", _seconds(1, 2, 7)),
        Launch("x", "exchange", _seconds(1, 1, 0), pairs, "exchange"),
        Wait("x"),
    ]
    assert run(program, 3).end.tolist() == [3, 3, 7]
    assert run_on_cores(program, 3, 3).end.tolist() == pytest.approx([3, 3, 7])


def test_a_transfer_begins_after_the_one_it_follows() -> None:
    after = Launch("b", "gradients", _seconds(1, 1), EVERYONE, "average", ("inter",), after="a")
    program: list[Op] = [_gather("a", 2), after, Wait("b")]
    assert run(program, 2).end.tolist() == [3, 3]
    assert run_on_cores(program, 2, 4).end.tolist() == pytest.approx([3, 3])


def test_ranks_share_cores() -> None:
    program = [Compute("a", _seconds(1, 3))]
    assert run_on_cores(program, 2, 1).end.tolist() == pytest.approx([2, 4])  # half speed until rank 0 has ended
    assert run_on_cores(program, 2, 2).end.tolist() == pytest.approx([1, 3])
    level = [Compute("a", _seconds(2, 2))]
    assert run_on_cores(level, 2, 1).end.max() == pytest.approx(4)  # balance gains nothing where cores are busy


def test_a_program_that_cannot_end_says_so() -> None:
    crossed = [Launch(k, "x", _seconds(*s), EVERYONE, k) for k, s in (("a", (1.0, 1.0)), ("b", (1.0, 1.0)))]
    never = Launch("c", "x", _seconds(1, 1), EVERYONE, "c", after="d")
    with pytest.raises(SpecError, match=r"never ends: it waits for 'd', which is not launched before"):
        run_on_cores([*crossed, never, Wait("c")], 2, 2)
    with pytest.raises(SpecError, match=r"never ends: it waits for 'e'"):
        run_on_cores([*crossed, Wait("e")], 2, 2)
    with pytest.raises(SpecError, match="cores is 0"):
        run_on_cores(crossed, 2, 0)


SMALL = ModelShape("t", "t", 96, 6, 384, 1, 2, 24.0, 36.0, 15.0, 1e6, "joint", 0, (1, 1, 1), (1, 1, 1), "")
PRICES: Prices = {
    "forward": Terms(1e-6, 2e-10, 1e-5, 1e-5),
    "recompute": Terms(1.2e-6, 2e-10, 1e-5, 1e-5),
    "backward": Terms(2e-6, 5e-10, 2e-5, 2e-5),
}


def _program(planner: str, topology: str | None, world: int, **options: object) -> list[Op]:
    random = np.random.default_rng(world)
    lens = [random.integers(1, 900, random.integers(0, 4)).tolist() for _ in range(world)]
    lens[0].append(2500)
    sequences = Sequences.from_ranks(lens)
    cluster = Cluster(world, 2)
    cost = SMALL.cost_model()
    placement = make_planner(planner, topology)(sequences, cluster, cost)
    work = step_work(placement, cluster, PRICES, head_dim=SMALL.head_dim, route_bytes=8.0)
    settings = StepOptions(prefetch=False, latency=1e-6, **options)  # type: ignore[arg-type]
    return step_program(work, SMALL.layer_parameters(), cluster, settings)


@pytest.mark.parametrize(
    ("planner", "topology", "world"), [("local", None, 3), ("bags", "g2n2", 4), ("balanced", None, 6)]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_both_executors_agree_where_nothing_is_shared(
    planner: str, topology: str | None, world: int, overlap: bool
) -> None:
    program = _program(planner, topology, world, overlap=overlap, shard_size=1, gradient_bytes=0.0)
    # Links of different streams must not meet, as only one executor shares them: give each stream its own.
    apart = [
        Launch(op.key, op.kind, op.seconds, op.meeting, op.stream, (op.stream,), op.after)
        if isinstance(op, Launch)
        else op
        for op in program
    ]
    exact, events = run(apart, world), run_on_cores(apart, world, 10 * world)
    assert events.end == pytest.approx(exact.end, rel=1e-9)
    assert events.busy == pytest.approx(exact.busy, rel=1e-9)
    for kind, seconds in exact.waiting.items():
        found = events.waiting.get(kind, 0) + events.exposed.get(kind, 0)
        assert found == pytest.approx(seconds + exact.exposed[kind], abs=1e-9)
    # The agreement can fail: without the meetings of ranks the recursion ends earlier.
    alone = Meeting.groups(np.arange(world))
    unmet = [
        Launch(op.key, op.kind, op.seconds, alone, op.stream, (op.stream,), op.after) if isinstance(op, Launch) else op
        for op in program
    ]
    assert run(unmet, world).end.min() < exact.end.min() * 0.999


def test_one_core_does_all_work_and_all_bytes() -> None:
    program = _program("balanced", None, 4)
    total = sum(float(op.seconds.sum()) for op in program if not isinstance(op, Wait))
    assert run_on_cores(program, 4, 1).end.max() == pytest.approx(total, rel=1e-6)
