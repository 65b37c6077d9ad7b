"""Routing on virtual ranks: every token arrives once, where the placement says, and comes back unchanged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import PlanInvariantError
from knapformer.plan import (
    BagSpec,
    Cluster,
    CostModel,
    Exchange,
    Placement,
    Sequences,
    make_planner,
    sequence_exchange,
    token_exchange,
)
from knapformer.plan.exchange import apply
from tests.plan.strategies import placements

COST = CostModel.from_shapes(64, 4)


def token_names(placement: Placement) -> list[np.ndarray]:
    """(tokens at home, 2) per rank: sequence id and offset of every token."""
    s = placement.sequences
    names = []
    for rank in range(placement.world_size):
        ids = s.of_rank(rank)
        rows = [np.stack([np.full(s.length[i], i), np.arange(s.length[i])], axis=1) for i in ids]
        names.append(np.concatenate(rows) if rows else np.zeros((0, 2), dtype=np.int64))
    return names


def expected_tokens(placement: Placement, rank: int) -> np.ndarray:
    """The same names in packed order, read off the placement the slow way."""
    t = placement.token_shards
    mine = [i for i in range(len(t)) if t.rank[i] == rank]
    mine.sort(key=lambda i: (bool(placement.split[t.seq[i]]), int(t.seq[i]), int(t.start[i])))
    rows = [(int(t.seq[i]), o) for i in mine for o in range(int(t.start[i]), int(t.stop[i]))]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def route(placement: Placement, arrays: list[np.ndarray]) -> tuple[list[Exchange], list[np.ndarray]]:
    tables = [token_exchange(placement, rank) for rank in range(placement.world_size)]
    return tables, apply(tables, arrays)


@given(placements())
def test_routing_delivers_every_token_once_and_brings_it_home(placement: Placement) -> None:
    names = token_names(placement)
    tables, routed = route(placement, names)
    for rank, got in enumerate(routed):
        np.testing.assert_array_equal(got, expected_tokens(placement, rank))
    for before, after in zip(names, apply([t.inverse() for t in tables], routed), strict=True):
        np.testing.assert_array_equal(before, after)


@given(placements())
def test_token_conservation(placement: Placement) -> None:
    assert placement.tokens().sum() == placement.sequences.num_tokens
    tables = [token_exchange(placement, rank) for rank in range(placement.world_size)]
    sent = np.stack([t.input_split_sizes for t in tables])
    received = np.stack([t.output_split_sizes for t in tables])
    np.testing.assert_array_equal(sent, received.T)
    np.testing.assert_array_equal(sent.sum(axis=1), placement.sequences.tokens_at_home(placement.world_size))
    np.testing.assert_array_equal(received.sum(axis=1), placement.tokens())


def test_a_lost_token_is_noticed() -> None:
    seqs = Sequences.from_ranks([[5], [7]])
    good = make_planner("bags", "g2n1")(seqs, Cluster(2), COST)
    t = good.token_shards
    stop = t.stop.copy()
    stop[0] -= 1
    bad = Placement(seqs, 2, 4, type(t)(t.seq, t.rank, t.start, stop), good.attention_shards)
    with pytest.raises(PlanInvariantError, match=r"token shards of sequence 0 do not partition \[0, 5\)"):
        bad.validate()
    with pytest.raises(AssertionError):
        names = token_names(bad)
        assert all(
            np.array_equal(a, b)
            for a, b in zip(
                names, apply([t.inverse() for t in route(bad, names)[0]], route(bad, names)[1]), strict=True
            )
        )


@given(placements())
def test_per_sequence_rows_reach_exactly_the_ranks_with_tokens(placement: Placement) -> None:
    s = placement.sequences
    tables = [sequence_exchange(placement, rank) for rank in range(placement.world_size)]
    ids = [s.of_rank(rank)[:, None] for rank in range(placement.world_size)]
    for rank, got in enumerate(apply(tables, ids)):
        packed = expected_tokens(placement, rank)[:, 0]
        expected = list(dict.fromkeys(packed.tolist()))  # first meeting in packed order
        assert got[:, 0].tolist() == expected


@given(placements(), st.integers(0, 2**32 - 1))
def test_rows_of_a_sequence_reach_exactly_the_ranks_with_tokens(placement: Placement, seed: int) -> None:
    """As its context does: all rows of it, in order, whatever their number."""
    s = placement.sequences
    rows = np.random.default_rng(seed).integers(0, 4, size=len(s))
    ranks = range(placement.world_size)
    names = [[(seq, i) for seq in s.of_rank(rank) for i in range(rows[seq])] for rank in ranks]
    arrays = [np.array(name, dtype=np.int64).reshape(-1, 2) for name in names]
    got = apply([sequence_exchange(placement, rank, rows) for rank in ranks], arrays)
    for rank in ranks:
        holds = dict.fromkeys(expected_tokens(placement, rank)[:, 0].tolist())
        assert got[rank].tolist() == [[seq, i] for seq in holds for i in range(rows[seq])]


@pytest.mark.parametrize("spec", ["g1n1024", "g4n256", "g8n128", "g1n512+g2n128+g8n32"])
def test_routing_at_1024_ranks(spec: str) -> None:
    rng = np.random.default_rng(0)
    lens = [rng.integers(1, 400, size=rng.integers(0, 4)).tolist() for _ in range(1024)]
    lens[3] = [90_000]
    seqs = Sequences.from_ranks(lens)
    placement = make_planner("bags", spec)(seqs, Cluster(1024, 8), COST).validate()
    names = token_names(placement)
    tables, routed = route(placement, names)
    for rank in range(0, 1024, 97):
        np.testing.assert_array_equal(routed[rank], expected_tokens(placement, rank))
    for before, after in zip(names, apply([t.inverse() for t in tables], routed), strict=True):
        np.testing.assert_array_equal(before, after)


def test_multicast_has_no_inverse() -> None:
    seqs = Sequences.from_ranks([[8], []])
    placement = make_planner("bags", BagSpec.parse("g2n1"))(seqs, Cluster(2), COST)
    with pytest.raises(PlanInvariantError, match="no inverse"):
        sequence_exchange(placement, 0).inverse()


@settings(max_examples=30)
@given(placements(max_world=4))
def test_a_wrong_order_is_noticed(placement: Placement) -> None:
    """The check above can fail: with two rows of a target swapped, routing is no longer what the placement says."""
    tables, _ = route(placement, token_names(placement))
    for rank, table in enumerate(tables):
        if len(table.recv_index) < 2:
            continue
        swapped = table.recv_index.copy()
        swapped[[0, 1]] = swapped[[1, 0]]
        broken = Exchange(
            table.send_index,
            swapped,
            table.input_split_sizes,
            table.output_split_sizes,
            table.num_source_rows,
            table.num_target_rows,
        )
        routed = apply([*tables[:rank], broken, *tables[rank + 1 :]], token_names(placement))
        assert not np.array_equal(routed[rank], expected_tokens(placement, rank))
