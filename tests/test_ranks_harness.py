"""The multi-rank harness, tested: it must report what ranks do, and survive what tests do to it."""

import gc
import os
import time
import warnings
from multiprocessing import active_children

import pytest

from tests import ranks
from tests.ranks import RankError, RankTimeoutError, run_ranks

pytest.importorskip("torch", reason="ranks run torch.distributed")


# ---- functions that run on the ranks ----


def all_reduce_rank(rank, world_size, scale):
    import torch
    import torch.distributed as dist

    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    x = torch.full((3,), rank * scale)
    dist.all_reduce(x)
    return x


def process_id(rank, world_size):
    return os.getpid()


def settings(rank, world_size):
    import torch
    import torch.distributed as dist

    return torch.get_num_threads(), dist.get_debug_level() == dist.DebugLevel.DETAIL, dist.get_backend()


def random_number(rank, world_size):
    import torch

    torch.set_default_dtype(torch.float64)
    return torch.rand(()).item()


def raise_on(rank, world_size, bad_rank):
    """The other ranks wait in a collective that will never complete."""
    import torch.distributed as dist

    if rank == bad_rank:
        raise ValueError(f"length -3 on rank {rank}")
    dist.barrier()


def raise_everywhere(rank, world_size):
    raise KeyError("the same on every rank")


def raise_unpicklable(rank, world_size):
    class LocalError(Exception):
        def __init__(self, left, right):
            super().__init__(f"{left} != {right}")

    raise LocalError(1, 2)


def fail_assertion_on_odd(rank, world_size):
    assert rank % 2 == 0, "odd rank"
    return rank


def sleep_on(rank, world_size, slow_rank, seconds):
    if rank == slow_rank:
        time.sleep(seconds)
    return rank


def die_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        os.write(2, b"last words\n")
        os._exit(7)
    return rank


def mismatched_collectives(rank, world_size):
    import torch
    import torch.distributed as dist

    if rank == 0:
        dist.all_reduce(torch.zeros(2))
    else:
        dist.barrier()


def warn(rank, world_size):
    warnings.warn("careless", FutureWarning, stacklevel=1)
    return "went on"


def groups_of(rank, world_size, members):
    """Process groups this rank was a member of before it made one of `members`."""
    import torch.distributed as dist

    before = len(dist.distributed_c10d._world.pg_names)
    dist.new_group(members)
    dist.barrier()
    return before, os.getpid()


def return_unpicklable(rank, world_size):
    return lambda: rank


# ---- tests ----


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce(world_size):
    results = run_ranks(world_size, all_reduce_rank, 2.0)
    expected = 2.0 * sum(range(world_size))
    assert [x.tolist() for x in results] == [[expected] * 3] * world_size


def test_workers_are_kept_and_set_up():
    first = run_ranks(2, process_id)
    assert len(set(first)) == 2
    assert run_ranks(2, process_id) == first
    assert run_ranks(2, settings) == [(1, True, "gloo")] * 2


def test_every_call_starts_from_the_same_state():
    first = run_ranks(2, random_number)
    assert first[0] == first[1]
    assert run_ranks(2, random_number) == first


def test_ranks_that_made_unequally_many_groups_find_a_new_world():
    first = run_ranks(3, groups_of, [1, 2])
    assert run_ranks(3, groups_of, [0, 1, 2]) == [(1, process) for _, process in first]
    assert [before for before, _ in run_ranks(3, groups_of, [0, 1, 2])] == [2, 2, 2]  # as many on all, so they stay


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_first_error_wins_over_ranks_that_wait(bad_rank):
    start = time.monotonic()
    with pytest.raises(RankError, match=f"rank {bad_rank} of 2 failed first: ValueError: length -3") as caught:
        run_ranks(2, raise_on, bad_rank)
    assert time.monotonic() - start < 10.0  # far less than the process group's own timeout
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in raise_on" in str(caught.value)
    assert f"rank {1 - bad_rank}: was still running" in str(caught.value)
    assert [x.tolist() for x in run_ranks(2, all_reduce_rank, 1.0)] == [[1.0] * 3] * 2


def test_expect_errors_gives_the_error_of_every_rank():
    errors = run_ranks(2, raise_everywhere, expect_errors=True)
    assert [(type(e), e.args) for e in errors] == [(KeyError, ("the same on every rank",))] * 2
    assert "in raise_everywhere" in errors[1].__notes__[0]


def test_expect_errors_mixes_values_and_errors():
    even, odd = run_ranks(2, fail_assertion_on_odd, expect_errors=True)
    assert even == 0
    assert isinstance(odd, AssertionError)
    assert "odd rank" in str(odd)


def test_unpicklable_errors_keep_their_name_and_message():
    errors = run_ranks(1, raise_unpicklable, expect_errors=True)
    assert (type(errors[0]).__name__, str(errors[0])) == ("LocalError", "1 != 2")
    with pytest.raises(RankError, match="LocalError: 1 != 2"):
        run_ranks(1, raise_unpicklable)


@pytest.mark.parametrize("expect_errors", [False, True])
def test_a_hang_is_ended_and_shown(expect_errors):
    before = run_ranks(2, process_id)
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"within 0.5 s from rank\(s\) 1 of 2") as caught:
        run_ranks(2, sleep_on, 1, 1000.0, timeout=0.5, expect_errors=expect_errors)
    assert time.monotonic() - start < 5.0
    assert "in sleep_on" in str(caught.value)
    assert "rank 0: returned" in str(caught.value)
    after = run_ranks(2, process_id)
    assert not set(before) & set(after)


def test_a_dead_rank_is_reported_with_its_last_words():
    with pytest.raises(RankError, match="rank 1 ended with exit code 7") as caught:
        run_ranks(2, die_on, 1)
    assert "last words" in str(caught.value)
    assert run_ranks(2, sleep_on, 0, 0.0) == [0, 1]


def test_a_pool_that_died_between_calls_is_replaced():
    victim = run_ranks(2, process_id)[0]
    os.kill(victim, 9)
    time.sleep(0.1)
    assert victim not in run_ranks(2, process_id)


def test_mismatched_collectives_raise_on_every_rank():
    errors = run_ranks(2, mismatched_collectives, expect_errors=True)
    assert [type(e) for e in errors] == [RuntimeError] * 2
    assert all("Detected mismatch between collectives" in str(e) for e in errors)


def test_ranks_obey_the_warning_filters_of_the_test():
    with pytest.raises(RankError, match="FutureWarning: careless"):
        run_ranks(1, warn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "care", FutureWarning)
        assert run_ranks(1, warn) == ["went on"]


def test_results_that_cannot_travel_are_errors():
    with pytest.raises(RankError, match="pickle"):
        run_ranks(1, return_unpicklable)


def test_functions_must_be_importable():
    with pytest.raises(TypeError, match="top level of an importable module"):
        run_ranks(1, lambda rank, world_size: None)


def test_pools_are_few_and_close_cleanly(monkeypatch):
    monkeypatch.setattr(ranks, "MAX_POOLS", 3)
    for world_size in (1, 2, 3, 4):
        assert run_ranks(world_size, sleep_on, 0, 0.0) == list(range(world_size))
    assert list(ranks._pools) == [2, 3, 4]
    ranks.close_pools()
    gc.collect()  # a connection or process left open would warn here
    assert not [child for child in active_children() if child.name.startswith("rank-")]
