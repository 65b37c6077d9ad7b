"""The surface that code written for the original KnapFormer uses, on top of steps; nothing else depends on it.

    balancer.plan_routing(seq_lens, token_dim)
    chunk_lens, x, features = balancer.route(x, features)
    full_seq_lens, q, k, v = balancer.pre_attn(q, k, v)    (tokens here, H, d) -> (full sequences, H / g, d)
    chunk_lens, o = balancer.post_attn(o)                  and back
    seq_lens, y, features = balancer.reverse_route(y, features)

All calls act on the latest step; inside a backward pass, on the step of that graph. `pre_attn` and `post_attn` exist
for bag topologies; new code calls `layout.attend` or `knapformer.attend`: any placement, any number of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from knapformer.attention.current import current_step, mark
from knapformer.comm import RankGroup
from knapformer.errors import SpecError
from knapformer.plan.arrays import exclusive_cumsum
from knapformer.plan.summary import summarize

if TYPE_CHECKING:
    from knapformer.attention import SplitAttention
    from knapformer.balancer.rule import PlanRule
    from knapformer.balancer.step import RoutingStep


class OriginalSurface:
    """Mixin of `SequenceBalancer`; see the module's docstring."""

    _group: RankGroup
    _rule: "PlanRule"
    _latest: "RoutingStep | None"

    @property
    def this_gpu_id(self) -> int:
        """Global rank of this process."""
        return self._group.ranks[self._group.rank]

    @property
    def balance_process_group(self) -> Any:
        """The torch process group of this rank's balancing group."""
        return self._group.handle

    @property
    def gpu_id2seq_ids(self) -> dict[int, list[int]]:
        """Global rank -> ids of the sequences at home there, of the latest step."""
        s = self._step().placement.sequences
        return {gpu: s.of_rank(rank).tolist() for rank, gpu in enumerate(self._group.ranks)}

    @property
    def gpu_id2seq_lens(self) -> dict[int, list[int]]:
        """Global rank -> lengths of the sequences at home there, of the latest step."""
        s = self._step().placement.sequences
        return {gpu: s.length[s.of_rank(rank)].tolist() for rank, gpu in enumerate(self._group.ranks)}

    def get_routing_plan_summary(self) -> dict[str, Any]:
        """The latest step's placement as plain dictionaries; see `knapformer.plan.summary`."""
        step = self._step()
        summary = summarize(step.placement, step.cost, self._group.ranks)
        if self._rule.spec is not None:
            bags = [[self._group.ranks[r] for r in bag] for bag in self._rule.spec.bags()]
            summary["bag_id2gpu_ids"] = dict(enumerate(bags))
            summary["gpu_id2bag_id"] = {gpu: bag for bag, gpus in enumerate(bags) for gpu in gpus}
        return summary

    def route(
        self, x: Tensor, features: Sequence[Tensor] | None = None
    ) -> tuple[list[int], Tensor, list[Tensor] | None]:
        """`RoutingStep.route` of the latest step."""
        return self._step().route(x, features)

    def reverse_route(
        self, x: Tensor, features: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        """`RoutingStep.reverse_route` of the latest step; lengths come as an int32 tensor, as in the original."""
        seq_lens, x, features = self._step().reverse_route(x, features)
        return torch.tensor(seq_lens, dtype=torch.int32, device=x.device), x, features

    def pre_attn(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gather the bag's full sequences with this rank's share of the heads. Collective over the bag.

        Returns:
            int32 lengths of the bag's sequences, and q, k, v of (sum of those lengths, H / g, K).

        Raises:
            SpecError: on every rank, without a bag topology or where a bag size does not divide the heads.
        """
        step, num_heads = self._step(), q_THK.shape[1]
        bag_heads = num_heads // self._bag_size()
        bag = self._bag(step, num_heads)
        if bag is None:  # a bag of one rank, or a bag without sequences
            q, k, v = (x[:, :bag_heads] for x in (q_THK, k_THK, v_THK))
            return _int32(step.layout.seq_lens, q), mark(q, step), mark(k, step), mark(v, step)
        q, k, v = (bag.by_token(x) for x in bag.split.send(q_THK, k_THK, v_THK).wait())
        return bag.full_lens, mark(q, step), mark(k, step), mark(v, step)

    def post_attn(self, o_LhK: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pre_attn` for attention outputs: (full sequences, H / g, K) -> (tokens here, H, K)."""
        step, bag_size = self._step(), self._bag_size()
        bag = self._bag(step, o_LhK.shape[1] * bag_size)
        if bag is None:
            o_THK = o_LhK.repeat(1, bag_size, 1) if bag_size > 1 else o_LhK
        else:
            o_THK = bag.split.tokens(*bag.split.give_back(bag.by_head(o_LhK)).wait())
        return _int32(step.layout.seq_lens, o_THK), mark(o_THK, step)

    def _bag_size(self) -> int:
        """Ranks of this rank's bag."""
        if self._rule.spec is None:
            raise SpecError(
                f"pre_attn and post_attn need a bag topology, this balancer plans with '{self._rule.planner.name}'; "
                "call layout.attend or knapformer.attend instead, which take any placement"
            )
        return next(len(bag) for bag in self._rule.spec.bags() if self._group.rank in bag)

    def _bag(self, step: "RoutingStep", num_heads: int) -> "BagAttention | None":
        spec = self._rule.spec
        for size, _ in spec.terms if spec else ():
            if num_heads % size:
                raise SpecError(
                    f"pre_attn and post_attn give each rank of a bag the same number of heads, but {num_heads} heads "
                    f"do not divide by the bag size {size} of '{spec}'; call layout.attend instead"
                )
        if step.token_grid > 1:
            raise SpecError(
                f"pre_attn and post_attn know no padding, but token_grid is {step.token_grid}; leave it at 1, or call "
                "layout.attend instead"
            )
        made = _made.setdefault(step, {})
        if num_heads not in made:
            tables, bag_heads = step.split_attention, num_heads // self._bag_size()
            made[num_heads] = (
                None if tables is None else BagAttention.of(tables.for_heads(num_heads, num_stages=1), bag_heads)
            )
        return made[num_heads]

    def _step(self) -> "RoutingStep":
        return current_step(self._latest)


def _int32(lengths: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=like.device)


@dataclass(frozen=True, slots=True, eq=False)
class BagAttention:
    """Split attention of a bag, token by token as callers of the original want it.

    Rows arrive segment by segment: a sequence's head groups one after another, each with all its tokens.

    Attributes:
        split: the exchanges.
        bag_heads: heads of each rank of the bag, H / g.
        full_lens: int32 lengths of the bag's sequences.
        token_order: the row that stands at each (token, head group); None where each sequence has one head group.
        row_order: its inverse.
    """

    split: "SplitAttention"
    bag_heads: int
    full_lens: Tensor
    token_order: Tensor | None
    row_order: Tensor | None

    @classmethod
    def of(cls, split: "SplitAttention", bag_heads: int) -> Self:
        segments, groups = split.segments[0], bag_heads // split.head_group
        lens = segments.q_lens.reshape(-1, groups)[:, 0]
        full_lens = _int32(lens.tolist(), segments.cu_q)
        if groups == 1:
            return cls(split, bag_heads, full_lens, None, None)
        starts = exclusive_cumsum(lens * groups)
        rows = [
            start + np.arange(length * groups).reshape(groups, length).T.ravel()
            for start, length in zip(starts.tolist(), lens.tolist(), strict=True)
        ]
        order = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
        token_order, row_order = (
            torch.from_numpy(each).to(segments.cu_q.device) for each in (order, np.argsort(order))
        )
        return cls(split, bag_heads, full_lens, token_order, row_order)

    def by_token(self, rows: Tensor) -> Tensor:
        """(rows, c, K) as they arrive -> (full sequences, H / g, K)."""
        rows = rows if self.token_order is None else rows.index_select(0, self.token_order)
        return rows.reshape(-1, self.bag_heads, rows.shape[2])

    def by_head(self, x_LhK: Tensor) -> Tensor:
        """The inverse of `by_token`."""
        rows = x_LhK.reshape(-1, self.split.head_group, x_LhK.shape[2])
        return rows if self.row_order is None else rows.index_select(0, self.row_order)


_made: WeakKeyDictionary["RoutingStep", dict[int, BagAttention | None]] = WeakKeyDictionary()
"""Of each step, for each number of heads that was asked for: kept as long as the step is."""
