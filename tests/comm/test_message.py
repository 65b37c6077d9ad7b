"""Messages carry any tensors as words, bit for bit, and their buffers never touch what is not theirs."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knapformer.comm import RankGroup, exchange, start_exchange
from knapformer.comm.exchange import DeviceExchange
from knapformer.comm.message import BufferPool, MessageLayout
from knapformer.comm.pack_index import PackIndex
from knapformer.plan import CostModel, Sequences, attention_exchange, make_planner, token_exchange
from knapformer.plan.cluster import Cluster
from tests.planners import UnevenHeadsPlanner
from tests.ranks import run_ranks

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex64]
CPU = torch.device("cpu")


def random_rows(dtype, rows, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(rows, *shape, generator=generator) > 0.5
    raw = torch.randint(0, 256, (rows, *shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.flatten().view(dtype).view(rows, *shape)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def side_of(index, num_rows, lanes=()):
    return PackIndex.of(np.array(index, dtype=np.int64), num_rows, np.array([len(index)]), lanes, CPU)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 99),
)
def test_tensors_beside_each_other_come_out_as_they_went_in(like, rows, seed):
    tensors = [random_rows(dtype, rows, shape, seed + i) for i, (dtype, shape) in enumerate(like)]
    format = MessageLayout([(t.dtype, t.shape[1:]) for t in tensors])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    shuffled, in_order = side_of(order.tolist(), rows), side_of(range(rows), rows)
    message = format.pack(tensors, shuffled, BufferPool())
    for tensor, taken in zip(tensors, format.unpack(message, shuffled, BufferPool()), strict=True):
        assert bits(taken) == bits(tensor)
    for tensor, taken in zip(tensors, format.unpack(message, in_order, BufferPool(), room=2), strict=True):
        assert bits(taken[2:]) == bits(tensor[order])


def test_the_comparison_can_fail():
    one = random_rows(torch.float32, 3, [2], 0)
    assert bits(one) != bits(one.flip(0))


@pytest.mark.parametrize("rows", [(3, 0, 2), (40, 31, 31)])
@pytest.mark.parametrize("words", [2, 16])  # 8 bytes, and some that are copied 16 at a time
def test_stacked_tensors_come_out_as_they_went_in_and_copies_are_filled(rows, words):
    num_rows = sum(rows)
    tensors = [random_rows(torch.float32, n, [words], i) for i, n in enumerate(rows)]
    index = np.random.default_rng(0).permutation([*range(num_rows), 0, num_rows - 1, 0])  # three copies
    side, format = side_of(index, num_rows, rows), MessageLayout([(torch.float32, torch.Size([words]))] * 3, (0, 1, 2))
    message = format.pack(tensors, side, BufferPool())
    assert bits(message.view(torch.float32)) == bits(torch.cat(tensors)[index])
    for tensor, taken in zip(tensors, format.unpack(message, side, BufferPool()), strict=True):
        assert bits(taken) == bits(tensor)
    only = MessageLayout([(torch.float32, torch.Size([words]))], (2,))
    (taken,) = only.unpack(message, side, BufferPool(), room=1)
    assert bits(taken[1:]) == bits(tensors[2])


def test_rows_that_stay_are_skipped():
    tensor = torch.arange(12.0).view(6, 2)
    message = MessageLayout([(tensor.dtype, tensor.shape[1:])]).pack(
        [tensor], side_of([3, 0, 2, 1], 4), BufferPool(), skip=2
    )
    assert torch.equal(message.view(torch.float32), tensor[2:][[3, 0, 2, 1]])


def test_a_tensor_that_begins_between_words_is_carried_too():
    tensor = torch.arange(7, dtype=torch.float32)[1:].view(3, 2)  # 4 bytes into its memory, words of 8
    format = MessageLayout([(tensor.dtype, tensor.shape[1:])])
    message = format.pack([tensor], side_of([2, 0, 1], 3), BufferPool())
    assert torch.equal(format.unpack(message, side_of([2, 0, 1], 3), BufferPool())[0], tensor)


# ---- memory ----

BIG = 1 << 16  # rows of 8 bytes


def take(pool, rows):
    return pool.take(rows, 1, torch.int64, CPU)


def test_memory_is_used_again_once_nothing_refers_to_it():
    pool = BufferPool()
    first, second = take(pool, BIG), take(pool, BIG)
    address = first.data_ptr()
    assert address != second.data_ptr()
    del first
    assert take(pool, BIG - 5).data_ptr() == address
    assert take(pool, BIG // 2).data_ptr() != address  # far smaller: memory of its own


def test_memory_is_not_used_again_while_anything_refers_to_it():
    pool = BufferPool()
    taken = take(pool, BIG)
    view, address = taken[7:].view(torch.float32), taken.data_ptr()
    apart = torch.empty(0).set_(taken.untyped_storage(), 3, torch.Size([2]), (1,))
    del taken
    assert take(pool, BIG).data_ptr() != address
    del view
    assert take(pool, BIG).data_ptr() != address
    del apart
    assert take(pool, BIG).data_ptr() == address


def test_autograd_keeps_what_it_saved():
    pool = BufferPool()
    saved = take(pool, BIG).view(torch.float64).fill_(3)
    x = torch.ones(BIG, 1, dtype=torch.float64, requires_grad=True)
    y = (x * saved).sum()
    del saved
    take(pool, BIG).fill_(-1)
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad is not None and bool((x.grad == 6).all())


def test_no_more_is_kept_than_was_in_use_at_once():
    pool = BufferPool()
    for rows in range(BIG, 40 * BIG, BIG):
        take(pool, rows)
        assert pool.bytes_held <= 8 * (rows + BIG)
    many = [take(pool, BIG) for _ in range(5)]
    del many
    take(pool, 2 * BIG)
    assert pool.bytes_held <= 8 * 41 * BIG


def test_outputs_never_share_memory_with_inputs_or_each_other():
    sequences = Sequences.from_ranks([[3, 4]])
    table = make_planner("local")(sequences, Cluster(1), CostModel.from_shapes(8, 2))

    group = RankGroup.of()
    x = torch.arange(14.0).view(7, 2)
    (first,) = exchange([x], DeviceExchange.of(token_exchange(table, 0), CPU), group)
    (second,) = exchange([x], DeviceExchange.of(token_exchange(table, 0), CPU), group)
    first.zero_()
    assert torch.equal(second, x) and x[1, 0] == 2


def partly_differentiable(rank, world_size, needs):
    """q, k, v of split attention, only some of which need a gradient; keys are sent to several ranks."""
    sequences = Sequences.from_ranks([[9, 2], [7]])
    cost = CostModel.from_shapes(12, 3)
    placement = UnevenHeadsPlanner()(sequences, Cluster(2), cost)
    table = attention_exchange(placement, rank)
    rows, keys = table.out.num_target_rows, int(table.k_lens.sum())
    device_table = DeviceExchange.of(
        table.qkv, CPU, source_rows=((rows,) * 3,), target_rows=((int(table.q_lens.sum()), keys, keys),)
    )
    tensors = [torch.ones(rows, 2, dtype=torch.float64, requires_grad=n) for n in needs]
    outputs = start_exchange(tensors, device_table, RankGroup.of()).wait()
    assert [o.requires_grad for o in outputs] == list(needs)
    sum((o * (i + 1)).sum() for i, o in enumerate(outputs) if o.requires_grad).backward()
    return [None if t.grad is None else float(t.grad.sum()) for t in tensors], [len(o) * 2 for o in outputs]


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, True), (False, False, True)])
def test_gradients_add_up_for_the_tensors_that_need_them(needs):
    results = run_ranks(2, partly_differentiable, needs)
    for i, need in enumerate(needs):
        returned = [grads[i] for grads, _ in results]
        if need:  # every element that arrived anywhere sent its weight back
            assert sum(returned) == (i + 1) * sum(sizes[i] for _, sizes in results)
        else:
            assert returned == [None, None]


def test_a_graph_that_is_dropped_frees_its_transfer():
    sequences = Sequences.from_ranks([[3]])
    placement = make_planner("local")(sequences, Cluster(1), CostModel.from_shapes(8, 2))

    x = torch.ones(3, 2, requires_grad=True)
    transfer = start_exchange([x], DeviceExchange.of(token_exchange(placement, 0), CPU), RankGroup.of())
    gone = weakref.ref(transfer)
    outputs = transfer.wait()
    outputs[0].sum().backward()
    del transfer, outputs
    gc.collect()
    assert gone() is None


def rows_that_stay(rank, world_size, wrong=False):
    """Parts handed out by the start and put in place by the wait, against splitting and concatenating around it."""
    sequences = Sequences.from_ranks([[9, 2], [7], []][:world_size])
    placement = UnevenHeadsPlanner()(sequences, Cluster(world_size), CostModel.from_shapes(12, 3))
    table = DeviceExchange.of(token_exchange(placement, rank), CPU)
    home = int(sequences.length[sequences.home == rank].sum())
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + home, 3, generator=generator, dtype=torch.float64)
    results = []
    for together in (True, False):
        leaf = x.clone().requires_grad_()
        if together:
            sent = start_exchange([leaf], table, RankGroup.of(), local_rows=(2, 3))
            ((one, two),) = sent.local
            (y,) = sent.wait(two * 2, one.exp(), two[:0])
        else:
            one, two, rest = leaf.split([2, 3, home])
            (arrived,) = start_exchange([rest], table, RankGroup.of()).wait()
            y = torch.cat([two * 2, one.exp(), arrived * (2 if wrong else 1)])
        (y * torch.arange(len(y), dtype=y.dtype)[:, None].sin()).sum().backward()
        results.append((y.detach(), leaf.grad))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_that_stay_are_as_if_split_off_and_concatenated(world_size):
    assert all(run_ranks(world_size, rows_that_stay))
    assert not all(run_ranks(world_size, rows_that_stay, True))


def test_outputs_may_be_changed_in_place():
    placement = make_planner("local")(Sequences.from_ranks([[3]]), Cluster(1), CostModel.from_shapes(8, 2))
    x = torch.ones(3, 2, requires_grad=True)
    (y,) = exchange([x], DeviceExchange.of(token_exchange(placement, 0), CPU), RankGroup.of())
    y.mul_(2).sum().backward()
    assert x.grad is not None and bool((x.grad == 2).all())


def test_a_gradient_of_a_gradient_is_refused():
    placement = make_planner("local")(Sequences.from_ranks([[3]]), Cluster(1), CostModel.from_shapes(8, 2))
    x = torch.ones(3, 2, requires_grad=True)
    (y,) = exchange([x * x], DeviceExchange.of(token_exchange(placement, 0), CPU), RankGroup.of())
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
