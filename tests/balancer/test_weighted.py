"""`PackedBatch.weighted`: under DDP and FSDP2, loss and gradient are those of one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from knapformer import CostModel, PackedBatch, SequenceBalancer
from knapformer.errors import DataError, SpecError
from tests.ranks import run_ranks
from tests.replicate import replicate

LENGTHS, TEXTS = [40, 3, 9, 5], [4, 0, 9, 2]
HOMES = {1: [0] * 4, 2: [0, 0, 1, 0], 3: [2, 0, 2, 0]}  # of three ranks one has no sample
MODES = ["token", "sample", "pixel"]
WRAPPERS = ["ddp", "fsdp2"]
KINDS = ["pixels", "loss_mask", "neither"]


def sample(index, kind):
    """Tokens that carry loss: by pixels, by a mask, or all but text. The third sample has text alone."""
    generator = torch.Generator().manual_seed(index)
    length, text = LENGTHS[index], TEXTS[index]
    visual = torch.arange(length) >= text
    tokens = {"x": torch.randn(length, 6, generator=generator, dtype=torch.float64)}
    if kind == "pixels":
        tokens["pixels"] = visual * torch.randint(0, 5, (length,), generator=generator)
    elif kind == "loss_mask":
        tokens["loss_mask"] = visual & (torch.rand(length, generator=generator) < 0.7)
    return PackedBatch(tokens, text_lens=[text])


class Model(nn.Module):
    """Something that needs whole sequences."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        generator = torch.Generator().manual_seed(9)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, here):
        q = self.inner(here.tokens["x"])[:, None]
        return here.layout.attend(q, q, q)[:, 0].sin()


def loss_of(model, here):
    error = model(here).square().mean(dim=1)
    return (error * here.tokens["weight"]).sum()


def gradients(model):
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def on_ranks(rank, world_size, wrapper, averaged):
    """(loss, gradients) of each kind and mode, as a trainer would see them."""
    found = {}
    for kind in KINDS:
        for mode in MODES if kind == "pixels" else MODES[:2]:
            mine = [sample(index, kind) for index, home in enumerate(HOMES[world_size]) if home == rank]
            batch = PackedBatch.join(mine, like=sample(0, kind)).weighted(mode, averaged=averaged)
            if wrapper == "ddp":
                model = replicate(Model())
            else:
                model = fully_shard(Model(), mesh=init_device_mesh("cpu", (world_size,)))
            step = SequenceBalancer(cost=CostModel.from_shapes(6, 1)).plan_routing(**batch.lengths)
            loss = loss_of(model, batch.route(step))
            loss.backward()
            total = loss.detach() / world_size
            dist.all_reduce(total)
            found[kind, mode] = torch.cat([total[None], gradients(model)])
    return found


def alone(kind, mode):
    """By one process that has all samples."""
    model = Model()
    batch = PackedBatch.join([sample(index, kind) for index in range(4)], like=sample(0, kind))
    loss = loss_of(model, batch.weighted(mode).local())
    loss.backward()
    return torch.cat([loss.detach()[None], gradients(model)])


def errors(world_size, wrapper, *, averaged=True):
    for rank in run_ranks(world_size, on_ranks, wrapper, averaged):
        for (kind, mode), got in rank.items():
            expected = alone(kind, mode)
            yield float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loss_and_gradients_are_those_of_one_process(world_size, wrapper):
    assert max(errors(world_size, wrapper)) < 1e-6  # weights are fp32


def test_the_comparison_can_fail():
    """Without the number of ranks, averaged gradients are too small by it."""
    assert min(errors(2, "ddp", averaged=False)) > 0.1


def added(rank, world_size):
    mine = [sample(index, "neither") for index, home in enumerate(HOMES[world_size]) if home == rank]
    weight = PackedBatch.join(mine, like=sample(0, "neither")).weighted(averaged=False).tokens["weight"]
    return float(weight.double().sum()), weight.tolist()


def test_weights_of_added_gradients_sum_to_one():
    found = run_ranks(2, added)
    assert sum(total for total, _ in found) == pytest.approx(1)
    tokens = sum(LENGTHS) - sum(TEXTS)
    first = [0.0] * 4 + [1 / tokens] * 36 + [1 / tokens] * 3 + [0.0] * 2 + [1 / tokens] * 3
    assert found[0][1] == pytest.approx(first) and found[1][1] == [0.0] * 9


def test_what_cannot_be_weighted():
    with pytest.raises(DataError, match="loss mode 'pixel' needs tokens 'pixels'"):
        sample(0, "loss_mask").weighted("pixel")
    with pytest.raises(SpecError, match="unknown loss mode 'batch'"):
        sample(0, "neither").weighted("batch")
    with pytest.raises(DataError, match="no tokens 'target'; it has x"):
        sample(0, "neither").local().visual("target")
