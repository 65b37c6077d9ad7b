"""Hugging Face accelerate: the same loop, with the model and optimiser prepared by it.

    accelerate launch --cpu --num_processes 2 -m examples.with_accelerate

The loader is not prepared: accelerate would deal its batches to ranks once more. Batches are moved with `to`.
Lines that balancing adds end in `# +`, lines it changes in `# ~`.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from examples.demo_data import CHANNELS, DemoData, add_noise
from examples.packed_batch import TinyDiT
from torch.utils.data import DataLoader

from knapformer import Cluster, CostModel, PackedBatch, SequenceBalancer
from knapformer.data import BalancedSampler, EpochSampler

BATCH = 8


def train(folder: Path, *, balanced: bool = True, epochs: int = 1, cpu: bool = True) -> list[float]:
    """The loss of every step."""
    accelerator = Accelerator(cpu=cpu)
    rank, world_size, losses = accelerator.process_index, accelerator.num_processes, []
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)  # ~ not the loader
    accelerator.register_for_checkpointing(sampler)  # + it has state_dict and load_state_dict

    for epoch in range(epochs):
        for batch in loader:
            batch = add_noise(batch.to(accelerator.device), epoch)
            here = batch.route(balancer.plan_routing(**batch.lengths))  # +
            error = (model(here) - here.tokens["target"]).square().mean(dim=1)  # ~
            loss = (error * here.tokens["weight"]).sum()  # ~
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()  # +
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = train(Path(temporary), balanced="--unbalanced" not in sys.argv, epochs=2)
    Accelerator().print("\n".join(f"step {step}  loss {loss:.5f}" for step, loss in enumerate(found)))
