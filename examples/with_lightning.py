"""PyTorch Lightning: a LightningModule that balances each training step, under DDP.

    python -m examples.with_lightning

`use_distributed_sampler=False`, as the sampler deals samples to ranks already. Lines that balancing adds end in `# +`,
lines it changes in `# ~`.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from examples.demo_data import CHANNELS, DemoData, add_noise
from examples.packed_batch import TinyDiT
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from knapformer import Cluster, CostModel, PackedBatch, SequenceBalancer
from knapformer.data import BalancedSampler, EpochSampler

BATCH = 8


class BalancedDiT(lightning.LightningModule):
    def __init__(self, folder: Path, *, balanced: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.folder, self.balanced = TinyDiT(CHANNELS), folder, balanced
        self.losses: list[float] = []

    def setup(self, stage: str) -> None:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        self.dataset = DemoData(self.folder)
        cost = CostModel.from_shapes(d_model=64, num_heads=4)  # +
        if self.balanced:
            lengths, cluster = self.dataset.lengths, Cluster(world_size)
            self.sampler = BalancedSampler(lengths, BATCH, cost=cost, cluster=cluster, rank=rank)  # ~
            self.balancer = SequenceBalancer(planner=self.sampler.planner, cost=cost)  # +
        else:
            self.sampler = EpochSampler(len(self.dataset), BATCH, rank=rank, world_size=world_size)
            self.balancer = SequenceBalancer(planner="local", cost=cost)

    def train_dataloader(self) -> DataLoader:
        collate = partial(PackedBatch.join, like=self.dataset[0])
        return DataLoader(self.dataset, batch_sampler=self.sampler, collate_fn=collate)  # ~

    def training_step(self, batch: PackedBatch, index: int) -> Tensor:
        batch = add_noise(batch, self.current_epoch)
        here = batch.route(self.balancer.plan_routing(**batch.lengths))  # +
        error = (self.model(here) - here.tokens["target"]).square().mean(dim=1)  # ~
        loss = (error * here.tokens["weight"]).sum()  # ~
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.losses.append(float(total) / self.trainer.world_size)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: PackedBatch, batch_idx: int) -> None:
        self.sampler.advance()  # +

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sampler"] = self.sampler.state_dict()  # +

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.sampler.load_state_dict(checkpoint["sampler"])  # +

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def train(folder: Path, *, balanced: bool = True, epochs: int = 1, devices: int = 2) -> list[float]:
    """The loss of every step."""
    module = BalancedDiT(folder, balanced=balanced)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=epochs,
        use_distributed_sampler=False,  # ~
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module.losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = train(Path(temporary), balanced="--unbalanced" not in sys.argv, epochs=2)
    if dist.get_rank() == 0:
        print("\n".join(f"step {step}  loss {loss:.5f}" for step, loss in enumerate(found)))
