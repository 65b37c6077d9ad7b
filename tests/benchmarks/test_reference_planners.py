"""The planners we compare with: examples worked by hand, valid placements, and what each scheme promises."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("highspy")

from benchmarks import planners as benchmark
from benchmarks.reference_planners import (
    REFERENCE_PLANNERS,
    FlexSPPlanner,
    KarmarkarKarpPlanner,
    LPTPlanner,
    NestedGroupsPlanner,
    UlyssesPlanner,
    ZelligePlanner,
)
from benchmarks.reference_planners.flexsp import _buckets
from benchmarks.reference_planners.karmarkar_karp import _join
from benchmarks.reference_planners.rank_sets import Prices, place

from knapformer.errors import PlanError
from knapformer.plan import Cluster, CostModel, Limits, Links, Placement, Planner, Sequences, make_planner, measure
from knapformer.plan.predict import predict
from knapformer.report import RunRecord, read_records, write_records

LINEAR = CostModel(num_heads=4, token=1, per_qk_pair=0, head_dim=1)  # work is the length; traffic costs thousands of it
QUICK: list[Planner] = [
    LPTPlanner(),
    KarmarkarKarpPlanner(),
    UlyssesPlanner(),
    NestedGroupsPlanner(),
    FlexSPPlanner(time_limit=0.2),
    ZelligePlanner(time_limit=0.2, searches=0),
]


def loads(planner: Planner, lengths: list[int], world_size: int) -> list[int]:
    sequences = Sequences.from_ranks([lengths] + [[]] * (world_size - 1))
    return sorted(planner(sequences, Cluster(world_size), LINEAR).validate().tokens().tolist(), reverse=True)


def test_longest_first_is_graham_s_worst_case() -> None:
    """5 5 4 4 3 3 3 on three ranks: 5 3 3, 5 3, 4 4 or the like, at most 11, where 9 everywhere is possible."""
    assert loads(LPTPlanner(), [5, 5, 4, 4, 3, 3, 3], 3) == [11, 8, 8]


def test_differencing_as_worked_by_hand() -> None:
    """8 7 6 5 4: 8-7 and 6-5 leave 4 1 1; then 4-1 and 3-1: sums 16 and 14. Longest first gives 17 and 13."""
    assert loads(KarmarkarKarpPlanner(), [8, 7, 6, 5, 4], 2) == [16, 14]
    assert loads(LPTPlanner(), [8, 7, 6, 5, 4], 2) == [17, 13]


def test_partitions_are_joined_largest_with_smallest() -> None:
    first, second = [(9, [0]), (4, [1])], [(5, [2]), (3, [3])]
    assert _join(first, second, 2) == [(12, [0, 3]), (9, [1, 2])]
    assert _join(first, second, 3) == [(9, [0]), (7, [1, 3]), (5, [2])]
    assert _join(first, second, 4) == [(9, [0]), (5, [2]), (4, [1]), (3, [3])]


@pytest.mark.parametrize("planner", QUICK, ids=lambda planner: planner.name)
def test_placements_are_valid(planner: Planner) -> None:
    rng = np.random.default_rng(7)
    for world_size, per_node, heads in ((1, 1, 3), (2, 2, 4), (3, 3, 5), (6, 4, 12), (8, 4, 7), (8, 8, 24)):
        counts = rng.integers(0, 4, world_size)
        lens = [np.exp(rng.uniform(0, 11, n)).astype(int).tolist() for n in counts]
        sequences, cluster = Sequences.from_ranks(lens), Cluster(world_size, per_node)
        placement = planner(sequences, cluster, CostModel.from_shapes(256, heads)).validate()
        assert placement.planner == planner.name
        assert placement.num_heads == heads
        if planner.name in ("lpt", "karmarkar-karp"):
            assert not placement.split.any()


@pytest.mark.parametrize("planner", QUICK, ids=lambda planner: planner.name)
def test_no_sequences(planner: Planner) -> None:
    empty = Sequences.from_ranks([[], []])
    assert len(planner(empty, Cluster(2), LINEAR).validate().token_shards) == 0


@pytest.mark.parametrize("planner", QUICK, ids=lambda planner: planner.name)
def test_a_broken_cap_is_an_error_and_never_silent(planner: Planner) -> None:
    sequences = Sequences.from_ranks([[40, 30], [20]])
    with pytest.raises(PlanError, match="above max_tokens_per_rank 10"):
        planner(sequences, Cluster(2), LINEAR, Limits(10))
    assert planner(sequences, Cluster(2), LINEAR, Limits(90)).tokens().max() <= 90


def test_registered_names_are_the_planners_own() -> None:
    assert list(REFERENCE_PLANNERS) == [planner.name for planner in QUICK]
    assert all(planner.name == name for name, planner in REFERENCE_PLANNERS.items())


# -- sets of ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "ranks"), [(8, (0, 1, 2, 3)), (8, (0, 1, 4, 5)), (6, tuple(range(6)))])
def test_the_price_of_a_set_is_what_is_predicted(heads: int, ranks: tuple[int, ...]) -> None:
    """The closed form of `Prices` against the prediction of the placement itself."""
    sequences, cluster = Sequences.from_ranks([[240]] + [[]] * 7), Cluster(8, ranks_per_node=4)
    cost = CostModel.from_shapes(512, heads)
    placement = place(sequences, cluster, cost, [ranks], "x", equal_rows=False)
    in_node = sum(rank < 4 for rank in ranks)
    least_in_node = min(in_node, len(ranks) - in_node) or in_node
    price = Prices(cluster, cost, equal_rows=False).share(sequences.length, len(ranks), least_in_node)
    assert predict(placement, cluster, cost).step == pytest.approx(price[0], rel=1e-9)


def test_left_over_heads_go_to_the_ranks_with_the_least() -> None:
    """6 heads on 4 ranks, twice: two ranks have a head more of the first sequence, the others of the second."""
    sequences, cost = Sequences.from_ranks([[64, 64], [], [], []]), CostModel.from_shapes(512, 6)
    placement = place(sequences, Cluster(4), cost, [(0, 1, 2, 3)] * 2, "x", equal_rows=False)
    assert placement.area().tolist() == [64 * 64 * 3] * 4
    assert not np.any(placement.attention_shards.stop % 64)


def test_rows_are_equal_where_that_is_allowed_and_better() -> None:
    sequences, cost = Sequences.from_ranks([[6400], [], [], []]), CostModel.from_shapes(512, 6)
    whole_heads, equal_rows = (
        place(sequences, Cluster(4), cost, [(0, 1, 2, 3)], "x", equal_rows=allowed) for allowed in (False, True)
    )
    assert whole_heads.area().max() == 2 * 6400**2
    assert equal_rows.area().max() == 1.5 * 6400**2


# -- what each scheme promises ----------------------------------------------------------------------------------------


def groups_of(placement: Placement) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for seq, rank in zip(placement.token_shards.seq.tolist(), placement.token_shards.rank.tolist(), strict=True):
        groups.setdefault(seq, set()).add(rank)
    return groups


@pytest.fixture(scope="module")
def mixed() -> tuple[Sequences, Cluster, CostModel]:
    """One sequence too long for a rank, several that are not."""
    lens = [[16000, 300], [900, 700], [4000], [3000], [500] * 4, [2500], [800], [1000]]
    return Sequences.from_ranks(lens), Cluster(8, 8), CostModel.from_shapes(num_heads=24)


def test_ulysses_uses_aligned_groups_of_one_size(mixed: tuple[Sequences, Cluster, CostModel]) -> None:
    for degree in (1, 2, 4, 8):
        placement = UlyssesPlanner(degree)(*mixed)
        assert all(group == set(range(min(group), min(group) + degree)) for group in groups_of(placement).values())
        assert all(min(group) % degree == 0 for group in groups_of(placement).values())
        assert measure(placement, *mixed[1:]).split_traffic == pytest.approx(1 - 1 / degree, abs=1e-3)


def test_ulysses_chooses_the_best_degree(mixed: tuple[Sequences, Cluster, CostModel]) -> None:
    steps = {g: predict(UlyssesPlanner(g)(*mixed), *mixed[1:]).step for g in (1, 2, 4, 8)}
    assert predict(UlyssesPlanner()(*mixed), *mixed[1:]).step == min(steps.values()) < max(steps.values())


def test_nested_groups_are_aligned_powers_of_two(mixed: tuple[Sequences, Cluster, CostModel]) -> None:
    groups = groups_of(NestedGroupsPlanner()(*mixed))
    sizes = {len(group) for group in groups.values()}
    assert len(sizes) > 1
    assert sizes <= {1, 2, 4, 8}
    assert all(group == set(range(min(group), min(group) + len(group))) for group in groups.values())
    assert all(min(group) % len(group) == 0 for group in groups.values())


def test_flexsp_s_groups_differ_and_do_not_overlap() -> None:
    """Over slow links: one sequence with half of all work, on half of the ranks; short ones on single ranks."""
    sequences = Sequences.from_ranks([[16000], [3300] * 2, [3300] * 6, [], [], [], [], []])
    cluster = Cluster(8, 8, links=Links(intra_node=50e9))
    placement = FlexSPPlanner(time_limit=1)(sequences, cluster, CostModel.from_shapes(num_heads=24))
    groups = {frozenset(group) for group in groups_of(placement).values()}
    assert len(groups_of(placement)[0]) == 4
    assert {len(group) for group in groups} > {4}
    assert sum(len(group) for group in groups) == len(frozenset().union(*groups))


def test_zellige_is_no_worse_than_nested_groups_and_overlaps(mixed: tuple[Sequences, Cluster, CostModel]) -> None:
    placement = ZelligePlanner(time_limit=0.5, searches=1)(*mixed)
    nested = NestedGroupsPlanner()(*mixed)
    assert predict(placement, *mixed[1:]).step <= predict(nested, *mixed[1:]).step * (1 + 1e-9)
    groups = list(groups_of(placement).values())
    assert any(a & b and a != b for a in groups for b in groups)


def test_buckets_are_cut_where_lengths_jump() -> None:
    lengths = np.array([100, 5000, 101, 99, 5100, 20000, 5000])
    assert _buckets(lengths, 3).tolist() == [0, 1, 0, 0, 1, 2, 1]
    assert len(set(_buckets(lengths, 16).tolist())) == 6


# -- the benchmark ----------------------------------------------------------------------------------------------------


def test_run_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"seq_lens": [[900, 300], [200]], "text_lens": [[100, 100], [100]]}] * 3
    trace = tmp_path / "tiny.json"
    trace.write_text(json.dumps({"meta": {"name": "tiny", "world": 2, "d_model": 256, "heads": 4}, "steps": steps}))
    output = tmp_path / "records" / "planners.jsonl"
    arguments = ["--traces", str(trace), "--steps", "2", "--planners", "local", "lpt", "bags:g2n1", "bags:g3n1"]
    assert benchmark.main([*arguments, "-o", str(output)]) == 0
    (run,) = read_records(output).values()
    assert [step["planner"] for step in run.steps] == ["local", "lpt", "bags:g2n1", "bags:g3n1"]
    assert "SpecError" in run.steps[3]["skipped"]
    assert {"versions", "commit", "processor", "time"} <= run.header["environment"].keys()
    sequences, cluster = Sequences.from_ranks(steps[0]["seq_lens"]), Cluster(2)
    cost = CostModel.from_shapes(256, 4)
    for step, planner in zip(
        run.steps, (make_planner("local"), LPTPlanner(), make_planner("bags", "g2n1")), strict=False
    ):
        expected = measure(planner(sequences, cluster, cost), cluster, cost).to_json()
        assert step["figures"].keys() == expected.keys() - set(benchmark.ABSOLUTE)
        for name, figure in step["figures"].items():
            assert figure == pytest.approx([expected[name]] * 2, rel=1e-6)
        assert (step["steps"], step["trace"], step["half"]) == (2, "tiny", 0.0)
        assert 0 < step["plan_seconds"]["median"] <= step["plan_seconds"]["p99"]
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_later_run_replaces_what_it_measures_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = {"seq_lens": [[900, 300], [200]], "text_lens": [[100, 100], [100]]}
    trace = tmp_path / "tiny.json"
    trace.write_text(json.dumps({"meta": {"name": "tiny", "world": 2}, "steps": [step] * 3}))
    output = tmp_path / "planners.jsonl"
    earlier = {"environment": {}, "command": [], "config": {}}
    old = [{"step": 0, "trace": "tiny", "planner": name} for name in ("local", "lpt")]
    write_records(output, [RunRecord("earlier", earlier, old)])
    assert benchmark.main(["--traces", str(trace), "--steps", "1", "--planners", "local", "-o", str(output)]) == 0
    kept = {run.name: [step["planner"] for step in run.steps] for run in read_records(output).values()}
    assert kept.pop("earlier") == ["lpt"] and list(kept.values()) == [["local"]]
