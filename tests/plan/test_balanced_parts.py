"""Parts of the balanced planner: exchanges between nodes, homes, names of ranks, slices, budgets that change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer.plan import Cluster, CostModel
from knapformer.plan.planners.balanced.fill import UNIT, changed
from knapformer.plan.planners.balanced.labels import relabel
from knapformer.plan.planners.balanced.moves import _slices
from knapformer.plan.planners.balanced.nodes import CANDIDATES, _exchange, level_nodes
from knapformer.plan.planners.balanced.pack import pack

WORKS = st.lists(st.integers(1, 200), max_size=CANDIDATES).map(
    lambda works: [(w, i) for i, w in enumerate(sorted(works))]
)


@given(WORKS, WORKS, st.integers(0, 300))
def test_exchange_is_the_best_of_all_pairs(give: list, take: list, wanted: int) -> None:
    i, j = _exchange(give, take, wanted)
    got = (give[i][0] if i >= 0 else 0) - (take[j][0] if j >= 0 else 0)
    pairs = [g - t for g in (0, *(w for w, _ in give)) for t in (0, *(w for w, _ in take))]
    assert abs(got - wanted) == min(abs(pair - wanted) for pair in pairs)


@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=30), min_size=2, max_size=9))
def test_exchanges_between_nodes_lose_nothing_and_raise_no_maximum(works: list[list[int]]) -> None:
    ids = iter(range(10_000))
    small = [sorted((w, next(ids)) for w in node) for node in works]
    before, loads = sorted(entry for node in small for entry in node), [sum(node) for node in works]
    excess = [load - sum(loads) // len(loads) for load in loads]
    highest = max(excess)
    level_nodes(small, excess, [0] * len(small))
    assert sorted(entry for node in small for entry in node) == before
    assert [sum(w for w, _ in node) - sum(loads) // len(loads) for node in small] == excess
    assert max(excess) <= highest
    assert all(node == sorted(node) for node in small)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 1, 4), (1, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_names_are_a_permutation_inside_nodes(sizes: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = Cluster(sum(sizes), node_sizes=sizes)
    home, rank, tokens = (rng.integers(0, most, size=40) for most in (sum(sizes), sum(sizes), 1000))
    names = relabel(cluster, home, rank, tokens)
    assert sorted(names.tolist()) == list(range(sum(sizes)))
    assert np.array_equal(cluster.node_of[names], cluster.node_of)


def test_a_permuted_plan_is_undone() -> None:
    cluster, home, permuted = Cluster(8, 4), np.arange(8), np.array([1, 0, 3, 2, 7, 6, 5, 4])
    assert relabel(cluster, home, permuted, np.full(8, 10))[permuted].tolist() == home.tolist()


def test_small_sequences_prefer_their_home() -> None:
    need, node = np.full((2, 6), UNIT // 8), np.array([0, 0, 0, 1, 1, 1])
    home, room, first = np.array([3, 1, -1, 0, 2, 2]), np.full((2, 8), UNIT), np.array([0, 4, 8])
    seed = np.zeros(2, dtype=np.int64)
    rank = pack(need, node, home, room, first, seed)
    assert rank[home >= 0].tolist() == [3, 1, 4, 6, 6]
    assert pack(need, node, np.full(6, -1), room, first, seed).tolist() == [0, 1, 2, 4, 5, 6]
    assert pack(need * 3, node, home, room, first, seed).tolist() == [0, 1, 2, 4, 5, 6]  # not small


def test_slices_level_load_and_traffic_together() -> None:
    cluster, cost = Cluster(4), CostModel.from_shapes(3072, 24)
    excess = np.array([40, -10, -20, -10]) * cost.token
    give, take = _slices(excess, np.array([0]), cluster, cost)
    assert int(give.sum()) <= int(take.sum())
    traffic = 3 * 24 * round(128 * 2 * 1e15 / 300e9)  # q, k, v of a token
    after = excess - (give - take) * cost.token + (give + take) * traffic
    assert int(after.max() - after.min()) <= 2 * (cost.token + traffic)
    assert int(after.max()) < 40 * cost.token // 5


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_changed_budgets_keep_their_sums(num_nodes: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    node = np.repeat(np.arange(num_nodes), width)
    budget = rng.integers(0, 10**6, size=(2, len(node)))
    free = rng.integers(0, budget + 1)
    change = rng.integers(-UNIT // 16, UNIT // 1000, size=len(node))
    first = np.arange(num_nodes + 1) * width
    got = changed(budget, free, change, first, node)
    assert int(got.min()) >= 0
    np.testing.assert_array_equal(np.add.reduceat(got, first[:-1], axis=1), np.add.reduceat(free, first[:-1], axis=1))
