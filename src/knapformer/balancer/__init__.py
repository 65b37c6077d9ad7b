"""The façade: `SequenceBalancer` plans a step, `RoutingStep` moves tokens and hands the model its layout."""

from knapformer.balancer.balancer import SequenceBalancer
from knapformer.balancer.loss import LossMode, loss_weights
from knapformer.balancer.packed import PackedBatch
from knapformer.balancer.step import RoutingStep

__all__ = ["LossMode", "PackedBatch", "RoutingStep", "SequenceBalancer", "loss_weights"]
