import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer.data import GroupSampler, LoaderGroup, loader_ranks
from knapformer.errors import DataError, SpecError

GROUPS = (LoaderGroup("clips", 1, 1), LoaderGroup("images", 2, 3))
IDS = {"clips": [100, 101, 102], "images": list(range(10))}


def sampler(**settings) -> GroupSampler:
    return GroupSampler(GROUPS, IDS, **settings)


def flat(loads: list[list[int]]) -> list[int]:
    return [id for load in loads for id in load]


def test_loads_follow_the_groups() -> None:
    loads = sampler().batch(0)
    assert [len(load) for load in loads] == [1, 3, 3]
    assert set(loads[0]) <= set(IDS["clips"]) and set(loads[1] + loads[2]) <= set(IDS["images"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 12])
def test_the_global_batch_is_the_same_on_every_world(world_size: int) -> None:
    one = sampler(seed=3)
    for step in (0, 1, 17):
        parts = [one.local(step, rank, world_size) for rank in range(world_size)]
        assert flat(parts) == flat(one.batch(step))  # in loader order, nothing twice, nothing lost
        assert sum(bool(part) for part in parts) == min(world_size, 3)


def test_loader_ranks() -> None:
    assert loader_ranks(4, 2).tolist() == [0, 0, 1, 1]
    assert loader_ranks(2, 1).tolist() == [0, 0]
    assert loader_ranks(2, 5).tolist() == [0, 2]
    assert loader_ranks(4, 8).tolist() == [0, 2, 4, 6]
    assert loader_ranks(3, 2).tolist() == [0, 0, 1]
    with pytest.raises(SpecError, match="world_size is 0"):
        loader_ranks(2, 0)


@given(st.integers(1, 23), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**70))
def test_every_sample_once_per_epoch(size: int, num_loaders: int, batch: int, seed: int) -> None:
    one = GroupSampler([LoaderGroup("s", num_loaders, batch)], {"s": np.arange(size) * 3}, seed=seed)
    per_step = num_loaders * batch
    seen = [id for step in range(3 * size) for id in flat(one.batch(step))]
    for epoch in range(3 * per_step):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == [3 * i for i in range(size)]


def test_epochs_are_shuffled_anew_and_seeds_differ() -> None:
    ids = {"s": range(50)}
    one = GroupSampler([LoaderGroup("s", 1, 50)], ids, seed=0)
    assert one.batch(0) != one.batch(1)
    assert one.batch(0) != GroupSampler([LoaderGroup("s", 1, 50)], ids, seed=1).batch(0)
    assert one.batch(0)[0] != list(range(50))


def test_sources_are_shuffled_independently() -> None:
    groups = [LoaderGroup("a", 1, 30), LoaderGroup("b", 1, 30)]
    loads = GroupSampler(groups, {"a": range(30), "b": range(30)}).batch(0)
    assert loads[0] != loads[1]


def test_two_groups_share_a_source_without_repeats() -> None:
    one = GroupSampler([LoaderGroup("s", 2, 2), LoaderGroup("s", 1, 6)], {"s": range(40)})
    seen = [id for step in range(4) for id in flat(one.batch(step))]
    assert sorted(seen) == list(range(40))


def test_stop_and_resume_on_other_worlds() -> None:
    # 12 samples on 4 ranks; stop after step 2, go on with 2 and with 3 ranks: all samples exactly once.
    groups, ids = [LoaderGroup("s", 4, 1)], {"s": range(12)}
    first = GroupSampler(groups, ids, seed=9)
    seen = []
    for _ in range(2):
        step = first.advance()
        seen += [id for rank in range(4) for id in first.local(step, rank, 4)]
    state = first.state_dict()
    assert state == {"seed": 9, "step": 2}
    for world_size in (2, 3):
        second = GroupSampler(groups, ids, seed=0)
        second.load_state_dict(state)
        step = second.advance()
        rest = [id for rank in range(world_size) for id in second.local(step, rank, world_size)]
        assert sorted(seen + rest) == list(range(12))


def test_going_back_gives_the_same_batch() -> None:
    one = sampler(seed=1)
    before = [one.batch(step) for step in range(30)]
    assert [one.batch(step) for step in reversed(range(30))] == before[::-1]


def test_fingerprint() -> None:
    same = sampler(seed=2).fingerprint()
    assert same == sampler(seed=2).fingerprint()
    fewer = GroupSampler(GROUPS, IDS | {"clips": [100, 101]}, seed=2).fingerprint()
    larger = GroupSampler([*GROUPS[:1], LoaderGroup("images", 2, 4)], IDS, seed=2).fingerprint()
    assert len({same, fewer, larger, sampler(seed=3).fingerprint()}) == 4


def test_bad_settings() -> None:
    with pytest.raises(SpecError, match="batch is 0"):
        LoaderGroup("s", 1, 0)
    with pytest.raises(SpecError, match="at least one LoaderGroup"):
        GroupSampler([], IDS)
    with pytest.raises(SpecError, match=r"'videos': no samples.*'images': 10"):
        GroupSampler([LoaderGroup("videos", 1, 1)], IDS)
    with pytest.raises(SpecError, match="no samples"):
        GroupSampler([LoaderGroup("none", 1, 1)], {"none": []})
    with pytest.raises(SpecError, match="rank 2 is not in a world of 2"):
        sampler().local(0, 2, 2)
    with pytest.raises(SpecError, match="step is -1"):
        sampler().batch(-1)
    for state in ({}, {"seed": 1}, {"seed": 1, "step": -1}, {"seed": 1, "step": 2.0}, {"seed": 1, "step": 1, "x": 1}):
        with pytest.raises(DataError, match="sampler state"):
            sampler().load_state_dict(state)
