"""A diffusion transformer written by hand, and one balanced training step of it.

    torchrun --nproc-per-node 2 examples/packed_batch.py

The model is what one writes anyway, with tokens packed instead of padded: no batch axis, one row per token. What it
asks of the layout is `attend`, in place of scaled_dot_product_attention, and `sequence_index`, which says whose
timestep a token has. `example` is there for `knapformer selfcheck --model examples/packed_batch.py:TinyDiT`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from knapformer import CostModel, PackedBatch, SequenceBalancer


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.shift = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor, layout) -> Tensor:
        first, second = self.shift(time)[layout.sequence_index].chunk(2, dim=1)
        qkv = self.qkv(F.layer_norm(x, x.shape[1:]) + first)
        q, k, v = qkv.view(len(x), 3, self.heads, self.head_dim).unbind(1)
        x = x + self.out(layout.attend(q, k, v).flatten(1))  # was: scaled_dot_product_attention(q, k, v)
        return x + self.mlp(F.layer_norm(x, x.shape[1:]) + second)


class TinyDiT(nn.Module):
    def __init__(self, channels: int = 4, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.channels = channels
        self.embed, self.time, self.place = nn.Linear(channels, width), nn.Linear(1, width), nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, channels)

    def forward(self, here: PackedBatch) -> Tensor:
        places = here.layout.positions(here.vectors["grid"]).float() / 16
        x = self.embed(here.tokens["x"]) + self.place(places).sin()
        time = self.time(here.vectors["time"][:, None]).sin()
        for block in self.blocks:
            x = block(x, time, here.layout)
        return self.head(x)

    def example(self, length: int, generator: torch.Generator) -> PackedBatch:
        """One sample of random numbers: a picture of one row of patches."""
        x, target = torch.randn(2, length, self.channels, generator=generator)
        vectors = {"time": torch.rand(1, generator=generator), "grid": torch.tensor([[1, 1, length]])}
        return PackedBatch({"x": x, "target": target, "pixels": torch.ones(length, dtype=torch.int64)}, vectors)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, rank = TinyDiT(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    lengths = [400, 9] if rank == 0 else [16]  # what this rank's loader produced: far more on one rank
    samples = [model.example(length, generator) for length in lengths]

    balancer = SequenceBalancer(cost=CostModel.from_shapes(64, 4))
    batch = PackedBatch.join(samples, like=model.example(1, generator))
    step = balancer.plan_routing(**batch.lengths)
    here = batch.weighted("sample").route(step)
    error = (model(here) - here.tokens["target"]).square().mean(dim=1)
    loss = (error * here.tokens["weight"]).sum()
    loss.backward()  # its mean over ranks is the gradient of the whole batch

    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        value, loads = float(total) / dist.get_world_size(), step.metrics.time_imbalance
        print(f"loss {value:.6f}, tokens {step.placement.tokens().tolist()}, imbalance {loads:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
