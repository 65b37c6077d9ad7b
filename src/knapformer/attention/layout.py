"""What one rank's model code sees of a placement: its packed tokens, whose and where they are, and attention.

Packed tokens are whole sequences first, then shards of split ones:

    [ seq 2 whole | seq 7 whole | seq 0, tokens 0..99 | seq 5, tokens 40..80 ]
      num_whole_tokens --------^

With a token grid, padding rows follow the whole sequences, so that the rank's rows are a multiple of it:

    [ seq 2 whole | seq 7 whole | padding | seq 0, tokens 0..99 | ... ]

Padding attends to itself alone. It counts as visual tokens of the sequence before it, so every index is valid; what a
model computes for it must not reach the loss (`token_mask`, or `reverse_route`, which drops it).
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from knapformer.attention.cross import Context
from knapformer.attention.keep import attend_kept
from knapformer.attention.kernels import Segments, choose_kernel
from knapformer.attention.split import SplitTables
from knapformer.errors import PlanError
from knapformer.plan import Placement, Sequences
from knapformer.plan.arrays import exclusive_cumsum, ranges


class Layout:
    """One rank's packed tokens. Immutable; index tensors are int64 on the layout's device.

    A plain class on purpose: FSDP2 rebuilds dataclasses among a module's arguments to cast the tensors in them.

    Args:
        seq_lens: tokens here of each packed shard, in packed order [tokens].
        sequence_ids: sequence id of each local sequence, in the order per-sequence vectors are delivered.
        sequence_index: (T,) local sequence of each packed token.
        position: (T,) offset of each packed token in its sequence.
        text_lens: (S,) leading text tokens of each local sequence.
        text_index, image_index: packed positions of text and of visual tokens.
        whole: segments of the whole sequences, the first packed tokens, in two runs: attention of the first hides the
            sending of q, k, v of split sequences, the second the return of their outputs.
        kernel: name of the attention kernel, None for the device's default.
        split_attention: exchanges of this rank's split attention; None if no sequence of its group is split.
        overlap: let traffic of split attention travel behind attention of whole sequences. Changes no result.
        context: makes the context rows of this rank, once they are asked for.
        padding: packed positions of padding rows.
    """

    def __init__(
        self,
        *,
        seq_lens: tuple[int, ...],
        sequence_ids: tuple[int, ...],
        sequence_index: Tensor,
        position: Tensor,
        text_lens: Tensor,
        text_index: Tensor,
        image_index: Tensor,
        whole: tuple[Segments, Segments],
        kernel: str | None = None,
        split_attention: SplitTables | None = None,
        overlap: bool = True,
        context: Callable[[], Context],
        padding: range = range(0),
    ) -> None:
        self.seq_lens = seq_lens
        self.sequence_ids = sequence_ids
        self.sequence_index = sequence_index
        self.position = position
        self.text_lens = text_lens
        self.text_index = text_index
        self.image_index = image_index
        self._whole = whole
        self._kernel = kernel
        self._split_attention = split_attention
        self._overlap = overlap
        self._make_context = context
        self.padding = padding

    @classmethod
    def of(
        cls,
        placement: Placement,
        rank: int,
        device: torch.device,
        *,
        kernel: str | None = None,
        split_attention: SplitTables | None = None,
        overlap: bool = True,
        token_grid: int = 1,
    ) -> Self:
        """The view of `rank`, padded to a multiple of `token_grid` rows."""
        shards = placement.token_shards
        order = placement.packed_order()
        mine = order[shards.rank[order] == rank]
        seq, start, count = shards.seq[mine], shards.start[mine], shards.count[mine]
        opens = np.flatnonzero(np.diff(seq, prepend=-1) != 0)  # shards of one sequence are neighbours
        ids, num_tokens = seq[opens], np.add.reduceat(count, opens) if len(opens) else count
        text_lens, context_lens = placement.sequences.text_length[ids], placement.sequences.context_length[ids]
        whole = count[~placement.split[seq]]
        position, is_token = ranges(start, count), np.array(True)
        first, num_padding = int(whole.sum()), -len(position) % token_grid
        padding = range(first, first + num_padding)
        if num_padding:
            whole, position = np.append(whole, num_padding), np.insert(position, first, [0] * num_padding)
            num_tokens[max(0, len(whole) - 2)] += num_padding
            is_token = np.ones(len(position), dtype=bool)
            is_token[first : first + num_padding] = False
        is_text = (position < np.repeat(text_lens, num_tokens)) & is_token
        cut = len(whole) if split_attention is None else split_attention.num_first

        def tensor(values: np.ndarray) -> Tensor:
            if not len(values):  # NumPy's empty arrays have strides of 0, for which torch.compile would compile anew
                return torch.empty(0, dtype=torch.int64, device=device)
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

        return cls(
            seq_lens=tuple(count.tolist()),
            sequence_ids=tuple(ids.tolist()),
            sequence_index=tensor(np.repeat(np.arange(len(ids)), num_tokens)),
            position=tensor(position),
            text_lens=tensor(text_lens),
            text_index=tensor(np.flatnonzero(is_text)),
            image_index=tensor(np.flatnonzero(~is_text)),
            whole=(Segments.of(whole[:cut], whole[:cut], device), Segments.of(whole[cut:], whole[cut:], device)),
            kernel=kernel,
            split_attention=split_attention,
            overlap=overlap,
            context=lambda: Context(num_tokens, context_lens, device),
            padding=padding,
        )

    @classmethod
    def local(
        cls,
        seq_lens: Sequence[int],
        text_lens: Sequence[int] | None = None,
        context_lens: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
        kernel: str | None = None,
    ) -> Self:
        """A layout of whole sequences for one process: no balancer and no communication."""
        beside = (None if lens is None else [list(lens)] for lens in (text_lens, context_lens))
        sequences = Sequences.from_ranks([list(seq_lens)], *beside)
        placement = Placement.whole(sequences, sequences.home, world_size=1, num_heads=1, planner="local")
        return cls.of(placement, 0, torch.device(device), kernel=kernel)

    @property
    def num_tokens(self) -> int:
        """Packed tokens T of this rank, padding included."""
        return len(self.sequence_index)

    @property
    def num_sequences(self) -> int:
        """Sequences S that have tokens here."""
        return len(self.sequence_ids)

    @property
    def num_whole_tokens(self) -> int:
        """Packed tokens of whole sequences and padding; those of split ones follow."""
        return self._whole[0].num_q + self._whole[1].num_q

    @cached_property
    def token_mask(self) -> Tensor:
        """(T,) bool: False for padding."""
        mask = torch.ones(self.num_tokens, dtype=torch.bool, device=self.sequence_index.device)
        mask[self.padding.start : self.padding.stop] = False
        return mask

    @property
    def cu_seqlens(self) -> Tensor:
        """(number of shards + 1,) int32 offsets of the packed shards; padding counts as a shard."""
        lens = np.asarray(self.seq_lens, dtype=np.int64)
        if self.padding:
            at = np.searchsorted(np.cumsum(lens), self.padding.start, side="right")
            lens = np.insert(lens, at, len(self.padding))
        offsets = np.append(exclusive_cumsum(lens), self.num_tokens).astype(np.int32)
        return torch.from_numpy(offsets).to(self.sequence_index.device)

    @cached_property
    def context(self) -> Context:
        """The context rows of this rank: what `RoutingStep.deliver_context` gives, and `cross_attend` takes."""
        return self._make_context()

    @property
    def num_context_rows(self) -> int:
        """Context rows N on this rank."""
        return self.context.num_rows

    def positions(self, grids_S3: Tensor) -> Tensor:
        """(T, 3) place (frame, row, column) of each packed token in the grid of its sequence, of the grids' dtype.

        A sequence's tokens are its text, at (0, 0, 0), then its grid, columns fastest. So grids are delivered, one row
        per sequence, and no positions are routed.

        Args:
            grids_S3: (S, 3) frames, rows and columns of each local sequence.
        """
        if grids_S3.shape != (self.num_sequences, 3):
            raise PlanError(
                f"positions takes one grid (frames, rows, columns) for each of the {self.num_sequences} sequences that "
                f"have tokens here, got shape {tuple(grids_S3.shape)}; deliver the grids with the step"
            )
        index = self.sequence_index
        # A sequence of text alone may have a grid of zeros.
        _, rows, columns = grids_S3.clamp_min(1).index_select(0, index).unbind(1)
        token = (self.position - self.text_lens.index_select(0, index)).clamp_min(0)
        place = token // (rows * columns), token // columns % rows, token % columns
        return torch.stack(place, dim=1).to(grids_S3.dtype)

    def attend(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, *, scale: float | None = None) -> Tensor:
        """Full attention of every sequence, whichever ranks hold its tokens. Collective where sequences are split.

        Args:
            q_THK, k_THK, v_THK: (T, H, K) of this rank's packed tokens.
            scale: factor on the logits; default 1 / sqrt(K).

        Returns:
            (T, H, K) outputs of this rank's packed tokens.
        """
        if not q_THK.shape == k_THK.shape == v_THK.shape or q_THK.ndim != 3 or len(q_THK) != self.num_tokens:
            raise PlanError(
                f"attend takes q, k and v of one shape (tokens, heads, head_dim) for the {self.num_tokens} packed "
                f"tokens of this rank, got {tuple(q_THK.shape)}, {tuple(k_THK.shape)} and {tuple(v_THK.shape)}"
            )
        return attend_kept(lambda q, k, v: self._attend(q, k, v, scale), q_THK, k_THK, v_THK)

    def _attend(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, scale: float | None) -> Tensor:
        """In the order of `knapformer.plan.timeline`, which also says where the runs of whole sequences are cut."""
        kernel = choose_kernel(self._kernel, q_THK.device, q_THK.dtype, head_dim=q_THK.shape[2])
        first, second = self._whole
        if self._split_attention is None:
            return kernel(q_THK, k_THK, v_THK, first, scale)
        split = self._split_attention.for_heads(q_THK.shape[1])
        # Rows of whole sequences stay: the exchange hands them out, and puts what comes of them before what returns.
        whole = (first, second) if self.num_whole_tokens else ()
        sent = split.send(q_THK, k_THK, v_THK, local_tokens=[segments.num_q for segments in whole])
        arriving = (sent.wait() for _ in split.segments)
        if not whole:
            (o,) = split.attend(kernel, arriving, scale).wait()
            return split.tokens(o)
        (q_1, q_2), (k_1, k_2), (v_1, v_2) = sent.local
        if self._overlap:
            o_1 = kernel(q_1, k_1, v_1, first, scale)
            returned = split.attend(kernel, arriving, scale)
            o_2 = kernel(q_2, k_2, v_2, second, scale)
        else:
            arrived = list(arriving)
            o_1, o_2 = kernel(q_1, k_1, v_1, first, scale), kernel(q_2, k_2, v_2, second, scale)
            returned = split.attend(kernel, arrived, scale)
        (o,) = returned.wait(split.rows(o_1), split.rows(o_2))
        return split.tokens(o)

    def cross_attend(
        self,
        q_THK: Tensor,
        k_NHK: Tensor,
        v_NHK: Tensor,
        *,
        context: Context | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of this rank's tokens to the context of their sequences. Nothing is exchanged.

        Args:
            q_THK: (T, H, K) of this rank's packed tokens.
            k_NHK, v_NHK: (N, H, K) of the context rows here, in the order in which `deliver_context` gives them.
            context: rows cut from the context (`Context.rows`), if k and v are of those; default all of it.
            scale: factor on the logits; default 1 / sqrt(K).

        Returns:
            (T, H, K) outputs of this rank's packed tokens; zeros where a sequence has no context.
        """
        context = context or self.context
        heads = q_THK.shape[1:]
        shapes = [(self.num_tokens, *heads), *[(context.num_rows, *heads)] * 2]
        if q_THK.ndim != 3 or [tuple(x.shape) for x in (q_THK, k_NHK, v_NHK)] != shapes:
            raise PlanError(
                f"cross_attend takes q (tokens, heads, head_dim) for the {self.num_tokens} packed tokens of this rank, "
                f"k and v for its {context.num_rows} context rows, got {tuple(q_THK.shape)}, {tuple(k_NHK.shape)} and "
                f"{tuple(v_NHK.shape)}; pass context_lens to plan_routing and deliver the context with the step"
            )
        kernel = choose_kernel(self._kernel, q_THK.device, q_THK.dtype, head_dim=q_THK.shape[2])
        return kernel(q_THK, k_NHK, v_NHK, context.segments, scale)
