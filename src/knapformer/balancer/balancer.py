"""`SequenceBalancer`: gathers lengths, plans on every rank alike, and makes sure that all ranks made the same plan.

    lengths --gather--> Sequences --planner--> Placement --digest compared--> RoutingStep

Settings are compared across ranks before anything is created from them, lengths carry a status, and plans are compared
by digest: a rank that differs makes every rank raise, none hangs.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from knapformer.balancer.batches import BatchT, Source, default_lengths
from knapformer.balancer.compat import OriginalSurface
from knapformer.balancer.outcome import Outcome
from knapformer.balancer.prefetch import Prefetch, PrefetchChannel
from knapformer.balancer.rule import PlanRule, read_cost
from knapformer.balancer.step import RoutingStep
from knapformer.balancer.subgroups import BalancingGroup
from knapformer.comm import LengthGather, RankGroup, agree, gather_integers
from knapformer.comm.gather import stable_digest
from knapformer.errors import CalibrationError, SpecError
from knapformer.plan import BagSpec, Cluster, CostModel, Limits, Planner, Sequences
from knapformer.plan.planners import BagsPlanner


class SequenceBalancer(OriginalSurface):
    """Balances each training step over the ranks of a process group.

    Args:
        bag_specs: "auto" for the default planner, or a bag spec such as "g1n8+g2n4" for the paper's bags. A spec that
            covers fewer ranks than the group repeats: each balancing group is balanced on its own.
        gamma: time of an attention FLOP over that of a token-wise FLOP, where no `cost` is given. Default 1.0 with
            bags, as published, and 1.25 otherwise.
        cost: prices, or a measured profile (a file, or the name of one that ships with the library); default from
            `gamma` and the token width given to `plan_routing`.
        cluster: nodes and links of the group's ranks; default one node.
        group: process group to balance over; default the whole world. Without torch.distributed: this process alone.
        planner: a planner, or its name, instead of the one `bag_specs` stands for.
        limits: hard limits such as `max_tokens_per_rank`.
        kernel: attention kernel by name; default by device.
        device: where routed tensors live; default that of the group's backend.
        verify: compare plans and routed tensors across ranks, one small collective each, so that a mistake on one rank
            raises on all. Turn off only where every microsecond counts.
        overlap: let traffic of split attention travel behind attention of whole sequences. Changes no result.
        token_grid: pad every rank's packed tokens to a multiple of this, for hardware or compilers that want few
            different sizes; see `Layout.padding`. A limit of tokens per rank holds with padding.

    Construction is collective over the world.

    Raises:
        RankMismatchError: on every rank, if ranks pass different arguments.
        SpecError: on every rank, for a bag spec that cannot be read or does not divide the group.
        CalibrationError: on every rank, for a profile that cannot be read.
    """

    def __init__(
        self,
        bag_specs: str | BagSpec = "auto",
        gamma: float | None = None,
        *,
        cost: CostModel | str | os.PathLike[str] | None = None,
        cluster: Cluster | None = None,
        group: Any = None,
        planner: Planner | str | None = None,
        limits: Limits | None = None,
        kernel: str | None = None,
        device: torch.device | str | None = None,
        verify: bool = True,
        overlap: bool = True,
        token_grid: int = 1,
    ) -> None:
        base = RankGroup.of(group)
        prices = read_cost(cost)
        settings: dict[str, object] = {
            "the bag spec": bag_specs,
            "gamma": gamma,
            "the cost model": prices,
            "the cluster": cluster,
            "the planner": planner if isinstance(planner, str) or planner is None else planner.name,
            "the planner's bag spec": planner.spec if isinstance(planner, BagsPlanner) else None,
            "the limits": limits,
            "the verify flag": verify,
            "the overlap flag": overlap,
            "the token grid": token_grid,
        }
        digests = [stable_digest(value) for value in settings.values()]
        agree(base, digests, list(settings), "construct SequenceBalancer with the same arguments on every rank")
        if isinstance(prices, CalibrationError):  # on every rank, as they agree
            raise prices

        self._rule = PlanRule.of(bag_specs, gamma, cost=prices, planner=planner, limits=limits, token_grid=token_grid)
        self._kernel, self._verify, self._overlap, self._token_grid = kernel, verify, overlap, token_grid
        if cluster is not None and cluster.world_size != base.size:
            raise SpecError(
                f"the cluster has {cluster.world_size} ranks, the process group {base.size}; describe the group's ranks"
            )
        self._base = base
        self._balancing = BalancingGroup.of(base, cluster or Cluster(base.size), self._rule.spec)
        self._group, self._cluster = self._balancing.group, self._balancing.cluster
        self._device = torch.device(device) if device is not None else self._group.device
        self._gather = LengthGather(self._group)
        self._channel = PrefetchChannel(base)
        self._latest: RoutingStep | None = None

    def plan_routing(
        self,
        seq_lens: Iterable[int] | torch.Tensor,
        token_dim: int | None = None,
        *,
        text_lens: Iterable[int] | torch.Tensor | None = None,
        context_lens: Iterable[int] | torch.Tensor | None = None,
    ) -> RoutingStep:
        """Plan one step. Collective over the balancing group.

        Args:
            seq_lens: tokens of each of this rank's sequences, text included where it is part of them; may be empty.
            token_dim: width of a token, for prices from shapes; not needed with a `cost`.
            text_lens: leading text tokens of each sequence, for models with separate text weights; default none.
            context_lens: rows beside each sequence that its tokens cross-attend to, such as text; default none.

        Returns:
            The step; the balancer's own `route`, `reverse_route`, `pre_attn`, `post_attn` act on the latest one.

        Raises:
            PlanError: on every rank, for lengths or limits that cannot be planned.
            RankMismatchError: on every rank, if ranks differ in arguments, number of calls, or the plan they made.
        """
        start, group = time.perf_counter(), self._group
        sequences = self._gather(seq_lens, text_lens, context_lens, {"token_dim": token_dim})
        outcome = Outcome.of(lambda: self._make_step(sequences, token_dim))
        mine = np.array(outcome.verdict, dtype=np.int64)
        if self._verify:
            step = outcome.settle(gather_integers(group, mine), group.ranks, group.size)
        else:
            step = outcome.settle(mine[None], (group.ranks[group.rank],), 1)
        self._latest = replace(step, plan_seconds=time.perf_counter() - start)
        return self._latest

    def prefetch(
        self,
        loader: Iterable[BatchT],
        *,
        lengths: Callable[[BatchT], Any] | None = None,
        token_dim: int | None = None,
        empty: Callable[[], BatchT] | None = None,
    ) -> Prefetch[BatchT]:
        """Load and plan each batch of `loader` in a thread, while the steps before it run. Collective over the group.

            for batch, step in balancer.prefetch(loader):
                _, x, _ = step.route(batch.x)
                ...

        Batches come in order, each with the step that `plan_routing` would have returned, its index tensors made. All
        ranks must take equally many. The loader is iterated in the thread, up to three batches ahead, so what it says
        of its position is ahead too: for checkpoints count the batches taken. Where steps run on an accelerator, let it
        make batches on the CPU and move them when they are taken. One iterator at a time may be open on a balancer.
        Leaving the loop closes it; see `Prefetch.close`.

        Args:
            loader: makes this rank's batches.
            lengths: seq_lens of a batch, or the tuple (seq_lens, text_lens) or (seq_lens, text_lens, context_lens), as
                for `plan_routing`; default the batch's attributes of these names, the last two if it has them.
            token_dim: as for `plan_routing`.
            empty: makes a batch without sequences, for ranks whose loader has ended while others have batches. Without
                it, all ranks stop where the first loader ends, with a warning.

        Raises:
            SpecError, RankMismatchError: on every rank, for arguments that make no sense or differ between ranks.

        Taking a batch raises what went wrong with it, after all batches before it were delivered: on the rank whose
        loader or `lengths` failed, its own exception, elsewhere `RankMismatchError`; `PlanError` on every rank for
        lengths that cannot be planned; `RankMismatchError` where another rank has closed its iterator.
        """

        def plan(sequences: Sequences) -> RoutingStep:
            step = self._make_step(sequences, token_dim)
            return step.prepare(step.cost.num_heads)

        def deliver(step: RoutingStep) -> None:
            self._latest = step

        first = self._base.ranks.index(self._group.ranks[0])
        return self._channel.open(
            Source(loader, lengths or default_lengths, empty),
            settings={"token_dim": token_dim},
            members=slice(first, first + self._group.size),
            plan=plan,
            deliver=deliver,
            device=self._device,
        )

    def _make_step(self, sequences: Sequences, token_dim: int | None) -> RoutingStep:
        """This rank's view of the plan; not collective."""
        start = time.perf_counter()
        placement, cost = self._rule.place(sequences, self._cluster, token_dim)
        attention_ranks, attention_group = self._balancing.sharing_attention(placement)
        return RoutingStep(
            placement=placement,
            cluster=self._cluster,
            cost=cost,
            group=self._group,
            attention_ranks=attention_ranks,
            attention_group=attention_group,
            device=self._device,
            kernel=self._kernel,
            verify=self._verify,
            overlap=self._overlap,
            token_grid=self._token_grid,
            plan_seconds=time.perf_counter() - start,
        )

    def cost(self, token_dim: int | None = None) -> CostModel:
        """The prices steps are planned with."""
        return self._rule.cost(token_dim)

    @property
    def cluster(self) -> Cluster:
        """The ranks of the balancing group."""
        return self._cluster

    def set_speeds(self, speeds: Sequence[int]) -> None:
        """Plan from now on for ranks of these speeds [per mille of nominal], one for each rank of the process group.

        Every rank must call it with the same speeds, between the same steps, and while no prefetch iterator is open.
        """
        if len(speeds) != self._base.size:
            raise SpecError(f"{len(speeds)} speeds for {self._base.size} ranks; give one per rank of the process group")
        first = self._base.ranks.index(self._group.ranks[0])
        self._cluster = replace(self._cluster, speeds=tuple(speeds[first : first + self._group.size]))

    @property
    def latest(self) -> RoutingStep | None:
        """The step that `plan_routing` returned last, or a prefetch iterator delivered."""
        return self._latest
