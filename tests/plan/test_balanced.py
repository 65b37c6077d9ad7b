"""The balanced planner: valid on anything, level where promised, few moves, limits, determinism."""

import os
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import PlanError, SpecError
from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences, Shards, make_planner, measure
from knapformer.plan.planners import BalancedPlanner
from tests.plan.strategies import sequences

COST = CostModel.from_shapes(3072, 24)
FUZZ_CASES = int(os.environ.get("KNAPFORMER_FUZZ_CASES", "1500"))
"""Seeded random cases; the nightly run takes 100,000."""


# -- workloads made here -----------------------------------------------------------------------------------------------


def mixed(world: int, seed: int) -> Sequences:
    """Images of four sizes: a quarter of the ranks have each, those with large ones few."""
    rng = np.random.default_rng(seed)
    kinds = [(4, 500), (5, 1300), (5, 4300), (1, 17000)]
    of_rank = [kinds[rank % 4] for rank in range(world)]
    return Sequences.from_ranks([rng.integers(side * 9 // 10, side * 11 // 10, size=num) for num, side in of_rank])


def low_resolution(world: int, seed: int) -> Sequences:
    rng = np.random.default_rng(seed)
    return Sequences.from_ranks([rng.integers(245, 658, size=32) for _ in range(world)])


def videos(world: int, seed: int) -> Sequences:
    """A few clips that no node can hold, some that no rank can, and many images."""
    rng = np.random.default_rng(seed)
    lens = [rng.choice([256, 1024, 8160], size=30).tolist() for _ in range(world)]
    lens[0].append(334_560)
    for rank in rng.choice(world, size=3, replace=False):
        lens[int(rank)].append(147_600)
    return Sequences.from_ranks(lens)


def level_inside_nodes(placement: Placement, cluster: Cluster) -> tuple[float, float]:
    """Largest over nodes of max / mean, for tokens and for area."""

    def worst(amount: np.ndarray) -> float:
        return max(amount[r.start : r.stop].max() / amount[r.start : r.stop].mean() for r in cluster.node_ranks())

    return worst(placement.tokens()), worst(placement.area())


# -- valid on anything -------------------------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[Sequences, Cluster, CostModel, BalancedPlanner, Limits]:
    """Odd worlds, ragged nodes, speeds, 1 to 64 heads, lengths 1 to 500,000, prices of 0, caps."""
    rng = np.random.default_rng(seed)
    world = int(rng.choice([1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 33]))
    inner = np.sort(rng.choice(np.arange(1, world), size=int(rng.integers(0, min(world - 1, 5) + 1)), replace=False))
    cluster = Cluster(
        world,
        node_sizes=tuple(np.diff([0, *inner.tolist(), world]).tolist()),
        speeds=tuple(rng.integers(200, 3000, size=world).tolist()) if rng.random() < 0.25 else (),
    )
    longest = int(rng.choice([3, 60, 1000, 30_000, 500_000]))
    most = int(rng.integers(1, 7))
    lens = [np.exp(rng.random(int(rng.integers(0, most))) * np.log(longest)).astype(np.int64) for _ in range(world)]
    seqs = Sequences.from_ranks(lens)
    cost = CostModel.from_shapes(
        int(rng.choice([64, 1536, 3072])), int(rng.integers(1, 65)), gamma=float(rng.choice([0, 0.5, 1.25, 10]))
    )
    level = (None, "both", "time")[int(rng.integers(3))]
    cap = -(-seqs.num_tokens // world) + int(rng.integers(0, 3)) * int(rng.integers(0, longest))
    return seqs, cluster, cost, BalancedPlanner(level), Limits(cap if cap and rng.random() < 0.4 else None)


def check(seqs: Sequences, cluster: Cluster, cost: CostModel, planner: BalancedPlanner, limits: Limits) -> Placement:
    placement = planner(seqs, cluster, cost, limits).validate()
    assert placement.sequences is seqs
    if limits.max_tokens_per_rank is not None:
        assert int(placement.tokens().max()) <= limits.max_tokens_per_rank
    if planner.level == "both" and not placement.skip_reason and not cluster.speeds:
        assert int(placement.tokens().max()) <= -(-seqs.num_tokens // cluster.world_size)
    return placement


@pytest.mark.parametrize("block", range(10))
def test_fuzz(block: int) -> None:
    for seed in range(block * FUZZ_CASES // 10, (block + 1) * FUZZ_CASES // 10):
        try:
            check(*random_case(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@settings(max_examples=150, deadline=None)
@given(sequences(), st.integers(1, 9), st.integers(1, 64), st.sampled_from([None, "both", "time"]))
def test_valid_placements(case: tuple[Sequences, int], per_node: int, heads: int, level: str | None) -> None:
    seqs, world = case
    cost = CostModel(heads, token=1000, per_qk_pair=7)
    check(seqs, Cluster(world, per_node), cost, BalancedPlanner(level), Limits())  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 7, 12])
@pytest.mark.parametrize("heads", [1, 7, 12, 38, 64])
def test_one_giant_and_ranks_with_nothing(world: int, heads: int) -> None:
    seqs = Sequences.from_ranks([[100_000]] + [[]] * (world - 1))
    cluster, cost = Cluster(world), CostModel.from_shapes(3072, heads)
    placement = check(seqs, cluster, cost, BalancedPlanner(), Limits())
    assert measure(placement, cluster, cost).time_imbalance <= 1.001


# -- level where promised ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("world", "per_node"), [(8, 8), (32, 8), (24, 8), (64, 4), (96, 4), (128, 8)])
def test_mixed_workload_is_level(world: int, per_node: int, seed: int) -> None:
    seqs, cluster = mixed(world, seed), Cluster(world, per_node)
    placement = check(seqs, cluster, COST, BalancedPlanner(), Limits())
    metrics = measure(placement, cluster, COST)
    tokens, area = level_inside_nodes(placement, cluster)
    assert tokens <= 1.001
    assert area <= 1.001
    assert metrics.time_imbalance <= 1.006  # nodes of few sequences
    assert measure(make_planner("local")(seqs, cluster, COST), cluster, COST).time_imbalance > 1.5
    assert metrics.step_over_ideal <= 1.07
    assert metrics.step_over_ideal_overlap <= 1.015


@pytest.mark.parametrize("seed", range(5))
def test_better_than_every_uniform_bag(seed: int) -> None:
    seqs, cluster = mixed(32, seed), Cluster(32, 8)
    ours = measure(BalancedPlanner()(seqs, cluster, COST), cluster, COST).step_over_ideal
    for size in (1, 2, 4, 8):
        bags = make_planner("bags", f"g{size}n{32 // size}")(seqs, cluster, COST)
        assert ours < measure(bags, cluster, COST).step_over_ideal


@pytest.mark.parametrize("seed", range(5))
def test_sequences_that_no_node_can_hold(seed: int) -> None:
    seqs, cluster, cost = videos(16, seed), Cluster(16, 4), CostModel.from_shapes(1536, 12)
    placement = check(seqs, cluster, cost, BalancedPlanner(), Limits())
    metrics = measure(placement, cluster, cost)
    assert metrics.cross_node_traffic > 0
    assert metrics.time_imbalance <= 1.002
    assert max(level_inside_nodes(placement, cluster)) <= 1.001


@pytest.mark.parametrize("workload", [mixed, low_resolution, videos])
def test_level_both(workload: Callable[[int, int], Sequences]) -> None:
    seqs, cluster = workload(16, 0), Cluster(16, 4)
    placement = check(seqs, cluster, COST, BalancedPlanner("both"), Limits())
    metrics = measure(placement, cluster, COST)
    assert metrics.token_imbalance <= 1.001
    assert metrics.attention_imbalance <= 1.001
    assert metrics.time_imbalance <= 1.001


@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_unequal_speed(seed: int) -> None:
    speeds = tuple(np.random.default_rng(seed).integers(500, 1500, size=16).tolist())
    seqs, cluster = mixed(16, seed), Cluster(16, 8, speeds=speeds)
    placement = check(seqs, cluster, COST, BalancedPlanner(), Limits())
    assert measure(placement, cluster, COST).time_imbalance <= 1.01
    blind = BalancedPlanner()(seqs, Cluster(16, 8), COST)
    assert measure(blind, cluster, COST).time_imbalance > 1.2


@pytest.mark.parametrize("seed", range(5))
def test_small_sequences_stay_at_home(seed: int) -> None:
    seqs, cluster = low_resolution(32, seed), Cluster(32, 8)
    placement = check(seqs, cluster, COST, BalancedPlanner(), Limits())
    metrics = measure(placement, cluster, COST)
    assert metrics.routed_fraction <= 0.04
    assert metrics.time_imbalance <= 1.001
    assert metrics.step_over_ideal <= 1.001
    assert measure(make_planner("local")(seqs, cluster, COST), cluster, COST).time_imbalance > 1.05


# -- identity, limits --------------------------------------------------------------------------------------------------


def test_level_at_home_is_left_alone() -> None:
    seqs = Sequences.from_ranks([[1000, 500]] * 8)
    placement = BalancedPlanner()(seqs, Cluster(8), COST)
    assert placement.skip_reason == "ranks are level to 1 per mille at home"
    assert np.array_equal(placement.token_shards.rank, seqs.home)
    uneven = Sequences.from_ranks([[1000, 500]] * 7 + [[1000, 600]])
    assert not BalancedPlanner()(uneven, Cluster(8), COST).skip_reason
    assert BalancedPlanner(tolerance=200)(uneven, Cluster(8), COST).skip_reason


def test_skip_respects_the_cap() -> None:
    seqs = Sequences.from_ranks([[100, 100], [201]])
    assert BalancedPlanner(tolerance=100)(seqs, Cluster(2), COST).skip_reason
    capped = BalancedPlanner(tolerance=100)(seqs, Cluster(2), COST, Limits(201))
    assert capped.skip_reason
    over = BalancedPlanner(tolerance=500)(Sequences.from_ranks([[100, 100], [202]]), Cluster(2), COST, Limits(201))
    assert not over.skip_reason
    assert over.tokens().tolist() == [201, 201]


def test_infeasible_cap_names_the_smallest() -> None:
    seqs, cluster = mixed(8, 0), Cluster(8)
    least = -(-seqs.num_tokens // 8)
    with pytest.raises(PlanError, match=f"smallest feasible cap is {least}"):
        BalancedPlanner()(seqs, cluster, COST, Limits(least - 1))
    assert int(check(seqs, cluster, COST, BalancedPlanner(), Limits(least)).tokens().max()) == least


def test_too_much_for_64_bits() -> None:
    with pytest.raises(PlanError, match="64 bits"):
        BalancedPlanner()(Sequences.from_ranks([[2**31 - 1], []]), Cluster(2), COST)


@pytest.mark.parametrize("options", [{"level": "area"}, {"tolerance": -1}])
def test_bad_options(options: dict) -> None:
    with pytest.raises(SpecError, match=r"level is|tolerance is"):
        BalancedPlanner(**options)


# -- determinism -------------------------------------------------------------------------------------------------------


def test_pure_function_of_its_arguments() -> None:
    seqs, cluster = mixed(16, 3), Cluster(16, 8)
    first = BalancedPlanner()(seqs, cluster, COST)
    BalancedPlanner()(videos(16, 0), cluster, COST)  # nothing is remembered
    again = BalancedPlanner()(Sequences(seqs.length.copy(), seqs.home.copy(), seqs.text_length.copy()), cluster, COST)
    assert first.digest() == again.digest()


def test_equal_sequences_may_change_places() -> None:
    lens = [[500, 500, 17000], [500, 4300, 4300], [500], [1300, 1300]]
    swapped = [[500, 500, 17000], [500, 4300, 4300], [500], [1300, 1300][::-1]]
    plans = [BalancedPlanner()(Sequences.from_ranks(x), Cluster(4), COST) for x in (lens, swapped)]
    assert plans[0].digest() == plans[1].digest()


def test_mutation_is_noticed() -> None:
    """The checks above can fail: moving one shard breaks level and digest."""
    seqs, cluster = mixed(16, 0), Cluster(16, 8)
    placement = BalancedPlanner()(seqs, cluster, COST)
    tokens = placement.token_shards
    rank = tokens.rank.copy()
    longest = int(np.argmax(tokens.count))
    rank[longest] = (rank[longest] + 1) % 16
    table = Shards.sorted(tokens.seq, rank, tokens.start, tokens.stop)
    moved = Placement(seqs, 16, 24, table, placement.attention_shards)
    assert level_inside_nodes(moved, cluster)[0] > 1.01
    assert moved.digest() != placement.digest()
