"""Clusters: which ranks share what, how fast they are, and that times round up."""

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import SpecError
from knapformer.plan import Cluster, Links


@pytest.mark.parametrize(
    ("cluster", "sizes", "node_of"),
    [
        (Cluster(1), (1,), [0]),
        (Cluster(5), (5,), [0] * 5),
        (Cluster(8, 4), (4, 4), [0, 0, 0, 0, 1, 1, 1, 1]),
        (Cluster(7, 3), (3, 3, 1), [0, 0, 0, 1, 1, 1, 2]),  # the last node is smaller
        (Cluster(3, 8), (3,), [0, 0, 0]),  # a node that is not full
        (Cluster(4, 1), (1, 1, 1, 1), [0, 1, 2, 3]),
        (Cluster(6, node_sizes=(1, 3, 2)), (1, 3, 2), [0, 1, 1, 1, 2, 2]),
        (Cluster(6, 4, node_sizes=(1, 3, 2)), (1, 3, 2), [0, 1, 1, 1, 2, 2]),  # explicit sizes win
    ],
)
def test_nodes(cluster: Cluster, sizes: tuple[int, ...], node_of: list[int]) -> None:
    assert cluster.node_sizes == sizes
    assert cluster.num_nodes == len(sizes)
    assert cluster.node_of.tolist() == node_of
    ranks = cluster.node_ranks()
    assert [len(r) for r in ranks] == list(sizes)
    assert [rank for node in ranks for rank in node] == list(range(cluster.world_size))
    assert all(node_of[rank] == node for node, r in enumerate(ranks) for rank in r)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Cluster(0), "world_size is 0; a cluster needs at least one rank"),
        (lambda: Cluster(-3), "world_size is -3"),
        (lambda: Cluster(4, 0), "ranks_per_node is 0; a node needs at least one rank"),
        (lambda: Cluster(4, -1), "ranks_per_node is -1"),
        (lambda: Cluster(4, node_sizes=(3, 2)), r"node_sizes \(3, 2\) must be positive and add up to world_size 4"),
        (lambda: Cluster(4, node_sizes=(5, -1)), "must be positive"),
        (lambda: Cluster(4, node_sizes=(4, 0)), "must be positive"),
        (lambda: Cluster(4, speeds=(1000,) * 3), r"speeds has 3 entries; give one per rank \(4\), or none"),
        (lambda: Cluster(2, speeds=(1000, 0)), "speed of rank 1 is 0; it must be a whole number from 1 to 1000000"),
        (lambda: Cluster(2, speeds=(1.0, 1000)), "speed of rank 0 is 1.0"),  # type: ignore[arg-type]
        (lambda: Cluster(2, speeds=(1000, 1_000_001)), "speed of rank 1 is 1000001"),
        (lambda: Links(intra_node=0), "positive bandwidth"),
        (lambda: Links(inter_node=-1), "positive bandwidth"),
        (lambda: Links(element_bytes=0), "positive bandwidth .* and element size"),
    ],
)
def test_impossible_clusters(build, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build()


def test_equal_ranks_have_one_spelling() -> None:
    assert Cluster(4, speeds=(1000,) * 4) == Cluster(4)
    assert Cluster(4).speed.tolist() == [1000] * 4
    assert Cluster(4, speeds=(1000, 1000, 1000, 999)) != Cluster(4)
    assert Cluster(8, 4) != Cluster(8, 2)
    assert hash(Cluster(8, 4)) == hash(Cluster(8, 4))


def test_time_of_faster_and_slower_ranks_rounds_up() -> None:
    cluster = Cluster(4, speeds=(2000, 1000, 500, 3))
    assert cluster.time(np.array([7, 7, 7, 7])).tolist() == [4, 7, 14, 2334]  # 3.5, 7, 14, 2333.3
    assert Cluster(4).time(np.array([7, 0, 1, 2])).tolist() == [7, 0, 1, 2]
    assert cluster.mean_time(7) == ceil(Fraction(7000, 3503)) == 2
    assert Cluster(4).mean_time(7) == 2
    assert Cluster(4).mean_time(8) == 2
    assert Cluster(4).mean_time(0) == 0


SPEEDS = st.lists(st.integers(1, 1_000_000), min_size=1, max_size=8)


@settings(deadline=None)
@given(SPEEDS, st.data())
def test_times_are_exact_quotients_rounded_up(speeds: list[int], data: st.DataObject) -> None:
    cluster = Cluster(len(speeds), speeds=tuple(speeds))
    load = [data.draw(st.integers(0, 2**53)) for _ in speeds]  # times up to 9e18, which floats would round
    expected = [ceil(Fraction(value * 1000, speed)) for value, speed in zip(load, speeds, strict=True)]
    assert cluster.time(np.array(load)).tolist() == expected
    total = sum(load) << 20  # beyond 64 bits
    assert cluster.mean_time(total) == ceil(Fraction(total * 1000, sum(speeds)))


@settings(deadline=None)
@given(SPEEDS, st.data())
def test_no_division_of_work_is_faster_than_the_mean_time(speeds: list[int], data: st.DataObject) -> None:
    cluster = Cluster(len(speeds), speeds=tuple(speeds))
    load = np.array([data.draw(st.integers(0, 10**9)) for _ in speeds])
    assert cluster.time(load).max() >= cluster.mean_time(int(load.sum()))
