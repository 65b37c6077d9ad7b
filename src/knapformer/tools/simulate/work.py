"""What a placement makes every rank do in one layer: seconds of computing by phase, and of split attention's traffic.

Prices of a phase are the `Terms` of a profile, or made from a device preset: forward and recompute alike, backward 2
times the token-wise work (gradients of inputs and of weights) and 2.5 times the attention (5 matrix products for 2).
Traffic is priced as planners price it: each row by the slowest link it crosses, a rank by the larger of both
directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from knapformer.data.profile import PHASES, Profile, Terms
from knapformer.plan import Cluster, Placement
from knapformer.plan.metrics import attention_traffic
from knapformer.tools.simulate.presets import DevicePreset, ModelShape
from knapformer.tools.simulate.program import Floats, Meeting

TOKEN_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5

Prices = Mapping[str, Terms]
"""Phase ("forward", "recompute", "backward") -> prices of one layer [s]."""


def device_prices(model: ModelShape, device: DevicePreset, *, layer_seconds: float = 0.0) -> Prices:
    """Prices at the rates assumed for a device; `layer_seconds` is a constant per layer and pass, such as launching."""
    token = model.linear_flop_per_token / device.token_flops
    per_qk_pair = model.attention_flop_per_row_key / device.attention_flops
    sequence = model.flop_per_sequence / device.token_flops
    once = Terms(token, per_qk_pair, sequence, layer_seconds)
    back = Terms(TOKEN_BACKWARD * token, ATTENTION_BACKWARD * per_qk_pair, TOKEN_BACKWARD * sequence, layer_seconds)
    return {"forward": once, "recompute": once, "backward": back}


def profile_prices(profile: Profile) -> Prices:
    """Prices that were measured."""
    return {phase: profile.terms(phase) for phase in PHASES}


@dataclass(frozen=True, slots=True, eq=False)
class PhaseWork:
    """Computing of one layer in one phase, (R,) each [s]: token-wise, attention of whole and of split sequences."""

    token: Floats
    whole: Floats
    split: Floats

    @property
    def total(self) -> Floats:
        return self.token + self.whole + self.split


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """A placement on a cluster, priced.

    Attributes:
        phases: computing by phase.
        qkv, out: (R,) time of q, k and v on their way to the attention shards, and of outputs on their way back [s].
        pairs: ranks that exchange them.
        crosses_nodes: whether any of it crosses nodes.
        route: (R,) time of bringing tokens from their home ranks to their shards [s].
        route_pairs: ranks between which they move.
        tokens: (R,) tokens held.
        split_rows: (R,) rows of q, k, v and o of its attention shards of split sequences.
    """

    phases: Mapping[str, PhaseWork]
    qkv: Floats
    out: Floats
    pairs: Meeting
    crosses_nodes: bool
    route: Floats
    route_pairs: Meeting
    tokens: Floats
    split_rows: Floats


def step_work(
    placement: Placement, cluster: Cluster, prices: Prices, *, head_dim: int, route_bytes: float = 0.0
) -> StepWork:
    """Price a placement.

    Args:
        placement: of one step.
        cluster: its ranks, links and speeds.
        prices: of a layer, by phase.
        head_dim: width of a head [elements].
        route_bytes: what is routed with every token [byte].
    """
    world_size = placement.world_size
    slowness = 1000.0 / cluster.speed
    phases = {phase: _phase(placement, terms, slowness) for phase, terms in prices.items()}

    traffic = attention_traffic(placement)
    crosses = traffic.source != traffic.target
    source, target = traffic.source[crosses], traffic.target[crosses]
    row = _seconds_per_byte(cluster, source, target) * head_dim * cluster.links.element_bytes
    qkv = (traffic.q_rows[crosses] + 2 * traffic.kv_rows[crosses]) * row
    out = traffic.q_rows[crosses] * row
    split_rows = _sum(traffic.target, traffic.rows, world_size)

    tokens, home = placement.token_shards, placement.sequences.home
    moves = np.flatnonzero(home[tokens.seq] != tokens.rank)
    start, stop = home[tokens.seq[moves]], tokens.rank[moves]
    routed = tokens.count[moves] * _seconds_per_byte(cluster, start, stop) * route_bytes
    return StepWork(
        phases=phases,
        qkv=_slower_direction(source, target, qkv, world_size),
        out=_slower_direction(source, target, out, world_size),
        pairs=Meeting.pairs(source, target, world_size),
        crosses_nodes=bool((cluster.node_of[source] != cluster.node_of[target]).any()),
        route=_slower_direction(start, stop, routed, world_size),
        route_pairs=Meeting.pairs(start, stop, world_size),
        tokens=placement.tokens().astype(np.float64),
        split_rows=split_rows,
    )


def _phase(placement: Placement, terms: Terms, slowness: Floats) -> PhaseWork:
    rows = placement.attention_shards
    seconds = rows.count * terms.row_seconds(placement.sequences.length[rows.seq])
    split = placement.split[rows.seq]
    world_size = placement.world_size
    return PhaseWork(
        token=slowness * terms.token_seconds(placement.tokens(), placement.num_shards()),
        whole=slowness * _sum(rows.rank[~split], seconds[~split], world_size),
        split=slowness * _sum(rows.rank[split], seconds[split], world_size),
    )


def _seconds_per_byte(cluster: Cluster, source: np.ndarray, target: np.ndarray) -> Floats:
    node, links = cluster.node_of, cluster.links
    return np.where(node[source] == node[target], 1.0 / links.intra_node, 1.0 / links.inter_node)


def _slower_direction(source: np.ndarray, target: np.ndarray, seconds: Floats, world_size: int) -> Floats:
    return np.maximum(_sum(source, seconds, world_size), _sum(target, seconds, world_size))


def _sum(rank: np.ndarray, amount: np.ndarray, world_size: int) -> Floats:
    return np.asarray(np.bincount(rank, weights=amount, minlength=world_size), dtype=np.float64)
