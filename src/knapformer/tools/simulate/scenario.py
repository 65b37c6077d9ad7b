"""A workload on a cluster one does not have: step time, throughput, utilisation, imbalance, memory, and where it goes.

Definitions, all over the simulated steps:

    HFU         FLOP done, recompute included (4 forward passes, 3 without checkpointing), over step time * ranks *
                dense peak
    MFU         FLOP of the model alone (3 forward passes), likewise
    imbalance   max / mean over ranks of the time they compute
    speed-up    step time of `local` over that of the planner =  balance * traffic * overlap:
      balance   local over the planner with exchanges that take no time
      traffic   what exchanges cost when nothing hides them (at most 1)
      overlap   what hiding them behind attention of whole sequences gains (at least 1)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from knapformer.data import Trace
from knapformer.data.profile import PLAIN
from knapformer.errors import SpecError
from knapformer.plan import Cluster, CostModel, Limits, Placement, Planner, Sequences, make_planner
from knapformer.plan.cost import TICKS_PER_SECOND
from knapformer.tools.simulate.clock import SimulatedStep, run
from knapformer.tools.simulate.cores import run_on_cores
from knapformer.tools.simulate.memory import peak_memory
from knapformer.tools.simulate.presets import ClusterPreset, ModelShape, cluster_preset, model_names, model_preset
from knapformer.tools.simulate.program import Floats
from knapformer.tools.simulate.step import StepOptions, step_program
from knapformer.tools.simulate.work import Prices, StepWork, device_prices, step_work

UPDATE_BYTES = 28
"""Device memory that AdamW reads and writes per parameter: gradient, weight and two moments in, three out [byte]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything but the lengths and the planner.

    Attributes:
        model: shape of the model.
        cluster: ranks and links.
        prices: of one layer by phase [s].
        options: how a step is run.
        peak_flops: dense peak of a rank [FLOP/s].
        memory_bytes: memory of a rank's device [byte].
        cores: processor cores that all ranks share, for runs on one machine; None: each rank has its own device.
    """

    model: ModelShape
    cluster: Cluster
    prices: Prices
    options: StepOptions = field(default_factory=StepOptions)
    peak_flops: float = float("inf")
    memory_bytes: float = float("inf")
    cores: float | None = None

    @classmethod
    def of(
        cls, model: ModelShape | str, cluster: ClusterPreset | str, prices: Prices | None = None, **options: Any
    ) -> "Scenario":
        """A model preset on a cluster preset; `options` are those of `StepOptions` that differ from the default."""
        model = model_preset(model) if isinstance(model, str) else model
        preset = cluster_preset(cluster) if isinstance(cluster, str) else cluster
        settings = StepOptions(**{"shard_size": preset.shard_size, **options})
        if "update_seconds" not in options:
            shard = settings.shard_size or preset.world_size
            update = UPDATE_BYTES * model.parameters / shard / preset.device.memory_bandwidth
            settings = replace(settings, update_seconds=update)
        return cls(
            model=model,
            cluster=preset.cluster(),
            prices=device_prices(model, preset.device) if prices is None else prices,
            options=settings,
            peak_flops=preset.device.peak_flops,
            memory_bytes=preset.device.memory_bytes,
        )

    def cost_model(self) -> CostModel:
        """What planners see: the mean price of the passes that a plain layer makes, in whole ticks."""
        phases = [self.prices[phase] for phase in PLAIN]
        ticks = TICKS_PER_SECOND / len(phases)
        # A table of row prices has no price per row and key; that in its longest sequence stands for it.
        row_keys = [float(p.row_seconds(longest)) / longest for p in phases for longest in [max(p.lengths, default=1)]]
        return CostModel(
            num_heads=self.model.num_heads,
            token=round(sum(p.token for p in phases) * ticks),
            per_qk_pair=round(sum(row_keys) * ticks),
            sequence=round(sum(p.sequence for p in phases) * ticks),
            head_dim=self.model.head_dim,
        )

    def work(self, placement: Placement) -> StepWork:
        """A placement, priced; what `time` and `memory` need of it."""
        return step_work(
            placement,
            self.cluster,
            self.prices,
            head_dim=self.model.head_dim,
            route_bytes=self.options.route_bytes,
        )

    def time(self, placement: Placement | StepWork, *, record: bool = False, **options: Any) -> SimulatedStep:
        """Run one step of a placement; `options` replace those of the scenario."""
        work = self.work(placement) if isinstance(placement, Placement) else placement
        settings = replace(self.options, **options)
        program = step_program(work, self.model.layer_parameters(), self.cluster, settings)
        if self.cores is not None:
            return run_on_cores(program, self.cluster.world_size, self.cores)
        return run(program, self.cluster.world_size, record=record)

    def memory(self, placement: Placement | StepWork) -> Floats:
        """(R,) estimated peak memory [byte]."""
        work = self.work(placement) if isinstance(placement, Placement) else placement
        return peak_memory(work, self.model, self.options, self.cluster.world_size)

    def flop(self, sequences: Sequences, *, recompute: bool) -> float:
        """FLOP of a step over all ranks: three forward passes, four with what checkpointing recomputes."""
        passes = 4 if recompute and self.options.checkpointing else 3
        return passes * self.model.num_layers * float(self.model.forward_flop(sequences.length).sum())


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Step time of `local` over that of the planner, and its factors (see the module)."""

    total: float
    balance: float
    traffic: float
    overlap: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """Figures of a workload, a scenario and a planner; means over steps unless said otherwise.

    Attributes:
        workload, planner: their names.
        ranks, steps: how many.
        step_seconds: of a step [s].
        tokens_per_second: of the whole cluster.
        hfu, mfu: of the dense peak.
        imbalance: max / mean over ranks of the time they compute.
        waiting_seconds, exposed_seconds: mean over ranks of the time they wait for other ranks, and for bytes, by kind
            of transfer [s].
        peak_memory_bytes: of the fullest rank of all steps [byte].
        fits: whether that is below the device's memory.
        local_step_seconds: of a step without balancing [s].
        speedup: over no balancing; of the summed step times.
    """

    workload: str
    planner: str
    ranks: int
    steps: int
    step_seconds: float
    tokens_per_second: float
    hfu: float
    mfu: float
    imbalance: float
    waiting_seconds: dict[str, float]
    exposed_seconds: dict[str, float]
    peak_memory_bytes: float
    fits: bool
    local_step_seconds: float
    speedup: SpeedUp

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def model_of(trace: Trace) -> ModelShape:
    """The model a workload was made for: the preset it names, else one of its width and heads, else FLUX.1."""
    if (name := trace.meta.get("model")) in model_names():
        return model_preset(str(name))
    shape = trace.meta.get("d_model"), trace.meta.get("heads")
    alike = [m for m in map(model_preset, model_names()) if (m.d_model, m.num_heads) == shape]
    return alike[0] if alike else model_preset("flux1")


def simulate(trace: Trace, scenario: Scenario, planner: Planner, limits: Limits | None = None) -> Simulation:
    """Simulate every step of a workload under a planner, and without balancing.

    Raises:
        SpecError: if the workload has other ranks than the cluster.
    """
    if trace.world_size != scenario.cluster.world_size:
        raise SpecError(
            f"workload {trace.name!r} is for {trace.world_size} ranks, the cluster has {scenario.cluster.world_size}"
        )
    cost, plan_local = scenario.cost_model(), make_planner("local")
    steps: list[SimulatedStep] = []
    seconds = np.zeros((trace.num_steps, 4))  # of `local`, then of the planner: free traffic, nothing hidden, as it is
    memory = flop = model_flop = 0.0
    for index in range(trace.num_steps):
        sequences = trace.sequences(index)
        placement = planner(sequences, scenario.cluster, cost, limits or Limits())
        work = scenario.work(placement)
        steps.append(scenario.time(work))
        memory = max(memory, float(scenario.memory(work).max()))
        local = plan_local(sequences, scenario.cluster, cost)
        if not placement.split.any() and np.array_equal(placement.token_shards.rank, local.token_shards.rank):
            seconds[index] = steps[-1].seconds
        else:
            compared = (
                scenario.time(local),
                scenario.time(work, free_traffic=True),
                scenario.time(work, overlap=False),
            )
            seconds[index] = [step.seconds for step in (*compared, steps[-1])]
        flop += scenario.flop(sequences, recompute=True)
        model_flop += scenario.flop(sequences, recompute=False)
    without, free, unhidden, planned = seconds.sum(axis=0).tolist()
    available = planned * trace.world_size * scenario.peak_flops
    return Simulation(
        workload=trace.name,
        planner=planner.name,
        ranks=trace.world_size,
        steps=trace.num_steps,
        step_seconds=planned / trace.num_steps,
        tokens_per_second=sum(step.num_tokens for step in trace.steps) / planned,
        hfu=flop / available,
        mfu=model_flop / available,
        imbalance=float(np.mean([step.busy.max() / step.busy.mean() for step in steps])),
        waiting_seconds=_means([step.waiting for step in steps]),
        exposed_seconds=_means([step.exposed for step in steps]),
        peak_memory_bytes=memory,
        fits=memory <= scenario.memory_bytes,
        local_step_seconds=without / trace.num_steps,
        speedup=SpeedUp(without / planned, without / free, free / unhidden, unhidden / planned),
    )


def _means(kinds: Sequence[dict[str, Floats]]) -> dict[str, float]:
    names = sorted({name for kind in kinds for name in kind})
    return {name: float(np.mean([kind[name].mean() if name in kind else 0.0 for kind in kinds])) for name in names}
