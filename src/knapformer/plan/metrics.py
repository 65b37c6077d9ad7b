"""How good a placement is: loads, imbalances, traffic, and the bound that no placement can beat.

imbalance is max/mean over ranks (>= 1); makespan the largest load; gap = makespan / lower bound - 1. Traffic counts
the elements of q, k, v and o that cross ranks in one forward pass of one layer: a uniform bag of g crosses 1 - 1/g.
"""

from dataclasses import asdict, dataclass
from typing import Any

from knapformer.plan.arrays import Int64Array, exact_sum
from knapformer.plan.cluster import NOMINAL_SPEED, Cluster
from knapformer.plan.cost import TICKS_PER_SECOND, CostModel
from knapformer.plan.placement import Placement
from knapformer.plan.predict import Traffic, attention_traffic, padding_tokens, predict, rank_loads
from knapformer.plan.sequences import Sequences
from knapformer.plan.timeline import timeline

__all__ = [
    "Metrics",
    "Traffic",
    "attention_traffic",
    "imbalance",
    "lower_bound",
    "measure",
    "rank_loads",
]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one placement.

    Attributes:
        time_imbalance, token_imbalance, attention_imbalance: max/mean over ranks of load, tokens, attention area.
        gap: makespan over lower bound, minus 1.
        split_traffic: share of all q, k, v, o elements that cross ranks.
        cross_node_traffic: share that crosses nodes.
        routed_fraction: share of tokens that leave their home rank.
        split_sequences: number of sequences that are split.
        makespan, lower_bound: per layer, forward [s].
        step_over_ideal: predicted step with no traffic hidden over ideal compute, the mean load (`plan.predict`).
        step_over_ideal_overlap: the same on the timeline, with traffic hidden as the executor does (`plan.timeline`).
        padding_tokens: rows of padding on all ranks together.
    """

    time_imbalance: float
    token_imbalance: float
    attention_imbalance: float
    gap: float
    split_traffic: float
    cross_node_traffic: float
    routed_fraction: float
    split_sequences: int
    makespan: float
    lower_bound: float
    step_over_ideal: float
    step_over_ideal_overlap: float
    padding_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(placement: Placement, cluster: Cluster, cost: CostModel, *, token_grid: int = 1) -> Metrics:
    """All metrics of a placement under a cost model whose `num_heads` is the placement's.

    Where ranks pad their tokens to a multiple of `token_grid`, times count padding, the ideal and the bound do not.
    """
    bound = lower_bound(placement.sequences, cluster, cost)
    traffic = attention_traffic(placement)
    prediction = predict(placement, cluster, cost, traffic, token_grid=token_grid)
    makespan = int(prediction.compute.max())
    all_rows = 4 * placement.num_heads * placement.sequences.num_tokens
    crosses = traffic.source != traffic.target
    crosses_nodes = cluster.node_of[traffic.source] != cluster.node_of[traffic.target]
    tokens = placement.token_shards
    routed = tokens.count[tokens.rank != placement.sequences.home[tokens.seq]].sum()
    return Metrics(
        time_imbalance=makespan / prediction.ideal if prediction.ideal else 1.0,
        token_imbalance=imbalance(placement.tokens()),
        attention_imbalance=imbalance(placement.area()),
        gap=makespan / bound - 1 if bound else 0.0,
        split_traffic=_share(traffic.rows[crosses].sum(), all_rows),
        cross_node_traffic=_share(traffic.rows[crosses_nodes].sum(), all_rows),
        routed_fraction=_share(routed, placement.sequences.num_tokens),
        split_sequences=int(placement.split.sum()),
        makespan=makespan / TICKS_PER_SECOND,
        lower_bound=bound / TICKS_PER_SECOND,
        step_over_ideal=prediction.step_over_ideal,
        step_over_ideal_overlap=timeline(placement, cluster, cost, token_grid=token_grid).step_over_ideal,
        padding_tokens=int(padding_tokens(placement, token_grid).sum()),
    )


def imbalance(amount: Int64Array) -> float:
    """Largest over mean; 1.0 where there is nothing to do."""
    total = exact_sum(amount)
    return float(int(amount.max()) * len(amount) / total) if total else 1.0


def lower_bound(sequences: Sequences, cluster: Cluster, cost: CostModel) -> int:
    """Makespan that no placement can beat [tick]: the mean load, or one indivisible token or row if that is more.

    Each sequence's constant is counted once, although a split sequence pays it on every rank that has tokens of it.
    """
    if not len(sequences):
        return 0
    indivisible = max(cost.token + cost.sequence, cost.per_qk_pair * int(sequences.length.max()))
    fastest = max(cluster.speeds, default=NOMINAL_SPEED)
    mean = cluster.mean_time(exact_sum(cost.work(sequences.length)))
    return max(mean, indivisible * NOMINAL_SPEED // fastest)


def _share(part: Any, whole: int) -> float:
    return float(int(part) / whole) if whole else 0.0
