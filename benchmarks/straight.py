"""The straight way to route and to share attention, to measure ours against: lists of chunks, split and cat.

Written as a first version usually is (and much as the published original works): every call walks Python lists of
chunks, splits tensors, concatenates buffers per destination, runs an all-to-all on a flat buffer, splits what arrived,
sorts and concatenates again. For bags only. Same results as the library's calls; a test holds it to that.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.plan import Placement


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out_splits: list[int], in_splits: list[int], group: Any) -> Tensor:
        ctx.args = (in_splits, out_splits, group)
        out = x.new_empty((sum(out_splits), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        out_splits, in_splits, group = ctx.args
        out = grad.new_empty((sum(out_splits), *grad.shape[1:]))
        dist.all_to_all_single(out, grad.contiguous(), out_splits, in_splits, group=group)
        return out, None, None, None


class StraightBags:
    """Routing and Ulysses attention of a bag placement, chunk by chunk.

    Args:
        placement: made by the `bags` planner.
        rank: of this process.
        bags: ranks of every bag.
        groups: process group of every bag of more than one rank.
    """

    def __init__(self, placement: Placement, rank: int, bags: Sequence[range], groups: dict[int, Any]) -> None:
        self.rank, self.world = rank, placement.world_size
        shards, seqs = placement.token_shards, placement.sequences
        self.home = {c: int(seqs.home[s]) for c, s in enumerate(shards.seq.tolist())}
        self.there = dict(enumerate(shards.rank.tolist()))
        self.length = dict(enumerate(shards.count.tolist()))
        self.seq = dict(enumerate(shards.seq.tolist()))
        ranks = range(self.world)
        self.at_home = {r: [c for c in self.home if self.home[c] == r] for r in ranks}
        self.at_there = {r: [c for c in self.there if self.there[c] == r] for r in ranks}
        self.bag = next(bag for bag in bags if rank in bag)
        self.group = groups.get(self.bag.start)

    def route(self, x: Tensor, features: Sequence[Tensor]) -> list[Tensor]:
        """Tokens to their shards, one tensor after another."""
        return [self._move(t, self.at_home, self.there, self.home) for t in (x, *features)]

    def reverse_route(self, x: Tensor) -> Tensor:
        """Back home."""
        return self._move(x, self.at_there, self.home, self.there)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Any) -> Tensor:
        """Ulysses over the bag; `kernel(q, k, v)` takes full sequences with this rank's heads."""
        if len(self.bag) == 1:
            return kernel(q, k, v)
        size = len(self.bag)
        packed = torch.cat([q, k, v], dim=-1)
        heads = packed.shape[1] // size
        parts = [part.contiguous() for part in packed.chunk(size, dim=1)]
        send = torch.cat([part.flatten() for part in parts])
        width = heads * packed.shape[2]
        chunks = {r: self.at_there[r] for r in self.bag}
        receive = [sum(self.length[c] for c in chunks[r]) * width for r in self.bag]
        flat = _AllToAll.apply(send, receive, [p.numel() for p in parts], self.group)
        order = [c for r in self.bag for c in chunks[r]]
        pieces = dict(zip(order, flat.split([self.length[c] * width for c in order]), strict=True))
        full = torch.cat([pieces[c] for c in sorted(order)]).view(-1, heads, packed.shape[2])
        out = kernel(*(t.contiguous() for t in full.chunk(3, dim=-1)))
        width = heads * out.shape[2]
        back = dict(zip(sorted(order), out.split([self.length[c] for c in sorted(order)]), strict=True))
        send = torch.cat([torch.cat([back[c] for c in chunks[r]]).flatten() for r in self.bag])
        sizes = [sum(self.length[c] for c in chunks[r]) * width for r in self.bag]
        mine = sum(self.length[c] for c in chunks[self.rank])
        flat = _AllToAll.apply(send, [mine * width] * size, sizes, self.group)
        return torch.cat([part.view(mine, heads, out.shape[2]) for part in flat.split([mine * width] * size)], dim=1)

    def _move(self, x: Tensor, held: dict[int, list[int]], to: dict[int, int], came: dict[int, int]) -> Tensor:
        pieces = dict(zip(held[self.rank], x.split([self.length[c] for c in held[self.rank]]), strict=True))
        buckets = {r: [pieces[c] for c in held[self.rank] if to[c] == r] for r in range(self.world)}
        send = torch.cat([x[:0], *(piece for r in buckets for piece in buckets[r])])
        incoming = [c for r in range(self.world) for c in held[r] if to[c] == self.rank]
        receive = [sum(self.length[c] for c in incoming if came[c] == r) for r in range(self.world)]
        moved = _AllToAll.apply(send, receive, [sum(len(p) for p in buckets[r]) for r in buckets], None)
        arrived = dict(zip(incoming, moved.split([self.length[c] for c in incoming]), strict=True))
        return torch.cat([moved[:0], *(arrived[c] for c in sorted(incoming))])
