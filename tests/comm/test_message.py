"""Messages carry any tensors as words, bit for bit, and their buffers never touch what is not theirs."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knapformer.comm import RankGroup, exchange, start_exchange
from knapformer.comm.exchange import DeviceExchange
from knapformer.comm.message import BufferPool, Format
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


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 99),
)
def test_tensors_beside_each_other_come_out_as_they_went_in(like, rows, seed):
    tensors = [random_rows(dtype, rows, shape, seed + i) for i, (dtype, shape) in enumerate(like)]
    format = Format([(t.dtype, t.shape[1:]) for t in tensors], stacked=False)
    message = torch.zeros(rows, format.width, dtype=format.word)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    format.put(message, [order] * len(tensors), tensors)
    for tensor, taken in zip(tensors, format.take(message, [order] * len(tensors)), strict=True):
        assert bits(taken) == bits(tensor)
    for tensor, taken in zip(tensors, format.take(message, [None] * len(tensors)), strict=True):
        assert bits(taken) == bits(tensor[order.argsort()])


def test_the_comparison_can_fail():
    one = random_rows(torch.float32, 3, [2], 0)
    assert bits(one) != bits(one.flip(0))


def test_a_tensor_that_begins_between_words_is_carried_too():
    tensor = torch.arange(7, dtype=torch.float32)[1:].view(3, 2)  # 4 bytes into its memory, words of 8
    format = Format([(tensor.dtype, tensor.shape[1:])], stacked=False)
    message = torch.zeros(3, format.width, dtype=format.word)
    format.put(message, [None], [tensor])
    assert torch.equal(format.take(message, [None])[0], tensor)


def test_the_pool_lends_what_it_got_back_and_nothing_else():
    pool, format = BufferPool(), Format([(torch.float32, torch.Size([4]))], stacked=False)
    first = pool.take(10, format, CPU)
    second = pool.take(10, format, CPU)
    assert first.data_ptr() != second.data_ptr()  # both under way
    pool.give(first)
    assert pool.take(5, format, CPU).data_ptr() == first.data_ptr()
    mine = torch.zeros(100, 2, dtype=torch.int64)
    pool.give(mine)  # a caller's tensor that served as a message
    assert pool.take(100, format, CPU).data_ptr() != mine.data_ptr()


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
        table.qkv, CPU, source_rows=(rows,) * 3, target_rows=(int(table.q_lens.sum()), keys, keys)
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
