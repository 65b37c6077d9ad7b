"""Is balancing worth it for this data set, what to set, what will it cost: everything the report shows, as plain data.

    material -> histogram -> policies -> simulated steps -> findings -> verdict

Every time, memory and chance here is a model's figure: of the simulator at the rates assumed for a device, on steps
drawn from the histogram. A policy's figure of merit is the share of rank time spent computing; its inverse ratio is the
speed-up, as all policies train on the same samples in the long run.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from knapformer.errors import SpecError
from knapformer.tools.advise.buckets import Buckets
from knapformer.tools.advise.histogram import Histogram
from knapformer.tools.advise.memory import NEGLIGIBLE, USABLE, TokenMemory, chance_above
from knapformer.tools.advise.policies import Outcome, Policies, run_policy
from knapformer.tools.advise.query import ScanOptions
from knapformer.tools.advise.sources import Material, load_material
from knapformer.tools.advise.verdict import verdict
from knapformer.tools.simulate.presets import cluster_preset
from knapformer.tools.simulate.scenario import Scenario

SCHEMA = 1
_MOST_SAMPLES = 64  # a rank takes at a time where nobody says
_TRIAL_STEPS = 10  # that fixed degrees are compared on
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions:
    """What to assume.

    Attributes:
        model: preset; None for the workload's or one that takes images and clips.
        cluster: preset.
        batch: samples a rank draws for a step; None for a trace's, else as many of the longest as fit, 1 to 64.
        num_steps: steps drawn; None for 20 to 100, fewer on larger clusters.
        seed: of the drawing.
        scan: how samples become tokens.
    """

    model: str | None = None
    cluster: str = "h100x32"
    batch: int | None = None
    num_steps: int | None = None
    seed: int = 0
    scan: ScanOptions = field(default_factory=ScanOptions)

    def __post_init__(self) -> None:
        for name in ("batch", "num_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SpecError(f"{name} is {value}; it must be at least 1")


def advise(sources: Sequence[str], options: AdviseOptions) -> dict[str, Any]:
    """Advice on a data set as plain data, the object `knapformer advise --json` prints.

    Args:
        sources: manifests, folders of them, or one bucket config, workload name or trace.
        options: what to assume.

    Raises:
        DataError, SpecError: for what cannot be read.
        PlanError: if the model, or every step even when balanced, is too large for the cluster.
    """
    preset = cluster_preset(options.cluster)
    material = load_material(sources, options.model, options.scan, ranks=preset.world_size)
    scenario = Scenario.of(material.model, preset)
    room, histogram = TokenMemory.of(scenario), material.histogram
    batch = options.batch or _batch(material, room)
    outcomes = _outcomes(material, scenario, batch=batch, room=room, options=options)
    after = next(outcome for outcome in outcomes if outcome.policy.name == "balanced")
    policies = [_policy(outcome, after, room) for outcome in outcomes]
    memory = _memory(histogram, scenario, room)
    return {
        "schema": SCHEMA,
        "basis": "modelled: simulated steps at assumed rates, not measurements",
        "source": _source(material),
        "model": {"name": material.model.name, "title": material.model.title},
        "cluster": {
            "name": preset.name,
            "device": preset.device.title,
            "ranks": preset.world_size,
            "ranks_per_node": preset.ranks_per_node,
        },
        "settings": {"batch": batch, "seed": options.seed, "scan": asdict(options.scan)},
        "distribution": _distribution(histogram, scenario),
        "memory": memory,
        "policies": policies,
        "verdict": verdict(policies, memory, batch),
        "lines": _lines(scenario, room.limit(split=True)),
    }


def _batch(material: Material, room: TokenMemory) -> int:
    if material.trace is not None:
        steps = material.trace.steps
        return max(1, round(float(np.mean([step.num_sequences for step in steps])) / material.trace.world_size))
    return min(_MOST_SAMPLES, max(1, room.limit(split=True) // material.histogram.longest))


def _outcomes(
    material: Material, scenario: Scenario, *, batch: int, room: TokenMemory, options: AdviseOptions
) -> list[Outcome]:
    """Policies of today, then balanced; and, where that is far from filling memory, balanced with more samples."""
    ranks, num_steps = scenario.cluster.world_size, options.num_steps
    num_steps = num_steps or int(np.clip(1600 // ranks, 20, 100))
    make = Policies(material.histogram, scenario, room, options.seed)
    buckets = material.buckets or Buckets.cut(material.histogram, scenario.cost_model(), batch, room.limit(split=False))
    drawn = make.random(batch) if material.trace is None else make.recorded(material.trace)
    policies = [drawn, *make.bucketed(buckets)]
    degrees = [g for g in (2, 4, 8) if ranks % g == 0 and g <= max(scenario.cluster.node_sizes)]
    if degrees:
        fixed = [make.fixed_degree(degree, batch) for degree in degrees]
        tried = [run_policy(policy, scenario, min(num_steps, _TRIAL_STEPS)).efficiency for policy in fixed]
        policies.append(fixed[int(np.argmax(tried))])
    policies.append(make.balanced(drawn, batch))
    more = min(_MOST_SAMPLES, _largest_batch(material.histogram, ranks, room))
    if options.batch is None and more >= 2 * batch:
        policies.append(make.balanced(make.random(more), more, more=True))
    return [run_policy(policy, scenario, num_steps) for policy in policies]


def _policy(outcome: Outcome, after: Outcome, room: TokenMemory) -> dict[str, Any]:
    policy, total = outcome.policy, outcome.seconds.sum()
    mean = float(outcome.seconds.mean())
    return {
        "name": policy.name,
        "text": policy.text,
        "steps": len(outcome.seconds),
        "refused_steps": outcome.refused,
        "computing": outcome.efficiency,
        "waiting": float(1 - (outcome.computing.sum() + outcome.traffic.sum()) / total),
        "traffic": float(outcome.traffic.sum() / total),
        "step_seconds": {"mean": mean, "p99": float(np.quantile(outcome.seconds, 0.99))},
        "samples_per_second": float(outcome.samples.sum() / total),
        "tokens_per_second": float(outcome.tokens.sum() / total),
        "speedup_of_balancing": after.efficiency / outcome.efficiency,
        "most_tokens_of_a_rank": int(outcome.rank_tokens.max()),
        "peak_memory_bytes": float(outcome.memory.max()),
        "heaviest_step": {
            "tokens_of_a_rank": policy.worst_tokens,
            "memory_bytes": room.at(policy.worst_tokens, split=policy.split),
            "fits": policy.worst_tokens <= room.limit(split=policy.split),
            "chance_a_step_too_large": policy.overflow,
            "hours_until_one": mean / policy.overflow / 3600 if policy.overflow > NEGLIGIBLE else None,
        },
        "dropped": policy.dropped,
        "seconds": [float(s) for s in outcome.seconds],
        "rank_tokens": [int(t) for t in outcome.rank_tokens],
    }


def _source(material: Material) -> dict[str, Any]:
    return {
        "kind": material.kind,
        "name": material.name,
        "samples": material.histogram.num_samples if material.kind != "buckets" else None,
        "rows": material.rows,
        "bad_rows": material.bad_rows,
        "clips": material.clips if material.kind == "manifest" else None,
        "problems": [{**asdict(problem), "message": problem.message()} for problem in material.problems],
        "notes": list(material.notes),
        "longest": dict(material.longest),
    }


def _distribution(histogram: Histogram, scenario: Scenario) -> dict[str, Any]:
    work, tokens = histogram.work(scenario.cost_model()), histogram.length.astype(np.float64)
    octave = np.floor(2 * np.log2(histogram.length)).astype(np.int64)
    start = np.flatnonzero(np.diff(octave, prepend=-1))
    quantiles = histogram.quantiles(np.array(_QUANTILES))

    def shares(amount: np.ndarray) -> list[float]:
        return [float(x) for x in np.add.reduceat(amount, start) / amount.sum()]

    bins = zip(
        octave[start],
        shares(histogram.count.astype(np.float64)),
        shares(histogram.count * tokens),
        shares(histogram.count * work),
        strict=True,
    )
    return {
        "mean_tokens": histogram.mean_length,
        "mean_text_tokens": float(np.dot(histogram.text, histogram.count) / histogram.num_samples),
        "longest": histogram.longest,
        "quantiles": {str(q): int(n) for q, n in zip(_QUANTILES, quantiles, strict=True)},
        "longest_1_percent": {
            "tokens": histogram.share_of_longest(0.01, tokens),
            "work": histogram.share_of_longest(0.01, work),
        },
        "bins": [
            {"from": float(2 ** (o / 2)), "to": float(2 ** ((o + 1) / 2)), "samples": s, "tokens": t, "work": w}
            for o, s, t, w in bins
        ],
    }


def _memory(histogram: Histogram, scenario: Scenario, room: TokenMemory) -> dict[str, Any]:
    limit, ranks, whole_limit = room.limit(split=True), scenario.cluster.world_size, room.limit(split=False)
    above = histogram.count[histogram.length > whole_limit].sum()
    return {
        "device_bytes": scenario.memory_bytes,
        "usable": USABLE,
        "without_tokens_bytes": room.fixed,
        "max_tokens_per_rank": limit,
        "samples_too_long_for_a_rank": float(above / histogram.num_samples),
        "batch_unbalanced": whole_limit // histogram.longest,
        "batch_balanced": _largest_batch(histogram, ranks, room),
    }


def _largest_batch(histogram: Histogram, ranks: int, room: TokenMemory) -> int:
    """Most samples per rank whose sum over all ranks practically never passes what they hold together."""
    limit = room.limit(split=True)
    low, high = 0, int(limit / histogram.mean_length) + 1
    while high - low > 1:
        middle = (low + high) // 2
        chance = chance_above(limit * ranks, middle * ranks, histogram.length, histogram.count)
        low, high = (middle, high) if chance < NEGLIGIBLE else (low, middle)
    return low


def _lines(scenario: Scenario, limit: int) -> list[str]:
    cluster, links = scenario.cluster, scenario.cluster.links
    between = f"Links({links.intra_node:g}, {links.inter_node:g})"
    return [
        "import knapformer",
        "from knapformer.plan import Cluster, CostModel, Limits, Links",
        "",
        "balancer = knapformer.SequenceBalancer(",
        '    "auto",',
        f"    cost={scenario.cost_model()!r},",
        f"    cluster=Cluster({cluster.world_size}, {max(cluster.node_sizes)}, {between}),",
        f"    limits=Limits(max_tokens_per_rank={limit}),",
        ")",
        "step = balancer.plan_routing(seq_lens)  # each step; then model(x, step.layout)",
        "_, x, _ = step.route(x)",
    ]
