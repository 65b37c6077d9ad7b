import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist

from knapformer import CostModel, PackedBatch, SequenceBalancer
from knapformer.errors import DataError
from tests.ranks import run_ranks

HOMES = [0, 0, 2]  # rank 1 of 3 has nothing


def sample(seed, length=5, text=2, context=3):
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch(
        {"x": torch.randn(length, 4, generator=generator), "id": torch.full((length,), seed, dtype=torch.int16)},
        {"time": torch.rand(1, generator=generator), "name": torch.tensor([[seed, 1]])},
        {"note": torch.full((context, 2), float(seed))},
        text_lens=[text],
    )


def test_samples_are_joined_in_order_also_none():
    collate = partial(PackedBatch.join, like=sample(0))
    batch = collate([sample(1), sample(2, length=7, text=0, context=0), sample(3)])
    assert batch.lengths == {"seq_lens": [5, 7, 5], "text_lens": [2, 0, 2], "context_lens": [3, 0, 3]}
    assert batch.tokens["id"].tolist() == [1] * 5 + [2] * 7 + [3] * 5
    assert batch.vectors["name"].tolist() == [[1, 1], [2, 1], [3, 1]]
    assert batch.context["note"][:, 0].tolist() == [1.0] * 3 + [3.0] * 3
    none = collate([])
    assert none.lengths == {"seq_lens": [], "text_lens": [], "context_lens": []}
    assert none.tokens["x"].shape == (0, 4) and none.tokens["id"].dtype == torch.int16
    assert none.vectors["name"].shape == (0, 2) and none.context["note"].shape == (0, 2)
    again = pickle.loads(pickle.dumps(collate([batch, none])))  # loaders' workers send them
    assert again.lengths == batch.lengths and torch.equal(again.tokens["x"], batch.tokens["x"])


def routed(rank, world_size, planner):
    mine = [sample(i + 1, length=[40, 3, 9][i]) for i, home in enumerate(HOMES) if home == rank]
    batch = PackedBatch.join(mine, like=sample(0))
    step = SequenceBalancer(cost=CostModel.from_shapes(8, 2), planner=planner).plan_routing(**batch.lengths)
    here = batch.route(step)
    ids = here.tokens["id"].long()
    of_token = here.vectors["name"][here.layout.sequence_index, 0]
    assert torch.equal(ids, of_token) and len(here.tokens["x"]) == here.layout.num_tokens
    of_context = [float(here.vectors["name"][s, 0]) for s in range(here.layout.num_sequences) for _ in range(3)]
    assert here.context["note"][:, 0].tolist() == of_context
    total = here.tokens["x"].double().sum()
    dist.all_reduce(total)
    return float(total), len(ids), step.layout is here.layout


@pytest.mark.parametrize("planner", ["local", "balanced"])
def test_a_routed_batch_holds_the_same_rows(planner):
    found = run_ranks(3, routed, planner)
    everything = sum(float(sample(i + 1, length=n).tokens["x"].double().sum()) for i, n in enumerate([40, 3, 9]))
    assert [total for total, *_ in found] == pytest.approx([everything] * 3, rel=1e-12)
    held = [tokens for _, tokens, _ in found]
    assert sum(held) == 52 and all(same for *_, same in found)
    assert (max(held) <= 18) == (planner == "balanced")


def test_replace_and_local():
    batch = sample(1).replace(weight=torch.ones(5), id=None)
    assert set(batch.tokens) == {"x", "weight"}
    with pytest.raises(DataError, match=r"still at home and has no layout; call batch.route\(step\)"):
        _ = batch.layout
    here = batch.local()
    assert here.layout.text_index.tolist() == [0, 1] and here.layout.num_context_rows == 3
    assert here.to("cpu").layout is here.layout


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match=r"tokens 'y' has shape \(3,\); its lengths want 4 rows"):
        PackedBatch({"x": torch.zeros(4), "y": torch.zeros(3)})
    with pytest.raises(DataError, match=r"vectors 'time' has shape \(\); its lengths want 1 rows"):
        PackedBatch({"x": torch.zeros(4)}, {"time": torch.tensor(0.5)})
    with pytest.raises(DataError, match=r"context 'text'.* want 2 rows"):
        PackedBatch({"x": torch.zeros(4)}, context={"text": torch.zeros(3)}, context_lens=[2])
    with pytest.raises(DataError, match="needs tensors of tokens"):
        PackedBatch({})
    with pytest.raises(DataError, match="one text and context length for each sequence"):
        PackedBatch({"x": torch.zeros(4)}, text_lens=[1, 1])
    with pytest.raises(DataError, match="different kinds"):
        PackedBatch.join([sample(1), PackedBatch({"x": torch.zeros(4, 4)})], like=sample(0))
