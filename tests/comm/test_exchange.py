"""Routing between real processes: bit-exact for every dtype, and differentiable."""

import pytest
import torch

from knapformer import SequenceBalancer
from tests.planners import RandomPlanner
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.int16, torch.float64, torch.uint8]


def lengths(rank: int, world_size: int) -> list[int]:
    return [[5, 1, 17], [], [9], [2, 2], [31], [], [1], [4, 4, 4]][(rank + world_size) % 8]


def tokens_of_every_dtype(rank: int, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    noise = torch.randint(-(2**62), 2**62, (num, 3), generator=generator)
    tensors = [noise[:, 0] > 0, noise, noise.view(torch.float64), torch.randn(num, 2, 2, generator=generator)]
    tensors += [noise.to(d) for d in (torch.int32, torch.int16, torch.uint8)]
    tensors += [torch.randn(num, 5, generator=generator).to(torch.bfloat16), torch.zeros(num, 0)]
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def there_and_back(rank: int, world_size: int, plan: int | str) -> dict[str, bool]:
    """Of a random placement, or of a bag spec."""
    balancer = SequenceBalancer(plan) if isinstance(plan, str) else SequenceBalancer(planner=RandomPlanner(plan))
    lens = lengths(rank, world_size)
    step = balancer.plan_routing(lens, 64)
    tensors = tokens_of_every_dtype(rank, sum(lens))
    owner = torch.stack([torch.full((sum(lens),), rank), torch.arange(sum(lens))], dim=1)
    _, routed_owner, routed = step.route(owner, tensors)
    placed = True
    for home in range(world_size):  # every rank can rebuild every rank's tokens, and so check what it was sent
        other = tokens_of_every_dtype(home, sum(lengths(home, world_size)))
        mine = routed_owner[:, 0] == home
        placed &= all(same_bits(t[mine], o[routed_owner[mine, 1]]) for t, o in zip(routed, other, strict=True))
    seq_lens, back_owner, back = step.reverse_route(routed_owner, routed)
    return {
        "placed": placed,
        "home": torch.equal(back_owner, owner) and all(map(same_bits, back, tensors)) and seq_lens == lens,
        "moved": bool((routed_owner[:, 0] != rank).any()) or not len(routed_owner),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_routing_is_bit_exact_for_every_dtype_in_one_call(world_size: int) -> None:
    results = [r for seed in range(4) for r in run_ranks(world_size, there_and_back, seed)]
    assert all(r["placed"] and r["home"] for r in results)
    assert world_size == 1 or any(r["moved"] for r in results)


@pytest.mark.parametrize(("world_size", "spec"), [(4, "g1n2"), (4, "g2n1"), (6, "g2n1"), (8, "g1n2+g2n1")])
def test_balancing_groups_side_by_side(world_size: int, spec: str) -> None:
    results = run_ranks(world_size, there_and_back, spec)
    assert all(r["placed"] and r["home"] for r in results)
    group = 4 if "+" in spec else 2
    for first in range(0, world_size, group):
        assert any(r["moved"] for r in results[first : first + group]) or spec == "g1n2"


def gradient_comes_home(rank: int, world_size: int) -> float:
    balancer = SequenceBalancer(planner=RandomPlanner(3))
    lens = lengths(rank, world_size)
    step = balancer.plan_routing(lens, 64)
    x = torch.randn(sum(lens), 4, dtype=torch.float64, requires_grad=len(lens) > 0)  # a rank without tokens needs none
    number = torch.arange(sum(lens))
    _, y, (number,) = step.route(x, [number + 1000 * rank])
    (y * number[:, None]).sum().backward()
    if not x.requires_grad:
        return 0.0
    expected = (torch.arange(sum(lens)) + 1000 * rank)[:, None].expand_as(x)
    return float((x.grad - expected).abs().max())


def test_gradients_flow_back_to_the_home_ranks() -> None:
    assert run_ranks(3, gradient_comes_home) == [0.0] * 3


def vectors_reach_holders(rank: int, world_size: int) -> tuple[bool, float]:
    balancer = SequenceBalancer(planner=RandomPlanner(5))
    lens = lengths(rank, world_size)
    step = balancer.plan_routing(lens, 64)
    ids = step.placement.sequences.of_rank(rank)
    names = torch.tensor(ids)
    vec = (torch.tensor(ids, dtype=torch.float64)[:, None] * torch.ones(2, dtype=torch.float64)).requires_grad_()
    got, delivered = step.deliver(names, vec)
    right = got.tolist() == list(step.layout.sequence_ids)
    per_token = delivered[step.layout.sequence_index]
    right &= torch.equal(per_token[:, 0].long(), got[step.layout.sequence_index])
    per_token.sum().backward()
    expected = torch.tensor(lens, dtype=torch.float64)[:, None].expand(len(lens), 2)  # one per token, wherever it is
    return right, float((vec.grad - expected).abs().sum())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_per_sequence_vectors_reach_holders_and_their_gradients_add_up(world_size: int) -> None:
    assert run_ranks(world_size, vectors_reach_holders) == [(True, 0.0)] * world_size
