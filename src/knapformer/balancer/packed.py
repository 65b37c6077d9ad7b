"""`PackedBatch`: the tensors of any number of samples, packed, at home or where a step's plan wants them.

    sample = PackedBatch(tokens={"x": x, "target": y}, vectors={"time": time})     one sequence
    batch = PackedBatch.join(samples, like=sample)              this rank's, perhaps none; a collate function
    step = balancer.plan_routing(**batch.lengths)               collective
    here = batch.weighted("sample").route(step)                 collective
    error = (model(here) - here.tokens["target"]).square().mean(dim=1)
    (error * here.tokens["weight"]).sum().backward()            the gradient of the whole batch, under DDP or FSDP

Three kinds of tensors, by what a row stands for: a token, a sequence, or a row of context that the tokens of a sequence
cross-attend to. All travel bit-exact, whatever their dtype. Models written by hand need no more than this.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.attention import Layout
from knapformer.balancer.loss import LossMode, loss_weights, visual_tokens
from knapformer.balancer.step import RoutingStep
from knapformer.errors import DataError

_KINDS = ("tokens", "vectors", "context")
_LENGTHS = ("seq_lens", "text_lens", "context_lens")


class PackedBatch:
    """S sequences with T tokens and N rows of context. A plain class, as `Layout` is; treat it as immutable.

    Args:
        tokens: name -> (T, ...), at least one.
        vectors: name -> (S, ...), one row per sequence: times, guidance, pooled text, grids, ids.
        context: name -> (N, ...).
        seq_lens: tokens of each sequence, text included where it is part of it; default: one sequence.
        text_lens: leading text tokens of each sequence; default none.
        context_lens: context rows of each sequence; default: those there are, for one sequence, else none.

    Raises:
        DataError: for tensors whose rows do not fit the lengths.
    """

    def __init__(
        self,
        tokens: Mapping[str, Tensor],
        vectors: Mapping[str, Tensor] | None = None,
        context: Mapping[str, Tensor] | None = None,
        *,
        seq_lens: Iterable[int] | None = None,
        text_lens: Iterable[int] | None = None,
        context_lens: Iterable[int] | None = None,
    ) -> None:
        self.tokens, self.vectors, self.context = dict(tokens), dict(vectors or {}), dict(context or {})
        self._layout: Layout | None = None
        rows, beside = (max(map(len, kind.values()), default=0) for kind in (self.tokens, self.context))
        self.seq_lens = [rows] if seq_lens is None else list(seq_lens)
        none = [0] * len(self.seq_lens)
        self.text_lens = none if text_lens is None else list(text_lens)
        self.context_lens = ([beside] if len(none) == 1 else none) if context_lens is None else list(context_lens)
        wanted = dict(zip(_KINDS, (sum(self.seq_lens), len(none), sum(self.context_lens)), strict=True))
        for kind, count in wanted.items():
            for name, tensor in getattr(self, kind).items():
                if not tensor.ndim or len(tensor) != count:
                    raise DataError(f"{kind} {name!r} has shape {tuple(tensor.shape)}; its lengths want {count} rows")
        if not self.tokens or not len(none) == len(self.text_lens) == len(self.context_lens):
            raise DataError("a batch needs tensors of tokens, and one text and context length for each sequence")

    @classmethod
    def join(cls, batches: Sequence["PackedBatch"], *, like: "PackedBatch") -> Self:
        """All sequences of the batches, in order. `like` is any batch of this kind: it shapes the join of none.

        `functools.partial(PackedBatch.join, like=sample)` is a collate function.
        """
        names = {kind: set(getattr(like, kind)) for kind in _KINDS}
        for batch in batches:
            if (found := {kind: set(getattr(batch, kind)) for kind in _KINDS}) != names:
                raise DataError(f"batches of different kinds cannot be joined: one has {found}, another {names}")
        tensors = (
            {name: torch.cat([row[:0], *(getattr(b, kind)[name] for b in batches)]) for name, row in of_like.items()}
            for kind, of_like in ((kind, getattr(like, kind)) for kind in _KINDS)
        )
        lens = {name: [n for batch in batches for n in getattr(batch, name)] for name in _LENGTHS}
        return cls(*tensors, **lens)

    @property
    def lengths(self) -> dict[str, Any]:
        """Arguments of `plan_routing`."""
        return {name: getattr(self, name) for name in _LENGTHS}

    @property
    def layout(self) -> Layout:
        """Whose and where the rows here are, and attention. Raises `DataError` before `route` or `local`."""
        if self._layout is None:
            raise DataError("this batch is still at home and has no layout; call batch.route(step) or batch.local()")
        return self._layout

    def visual(self, name: str) -> Tensor:
        """(T_img, ...) the rows of the visual tokens here, in the order of `layout.image_index`, of a routed batch."""
        if name not in self.tokens:
            raise DataError(f"this batch has no tokens {name!r}; it has {', '.join(self.tokens)}")
        return self.tokens[name].index_select(0, self.layout.image_index)

    def replace(self, **tokens: Tensor | None) -> Self:
        """The same batch with these tensors of tokens instead, or besides; without those that are None."""
        kept = {name: tensor for name, tensor in {**self.tokens, **tokens}.items() if tensor is not None}
        return self._like((kept, self.vectors, self.context), self._layout)

    def weighted(
        self, mode: LossMode = "token", *, averaged: bool = True, group: dist.ProcessGroup | None = None
    ) -> Self:
        """The same batch with tokens `weight`, (T,) fp32: what each counts in the loss. Call it before `route`.

        The loss of a rank is then the sum of weight * error over the tokens it was given. Tokens carry loss where
        tokens `pixels` are above 0, or where tokens `loss_mask` are set; in a batch without either, all but text do.
        Collective over `group`.

        Args:
            mode: what counts the same: each "token", each "sample", or each "pixel"; see `knapformer.balancer.loss`.
            averaged: whether the trainer averages gradients over the ranks of `group`, as DDP and FSDP do. The batch's
                loss is the mean of the ranks' losses then; otherwise, where gradients are added, it is their sum.
            group: ranks that hold the batch; default all.

        Raises:
            DataError: the mode is "pixel", and the batch has no tokens `pixels`.
            SpecError: for an unknown mode.
        """
        pixels, mask = self.tokens.get("pixels"), self.tokens.get("loss_mask")
        if pixels is None:
            if mode == "pixel":
                raise DataError("loss mode 'pixel' needs tokens 'pixels': how many pixels each token stands for")
            device = next(iter(self.tokens.values())).device
            pixels = visual_tokens(self.seq_lens, self.text_lens, device) if mask is None else mask
        weight = loss_weights(self.seq_lens, pixels, mode, group=group)
        ranks = dist.get_world_size(group) if averaged and dist.is_initialized() else 1
        return self.replace(weight=weight * ranks)

    def to(self, device: torch.device | str) -> Self:
        """The same batch on a device."""
        kinds = (self.tokens, self.vectors, self.context)
        return self._like(
            [{n: t.to(device, non_blocking=True) for n, t in kind.items()} for kind in kinds], self._layout
        )

    def route(self, step: RoutingStep) -> Self:
        """The rows that the step's plan wants on this rank, with their layout. Collective."""
        first, *others = self.tokens.values()
        _, moved, features = step.route(first, others)
        vectors = step.deliver(*self.vectors.values()) if self.vectors else ()
        context = step.deliver_context(*self.context.values()) if self.context else ()
        kinds = (self.tokens, self.vectors, self.context)
        rows = ((moved, *(features or [])), vectors, context)
        return self._like([dict(zip(k, r, strict=True)) for k, r in zip(kinds, rows, strict=True)], step.layout)

    def local(self, *, kernel: str | None = None) -> Self:
        """The same rows with a layout of their own, for one process: no balancer and no communication."""
        device = next(iter(self.tokens.values())).device
        layout = Layout.local(self.seq_lens, self.text_lens, self.context_lens, device=device, kernel=kernel)
        return self._like((self.tokens, self.vectors, self.context), layout)

    def _like(self, kinds: Sequence[dict[str, Tensor]], layout: Layout | None) -> Self:
        """Other tensors of the same sequences; the lengths stay those of whole sequences at home."""
        other = object.__new__(type(self))
        other.tokens, other.vectors, other.context = kinds
        other._layout = layout
        for name in _LENGTHS:
            setattr(other, name, getattr(self, name))
        return other
