"""Cross-attention to context rows, and places of tokens: on one process, and on virtual ranks of random placements."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer import Layout, SequenceBalancer, attend, cross_attend
from knapformer.data import Grid, grid_positions
from knapformer.errors import PlanError
from knapformer.plan import Placement, Sequences, sequence_exchange, token_exchange
from knapformer.plan.exchange import apply
from tests.attention.test_host_sync import without_host_sync
from tests.models.reference import dense_attention
from tests.plan.strategies import placements, random_placement

LENS, CONTEXT = [5, 1, 9, 2], [3, 0, 17, 1]


def inputs(num_tokens, num_rows, heads=3):
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, heads, 4, generator=g, dtype=torch.float64).requires_grad_()
        for n in (num_tokens, *[num_rows] * 2)
    ]


def test_each_sequence_attends_to_its_own_context():
    q, k, v = inputs(17, 21)
    layout = Layout.local(LENS, context_lens=CONTEXT)
    assert (layout.num_context_rows, layout.context.lens.tolist()) == (21, CONTEXT)
    got = layout.cross_attend(q, k, v, scale=0.7)
    parts = zip(q.split(LENS), k.split(CONTEXT), v.split(CONTEXT), strict=True)
    expected = [dense_attention(*part, 0.7) if len(part[1]) else torch.zeros_like(part[0]) for part in parts]
    torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=1e-12)
    assert not got[5].any()  # the sequence without context
    wrong = Layout.local(LENS, context_lens=[3, 1, 16, 1]).cross_attend(q, k, v, scale=0.7)
    assert not torch.allclose(wrong, got, atol=1e-3)
    got.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize(("lens", "context"), [([], []), ([4, 2], [0, 0])])
def test_nothing_to_attend_to(lens, context):
    """Zeros, and gradients of zero for whatever came in, so that no parameter is left without one."""
    q, k, v = inputs(sum(lens), 0)
    out = Layout.local(lens, context_lens=context).cross_attend(q, k, v)
    out.sum().backward()
    assert out.shape == q.shape and not out.any()
    assert all(x.grad is not None and not x.grad.any() for x in (q, k, v))


def test_a_part_of_the_context():
    """As image-to-video models have it: the first rows are an image's, the rest text, with keys of their own."""
    q, k, v = inputs(17, 21)
    layout = Layout.local(LENS, context_lens=CONTEXT)
    for start, stop, kept in ((0, 2, [2, 0, 2, 1]), (2, None, [1, 0, 15, 0]), (17, None, [0] * 4)):
        rows, part = layout.context.rows(start, stop)
        assert part.lens.tolist() == kept and part.num_rows == sum(kept)
        got = layout.cross_attend(q, k[rows], v[rows], context=part)
        cut = [[x[start:stop] for x in y.split(CONTEXT)] for y in (k, v)]
        expected = Layout.local(LENS, context_lens=kept).cross_attend(q, *map(torch.cat, cut))
        assert torch.equal(got, expected)


def test_errors_say_what_is_missing():
    q, k, v = inputs(17, 21)
    with pytest.raises(
        PlanError, match=r"q .* for the 17 packed tokens .* its 0 context rows, got .*; pass context_lens"
    ):
        Layout.local(LENS).cross_attend(q, k, v)
    with pytest.raises(PlanError, match="cross_attend takes"):
        Layout.local(LENS, context_lens=CONTEXT).cross_attend(q, k[:, :2], v)
    with pytest.raises(PlanError, match=r"one grid .* for each of the 4 sequences .* got shape \(3, 3\)"):
        Layout.local(LENS).positions(torch.ones(3, 3, dtype=torch.int32))
    for call in (attend, cross_attend):
        with pytest.raises(PlanError, match="no step is active"):
            call(q, k, v)


def test_without_a_layout_at_hand():
    step = SequenceBalancer().plan_routing(LENS, context_lens=CONTEXT)
    q, k, v = inputs(17, 21)
    with step:
        out = cross_attend(q, k, v)
    assert torch.equal(out, step.layout.cross_attend(q, k, v))


def test_no_layer_waits_for_the_device():
    layout = Layout.local(LENS, context_lens=CONTEXT)
    q, k, v = inputs(17, 21)
    grad, grids = torch.randn_like(q), torch.tensor([[1, 1, n] for n in LENS])
    layout.cross_attend(q, k, v)  # makes the context
    without_host_sync(lambda: layout.cross_attend(q, k, v).backward(grad))
    without_host_sync(lambda: layout.positions(grids))


# -- places of tokens -----------------------------------------------------------------------------------------------


@st.composite
def placed_grids(draw):
    """Sequences of some text and a grid each, placed anywhere."""
    world = draw(st.integers(1, 5))
    grids = [draw(st.lists(st.tuples(*[st.integers(1, 4)] * 3), max_size=3)) for _ in range(world)]
    text = [[draw(st.integers(0, 5)) for _ in rank] for rank in grids]
    lens = [[t + int(np.prod(g)) for g, t in zip(*pair, strict=True)] for pair in zip(grids, text, strict=True)]
    sequences = Sequences.from_ranks(lens, text)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_placement(sequences, world, 2, rng), grids, text


def places(placement: Placement, grids: list) -> list[torch.Tensor]:
    """Places of each rank's tokens, from grids that were delivered."""
    ranks = range(placement.world_size)
    rows = [np.array(g, dtype=np.int32).reshape(-1, 3) for g in grids]
    delivered = apply([sequence_exchange(placement, rank) for rank in ranks], rows)
    layouts = [Layout.of(placement, rank, torch.device("cpu")) for rank in ranks]
    return [layout.positions(torch.from_numpy(rows)) for layout, rows in zip(layouts, delivered, strict=True)]


@settings(deadline=None)
@given(placed_grids())
def test_places_are_what_routing_them_would_give(case):
    placement, grids, text = case
    ids = []
    for rank in zip(grids, text, strict=True):
        parts = [
            np.concatenate([np.zeros((t, 3), np.int32), grid_positions(Grid(*g))]) for g, t in zip(*rank, strict=True)
        ]
        ids.append(np.concatenate([np.zeros((0, 3), np.int32), *parts]))
    routed = apply([token_exchange(placement, rank) for rank in range(placement.world_size)], ids)
    for got, expected in zip(places(placement, grids), routed, strict=True):
        assert got.dtype == torch.int32
        assert np.array_equal(got.numpy(), expected)


def test_other_grids_give_other_places():
    """The comparison above can fail."""
    sequences = Sequences.from_ranks([[26]], [[2]])
    placement = Placement.whole(sequences, sequences.home, world_size=1, num_heads=2, planner="local")
    one, other = (places(placement, [[grid]])[0] for grid in ((2, 3, 4), (2, 4, 3)))
    assert not torch.equal(one, other)


def test_a_sequence_of_text_alone_needs_no_grid():
    got = Layout.local([3, 4], [3, 0]).positions(torch.tensor([[0, 0, 0], [1, 2, 2]]))
    assert got.tolist() == [[0, 0, 0]] * 4 + [[0, 0, 1], [0, 1, 0], [0, 1, 1]]


@given(placements())
def test_context_segments_of_any_placement(placement: Placement):
    """As many queries as a sequence has tokens here, and all of its context, wherever its shards lie."""
    s = placement.sequences
    context = np.arange(len(s)) % 4
    for rank in range(placement.world_size):
        placed = Placement(
            Sequences(s.length, s.home, s.text_length, context),
            placement.world_size,
            placement.num_heads,
            placement.token_shards,
            placement.attention_shards,
        )
        layout = Layout.of(placed, rank, torch.device("cpu"))
        t = placement.token_shards
        tokens = [int(t.count[(t.seq == seq) & (t.rank == rank)].sum()) for seq in layout.sequence_ids]
        assert layout.context.segments.cu_q.diff().tolist() == tokens
        assert layout.context.segments.cu_k.diff().tolist() == [int(context[seq]) for seq in layout.sequence_ids]
