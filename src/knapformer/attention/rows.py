"""Operations on packed rows that depend on whose rows they are: modulation by sequence, text and image streams.

Models and adapters share them. Modulation vectors have a row per sequence, and each token has an index into those rows,
so nothing of size (T, 6 D) ever exists. `modulate` and `add_gated` are the seam for a fused kernel: replace their body,
and every model has it.

Legend: T tokens on this rank (T_txt text, T_img visual), S rows of modulation vectors, D width.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Tokens modulated at a time: few enough for a processor's cache, enough to keep an accelerator busy.
BLOCK_ROWS = 256
LAUNCH_ROWS = 16_384


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of angles, of some norms and of sums over many tokens: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def modulate(x_TD: Tensor, shift_SD: Tensor | None, scale_SD: Tensor, index_T: Tensor) -> Tensor:
    """x * (1 + scale) + shift, with the shift and scale of each token's own sequence.

    Args:
        x_TD: normalised tokens (T, D).
        shift_SD: one row per sequence (S, D); None for no shift.
        scale_SD: one row per sequence (S, D).
        index_T: (T,) row of each token's sequence, int64.
    """
    return _scale(x_TD, 1 + scale_SD, index_T, shift_SD, shift_SD is not None)


def add_gated(x_TD: Tensor, branch_TD: Tensor, gate_SD: Tensor, index_T: Tensor) -> Tensor:
    """x + gate * branch, with the gate of each token's own sequence; arguments as in `modulate`."""
    return _scale(branch_TD, gate_SD, index_T, x_TD, False)


def _scale(x_TD: Tensor, scale_SD: Tensor, index_T: Tensor, added: Tensor | None, added_by_sequence: bool) -> Tensor:
    """x * scale + added, where `scale` has a row per sequence, and `added` has one per sequence or one per token."""
    if not torch.compiler.is_compiling():
        return cast(Tensor, _Scale.apply(x_TD, scale_SD, index_T, added, added_by_sequence))
    out_TD = x_TD * _expand(scale_SD, index_T)  # the compiler fuses the gather
    if added is None:
        return out_TD
    return out_TD + (_expand(added, index_T) if added_by_sequence else added)


def _expand(rows_SD: Tensor, index_T: Tensor) -> Tensor:
    """(T, D) each token's row. The gather is of fp32 rows, because its backward sums gradients in their precision."""
    return rows_SD.to(compute_dtype(rows_SD.dtype)).index_select(0, index_T).to(rows_SD.dtype)


class _Scale(Function):
    """`_scale` a few tokens at a time, so that a sequence's rows are never there once per token, now or for backward.

    Of what has a row per token, only x is kept for backward, and only if the scale needs a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, scale_SD: Tensor, index_T: Tensor, added: Tensor | None, added_by_sequence: bool
    ) -> Tensor:
        ctx.save_for_backward(x_TD if ctx.needs_input_grad[1] else None, scale_SD, index_T)
        ctx.x_dtype, ctx.added_by_sequence = x_TD.dtype, added_by_sequence
        ctx.added_dtype = None if added is None else added.dtype
        dtype = torch.promote_types(x_TD.dtype, scale_SD.dtype)
        if added is not None:
            dtype = torch.promote_types(dtype, added.dtype)
        out_TD = torch.empty_like(x_TD, dtype=dtype)
        for rows in _row_blocks(x_TD):
            index, out = index_T[rows], out_TD[rows]
            torch.mul(x_TD[rows], scale_SD.index_select(0, index), out=out)
            if added is not None:
                out += added.index_select(0, index) if added_by_sequence else added[rows]
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_TD,) = grads
        x_TD, scale_SD, index_T = ctx.saved_tensors
        needs_x, needs_scale, _, needs_added, _ = ctx.needs_input_grad
        # Many tokens add up to one row: not in half precision.
        sums = torch.zeros_like(scale_SD, dtype=compute_dtype(scale_SD.dtype))
        grad_x_TD = torch.empty_like(grad_TD, dtype=ctx.x_dtype) if needs_x else None
        grad_scale_SD = sums if needs_scale else None
        grad_added_SD = sums.clone() if needs_added and ctx.added_by_sequence else None
        for rows in _row_blocks(grad_TD):
            index, grad = index_T[rows], grad_TD[rows]
            if grad_x_TD is not None:
                grad_x_TD[rows] = grad * scale_SD.index_select(0, index)
            if grad_scale_SD is not None:
                grad_scale_SD.index_add_(0, index, (grad * x_TD[rows]).to(sums.dtype))
            if grad_added_SD is not None:
                grad_added_SD.index_add_(0, index, grad.to(sums.dtype))
        grad_added = grad_TD if grad_added_SD is None else grad_added_SD
        return (
            grad_x_TD,
            None if grad_scale_SD is None else grad_scale_SD.to(scale_SD.dtype),
            None,
            grad_added.to(ctx.added_dtype) if needs_added else None,
            None,
        )


def _row_blocks(x_TD: Tensor) -> list[slice]:
    size = BLOCK_ROWS if x_TD.device.type == "cpu" else LAUNCH_ROWS
    return [slice(start, start + size) for start in range(0, len(x_TD), size)]


def mean_by_sequence(x_TD: Tensor, index_T: Tensor, num_sequences: int) -> Tensor:
    """(S, D) mean of each sequence's rows, summed in fp32 at least; zeros for a sequence without rows."""
    wide = compute_dtype(x_TD.dtype)
    count_S = x_TD.new_zeros(num_sequences, dtype=wide).index_add(0, index_T, torch.ones_like(index_T, dtype=wide))
    total_SD = x_TD.new_zeros(num_sequences, x_TD.shape[1], dtype=wide).index_add(0, index_T, x_TD.to(wide))
    return (total_SD / count_S.clamp_min(1)[:, None]).to(x_TD.dtype)


class StreamIndex(Protocol):
    """Where text and visual tokens lie among packed rows: a layout, or its index tensors."""

    @property
    def text_index(self) -> Tensor:
        """(T_txt,) packed positions of the text tokens."""
        ...

    @property
    def image_index(self) -> Tensor:
        """(T_img,) packed positions of the visual tokens. With `text_index` it partitions 0..T-1."""
        ...


def merge_streams(txt: Tensor, img: Tensor, layout: StreamIndex) -> Tensor:
    """Put text rows (T_txt, ...) and visual rows (T_img, ...) into packed order (T, ...).

    Both inputs stay in the graph when they have no rows: their parameters then get zero gradients, not None. The two
    index sets cover every row, so the buffer needs no initial value.
    """
    packed = img.new_empty((txt.shape[0] + img.shape[0], *img.shape[1:]))
    packed = packed.index_copy_(0, layout.text_index, txt)
    return packed.index_copy_(0, layout.image_index, img)


def split_streams(packed: Tensor, layout: StreamIndex) -> tuple[Tensor, Tensor]:
    """Inverse of `merge_streams`: packed rows (T, ...) to (text rows, visual rows)."""
    return packed.index_select(0, layout.text_index), packed.index_select(0, layout.image_index)
