"""Parts of the balanced planner: groups of nodes, exchanges between them, packing, homes, names of ranks, slices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer.plan import Cluster, CostModel, Sequences
from knapformer.plan.planners.balanced.moves import few_moves
from knapformer.plan.planners.balanced.nodes import CANDIDATES, assign_groups, best_exchange, level_groups
from knapformer.plan.planners.balanced.planner import relabel
from knapformer.plan.planners.balanced.ranks import UNIT, apportion, fill, pack, spread

WORKS = st.lists(st.integers(1, 200), max_size=CANDIDATES).map(
    lambda works: [(w, i) for i, w in enumerate(sorted(works))]
)
COST = CostModel.from_shapes(3072, 24)


# -- nodes -------------------------------------------------------------------------------------------------------------


def groups_of(lens: list[list[int]], cluster: Cluster, room: tuple[int, int] = (1, 1)):
    """Groups where work is the number of tokens."""
    sequences = Sequences.from_ranks(lens)
    return assign_groups(sequences, cluster, sequences.length, sequences.num_tokens, room)


def test_every_node_is_a_group_where_each_sequence_fits_one() -> None:
    groups = groups_of([[100, 100], [], [100], [100]], Cluster(4, 1))
    assert groups.of_node.tolist() == [0, 1, 2, 3]
    assert sorted(groups.of_sequence.tolist()) == [0, 1, 2, 3]
    assert groups.beyond == []


def test_nodes_are_grouped_for_a_sequence_that_none_holds() -> None:
    groups = groups_of([[150, 50], [50, 50], [50], [50]], Cluster(4, 1))
    assert groups.beyond == [0]
    assert np.bincount(groups.of_node).tolist() == [2, 1, 1]
    work = np.bincount(groups.of_sequence, [150, 50, 50, 50, 50, 50])
    assert work.tolist() == [200, 100, 100]
    wide = groups_of([[150, 50], [50, 50], [50], [50]], Cluster(4, 1), (1, 2))  # at most half of their room
    assert np.bincount(wide.of_node).tolist() == [3, 1]


@given(WORKS, WORKS, st.integers(0, 300))
def test_exchange_is_the_best_of_all_pairs(give: list, take: list, wanted: int) -> None:
    i, j = best_exchange(give, take, wanted)
    got = (give[i][0] if i >= 0 else 0) - (take[j][0] if j >= 0 else 0)
    pairs = [g - t for g in (0, *(w for w, _ in give)) for t in (0, *(w for w, _ in take))]
    assert abs(got - wanted) == min(abs(pair - wanted) for pair in pairs)


@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=30), min_size=2, max_size=9))
def test_exchanges_between_groups_lose_nothing_and_raise_no_maximum(works: list[list[int]]) -> None:
    ids = iter(range(10_000))
    small = [sorted((w, next(ids)) for w in group) for group in works]
    before, loads = sorted(entry for group in small for entry in group), [sum(group) for group in works]
    excess = [load - sum(loads) // len(loads) for load in loads]
    highest = max(excess)
    level_groups(small, excess, [0] * len(small))
    assert sorted(entry for group in small for entry in group) == before
    assert [sum(w for w, _ in group) - sum(loads) // len(loads) for group in small] == excess
    assert max(excess) <= highest
    assert all(group == sorted(group) for group in small)


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_small_sequences_prefer_their_home() -> None:
    need, group = np.full((2, 6), UNIT // 8), np.array([0, 0, 0, 1, 1, 1])
    home, room, first = np.array([3, 1, 7, 4, 6, 6]), np.full((2, 8), UNIT), np.array([0, 4, 8])
    rank = pack(need, group, home, room, first)
    assert rank[[0, 1, 3, 4, 5]].tolist() == [3, 1, 4, 6, 6]
    nowhere = np.array([7, 7, 7, 0, 0, 0])
    assert pack(need, group, nowhere, room, first).tolist() == [0, 1, 2, 4, 5, 6]
    assert pack(need * 3, group, home, room, first).tolist() == [0, 1, 2, 4, 5, 6]  # not small


def test_groups_of_unequal_size_keep_to_their_ranks() -> None:
    need, group = np.full((2, 8), UNIT), np.array([0, 1, 1, 1, 2, 2, 2, 2])
    first = np.array([0, 1, 4, 6])
    rank = pack(need, group, np.zeros(8, dtype=np.int64), np.full((2, 6), UNIT), first)
    assert rank[0] == 0
    assert sorted(rank[1:4].tolist()) == [1, 2, 3]
    assert set(rank[4:].tolist()) == {4, 5}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_filling_meets_every_budget(amounts: list[int], data: st.DataObject) -> None:
    total, num = sum(amounts), data.draw(st.integers(1, 6))
    ends = sorted(data.draw(st.lists(st.integers(0, total), min_size=num - 1, max_size=num - 1)))
    budgets = np.diff([0, *ends, total])
    cuts = fill(np.array(amounts), budgets)
    assert np.bincount(cuts.place, cuts.num, minlength=num).tolist() == budgets.tolist()
    assert np.bincount(cuts.item, cuts.num, minlength=len(amounts)).tolist() == amounts
    assert len(cuts.item) <= len(amounts) + num - 1


@pytest.mark.parametrize(
    ("ranks", "heads", "used"), [(16, 12, 12), (24, 12, 24), (32, 24, 24), (16, 24, 16), (5, 7, 5)]
)
def test_even_shares_touch_as_few_heads_as_they_can(ranks: int, heads: int, used: int) -> None:
    tokens, rows = spread(1000, heads, np.arange(ranks), np.full(ranks, 1000))
    assert len(tokens.place) == len(rows.place) == used
    assert int(tokens.num.sum()) == 1000
    assert int(rows.num.sum()) == 1000 * heads
    assert int(rows.num.max() - rows.num.min()) <= 1


def test_apportion_adds_up() -> None:
    shares = apportion(np.array([10, 7]), np.array([1, 2, 1, 5, 5]), np.array([0, 0, 0, 1, 1]))
    assert shares.tolist() == [2, 5, 3, 3, 4]


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


# -- moves -------------------------------------------------------------------------------------------------------------


def test_slices_of_tokens_level_what_whole_sequences_cannot() -> None:
    """One sequence too many by 40 tokens: nothing can move, so its end goes to the others, its rows stay."""
    lens = [[1000] * 39 + [1040], [1000] * 40, [1000] * 40, [1000] * 40]
    sequences, cluster = Sequences.from_ranks(lens), Cluster(4)
    work = COST.work(sequences.length)
    placement = few_moves(sequences, cluster, COST, work, "few")
    assert placement is not None
    placement.validate()
    assert placement.split.nonzero()[0].tolist() == [39]
    assert placement.tokens().max() - placement.tokens().min() <= 60  # level in time: rank 0 has more attention
    rows = placement.attention_shards
    assert np.array_equal(rows.rank, sequences.home)


def test_few_moves_gives_up_where_sequences_are_large() -> None:
    sequences = Sequences.from_ranks([[5000, 5000], [100]])
    assert few_moves(sequences, Cluster(2), COST, COST.work(sequences.length), "few") is None
