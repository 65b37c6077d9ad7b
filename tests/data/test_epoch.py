from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer.data import EpochSampler
from knapformer.errors import DataError, SpecError

# Width, height and how many: 18 pictures in 7 aspect ratios, which buckets by shape turn into 7 steps of one epoch.
SEVEN_RATIOS = [
    (640, 1440, 1),
    (720, 1280, 1),
    (832, 1104, 9),
    (848, 1072, 1),
    (960, 960, 2),
    (1104, 832, 2),
    (1280, 720, 2),
]


def joined(lists) -> list[int]:
    return list(chain.from_iterable(lists))


def on_all_ranks(world_size: int, num_samples: int, batch: int | None = None, **settings) -> list[EpochSampler]:
    return [EpochSampler(num_samples, batch, rank=r, world_size=world_size, **settings) for r in range(world_size)]


def steps(ranks: list[EpochSampler]) -> list[list[list[int]]]:
    """[step][rank] samples."""
    return list(map(list, zip(*(list(sampler) for sampler in ranks), strict=True)))


def flat(steps_left: list[list[list[int]]]) -> list[int]:
    return joined(joined(steps_left))


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**70))
def test_every_sample_once_per_epoch_on_any_number_of_ranks(size: int, batch: int, world_size: int, seed: int) -> None:
    ranks = on_all_ranks(world_size, size, batch, seed=seed)
    found = steps(ranks)
    assert sorted(flat(found)) == list(range(size))
    assert len(found) == len(ranks[0]) == -(-size // batch)
    one = steps(on_all_ranks(1, size, batch, seed=seed))
    assert [joined(step) for step in found] == [joined(step) for step in one]  # the same global batches, in order
    assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in found)


def test_epochs_and_seeds_differ_and_come_back() -> None:
    sampler = EpochSampler(50, 50)
    first = list(sampler)
    sampler.advance()
    assert (sampler.epoch, sampler.taken) == (1, 0)
    assert sorted(joined(list(sampler))) == list(range(50)) and list(sampler) != first
    assert list(EpochSampler(50, 50, seed=1)) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


@pytest.mark.parametrize("world_size, batch", [(2, 4), (3, 4), (2, 2), (3, 3), (5, 7)])
def test_saved_on_four_ranks_resumed_on_others(world_size: int, batch: int) -> None:
    # 12 samples on 4 ranks, stopped after 2 steps: the rest comes on any ranks, and with any batch, once.
    before = on_all_ranks(4, 12, 4, seed=9)
    seen = flat(steps(before)[:2])
    for sampler in before:
        sampler.advance()
        sampler.advance()
    (state,) = {tuple(sampler.state_dict().items()) for sampler in before}
    after = on_all_ranks(world_size, 12, batch)
    for sampler in after:
        sampler.load_state_dict(dict(state))
    rest = flat(steps(after))
    assert len(seen) == 8 and len(rest) == 4
    assert sorted(seen + rest) == list(range(12))


def test_iteration_does_not_move_the_state() -> None:
    # Loaders with workers iterate ahead; what counts is what was trained on.
    sampler = EpochSampler(12, 4)
    list(sampler)
    assert sampler.taken == 0
    sampler.advance()
    assert sampler.taken == 4 and len(sampler) == 2
    assert list(sampler) == list(EpochSampler(12, 4))[1:]


def test_pictures_of_seven_shapes_are_one_step_not_seven() -> None:
    shapes = [(w, h) for w, h, count in SEVEN_RATIOS for _ in range(count)]
    assert len(shapes) == 18 and len(set(shapes)) == 7
    for world_size in (1, 2, 8):
        found = steps(on_all_ranks(world_size, len(shapes), 18))
        assert len(found) == 1 and sorted(flat(found)) == list(range(18))


def test_fewer_samples_than_a_batch_and_than_ranks_train() -> None:
    found = steps(on_all_ranks(64, 16, 128))
    assert len(found) == 1 and sorted(flat(found)) == list(range(16))
    assert sum(bool(rank) for rank in found[0]) == 16


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 40))
def test_a_budget_of_tokens(lengths: list[int], most: int) -> None:
    sampler = EpochSampler(len(lengths), max_tokens=most, lengths=lengths)
    found = list(sampler)
    assert sorted(joined(found)) == list(range(len(lengths))) and len(found) == len(sampler)
    for step, following in zip(found, [*found[1:], None], strict=True):
        tokens = sum(lengths[s] for s in step)
        assert step and (tokens <= most or len(step) == 1)
        assert following is None or tokens + lengths[following[0]] > most  # no room for the next
    for step in found:
        assert sampler.global_batch().tolist() == step
        sampler.advance()
    assert sampler.epoch == 1


def test_eight_clips_on_one_rank_and_a_picture_on_another_are_equally_many_steps() -> None:
    # Ranks that cut their own samples into micro-batches would have 4 and 1; here steps are of the whole batch.
    lengths = [32_760] * 8 + [1560]
    for world_size in (1, 2, 5):
        ranks = on_all_ranks(world_size, 9, max_tokens=2 * 32_760, lengths=lengths)
        found = steps(ranks)  # raises if ranks differ in their number of steps
        assert sorted(flat(found)) == list(range(9))
        assert all(sum(lengths[s] for s in joined(step)) <= 2 * 32_760 for step in found)


def test_fingerprint() -> None:
    ranks = on_all_ranks(3, 12, 4, lengths=range(1, 13))
    assert len({sampler.fingerprint() for sampler in ranks}) == 1
    others = [
        EpochSampler(12, 5, lengths=range(1, 13), world_size=3),
        EpochSampler(12, 4, lengths=range(2, 14), world_size=3),
        EpochSampler(12, 4, lengths=range(1, 13), world_size=3, seed=1),
        EpochSampler(12, 4, lengths=range(1, 13), world_size=2),
    ]
    ranks[1].advance()
    assert len({sampler.fingerprint() for sampler in [*ranks[:2], *others]}) == 6


def test_as_batch_sampler_of_a_data_loader() -> None:
    data = pytest.importorskip("torch.utils.data")
    for num_workers in (0, 1):
        seen = []
        for sampler in on_all_ranks(3, 4, 2):
            loader = data.DataLoader(range(100, 104), batch_sampler=sampler, collate_fn=list, num_workers=num_workers)
            batches = list(loader)
            assert len(batches) == len(loader) == 2
            seen += batches
        assert [] in seen and sorted(joined(seen)) == [100, 101, 102, 103]


def test_bad_settings() -> None:
    for arguments in ({}, {"batch": 0}, {"batch": 2, "max_tokens": 3}, {"max_tokens": -1}):
        with pytest.raises(SpecError, match="either batch or max_tokens"):
            EpochSampler(3, **arguments)
    with pytest.raises(SpecError, match="at least one sample"):
        EpochSampler(0, 1)
    with pytest.raises(SpecError, match="rank 2 is not in a world of 2"):
        EpochSampler(3, 1, rank=2, world_size=2)
    with pytest.raises(SpecError, match="needs the lengths"):
        EpochSampler(3, max_tokens=5)
    with pytest.raises(SpecError, match="one entry for each of 3"):
        EpochSampler(3, max_tokens=5, lengths=[1, 2])
    good = EpochSampler(3, 1).state_dict()
    for change in ({"taken": 3}, {"taken": -1}, {"epoch": -1}, {"seed": 1.0}, {"step": 1}):
        with pytest.raises(DataError, match="does not fit"):
            EpochSampler(3, 1).load_state_dict(good | change)
