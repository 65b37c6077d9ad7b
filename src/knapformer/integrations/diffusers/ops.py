"""What packed forwards of all families are made of: norms, projections and attention by modules of diffusers.

Everything here works on packed rows (T, ...) without a batch axis and on any number of rows, none included, so sizes
are always explicit. `BlockContext` carries what every block of one forward uses.

Legend: T tokens on this rank, S sequences that have tokens here, D width, H heads, K head dim, N rows of all texts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from knapformer.attention import Layout
from knapformer.attention.rotation import Rotation, rotate
from knapformer.attention.rows import modulate
from knapformer.errors import SpecError

EXTRA_DIMS = 8  # kernels want head dims that are multiples of 8
FAR = 4096.0  # a power of two, exact in half precision; 8 of them put a key 32768 / sqrt(K) below all others


class BlockContext:
    """What the blocks of one packed forward share. A plain class on purpose: FSDP2 would cast what is in a dataclass.

    Modulation vectors have a row per sequence, or, where some tokens are clean (conditioning frames, at time 0), a
    second row per sequence after those: row = sequence, or S + sequence for a clean token.

    Args:
        layout: where each token belongs, and attention.
        rotation: of each row; None where the model has none.
        clean: (T_img,) which visual tokens are clean; None if the vectors have no second rows.
        visual: whether the rows at hand are the visual ones alone, attending to each other only.
    """

    def __init__(
        self,
        layout: Layout,
        rotation: Rotation | None = None,
        *,
        clean: Tensor | None = None,
        visual: bool = False,
    ) -> None:
        self.layout = layout
        self.rotation = rotation
        self.visual = visual
        self.text_vector = layout.sequence_index.index_select(0, layout.text_index)
        self.image_vector = layout.sequence_index.index_select(0, layout.image_index)
        self.vector = self.image_vector if visual else layout.sequence_index
        if clean is not None:
            self.image_vector = self.image_vector + layout.num_sequences * clean
            self.vector = self.vector.index_copy(0, layout.image_index, self.image_vector)

    @classmethod
    def texts(cls, layout: Layout, rotation: Rotation | None = None) -> "BlockContext":
        """For blocks that refine the whole texts of the local sequences, (N, D) rows, attending among themselves."""
        lens = layout.context.lens
        filled = np.flatnonzero(lens)
        device = layout.sequence_index.device
        ctx = cls(Layout.local(lens[filled].tolist(), device=device), rotation)
        ctx.vector = torch.from_numpy(filled).to(device).index_select(0, ctx.vector)
        return ctx

    def attend(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
        """Rotate queries and keys, and attend."""
        if self.rotation is not None:
            q_THK, k_THK = rotate(q_THK, self.rotation), rotate(k_THK, self.rotation)
        if self.visual:
            return attend_visual(self.layout, q_THK, k_THK, v_THK)
        return self.layout.attend(q_THK, k_THK, v_THK)


def adaptive(norm: Any, vec_SD: Tensor, count: int) -> Sequence[Tensor]:
    """The `count` modulation vectors of a diffusers adaLN module (`silu`, then `linear`), in its own order."""
    return norm.linear(norm.silu(vec_SD)).chunk(count, dim=-1)


def continuous_norm(norm: Any, x_TD: Tensor, vec_SD: Tensor, index_T: Tensor) -> Tensor:
    """`AdaLayerNormContinuous` by sequence. Its linear layer gives scale first, then shift."""
    scale, shift = norm.linear(norm.silu(vec_SD).to(x_TD.dtype)).chunk(2, dim=-1)
    return modulate(norm.norm(x_TD), shift, scale, index_T)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(T, H K) to (T, H, K)."""
    return x.unflatten(-1, (heads, x.shape[-1] // heads))


def keep_in_graph(out: Tensor, *unused: Tensor) -> Tensor:
    """`out` unchanged, with the parameters behind `unused` getting zero gradients instead of none.

    The last text stream of some models ends nowhere. A parameter with a gradient on some ranks only would make ranks
    reduce different tensors. Sums over no elements, so not even NaN there can reach the output.
    """
    for tensor in unused:
        out = out + tensor[:0].sum()
    return out


def attend_visual(layout: Layout, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
    """Attention among the visual tokens of each sequence, by `layout.attend` with the text keys out of reach.

    No kernel takes a mask, and none is needed: further channels, 1 in every query and a large negative number in text
    keys, put the logits of text so low that its weights are exactly 0. Text rows are computed too, for nothing.

    Args:
        layout: of the joint sequences.
        q_THK, k_THK, v_THK: (T_img, H, K) of the visual tokens.
    """
    (_, heads, width), at = q_THK.shape, layout.image_index
    rows = layout.num_tokens, heads

    def packed(x_THK: Tensor, image: float = 0, text: float = 0) -> Tensor:
        x = x_THK.new_zeros(*rows, width).index_copy(0, at, x_THK)
        extra = x_THK.new_full((*rows, EXTRA_DIMS), image).index_fill_(0, layout.text_index, text)
        return torch.cat((x, extra), dim=-1)

    o = layout.attend(packed(q_THK, 1, 1), packed(k_THK, 0, -FAR), packed(v_THK), scale=width**-0.5)
    return o.index_select(0, at).narrow(-1, 0, width)


def clip_half(x: Tensor) -> Tensor:
    """Keep fp16 activations finite, as diffusers does."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def project_qkv(
    attn: Any, x_TD: Tensor, text_ND: Tensor | None = None, *, added: bool = False, norm_heads: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (T, H, K) of an attention module's own projections and norms.

    Args:
        attn: diffusers attention module.
        x_TD: its input.
        text_ND: where keys and values come from, in cross-attention.
        added: take the projections of the second stream, `add_q_proj` and so on.
        norm_heads: norms are per head; otherwise they span all heads.
    """
    if getattr(attn, "fused_projections", False):
        raise SpecError(
            f"{type(attn).__name__} has fused projections, which the packed forward does not use; call "
            "model.unfuse_qkv_projections() first"
        )
    names = ("add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_q", "to_k", "to_v")
    sources = [x_TD, *[x_TD if text_ND is None else text_ND] * 2]
    q, k, v = (getattr(attn, name)(source) for name, source in zip(names, sources, strict=True))
    norms = ("norm_added_q", "norm_added_k") if added else ("norm_q", "norm_k")
    norm_q, norm_k = (getattr(attn, name, None) or nn.Identity() for name in norms)
    if not norm_heads:
        q, k = norm_q(q), norm_k(k)
    q, k, v = (split_heads(x, attn.heads) for x in (q, k, v))
    return (norm_q(q), norm_k(k), v) if norm_heads else (q, k, v)


def cross_attention(attn: Any, x_TD: Tensor, text_ND: Tensor, ctx: BlockContext) -> Tensor:
    """Attention of each token to the whole text of its sequence, with norms that span all heads."""
    attended = ctx.layout.cross_attend(*project_qkv(attn, x_TD, text_ND, norm_heads=False))
    return project_out(attn.to_out, attended)


def project_out(out: nn.Module, x_THK: Tensor) -> Tensor:
    """(T, H, K) through an attention module's output: a linear layer, or a list of it and a dropout."""
    x = x_THK.flatten(1)
    for layer in out if isinstance(out, nn.ModuleList) else [out]:
        x = layer(x)
    return x


def run_block(model: Any, block: nn.Module, *args: Any) -> Any:
    """Call a block as diffusers does, checkpointed if the model says so. Hooks of FSDP2 fire: it is a module's call."""
    if torch.is_grad_enabled() and model.gradient_checkpointing:
        return model._gradient_checkpointing_func(block, *args)
    return block(*args)


def rope(positions: Tensor, dims: Sequence[int], theta: float) -> Rotation:
    """Rotation by positions (T, A): `dims` channels turn with each axis, by angles of diffusers in fp32."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    tables = []
    for axis, dim in enumerate(dims):
        table: Any = get_1d_rotary_pos_embed  # its annotations know no tensors
        tables.append(table(dim, positions[:, axis].float(), theta, use_real=True, freqs_dtype=torch.float32))
    cos, sin = (torch.cat(axes, dim=1) for axes in zip(*tables, strict=True))
    return Rotation.of_channels(cos, sin)


def by_axis(tables: Sequence[Tensor], positions: Tensor) -> Tensor:
    """Rows of one table per axis, at positions (T, A), side by side."""
    return torch.cat([table.index_select(0, positions[:, axis]) for axis, table in enumerate(tables)], dim=1)
