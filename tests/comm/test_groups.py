"""Groups of ranks: members and their order, one collective in each, errors on every rank."""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from knapformer.comm import RankGroup, gather_integers, partition
from knapformer.comm.groups import num_memberships, side_group
from knapformer.errors import RankMismatchError, SpecError
from tests.ranks import run_ranks


def heard(group):
    """The global ranks that take part in a collective of the group, in its order."""
    return gather_integers(group, np.array([dist.get_rank()], dtype=np.int64))[:, 0].tolist()


# ---- of ----


def test_without_torch_distributed_there_is_one_rank():
    group = RankGroup.of()
    assert (group.rank, group.ranks, group.size, group.handle) == (0, (0,), 1, None)
    assert group.device == torch.device("cpu")
    assert num_memberships() == 0
    assert partition(group, [1]) is group
    with pytest.raises(SpecError, match=r"torch\.distributed is not initialised"):
        RankGroup.of(object())


def the_world(rank, world_size):
    group = RankGroup.of()
    return group.rank, group.ranks, group.size, group.handle is dist.group.WORLD, heard(group)


@pytest.mark.parametrize("world_size", range(1, 7))
def test_the_default_is_the_world(world_size):
    everyone = tuple(range(world_size))
    expected = [(rank, everyone, world_size, True, list(everyone)) for rank in everyone]
    assert run_ranks(world_size, the_world) == expected


def of_one_group(rank, world_size, members):
    created = dist.new_group(members)
    group = RankGroup.of(created)
    return group.rank, group.ranks, group.device.type, heard(group)


def test_a_group_that_is_a_part_of_the_world():
    results = run_ranks(4, of_one_group, [1, 3], expect_errors=True)
    assert results[1::2] == [(0, (1, 3), "cpu", [1, 3]), (1, (1, 3), "cpu", [1, 3])]
    for error in results[::2]:
        assert isinstance(error, SpecError) and "not a member of the group" in str(error)


def of_a_destroyed_group(rank, world_size):
    created = dist.new_group([0, 1])
    group = RankGroup.of(created)
    dist.destroy_process_group(created)
    del created
    gc.collect()
    return group.handle


def test_a_destroyed_group_is_noticed_and_not_kept_alive():
    for error in run_ranks(2, of_a_destroyed_group, expect_errors=True):
        assert isinstance(error, RankMismatchError) and "has been destroyed; make a new balancer" in str(error)


# ---- partition ----


def cut(rank, world_size, sizes):
    mine = partition(RankGroup.of(), sizes)
    return mine.rank, mine.ranks, mine.size, mine.handle is None, heard(mine)


@pytest.mark.parametrize(
    "sizes", [[1, 1], [1, 2], [2, 1], [2, 2], [1, 2, 1], [1, 4], [2, 3], [1, 2, 3], [3, 3], [2, 2, 2], [1] * 6], ids=str
)
def test_parts_are_consecutive_and_each_talks_within_itself(sizes):
    starts = np.cumsum([0, *sizes]).tolist()
    expected = []
    for start, size in zip(starts, sizes, strict=False):
        ranks = tuple(range(start, start + size))
        expected += [(rank - start, ranks, size, size == 1, list(ranks)) for rank in ranks]
    assert run_ranks(sum(sizes), cut, sizes) == expected


def cut_twice(rank, world_size):
    """Two partitions at once, as balancing groups and nodes are; each rank hears those of the group it asks."""
    world = RankGroup.of()
    wide, narrow = partition(world, [4, 2]), partition(world, [1, 3, 2])
    return heard(narrow), heard(wide), heard(narrow)


def test_partitions_do_not_disturb_each_other():
    wide, narrow = [[0, 1, 2, 3]] * 4 + [[4, 5]] * 2, [[0]] + [[1, 2, 3]] * 3 + [[4, 5]] * 2
    assert run_ranks(6, cut_twice) == list(zip(narrow, wide, narrow, strict=True))


def cut_trivially(rank, world_size):
    group = RankGroup.of()
    before = num_memberships()
    return partition(group, [world_size]) is group and num_memberships() == before


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_trivial_partition_makes_no_group(world_size):
    assert all(run_ranks(world_size, cut_trivially))


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [3, 0], [4, -1], [3, 1]], ids=str)
def test_sizes_that_do_not_add_up_are_refused_on_every_rank(sizes):
    for error in run_ranks(3, cut, sizes, expect_errors=True):
        assert isinstance(error, SpecError) and f"a group of 3 ranks into parts of {sizes}" in str(error)


def cut_a_part(rank, world_size):
    group = dist.new_group([0, 1])
    if rank < 2:
        partition(RankGroup.of(group), [1, 1])


def test_a_part_of_the_world_is_not_cut_again():
    results = run_ranks(3, cut_a_part, expect_errors=True)
    assert results[2] is None
    for error in results[:2]:
        assert isinstance(error, SpecError) and "sub-groups of a group of 2 ranks in a world of 3" in str(error)


# ---- side groups ----


def beside(rank, world_size, members):
    """A collective of the side group that is begun before, and ended after, one of the group itself."""
    created = [(ranks, dist.new_group(ranks)) for ranks in members]
    group = RankGroup.of(next((mine for ranks, mine in created if rank in ranks), None))
    side = side_group(group)
    value = torch.tensor([float(rank)])
    begun = None if side.handle is None else dist.all_reduce(value, group=side.handle, async_op=True)
    ranks = heard(group)
    if begun is not None:
        begun.wait()
    own = side.handle is None or (side.handle is not group.handle and dist.get_backend(side.handle) == "gloo")
    return own, (side.rank, side.ranks) == (group.rank, group.ranks), ranks, value.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_a_side_group_has_the_same_ranks_and_messages_of_its_own(world_size):
    everyone = list(range(world_size))
    assert run_ranks(world_size, beside, []) == [(True, True, everyone, float(sum(everyone)))] * world_size


def test_side_groups_of_parts_of_the_world():
    members = [[0, 2], [1, 3, 4], [5]]
    results = run_ranks(6, beside, members)
    for ranks in members:
        assert [results[rank] for rank in ranks] == [(True, True, ranks, float(sum(ranks)))] * len(ranks)


def beside_ranks_in_another_order(rank, world_size):
    backwards = tuple(reversed(range(world_size)))
    return side_group(RankGroup(world_size - 1 - rank, backwards, weakref.ref(dist.group.WORLD)))


def test_a_side_group_of_ranks_in_another_order_is_refused_on_every_rank():
    for error in run_ranks(3, beside_ranks_in_another_order, expect_errors=True):
        assert isinstance(error, SpecError) and "in ascending order here, got [2, 1, 0]" in str(error)


def memberships(rank, world_size):
    before = num_memberships()
    dist.new_group([0, 1])
    dist.barrier()
    return num_memberships() - before


def test_memberships_are_counted_where_the_rank_is_a_member():
    assert run_ranks(3, memberships) == [1, 1, 0]
