"""A plain FSDP2 loop over pictures and clips of every size, balanced; `--unbalanced` for the same steps at home.

    torchrun --nproc-per-node 2 -m examples.fsdp2

Lines that balancing adds to such a loop end in `# +`, lines it changes in `# ~`.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from examples.demo_data import CHANNELS, DemoData, add_noise
from examples.packed_batch import TinyDiT
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from knapformer import Cluster, CostModel, PackedBatch, SequenceBalancer
from knapformer.data import BalancedSampler, EpochSampler

BATCH = 8


def train(folder: Path, *, balanced: bool = True, epochs: int = 1) -> list[float]:
    """The loss of every step."""
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    dataset = DemoData(folder)
    cost = CostModel.from_shapes(d_model=64, num_heads=4)  # +
    if balanced:
        sampler = BalancedSampler(dataset.lengths, BATCH, cost=cost, cluster=Cluster(world_size), rank=rank)  # ~
        balancer = SequenceBalancer(planner=sampler.planner, cost=cost)  # +
    else:
        sampler = EpochSampler(len(dataset), BATCH, rank=rank, world_size=world_size)
        balancer = SequenceBalancer(planner="local", cost=cost)
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,  # ~
        collate_fn=partial(PackedBatch.join, like=dataset[0]),  # ~
    )

    torch.manual_seed(0)
    model = TinyDiT(CHANNELS)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(epochs):
        for batch in loader:
            batch = add_noise(batch, epoch)
            here = batch.route(balancer.plan_routing(**batch.lengths))  # +
            error = (model(here) - here.tokens["target"]).square().mean(dim=1)  # ~
            loss = (error * here.tokens["weight"]).sum()  # ~
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()  # + sampler.state_dict() is what a checkpoint saves
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / world_size)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as temporary:
        found = train(Path(temporary), balanced="--unbalanced" not in sys.argv, epochs=2)
    if dist.get_rank() == 0:
        print("\n".join(f"step {step}  loss {loss:.5f}" for step, loss in enumerate(found)))
    dist.destroy_process_group()
