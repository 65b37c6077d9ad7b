import numpy as np
import pytest

from knapformer.data import AheadPlanner, BalancedSampler, EpochSampler, load_workload
from knapformer.data.balanced import reading_ranks
from knapformer.errors import PlanError, SpecError
from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences, make_planner, measure

COST = CostModel.from_shapes(3072, 24, gamma=1.25)


def as_gathered(lengths: np.ndarray, per_rank: list[list[int]]) -> Sequences:
    return Sequences.from_ranks([lengths[samples].tolist() for samples in per_rank])


def epoch_of(name: str, num_samples: int = 2000) -> tuple[np.ndarray, Cluster]:
    trace = load_workload(name)
    found = np.concatenate([row for step in trace.steps for row in step.seq_lens])[:num_samples]
    return found, Cluster(trace.world_size, 8)


@pytest.mark.parametrize(
    ("name", "most_routed"),
    [("flux-joint-32", 0.17), ("real-mix-32", 0.25), ("video-v50-32", 0.43), ("flux-lowres-32", 0.01)],
)
def test_whole_samples_are_read_where_they_are_used(name: str, most_routed: float) -> None:
    lengths, cluster = epoch_of(name)
    sampler = BalancedSampler(lengths, 8 * cluster.world_size, cost=COST, cluster=cluster)
    blind = EpochSampler(len(lengths), 8 * cluster.world_size, world_size=cluster.world_size)
    for _ in range(3):
        dealt = sampler.deal(sampler.global_batch())
        placement = sampler.planner(as_gathered(lengths, dealt), cluster, COST, Limits()).validate()
        metrics = measure(placement, cluster, COST)
        homes = placement.sequences.home
        assert (reading_ranks(placement) == homes).all()
        split = placement.sequences.length[placement.split].sum() / placement.sequences.num_tokens
        assert metrics.routed_fraction <= split  # only split ones move, and not all of those
        at_random = as_gathered(lengths, blind.deal(sampler.global_batch()))
        usual = measure(make_planner("balanced")(at_random, cluster, COST, Limits()), cluster, COST)
        assert metrics.time_imbalance < 1.005
        assert metrics.split_traffic < usual.split_traffic + 0.01
        assert usual.time_imbalance < 1.005 and metrics.routed_fraction < most_routed < usual.routed_fraction
        sampler.advance()
        blind.advance()


def test_it_is_an_epoch_sampler() -> None:
    lengths = np.arange(1, 41) ** 2
    seen = []
    for rank in range(3):
        sampler = BalancedSampler(lengths, 7, cost=COST, cluster=Cluster(3), rank=rank, seed=4)
        assert len(sampler) == 6
        seen += [sample for step in sampler for sample in step]
    assert sorted(seen) == list(range(40))
    plain = EpochSampler(40, 7, seed=4)
    assert (plain.global_batch() == sampler.global_batch()).all()
    budget = BalancedSampler(lengths, max_tokens=2000, cost=COST, cluster=Cluster(1))
    assert all(len(step) == 1 or lengths[step].sum() <= 2000 for step in budget)


def test_the_plan_does_not_depend_on_homes_if_they_are_the_planned_ones() -> None:
    planner, cluster = AheadPlanner(), Cluster(4)
    lengths = [900, 30, 30, 30, 20, 20, 700, 5, 5, 5]
    sequences = Sequences.from_ranks([lengths, [], [], []])
    homes = planner.homes(sequences, cluster, COST)
    order = np.argsort(homes, kind="stable")
    moved = Sequences(sequences.length[order], homes[order], sequences.text_length[order])
    placement = planner(moved, cluster, COST).validate()
    assert placement.planner == "balanced, ahead" and placement.split.any() and not placement.split.all()
    assert (placement.sequences.home == reading_ranks(placement)).all()


def test_other_lengths_than_planned_are_planned_anew() -> None:
    cluster = Cluster(4)
    lengths = np.array([900, 31, 30, 29, 20, 20, 700, 5, 5, 5])
    sampler = BalancedSampler(lengths, 10, cost=COST, cluster=cluster)
    longer = as_gathered(lengths + 40, sampler.deal(sampler.global_batch()))
    placement: Placement = sampler.planner(longer, cluster, COST).validate()
    assert placement.planner == "balanced"
    assert measure(placement, cluster, COST).time_imbalance < 1.01


def test_limits_hold() -> None:
    lengths, cluster = np.array([100, 100, 90, 10]), Cluster(2)
    sampler = BalancedSampler(lengths, 4, cost=COST, cluster=cluster, limits=Limits(150))
    placement = sampler.planner(as_gathered(lengths, sampler.deal(np.arange(4))), cluster, COST, sampler.limits)
    assert placement.tokens().tolist() == [150, 150]
    with pytest.raises(PlanError, match="smallest feasible cap is 150"):
        BalancedSampler(lengths, 4, cost=COST, cluster=cluster, limits=Limits(149)).deal(np.arange(4))


def test_bad_settings() -> None:
    with pytest.raises(SpecError, match=r"text_lengths has shape \(1,\)"):
        BalancedSampler([3, 4], 1, text_lengths=[1], cost=COST, cluster=Cluster(1))
    with pytest.raises(PlanError, match="length 0"):
        BalancedSampler([3, 0], 1, cost=COST, cluster=Cluster(1))
