"""Split attention on virtual ranks in NumPy: any cut of tokens and rows gives the attention of the whole sequence."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.plan import Cluster, CostModel, Placement, Sequences, attention_exchange, make_planner, token_exchange
from knapformer.plan.attention import head_group
from knapformer.plan.exchange import apply
from tests.plan.strategies import placements

HEAD_DIM = 3
COST_24 = replace(CostModel.from_shapes(64, 4), num_heads=24)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(Lq, d), (Lk, d), (Lk, d) -> (Lq, d)."""
    scores = q @ k.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def by_sequence(placement: Placement, qkv: list[np.ndarray]) -> list[np.ndarray]:
    """Attention of every sequence at home, the plain way."""
    s, heads = placement.sequences, placement.num_heads
    out = [np.zeros_like(x[0]) for x in qkv]
    for seq in range(len(s)):
        home, at = int(s.home[seq]), slice(int(s.home_start[seq]), int(s.home_start[seq] + s.length[seq]))
        for h in range(heads):
            out[home][at, h] = attend(*(qkv[home][i, at, h] for i in range(3)))
    return out


def by_placement(
    placement: Placement, qkv: list[np.ndarray], *, num_stages: int = 1, broken: bool = False
) -> list[np.ndarray]:
    """Route, exchange, attend in segments, exchange back, route back."""
    world, heads = placement.world_size, placement.num_heads
    route = [token_exchange(placement, r) for r in range(world)]
    routed = [apply(route, [x[i] for x in qkv]) for i in range(3)]
    tables = [attention_exchange(placement, r, num_stages=num_stages) for r in range(world)]
    c = tables[0].head_group
    assert all(t.head_group == c and t.num_stages == num_stages for t in tables)
    whole = [len(routed[0][r]) - tables[r].num_split_tokens for r in range(world)]
    rows = [np.concatenate([routed[i][r][whole[r] :].reshape(-1, c, HEAD_DIM) for i in range(3)]) for r in range(world)]
    segments = apply([t.qkv for t in tables], rows)
    outputs = []
    for table, buffer in zip(tables, segments, strict=True):
        parts, at = [np.zeros((0, c, HEAD_DIM))], 0
        for q_lens, k_lens in table.segment_lens():
            num_q, num_k = int(q_lens.sum()), int(k_lens.sum())
            q, k, v = np.split(buffer[at : at + num_q + 2 * num_k], [num_q, num_q + num_k])
            out, i, j = np.zeros_like(q), 0, 0
            for nq, nk in zip(q_lens.tolist(), k_lens.tolist(), strict=True):
                for h in range(c):
                    out[i : i + nq, h] = attend(q[i : i + nq, h], k[j : j + nk, h], v[j : j + nk, h])
                i, j = i + nq, j + nk
            parts.append(out[::-1] if broken else out)
            at += num_q + 2 * num_k
        outputs.append(np.concatenate(parts))
    back = apply([t.out for t in tables], outputs)
    result = []
    for r in range(world):
        local = np.zeros_like(routed[0][r])
        local[whole[r] :] = back[r].reshape(-1, heads, HEAD_DIM)
        shards = placement.token_shards
        start = placement.packed_start()
        for i in np.flatnonzero((shards.rank == r) & ~placement.split[shards.seq]):
            at = slice(int(start[i]), int(start[i] + shards.count[i]))
            for h in range(heads):
                local[at, h] = attend(*(routed[n][r][at, h] for n in range(3)))
        result.append(local)
    return apply([t.inverse() for t in route], result)


def random_qkv(placement: Placement) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    home = placement.sequences.tokens_at_home(placement.world_size)
    return [rng.standard_normal((3, n, placement.num_heads, HEAD_DIM)) for n in home.tolist()]


@settings(max_examples=60, deadline=None)
@given(placements(), st.sampled_from([1, 2, 4]))
def test_any_placement_gives_the_attention_of_whole_sequences(placement: Placement, num_stages: int) -> None:
    qkv = random_qkv(placement)
    got = by_placement(placement, qkv, num_stages=num_stages)
    for expected, found in zip(by_sequence(placement, qkv), got, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_every_part_has_a_share_of_each_ranks_rows() -> None:
    placement = make_planner("bags", "g4n1")(Sequences.from_ranks([[40], [9], [], [16]]), Cluster(4), COST_24)
    assert head_group(placement) == 6 and head_group(placement, 2) == 3 and head_group(placement, 4) == 1
    for rank in range(4):
        table = attention_exchange(placement, rank, num_stages=2)
        rows = [int(queries.sum()) for queries, _ in table.segment_lens()]
        assert rows[0] == rows[1] > 0
        sent = table.qkv.input_split_sizes.reshape(2, 4)
        assert (sent[0] == sent[1]).all()


def test_the_comparison_can_fail() -> None:
    placement = make_planner("bags", "g2n1")(Sequences.from_ranks([[9], [4]]), Cluster(2), CostModel.from_shapes(8, 4))
    qkv = random_qkv(placement)
    pairs = zip(by_sequence(placement, qkv), by_placement(placement, qkv, broken=True), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) > 0.01


@pytest.mark.parametrize("heads", [1, 5, 7, 12, 24])
@pytest.mark.parametrize("spec", ["g2n2", "g4n1", "g1n2+g2n1"])
def test_bags_of_any_head_count(spec: str, heads: int) -> None:
    seqs = Sequences.from_ranks([[1, 7], [], [23], [2]])
    placement = make_planner("bags", spec)(seqs, Cluster(4), replace(CostModel.from_shapes(64, 4), num_heads=heads))
    qkv = random_qkv(placement)
    for expected, got in zip(by_sequence(placement, qkv), by_placement(placement, qkv), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_neighbouring_heads_travel_together_where_cuts_allow() -> None:
    seqs = Sequences.from_ranks([[16], [8], [4], [4]])

    def group(spec: str, heads: int) -> int:
        return head_group(
            make_planner("bags", spec)(seqs, Cluster(4), replace(CostModel.from_shapes(64, 4), num_heads=heads))
        )

    assert group("g4n1", 24) == 6
    assert group("g2n2", 24) == 12
    assert group("g1n2+g2n1", 24) == 12
    assert group("g4n1", 7) == 1
    assert group("g1n4", 24) == 24


@settings(max_examples=60, deadline=None)
@given(placements())
def test_scaling_the_heads_keeps_a_placement_valid(placement: Placement) -> None:
    for heads in (1, 7, 24):
        placement.with_num_heads(heads).validate()
