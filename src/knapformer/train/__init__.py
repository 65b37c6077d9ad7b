"""Training: rectified flow over packed batches, FSDP2 wiring, meters and checkpoints. A small trainer, not a framework.

Reading order: `flow` (what is learned), `batch` (samples to packed tensors), `step` (route, model, loss), `parallel`
(FSDP2), `trainer` (the loop), `checkpoint`.
"""

from knapformer.balancer import LossMode, loss_weights
from knapformer.train.batch import collate
from knapformer.train.config import TrainConfig, read_config
from knapformer.train.step import flow_loss
from knapformer.train.trainer import StepReport, Trainer

__all__ = [
    "LossMode",
    "StepReport",
    "TrainConfig",
    "Trainer",
    "collate",
    "flow_loss",
    "loss_weights",
    "read_config",
]
