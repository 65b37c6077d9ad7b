"""A training step as a program: fully sharded parameters, prefetched one layer ahead, checkpointed layers.

    route | layer 1 ... N forward | layer N ... 1: recompute, backward | gradients reduced | update

One layer forward, with the overlap of the executor (`knapformer.attention.Layout.attend`):

    wait parameters; launch those of the next layer
    token-wise work before attention
    launch q, k, v;  first whole sequences;  wait;  split attention;  launch outputs;  other whole sequences;  wait
    token-wise work after attention

Backward mirrors it. Gradients of a layer are reduce-scattered behind the backward pass of the next, and averaged over
replicas behind that; each layer first waits for the reduction before, as FSDP2 does to reuse its buffer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from knapformer.errors import SpecError
from knapformer.plan import Cluster
from knapformer.tools.simulate.program import Compute, Floats, Launch, Meeting, Op, Wait
from knapformer.tools.simulate.work import PhaseWork, StepWork

BEFORE_ATTENTION = 0.4
"""Share of a layer's token-wise work that lies before attention: 6/24 in a block of two streams, 14/24 in one of a
single stream, 0.47 over FLUX's blocks. Only waits inside a layer depend on it."""

FIRST_WHOLE = 0.75
"""Share of whole sequences' attention that runs while q, k and v travel; the rest hides the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step is run.

    Attributes:
        checkpointing: recompute every layer in backward.
        overlap: let traffic of split attention travel behind attention of whole sequences.
        free_traffic: exchanges take no time; what balance alone would give.
        prefetch: gather parameters one layer ahead.
        shard_size: ranks that share one copy of the parameters; None for all.
        parameter_bytes, gradient_bytes: per parameter when gathered and when reduced [byte].
        latency: of a collective or exchange [s].
        step_seconds: constant per step: loading, launching, whatever the simulation leaves out [s].
        update_seconds: the optimiser's update [s].
        route_bytes: routed with every token: latent and target of 64 channels in bf16, positions [byte].
    """

    checkpointing: bool = True
    overlap: bool = True
    free_traffic: bool = False
    prefetch: bool = True
    shard_size: int | None = None
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    latency: float = 20e-6
    step_seconds: float = 0.0
    update_seconds: float = 0.0
    route_bytes: float = 272.0


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """Collectives of sharded parameters: who meets there, over which links, and the time per byte of a whole layer.

    Attributes:
        shard, replicas: ranks that share one copy of the parameters; ranks that hold the same piece of it.
        gather: of gathering a layer, or of reducing its gradients, over `shard` [s/byte].
        average: of averaging gradients over `replicas` [s/byte].
        links, average_links: what these use.
    """

    shard: Meeting
    replicas: Meeting
    gather: float
    average: float
    links: tuple[str, ...]
    average_links: tuple[str, ...]

    @classmethod
    def of(cls, cluster: Cluster, shard_size: int | None) -> "Sharding":
        """Parameters sharded over `shard_size` consecutive ranks, replicated over the others.

        A ring over g ranks moves (g - 1) / g of a layer over each link. Where it crosses nodes, the k ranks that it
        has in a node use k network adapters at once; the slower of these and of a rank's link in the node counts.
        """
        world_size = cluster.world_size
        size = world_size if shard_size is None else shard_size
        if size < 1 or world_size % size:
            raise SpecError(f"shard_size is {size}; it must divide the world size {world_size}")
        ranks = np.arange(world_size)
        per_byte, links = _ring(cluster, ranks[:size])
        average, average_links = _ring(cluster, ranks[::size])
        return cls(
            shard=Meeting.groups(ranks // size),
            replicas=Meeting.groups(ranks % size),
            gather=per_byte,
            average=2 * average / size,
            links=links,
            average_links=average_links,
        )


def _ring(cluster: Cluster, ranks: np.ndarray) -> tuple[float, tuple[str, ...]]:
    if len(ranks) == 1:
        return 0.0, ()
    node = cluster.node_of[ranks]
    share = (len(ranks) - 1) / len(ranks)
    if node[0] == node[-1]:
        return share / cluster.links.intra_node, ("intra",)
    most = int(np.bincount(node - node[0]).max())
    bandwidth = min(cluster.links.intra_node, most * cluster.links.inter_node)
    return share / bandwidth, ("intra", "inter") if most > 1 else ("inter",)


def step_program(work: StepWork, layer_parameters: Floats, cluster: Cluster, options: StepOptions) -> list[Op]:
    """The program of one step.

    Args:
        work: what each rank computes and sends in a layer.
        layer_parameters: (layers,) parameters of each layer.
        cluster: ranks and links.
        options: how it is run.
    """
    return list(_Builder(work, layer_parameters, cluster, options).step())


class _Builder:
    def __init__(self, work: StepWork, layer_parameters: Floats, cluster: Cluster, options: StepOptions) -> None:
        self.work, self.parameters, self.options = work, layer_parameters, options
        self.sharding = Sharding.of(cluster, options.shard_size)
        self.zero = np.zeros(cluster.world_size)
        self.split_links = ("intra", "inter") if work.crosses_nodes else ("intra",)

    def step(self) -> Iterator[Op]:
        layers, checkpointing = range(len(self.parameters)), self.options.checkpointing
        yield Compute("step", self.zero + self.options.step_seconds)
        if self.work.route.any() and not self.options.free_traffic:
            yield self._transfer("route", "route", self.work.route, self.work.route_pairs, ("intra", "inter"))
            yield Wait("route")
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            yield from self._parameters("forward", layer, following)
            yield from self._forward(f"forward {layer}", self.work.phases["forward" if checkpointing else "recompute"])
        for layer, following in zip(layers[::-1], [*layers[-2::-1], None], strict=True):
            yield from self._parameters("backward", layer, following)
            if checkpointing:
                yield from self._forward(f"recompute {layer}", self.work.phases["recompute"])
            yield from self._backward(f"backward {layer}", self.work.phases["backward"])
            yield from self._gradients(layer)
        yield from self._finish()

    def _parameters(self, way: str, layer: int, following: int | None) -> Iterator[Op]:
        """Wait for a layer's parameters and launch the gathering of those that follow."""
        if self.sharding.gather == 0:
            return
        first = layer == (0 if way == "forward" else len(self.parameters) - 1)
        if first or not self.options.prefetch:
            yield self._gather(way, layer)
        yield Wait(f"gather {way} {layer}")
        if self.options.prefetch and following is not None:
            yield self._gather(way, following)

    def _gather(self, way: str, layer: int) -> Launch:
        seconds = self.parameters[layer] * self.options.parameter_bytes * self.sharding.gather
        return self._collective(f"gather {way} {layer}", "parameters", seconds, "gather")

    def _gradients(self, layer: int) -> Iterator[Op]:
        """Reduce a layer's gradients behind what follows; first wait for the reduction before."""
        sharding, size = self.sharding, self.parameters[layer] * self.options.gradient_bytes
        if sharding.gather > 0:
            if layer + 1 < len(self.parameters):
                yield Wait(f"reduce {layer + 1}")
            yield self._collective(f"reduce {layer}", "gradients", size * sharding.gather, "reduce")
        if sharding.average > 0:
            after = f"reduce {layer}" if sharding.gather > 0 else ""
            seconds = self.zero + size * sharding.average + self.options.latency
            yield Launch(
                f"average {layer}", "gradients", seconds, sharding.replicas, "average", sharding.average_links, after
            )

    def _finish(self) -> Iterator[Op]:
        if self.sharding.gather > 0:
            yield Wait("reduce 0")
        if self.sharding.average > 0:
            yield Wait("average 0")
        # The norm of the gradients is reduced over all ranks, so nobody updates before the last one is there.
        everyone = Meeting.groups(np.zeros(len(self.zero), dtype=np.int64))
        yield Launch("norm", "gradients", self.zero + self.options.latency, everyone, "reduce", ())
        yield Wait("norm")
        yield Compute("update", self.zero + self.options.update_seconds)

    def _forward(self, name: str, work: PhaseWork) -> Iterator[Op]:
        yield Compute(f"{name}: token-wise", BEFORE_ATTENTION * work.token)
        yield from self._attention(name, work, (self.work.qkv, self.work.out), FIRST_WHOLE)
        yield Compute(f"{name}: token-wise", (1 - BEFORE_ATTENTION) * work.token)

    def _backward(self, name: str, work: PhaseWork) -> Iterator[Op]:
        yield Compute(f"{name}: token-wise", (1 - BEFORE_ATTENTION) * work.token)
        yield from self._attention(name, work, (self.work.out, self.work.qkv), 1 - FIRST_WHOLE)
        yield Compute(f"{name}: token-wise", BEFORE_ATTENTION * work.token)

    def _attention(self, name: str, work: PhaseWork, traffic: tuple[Floats, Floats], first: float) -> Iterator[Op]:
        if not work.split.any() or self.options.free_traffic:
            yield Compute(f"{name}: attention", work.whole + work.split)
            return
        there, back = (
            self._transfer(f"{name}: {way}", "exchange", seconds, self.work.pairs, self.split_links)
            for way, seconds in zip(("there", "back"), traffic, strict=True)
        )
        split = Compute(f"{name}: split attention", work.split)
        if not self.options.overlap:
            yield from (there, Wait(there.key), Compute(f"{name}: whole attention", work.whole), split, back)
            yield Wait(back.key)
            return
        yield there
        yield Compute(f"{name}: whole attention", first * work.whole)
        yield from (Wait(there.key), split, back)
        yield Compute(f"{name}: whole attention", (1 - first) * work.whole)
        yield Wait(back.key)

    def _transfer(self, key: str, kind: str, seconds: Floats, pairs: Meeting, links: tuple[str, ...]) -> Launch:
        seconds = np.where(seconds > 0, seconds + self.options.latency, 0.0)
        return Launch(key, kind, seconds, pairs, "exchange", links)

    def _collective(self, key: str, kind: str, seconds: float, stream: str) -> Launch:
        return Launch(
            key, kind, self.zero + seconds + self.options.latency, self.sharding.shard, stream, self.sharding.links
        )
