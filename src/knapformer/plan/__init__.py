"""The pure core: lengths in, placement out. NumPy and integers only, no torch, no clock, no communication.

Reading order: `sequences` (what there is), `cluster` and `cost` (where it may go and what it costs), `placement`
(where it goes), `planners` (who decides), `exchange` and `attention` (who sends what to whom), `metrics`.
"""

from knapformer.plan.attention import AttentionExchange, attention_exchange
from knapformer.plan.bagspec import BagSpec
from knapformer.plan.cluster import Cluster, Links
from knapformer.plan.cost import TICKS_PER_SECOND, CostModel
from knapformer.plan.exchange import Exchange, sequence_exchange, token_exchange
from knapformer.plan.metrics import Metrics, lower_bound, measure
from knapformer.plan.placement import Placement, Shards
from knapformer.plan.planners import PLANNERS, Limits, Planner, make_planner
from knapformer.plan.sequences import Sequences

__all__ = [
    "PLANNERS",
    "TICKS_PER_SECOND",
    "AttentionExchange",
    "BagSpec",
    "Cluster",
    "CostModel",
    "Exchange",
    "Limits",
    "Links",
    "Metrics",
    "Placement",
    "Planner",
    "Sequences",
    "Shards",
    "attention_exchange",
    "lower_bound",
    "make_planner",
    "measure",
    "sequence_exchange",
    "token_exchange",
]
