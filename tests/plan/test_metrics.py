"""Metrics: by hand, against a count of every single element, and the bound that nothing beats."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.plan import (
    TICKS_PER_SECOND,
    Cluster,
    CostModel,
    Links,
    Placement,
    Sequences,
    Shards,
    attention_exchange,
    lower_bound,
    make_planner,
    measure,
)
from knapformer.plan.metrics import attention_traffic, imbalance, rank_loads
from knapformer.plan.predict import row_prices
from tests.plan.strategies import placements

COSTS = st.builds(
    CostModel,
    num_heads=st.just(1),
    token=st.integers(0, 1000),
    per_qk_pair=st.integers(1, 1000),
    sequence=st.integers(0, 10_000),
)
SPEEDS = st.lists(st.integers(200, 3000), min_size=7, max_size=7)


def shards(rows: list[tuple[int, int, int, int]]) -> Shards:
    return Shards(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def rank_of_each(table: Shards, seq: int) -> list[int]:
    """Rank of every token or row of a sequence."""
    ranks: list[int] = []
    for i in np.flatnonzero(table.seq == seq):
        ranks += [int(table.rank[i])] * int(table.count[i])
    return ranks


def crossing(placement: Placement, group_of: list[int]) -> tuple[int, int]:
    """Count one by one: elements of q, k, v and o that go from one group of ranks to another, and all of them."""
    crosses = total = 0
    for seq, length in enumerate(placement.sequences.length.tolist()):
        total += 4 * length * placement.num_heads
        if not placement.split[seq]:
            continue
        tokens = [group_of[r] for r in rank_of_each(placement.token_shards, seq)]
        rows = [group_of[r] for r in rank_of_each(placement.attention_shards, seq)]
        for row, group in enumerate(rows):
            crosses += 2 * (tokens[row % length] != group)  # the query there, its output back
        table = placement.attention_shards
        for i in np.flatnonzero(table.seq == seq):
            for _head in range(int(table.start[i]) // length, (int(table.stop[i]) - 1) // length + 1):
                crosses += 2 * sum(group != group_of[table.rank[i]] for group in tokens)  # every key and value
    return crosses, total


# -- imbalance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amount", "expected"),
    [([3, 3, 3], 1), ([6, 0, 0], 3), ([4, 2], 4 / 3), ([0, 0], 1), ([5], 1), ([1, 2, 3, 4], 1.6)],
)
def test_imbalance(amount: list[int], expected: float) -> None:
    assert imbalance(np.array(amount)) == pytest.approx(expected, abs=1e-15)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=40))
def test_imbalance_is_exact_also_where_the_sum_exceeds_64_bits(amount: list[int]) -> None:
    total = sum(amount)
    expected = Fraction(max(amount) * len(amount), total) if total else Fraction(1)
    assert imbalance(np.array(amount)) == float(expected)
    assert imbalance(np.array(amount)) >= 1


def test_a_plain_sum_would_overflow() -> None:
    amount = np.full(4, 2**62)
    assert imbalance(amount) == 1
    assert amount.sum() == 0


# -- everything by hand ---------------------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    """Two nodes of two ranks, 2 heads. Sequence 0 of 4 tokens is split over ranks 0 and 2, 1 and 2 are whole."""
    seqs = Sequences.from_ranks([[4], [2], [6], []])
    tokens = shards([(0, 0, 0, 2), (0, 2, 2, 4), (1, 1, 0, 2), (2, 3, 0, 6)])
    rows = shards([(0, 0, 0, 3), (0, 2, 3, 8), (1, 1, 0, 4), (2, 3, 0, 12)])
    placement = Placement(seqs, 4, 2, tokens, rows).validate()
    cost = CostModel(num_heads=2, token=10, per_qk_pair=1, sequence=7)
    got = measure(placement, Cluster(4, 2), cost)

    loads = [2 * 10 + 3 * 4 + 7, 2 * 10 + 4 * 2 + 7, 2 * 10 + 5 * 4 + 7, 6 * 10 + 12 * 6 + 7]  # 39, 35, 47, 139
    assert rank_loads(placement, cost).tolist() == loads
    assert got.makespan == 139 / TICKS_PER_SECOND
    assert got.time_imbalance == pytest.approx(139 / (260 / 4), rel=1e-12)
    assert got.token_imbalance == 6 / 3
    assert got.attention_imbalance == 72 / ((12 + 8 + 20 + 72) / 4)
    # Work 40 + 32 + 7, 20 + 8 + 7, 60 + 72 + 7: a split sequence's constant is counted once.
    assert got.lower_bound == 64 / TICKS_PER_SECOND  # 253 / 4, rounded up to whole ticks
    assert got.gap == pytest.approx(139 / 64 - 1, rel=1e-12)
    # Head 0: rows 0, 1, 2 on rank 0, 3 on rank 2; head 1: all on rank 2. Query 2 goes from rank 2 to 0, queries 0
    # and 1 of head 1 go from 0 to 2; outputs go back. Keys and values: rank 0 needs 2 of head 0, rank 2 needs 2 of
    # each head.
    assert got.split_traffic == (2 * 3 + 2 * 6) / (4 * 2 * 12)
    assert got.cross_node_traffic == got.split_traffic  # ranks 0 and 2 lie on two nodes
    assert measure(placement, Cluster(4), cost).cross_node_traffic == 0
    assert got.routed_fraction == (2 + 6) / 12  # half of sequence 0, and sequence 2, whose home is rank 2
    assert got.split_sequences == 1


def test_at_home_nothing_moves() -> None:
    cost = CostModel.from_shapes(64, 4)
    got = measure(make_planner("local")(Sequences.from_ranks([[9, 4], [1], []]), Cluster(3), cost), Cluster(3), cost)
    assert (got.split_traffic, got.cross_node_traffic, got.routed_fraction, got.split_sequences) == (0, 0, 0, 0)
    assert got.token_imbalance == 13 / (14 / 3)
    assert got.step_over_ideal == got.step_over_ideal_overlap == got.time_imbalance


def test_a_step_without_work() -> None:
    cost = CostModel.from_shapes(64, 4)
    for planner in (make_planner("local"), make_planner("bags", "g3n1")):
        got = measure(planner(Sequences.from_ranks([[], [], []]), Cluster(3), cost), Cluster(3), cost)
        assert (got.time_imbalance, got.token_imbalance, got.attention_imbalance, got.gap) == (1, 1, 1, 0)
        assert (got.makespan, got.lower_bound, got.split_traffic, got.routed_fraction) == (0, 0, 0, 0)


def test_to_json_has_every_figure() -> None:
    cost = CostModel.from_shapes(64, 4)
    data = measure(make_planner("local")(Sequences.from_ranks([[9]]), Cluster(1), cost), Cluster(1), cost).to_json()
    assert list(data) == [
        "time_imbalance", "token_imbalance", "attention_imbalance", "gap", "split_traffic", "cross_node_traffic",
        "routed_fraction", "split_sequences", "makespan", "lower_bound", "step_over_ideal", "step_over_ideal_overlap",
        "padding_tokens",
    ]  # fmt: skip
    assert {type(value) for value in data.values()} == {int, float}


# -- traffic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3, 8, 24, 30])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_uniform_bag_crosses_exactly_1_minus_1_over_g(size: int, heads: int) -> None:
    """Lengths that the bag divides; the heads need not be divisible."""
    seqs = Sequences.from_ranks([[24, 48]] + [[72]] * (2 * size - 1))
    cost = CostModel(num_heads=heads, token=1, per_qk_pair=1)
    placement = make_planner("bags", f"g{size}n2")(seqs, Cluster(2 * size), cost)
    got = measure(placement, Cluster(2 * size, size), cost)
    assert got.split_traffic == (size - 1) / size
    assert got.cross_node_traffic == 0  # each bag is a node
    assert got.split_sequences == (0 if size == 1 else len(seqs))


def test_a_bag_of_another_size_has_another_share() -> None:
    seqs = Sequences.from_ranks([[24], [48], [72], [24]])
    cost = CostModel(num_heads=8, token=1, per_qk_pair=1)
    shares = [
        measure(make_planner("bags", spec)(seqs, Cluster(4), cost), Cluster(4), cost).split_traffic
        for spec in ("g1n4", "g2n2", "g4n1", "g1n2+g2n1")
    ]
    assert shares[:3] == [0, 0.5, 0.75]
    assert 0 < shares[3] < 0.5


@pytest.mark.parametrize(("ranks_per_node", "share"), [(8, 0), (4, 1 / 2), (2, 3 / 4), (1, 7 / 8)])
def test_cross_node_share_of_a_bag_that_spans_nodes(ranks_per_node: int, share: float) -> None:
    seqs = Sequences.from_ranks([[64], [16]] + [[8]] * 6)
    cost = CostModel(num_heads=16, token=1, per_qk_pair=1)
    got = measure(make_planner("bags", "g8n1")(seqs, Cluster(8), cost), Cluster(8, ranks_per_node), cost)
    assert got.cross_node_traffic == share
    assert got.split_traffic == 7 / 8


@settings(deadline=None)
@given(placements(), st.integers(1, 7))
def test_traffic_is_the_count_of_every_crossing_element(placement: Placement, ranks_per_node: int) -> None:
    cluster = Cluster(placement.world_size, ranks_per_node)
    cost = CostModel(placement.num_heads, 1, 1)
    got = measure(placement, cluster, cost)
    by_rank, total = crossing(placement, list(range(placement.world_size)))
    by_node, _ = crossing(placement, cluster.node_of.tolist())
    assert got.split_traffic == (by_rank / total if total else 0)
    assert got.cross_node_traffic == (by_node / total if total else 0)
    assert got.cross_node_traffic <= got.split_traffic


@settings(deadline=None)
@given(placements())
def test_traffic_is_what_the_exchange_sends(placement: Placement) -> None:
    """The executor's own tables, pair of ranks by pair of ranks."""
    traffic = attention_traffic(placement)
    expected = np.zeros((2, placement.world_size, placement.world_size), dtype=np.int64)
    np.add.at(expected[0], (traffic.source, traffic.target), traffic.q_rows + 2 * traffic.kv_rows)
    np.add.at(expected[1], (traffic.target, traffic.source), traffic.q_rows)
    for rank in range(placement.world_size):
        table = attention_exchange(placement, rank)
        for way, exchange in enumerate((table.qkv, table.out)):
            np.testing.assert_array_equal(exchange.input_split_sizes * table.head_group, expected[way, rank])


def test_the_count_can_fail() -> None:
    """Two placements that differ only in where one head's rows are computed have different traffic."""
    seqs = Sequences.from_ranks([[6], [2]])
    tokens = shards([(0, 0, 0, 5), (0, 1, 5, 6), (1, 1, 0, 2)])
    near = Placement(seqs, 2, 2, tokens, shards([(0, 0, 0, 12), (1, 1, 0, 4)])).validate()
    far = Placement(seqs, 2, 2, tokens, shards([(0, 0, 0, 6), (0, 1, 6, 12), (1, 1, 0, 4)])).validate()
    assert crossing(near, [0, 1]) == (4 * 2, 64)
    assert crossing(far, [0, 1]) == (4 + 4 * 5, 64)
    cost = CostModel(2, 1, 1)
    assert measure(near, Cluster(2), cost).split_traffic == 8 / 64
    assert measure(far, Cluster(2), cost).split_traffic == 24 / 64


@settings(deadline=None)
@given(placements())
def test_routed_fraction_the_slow_way(placement: Placement) -> None:
    s = placement.sequences
    away = sum(
        rank != home for i, home in enumerate(s.home.tolist()) for rank in rank_of_each(placement.token_shards, i)
    )
    cost = CostModel(placement.num_heads, 1, 1)
    got = measure(placement, Cluster(placement.world_size), cost)
    assert got.routed_fraction == (away / s.num_tokens if s.num_tokens else 0)


@pytest.mark.parametrize(
    ("heads", "more", "step", "overlap"),
    [
        # A bag of 2 and a sequence of 4 tokens: each rank has 2 tokens and half of the heads. Compute is 7 + 2 * 10
        # + area, of which 2/5 of 27 before attention. 10 ticks a row: of 2 heads q, k, v 3 * 4 there and o 4 back.
        (2, [], 43 + 80, 43 + 80),  # one head a rank: nothing to compute meanwhile
        (4, [], 59 + 160, 10 + 120 + 20 + 20 + 17),  # 2 stages: only the links are busy until the last outputs are back
        (4, [5], 59 + 157 + 160, 33 + 120 + 20 + 20 + 51),  # and a whole sequence of area 100: the links still
        (4, [9], 59 + 421 + 160, 59 + 421 + 24),  # of area 324: the last outputs, 20 + 4 as stages are shorter
    ],
)
def test_predicted_step_by_hand(heads: int, more: list[int], step: int, overlap: int) -> None:
    seqs = Sequences.from_ranks([[4, *more], more])
    tokens = [(0, 0, 0, 2), (0, 1, 2, 4)] + [(1 + i, i, 0, more[0]) for i in range(2) if more]
    rows = [(0, 0, 0, 2 * heads), (0, 1, 2 * heads, 4 * heads)]
    rows += [(1 + i, i, 0, heads * more[0]) for i in range(2) if more]
    placement = Placement(seqs, 2, heads, shards(tokens), shards(rows)).validate()
    cost = CostModel(heads, token=10, per_qk_pair=1, sequence=7, head_dim=5)
    cluster = Cluster(2, links=Links(intra_node=TICKS_PER_SECOND, element_bytes=2))  # 10 ticks a row
    got = measure(placement, cluster, cost)
    ideal = int(rank_loads(placement, cost).max())
    assert got.time_imbalance == 1
    assert got.step_over_ideal == step / ideal
    assert got.step_over_ideal_overlap == overlap / ideal
    slow = measure(placement, Cluster(2, 1, links=Links(inter_node=TICKS_PER_SECOND / 3)), cost)
    assert slow.step_over_ideal == (ideal + 3 * (80 if heads == 2 else 160)) / ideal


def test_what_goes_there_and_back_takes_both_times() -> None:
    """One token on rank 1, its row on rank 0: q, k and v (3 rows) go one way, then the output the other."""
    placement = Placement(Sequences.from_ranks([[1], []]), 2, 1, shards([(0, 1, 0, 1)]), shards([(0, 0, 0, 1)]))
    cost = CostModel(1, token=1, per_qk_pair=1)
    got = measure(placement.validate(), Cluster(2), cost)
    row, _ = row_prices(Cluster(2), cost)
    assert got.step_over_ideal == 1 + 3 * row  # both ways at once
    assert got.step_over_ideal_overlap == 2 + 4 * row  # one after the other


# -- lower bound ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(placements(), COSTS, SPEEDS)
def test_no_placement_beats_the_lower_bound(placement: Placement, cost: CostModel, speeds: list[int]) -> None:
    cost = replace(cost, num_heads=placement.num_heads)
    for cluster in (
        Cluster(placement.world_size),
        Cluster(placement.world_size, speeds=tuple(speeds[: placement.world_size])),
    ):
        bound = lower_bound(placement.sequences, cluster, cost)
        assert int(rank_loads(placement, cost, cluster).max()) >= bound
        got = measure(placement, cluster, cost)
        assert got.gap >= 0
        assert min(got.time_imbalance, got.token_imbalance, got.attention_imbalance) >= 1
        assert min(got.step_over_ideal, got.step_over_ideal_overlap) >= got.time_imbalance


@pytest.mark.parametrize("spec", ["g1n6", "g2n3", "g3n2", "g6n1"])
def test_the_bound_is_reached_where_everything_divides(spec: str) -> None:
    cost = CostModel(num_heads=6, token=1000, per_qk_pair=3)
    seqs = Sequences.from_ranks([[120]] * 6)
    placement = make_planner("bags", spec)(seqs, Cluster(6), cost)
    assert lower_bound(seqs, Cluster(6), cost) == int(rank_loads(placement, cost).max()) == 120_000 + 3 * 6 * 120**2
    assert measure(placement, Cluster(6), cost).gap == 0


def test_a_higher_bound_would_be_beaten() -> None:
    """So the property above can fail: the bound cannot be raised by a single tick."""
    cost = CostModel(num_heads=6, token=1000, per_qk_pair=3)
    seqs = Sequences.from_ranks([[120]] * 6)
    placement = make_planner("bags", "g6n1")(seqs, Cluster(6), cost)
    assert int(rank_loads(placement, cost).max()) < lower_bound(seqs, Cluster(6), cost) + 1


def test_the_bound_with_speeds_is_reached_by_a_division_by_speed() -> None:
    seqs = Sequences.from_ranks([[30], [], []])
    cost = CostModel(num_heads=1, token=10, per_qk_pair=0)
    cluster = Cluster(3, speeds=(1000, 2000, 3000))
    tokens = [(0, 0, 0, 5), (0, 1, 5, 15), (0, 2, 15, 30)]
    placement = Placement(seqs, 3, 1, shards(tokens), shards([(0, 0, 0, 30)])).validate()
    assert rank_loads(placement, cost, cluster).tolist() == [50, 50, 50]
    assert lower_bound(seqs, cluster, cost) == 50
    assert rank_loads(placement, cost).tolist() == [50, 100, 150]


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (CostModel(1, 100, 0), 100),  # 3 tokens over 100 ranks: one rank has a token
        (CostModel(1, 100, 0, sequence=50), 150),  # and its sequence
        (CostModel(2, 0, 7), 7 * 3),  # 6 rows over 100 ranks: one rank has a row against 3 keys
        (CostModel(1, 10, 7), 7 * 3),  # the row costs more than the token
    ],
)
def test_indivisible_parts(cost: CostModel, expected: int) -> None:
    seqs = Sequences.from_ranks([[3]] + [[]] * 99)
    assert lower_bound(seqs, Cluster(100), cost) == expected
    fast = Cluster(100, speeds=(1000,) * 99 + (2000,))
    assert lower_bound(seqs, fast, cost) == expected // 2


def test_the_bound_of_work_beyond_64_bits() -> None:
    cost = CostModel.from_shapes()
    seqs = Sequences.from_ranks([[10_000_000]] * 8)
    work = 452_984_832 * 10**7 + 1280 * 24 * 10**14
    assert 8 * work > 2**63
    assert lower_bound(seqs, Cluster(8), cost) == work
    got = measure(make_planner("local")(seqs, Cluster(8), cost), Cluster(8), cost)
    assert (got.gap, got.time_imbalance, got.attention_imbalance) == (0, 1, 1)
