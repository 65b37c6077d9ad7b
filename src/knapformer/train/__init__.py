"""Training: rectified flow over packed batches, FSDP2 wiring, meters and checkpoints. A small trainer, not a framework.

Reading order: `flow` (what is learned), `batch` (samples to packed tensors), `step` (plan, route, model, loss),
`parallel` (FSDP2), `trainer` (the loop), `checkpoint`.
"""

from knapformer.train.batch import HomeBatch, collate
from knapformer.train.config import TrainConfig, read_config
from knapformer.train.step import flow_loss
from knapformer.train.trainer import StepReport, Trainer

__all__ = ["HomeBatch", "StepReport", "TrainConfig", "Trainer", "collate", "flow_loss", "read_config"]
