"""The training loop: load, collate, plan, route, forward, backward, update; measure, record, save.

`fit` loads and plans the next batch in a thread while a step runs; `step` trains on a batch that it is given.

One step takes the same global batch and gives the same loss and gradients on any number of ranks and with any planner.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from knapformer.balancer import PackedBatch, RoutingStep, SequenceBalancer
from knapformer.comm import RankGroup, gather_integers
from knapformer.data import GroupSampler, Manifest
from knapformer.data.media import load_item
from knapformer.data.text import VOCAB_SIZE
from knapformer.errors import KnapFormerWarning
from knapformer.models import CrossDiT, CrossDiTConfig, MMDiT, PackedModel
from knapformer.plan import Cluster, CostModel, Limits
from knapformer.train.batch import collate
from knapformer.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from knapformer.train.config import TrainConfig
from knapformer.train.meters import StepMeter
from knapformer.train.parallel import make_mesh, shard_model
from knapformer.train.step import flow_loss


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step measured; the same on every rank.

    Attributes:
        loss: of the whole batch.
        seconds: wall time of the slowest rank, from a common start, before the batch is planned or taken, to the end of
            the update [s].
        busy_seconds: per rank, time its main thread computed instead of waiting; empty where that is not measured.
        tokens: of the whole batch.
        rank_tokens: that each rank held after routing.
        modelled_imbalance: max/mean over ranks of modelled load.
        split_traffic, routed_fraction: of the placement.
        plan_seconds: gathering lengths, planning and comparing plans, of the slowest rank, wherever it was done [s].
        wait_seconds: the time in `seconds` spent waiting for a batch that is loaded and planned ahead, of the slowest
            rank [s].
    """

    loss: float
    seconds: float
    busy_seconds: list[float]
    tokens: int
    rank_tokens: list[int]
    modelled_imbalance: float
    split_traffic: float
    routed_fraction: float
    plan_seconds: float
    wait_seconds: float

    @property
    def measured_imbalance(self) -> float | None:
        """max/mean over ranks of busy time."""
        busy = self.busy_seconds
        return max(busy) * len(busy) / sum(busy) if busy else None

    def to_json(self) -> dict[str, Any]:
        """Plain data for a run record."""
        return {n: getattr(self, n) for n in (*self.__slots__, "measured_imbalance")}


class Trainer:
    """A model, its optimiser, its data and its balancer on this rank. Construction is collective.

    Args:
        config: the run.
        manifest: the data set.
        device: where the model lives.
    """

    def __init__(self, config: TrainConfig, manifest: Manifest, device: torch.device) -> None:
        self.config, self.manifest, self.device = config, manifest, device
        self.sampler = GroupSampler(config.loader_groups(), manifest.ids_by_source(), seed=config.train.seed)
        shape = config.shape()
        self.model: PackedModel = shard_model(
            lambda: CrossDiT(shape) if isinstance(shape, CrossDiTConfig) else MMDiT(shape),
            make_mesh(device.type, config.train.replicas),
            seed=config.train.seed,
            checkpointing=config.train.checkpointing,
            compile=config.train.compile,
            precision=config.train.precision,
        )
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        self.balancer = make_balancer(config, device)
        generator = torch.Generator().manual_seed(config.train.seed)
        self.text_table = torch.randn(VOCAB_SIZE, config.model.text_channels, generator=generator).to(device)
        self._world = RankGroup.of()
        self._meter = StepMeter(self._world.size)
        if config.balancer.recalibrate and device.type != "cpu":
            warnings.warn(
                "recalibrate is ignored: busy time of a rank is measured on CPU only", KnapFormerWarning, stacklevel=2
            )

    def load(self, step: int) -> PackedBatch:
        """What this rank loads for a step, collated and on the CPU."""
        ids = self.sampler.local(step, self._world.rank, self._world.size)
        return collate(
            [load_item(self.manifest[sample], self.config.media_options()) for sample in ids],
            step=step,
            seed=self.config.train.seed,
            channels=self.config.shape().in_channels,
            pooled_channels=self.config.model.pooled_channels,
            max_text=self.config.data.max_text,
            joint=self.config.model.kind != "cross",
            options=self.config.media_options(),
            clean_frames=self.config.data.clean_frames,
        )

    def step(self, batch: PackedBatch) -> StepReport:
        """Plan a batch and train on it. Collective."""
        return self._run(lambda: (batch, self.balancer.plan_routing(**batch.lengths)))

    def fit(self) -> Iterator[tuple[int, StepReport]]:
        """Train to the configured number of steps, resuming and saving as configured; yields each step's report."""
        run = self.config.train
        if run.checkpoints and (found := latest_checkpoint(run.checkpoints)):
            self.restore(found)
        every = self.config.balancer.recalibrate or run.steps
        while self.sampler.step < run.steps:
            yield from self._fit_until(min(run.steps, self.sampler.step + every))
            if self.config.balancer.recalibrate:
                self.recalibrate()

    def _fit_until(self, stop: int) -> Iterator[tuple[int, StepReport]]:
        """Train to step `stop`, saving as configured."""
        run = self.config.train
        # The sampler's position is what is saved, so it counts steps taken, not batches loaded ahead.
        loader = map(self.load, range(self.sampler.step, stop))
        with self.balancer.prefetch(loader) as planned:
            while self.sampler.step < stop:
                report = self._run(lambda: next(planned), lambda: planned.wait_seconds)
                step = self.sampler.advance()
                if run.checkpoints and (
                    self.sampler.step == run.steps or (run.save_every and self.sampler.step % run.save_every == 0)
                ):
                    self.save(run.checkpoints)
                yield step, report

    def _run(
        self, take: Callable[[], tuple[PackedBatch, RoutingStep]], waited: Callable[[], float] = float
    ) -> StepReport:
        """Train on the batch that `take` gives with its step, having `waited` for it [s]. Collective."""
        config = self.config
        dist.barrier()
        self._synchronize()
        start, busy_start = time.perf_counter(), time.thread_time()
        batch, step = take()
        batch = batch.to(self.device)
        loss = flow_loss(self.model, step, batch, self.text_table, mode=config.train.loss)
        loss.backward()
        if config.optim.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronize()
        elapsed, busy = time.perf_counter() - start, time.thread_time() - busy_start
        total = loss.detach().double()
        dist.all_reduce(total)
        rank, times = step.group.rank, np.array([elapsed, busy, step.plan_seconds, waited()])
        held = [sum(batch.seq_lens), int(step.placement.tokens()[rank]), int(step.placement.area()[rank])]
        measured = gather_integers(self._world, np.append((times * 1e9).astype(np.int64), held))
        self._meter.add(tokens=measured[:, 5], area=measured[:, 6], busy=measured[:, 1])
        seconds, metrics = measured[:, :4] / 1e9, step.metrics
        return StepReport(
            loss=float(total) / self._world.size,
            seconds=float(seconds[:, 0].max()),
            busy_seconds=seconds[:, 1].tolist() if self.device.type == "cpu" else [],
            tokens=int(measured[:, 4].sum()),
            rank_tokens=measured[:, 5].tolist(),
            modelled_imbalance=metrics.time_imbalance,
            split_traffic=metrics.split_traffic,
            routed_fraction=metrics.routed_fraction,
            plan_seconds=float(seconds[:, 2].max()),
            wait_seconds=float(seconds[:, 3].max()),
        )

    def recalibrate(self) -> None:
        """Plan for the ranks' speeds as measured in the last steps; warn of a straggler and of prices that drifted.

        Collective; not while a batch is planned ahead.
        """
        found = self._meter.estimate(self.balancer.cost())
        mine = found.speeds if found else [0] * self._world.size
        speeds = gather_integers(self._world, np.array(mine, dtype=np.int64))[0]  # of one rank: CPUs round differently
        if speeds.all():
            self.balancer.set_speeds(speeds.tolist())
        if found:
            self._meter.warn(found)

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint. Collective."""
        return save_checkpoint(folder, self.model, self.optimizer, self.sampler.state_dict())

    def restore(self, path: str | Path) -> None:
        """Go on from a checkpoint, written on any number of ranks. Collective."""
        self.sampler.load_state_dict(load_checkpoint(path, self.model, self.optimizer))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_balancer(config: TrainConfig, device: torch.device) -> SequenceBalancer:
    """The balancer a configuration describes. Collective."""
    balancer, shape = config.balancer, config.shape().cost_shape()
    cost: CostModel | str = balancer.profile or CostModel.from_shapes(
        shape.d_model,
        shape.num_heads,
        linear_coeff=shape.linear_coeff,
        attention_coeff=shape.attention_coeff,
        gamma=balancer.gamma,
    )
    return SequenceBalancer(
        balancer.topology or "auto",
        cost=cost,
        planner=balancer.planner,
        cluster=Cluster(dist.get_world_size(), balancer.ranks_per_node),
        limits=Limits(balancer.max_tokens_per_rank),
        kernel=balancer.kernel,
        token_grid=balancer.token_grid,
        device=device,
    )
