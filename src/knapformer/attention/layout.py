"""What one rank's model code sees of a placement: its packed tokens, whose they are, and `attend`.

Packed tokens are whole sequences first, then shards of split ones:

    [ seq 2 whole | seq 7 whole | seq 0, tokens 0..99 | seq 5, tokens 40..80 ]
      num_whole_tokens --------^
"""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from knapformer.attention.kernels import Segments, choose_kernel
from knapformer.attention.split import SplitAttention
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
        text_index, image_index: packed positions of text and of visual tokens.
        whole: segments of the whole sequences, the first packed tokens, in two parts: attention of the first hides the
            sending of q, k, v of split sequences, the second the return of their outputs.
        kernel: name of the attention kernel, None for the device's default.
        split_attention: number of heads -> this rank's split attention; None if no sequence of its group is split.
        overlap: let traffic of split attention travel behind attention of whole sequences. Changes no result.
    """

    def __init__(
        self,
        *,
        seq_lens: tuple[int, ...],
        sequence_ids: tuple[int, ...],
        sequence_index: Tensor,
        position: Tensor,
        text_index: Tensor,
        image_index: Tensor,
        whole: tuple[Segments, Segments],
        kernel: str | None = None,
        split_attention: Callable[[int], SplitAttention] | None = None,
        overlap: bool = True,
    ) -> None:
        self.seq_lens = seq_lens
        self.sequence_ids = sequence_ids
        self.sequence_index = sequence_index
        self.position = position
        self.text_index = text_index
        self.image_index = image_index
        self._whole = whole
        self._kernel = kernel
        self._split_attention = split_attention
        self._overlap = overlap

    @classmethod
    def of(
        cls,
        placement: Placement,
        rank: int,
        device: torch.device,
        *,
        kernel: str | None = None,
        split_attention: Callable[[int], SplitAttention] | None = None,
        overlap: bool = True,
    ) -> Self:
        """The view of `rank`."""
        shards = placement.token_shards
        order = placement.packed_order()
        mine = order[shards.rank[order] == rank]
        seq, start, count = shards.seq[mine], shards.start[mine], shards.count[mine]
        local = np.cumsum(np.diff(seq, prepend=-1) != 0) - 1
        position = ranges(start, count)
        is_text = position < np.repeat(placement.sequences.text_length[seq], count)
        whole = count[~placement.split[seq]]
        area = np.cumsum(whole * whole)
        # q, k and v are three times the traffic of the outputs, so they get three quarters to hide behind.
        cut = int(np.searchsorted(area, area[-1] * 3 // 4)) + 1 if split_attention and len(whole) else len(whole)

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

        return cls(
            seq_lens=tuple(count.tolist()),
            sequence_ids=tuple(dict.fromkeys(seq.tolist())),
            sequence_index=tensor(np.repeat(local, count)),
            position=tensor(position),
            text_index=tensor(np.flatnonzero(is_text)),
            image_index=tensor(np.flatnonzero(~is_text)),
            whole=(Segments.of(whole[:cut], whole[:cut], device), Segments.of(whole[cut:], whole[cut:], device)),
            kernel=kernel,
            split_attention=split_attention,
            overlap=overlap,
        )

    @classmethod
    def local(
        cls,
        seq_lens: Sequence[int],
        text_lens: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
        kernel: str | None = None,
    ) -> Self:
        """A layout of whole sequences for one process: no balancer and no communication."""
        sequences = Sequences.from_ranks([list(seq_lens)], None if text_lens is None else [list(text_lens)])
        placement = Placement.whole(sequences, sequences.home, world_size=1, num_heads=1, planner="local")
        return cls.of(placement, 0, torch.device(device), kernel=kernel)

    @property
    def num_tokens(self) -> int:
        """Packed tokens T of this rank."""
        return len(self.sequence_index)

    @property
    def num_sequences(self) -> int:
        """Sequences S that have tokens here."""
        return len(self.sequence_ids)

    @property
    def num_whole_tokens(self) -> int:
        """Packed tokens of whole sequences; those of split ones follow."""
        return self._whole[0].num_q + self._whole[1].num_q

    @property
    def cu_seqlens(self) -> Tensor:
        """(number of shards + 1,) int32 offsets of the packed shards."""
        lens = np.asarray(self.seq_lens, dtype=np.int64)
        offsets = np.append(exclusive_cumsum(lens), self.num_tokens).astype(np.int32)
        return torch.from_numpy(offsets).to(self.sequence_index.device)

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
        kernel = choose_kernel(self._kernel, q_THK.device, q_THK.dtype, head_dim=q_THK.shape[2])
        first, second = self._whole
        if self._split_attention is None:
            return kernel(q_THK, k_THK, v_THK, first, scale)
        split = self._split_attention(q_THK.shape[1])
        if self.num_whole_tokens == 0:
            q, k, v = split.send(q_THK, k_THK, v_THK).wait()
            (o,) = split.give_back(kernel(q, k, v, split.segments, scale)).wait()
            return split.tokens(o)
        rows = first.num_q, second.num_q, self.num_tokens - self.num_whole_tokens
        # One split each: slices would fill and add up whole-size gradients.
        (q_1, q_2, q_s), (k_1, k_2, k_s), (v_1, v_2, v_s) = (x.split(rows) for x in (q_THK, k_THK, v_THK))
        sent = split.send(q_s, k_s, v_s)
        received = None if self._overlap else sent.wait()
        o_1 = kernel(q_1, k_1, v_1, first, scale)
        q, k, v = received or sent.wait()
        returned = split.give_back(kernel(q, k, v, split.segments, scale))
        outputs = None if self._overlap else returned.wait()
        o_2 = kernel(q_2, k_2, v_2, second, scale)
        (o,) = outputs or returned.wait()
        return torch.cat([o_1, o_2, split.tokens(o)])
