"""The paper's routing-plan summary, by hand for one plan and against the tables for any."""

import numpy as np
import pytest
from hypothesis import given, settings

from knapformer.plan import Cluster, CostModel, Placement, Sequences, Shards, make_planner
from knapformer.plan.summary import summarize
from tests.plan.strategies import placements

COST = CostModel(num_heads=2, token=10**12, per_qk_pair=5 * 10**11)  # a token a millisecond, a pair of tokens as well


def by_hand() -> Placement:
    """Sequences 0 (4 tokens) and 1 (2) at home on rank 0, 2 (3) on rank 2; 0 is cut over ranks 2 and 1."""
    return Placement(
        Sequences.from_ranks([[4, 2], [], [3]]),
        3,
        2,
        Shards(np.array([0, 0, 1, 2]), np.array([2, 1, 1, 0]), np.array([0, 3, 0, 0]), np.array([3, 4, 2, 3])),
        Shards(np.array([0, 1, 2]), np.array([1, 1, 0]), np.array([0, 0, 0]), np.array([8, 4, 6])),
    ).validate()


def test_by_hand() -> None:
    assert summarize(by_hand(), COST) == {
        "balance_gpu_ids": [0, 1, 2],
        "seq_id2seq_len": {0: 4, 1: 2, 2: 3},
        "seq_id2seq_workload": {0: pytest.approx(0.020), 1: pytest.approx(0.006), 2: pytest.approx(0.012)},
        "gpu_id2seq_ids": {0: [0, 1], 1: [], 2: [2]},
        "gpu_id2seq_lens": {0: [4, 2], 1: [], 2: [3]},
        "gpu_id2seq_workloads": {0: pytest.approx([0.020, 0.006]), 1: [], 2: pytest.approx([0.012])},
        "gpu_id2chunk_ids": {0: [0, 1, 2], 1: [], 2: [3]},
        "gpu_id2chunk_lens": {0: [3, 1, 2], 1: [], 2: [3]},
        "balance_gpu_id2chunk_ids": {0: [3], 1: [1, 2], 2: [0]},
        "balance_gpu_id2chunk_lens": {0: [3], 1: [1, 2], 2: [3]},
        "balance_chunk_id2gpu_id": {0: 2, 1: 1, 2: 1, 3: 0},
        "balance_chunk_id2chunk_len": {0: 3, 1: 1, 2: 2, 3: 3},
        "chunk_id2seq_id": {0: 0, 1: 0, 2: 1, 3: 2},
    }


def test_global_ranks_of_a_balancing_group() -> None:
    summary = summarize(by_hand(), COST, gpu_ids=[8, 9, 12])
    assert summary["balance_gpu_ids"] == [8, 9, 12]
    assert summary["gpu_id2seq_lens"] == {8: [4, 2], 9: [], 12: [3]}
    assert summary["balance_gpu_id2chunk_lens"] == {8: [3], 9: [1, 2], 12: [3]}
    assert summary["balance_chunk_id2gpu_id"] == {0: 12, 1: 9, 2: 9, 3: 8}
    assert summary["seq_id2seq_len"] == summarize(by_hand(), COST)["seq_id2seq_len"]


def test_nothing_to_do() -> None:
    empty = make_planner("bags", "g2n1")(Sequences.from_ranks([[], []]), Cluster(2), COST)
    summary = summarize(empty, COST)
    assert summary["gpu_id2seq_lens"] == summary["balance_gpu_id2chunk_lens"] == {0: [], 1: []}
    assert summary["seq_id2seq_len"] == summary["chunk_id2seq_id"] == {}


@settings(deadline=None)
@given(placements())
def test_any_plan_keeps_its_tokens_and_agrees_with_itself(placement: Placement) -> None:
    summary = summarize(placement, COST)
    ranks = range(placement.world_size)
    chunk_len, chunk_seq = summary["balance_chunk_id2chunk_len"], summary["chunk_id2seq_id"]
    for rank in ranks:
        home_ids, ids = summary["gpu_id2chunk_ids"][rank], summary["balance_gpu_id2chunk_ids"][rank]
        assert summary["gpu_id2chunk_lens"][rank] == [chunk_len[c] for c in home_ids]
        assert summary["balance_gpu_id2chunk_lens"][rank] == [chunk_len[c] for c in ids]
        assert all(summary["balance_chunk_id2gpu_id"][c] == rank for c in ids)
        assert [chunk_seq[c] for c in ids] == sorted(chunk_seq[c] for c in ids)  # chunk order is by sequence id
        assert sum(summary["gpu_id2chunk_lens"][rank]) == sum(summary["gpu_id2seq_lens"][rank])
        assert sum(summary["balance_gpu_id2chunk_lens"][rank]) == placement.tokens()[rank]
    for seq, length in summary["seq_id2seq_len"].items():
        assert sum(chunk_len[c] for c, s in chunk_seq.items() if s == seq) == length
    assert sorted(c for rank in ranks for c in summary["balance_gpu_id2chunk_ids"][rank]) == list(chunk_len)


def test_plain_python_values_only() -> None:
    """Users print and dump it: NumPy integers would show as such."""

    def plain(value) -> bool:
        if isinstance(value, dict):
            return all(type(k) is int and plain(v) for k, v in value.items())
        return all(map(plain, value)) if isinstance(value, list) else type(value) in (int, float)

    assert all(plain(value) for value in summarize(by_hand(), COST).values())
    assert not plain([np.int64(1)])  # the check can fail
