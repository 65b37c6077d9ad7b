"""Predicted step: hand-computed traffic, overlap, speeds, and the figures that metrics report."""

import numpy as np
import pytest

from knapformer.errors import SpecError
from knapformer.plan import Cluster, CostModel, Links, Placement, Sequences, Shards, make_planner, measure
from knapformer.plan.metrics import lower_bound, rank_loads
from knapformer.plan.predict import predict

COST = CostModel(num_heads=4, token=1000, per_qk_pair=10, head_dim=8)
LINKS = Links(intra_node=16e15, inter_node=2e15, element_bytes=2)  # a row of 16 bytes: 1 tick inside a node, 8 across


def halves(length: int = 10) -> Placement:
    """One sequence, tokens and heads in two halves on ranks 0 and 1."""
    seqs = Sequences.from_ranks([[length], []])
    rows = 4 * length
    return Placement(
        seqs,
        2,
        4,
        Shards.sorted([0, 0], [0, 1], [0, length // 2], [length // 2, length]),
        Shards.sorted([0, 0], [0, 1], [0, rows // 2], [rows // 2, rows]),
    ).validate()


@pytest.mark.parametrize(("ranks_per_node", "price"), [(2, 1), (1, 8)])
def test_traffic_of_two_halves(ranks_per_node: int, price: int) -> None:
    prediction = predict(halves(), Cluster(2, ranks_per_node, LINKS), COST)
    # q, k, v of 5 tokens and 2 heads go out, 5 tokens' outputs of 2 heads come back: 40 rows each way
    assert prediction.traffic.tolist() == [40 * price] * 2
    assert prediction.compute.tolist() == [5 * 1000 + 20 * 10 * 10] * 2
    assert prediction.ideal == 7000
    assert prediction.step == 7000 + 40 * price
    assert prediction.step_over_ideal == pytest.approx(1 + 40 * price / 7000)


def test_traffic_is_the_larger_direction_over_the_whole_pass() -> None:
    seqs = Sequences.from_ranks([[10], []])
    whole = Shards.sorted([0], [0], [0], [10])
    moved = Placement(seqs, 2, 4, whole, Shards.sorted([0], [1], [0], [40]))
    # rank 0 sends 3 * 40 rows and receives 40; rank 1 the other way round
    assert predict(moved, Cluster(2, 2, LINKS), COST).traffic.tolist() == [120, 120]


def test_speeds() -> None:
    cluster = Cluster(2, speeds=(500, 2000))
    assert cluster.time(np.array([10, 10])).tolist() == [20, 5]
    assert cluster.time(np.array([1, 1])).tolist() == [2, 1]  # rounded up
    assert cluster.mean_time(25) == 10
    assert Cluster(2, speeds=(1000, 1000)) == Cluster(2)
    placement = halves()
    assert rank_loads(placement, COST, cluster).tolist() == [14000, 3500]
    assert lower_bound(placement.sequences, cluster, COST) == 5600
    assert measure(placement, cluster, COST).time_imbalance == pytest.approx(14000 / 5600)


@pytest.mark.parametrize("speeds", [(1,), (0, 1), (1, 2_000_000), (1.0, 1)])
def test_bad_speeds(speeds: tuple) -> None:
    with pytest.raises(SpecError, match="speed"):
        Cluster(2, speeds=speeds)


def test_bad_links() -> None:
    with pytest.raises(SpecError, match="positive bandwidth"):
        Links(inter_node=0.0)


def test_metrics_report_the_prediction() -> None:
    metrics = measure(halves(), Cluster(2, 2, LINKS), COST)
    assert metrics.step_over_ideal == pytest.approx(1 + 40 / 7000)
    assert 1 < metrics.step_over_ideal_overlap < metrics.step_over_ideal


def test_uniform_bag_costs_what_the_formula_says() -> None:
    """L tokens on g ranks alike: 4 L (1 - 1/g) / g tokens of traffic for each."""
    seqs, cost = Sequences.from_ranks([[4096], [], [], []]), CostModel.from_shapes(3072, 24)
    prediction = predict(make_planner("bags", "g4n1")(seqs, Cluster(4), cost), Cluster(4), cost)
    seconds = 4 * 4096 * (3 / 4) / 4 * 3072 * 2 / 300e9
    np.testing.assert_allclose(prediction.traffic, seconds * 1e15, rtol=1e-6)


def test_nothing_to_do() -> None:
    seqs = Sequences.from_ranks([[], []])
    metrics = measure(make_planner("local")(seqs, Cluster(2), COST), Cluster(2), COST)
    assert metrics.step_over_ideal == metrics.step_over_ideal_overlap == 1.0
