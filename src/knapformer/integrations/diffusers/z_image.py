"""Z-Image: image and caption are refined separately, then single-stream blocks work on both.

The model appends *learned* padding to either, up to a multiple of 32 rows, and attends to it, so `pad` appends rows
too, and a last channel of every row says which they are. Captions are counted along the first axis from 1, padding
included; the image comes after them; its padding is at (0, 0, 0). The image is refined by attention to itself only,
captions on every rank that holds tokens of their sequence. Give captions at their true length: the model pads them.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.attention.rows import add_gated, merge_streams, modulate
from knapformer.errors import DataError
from knapformer.integrations.diffusers.family import Family, PackedBlock, Widths
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.ops import BlockContext, project_out, project_qkv, run_block
from knapformer.integrations.diffusers.patches import Extent, grid_positions

MULTIPLE = 32


class ZImage(Family):
    """`ZImageTransformer2DModel`."""

    model_class = "ZImageTransformer2DModel"
    modules = "all_x_embedder all_final_layer noise_refiner context_refiner t_embedder cap_embedder layers"
    processors = ("ZSingleStreamAttnProcessor",)
    channels_last = True
    reads_channels_last = True
    masks_text = True
    own_positions = False

    def widths(self, model: Any) -> Widths:
        pt, ph, pw = self.patch(model)
        flat = model.in_channels * pt * ph * pw
        return Widths(image=flat + 1, text=model.config.cap_feat_dim + 1, out=flat)

    def patch(self, model: Any) -> Extent:
        size = model.all_patch_size[0]
        return model.all_f_patch_size[0], size, size

    def pad(self, rows: Tensor) -> Tensor:
        return nn.functional.pad(rows, (0, 0, 0, -len(rows) % MULTIPLE))

    def mark(self, rows: Tensor) -> Tensor:
        flag = torch.arange(len(self.pad(rows)), device=rows.device) >= len(rows)
        return torch.cat((self.pad(rows), flag[:, None].to(rows.dtype)), dim=1)

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        length = len(text) + -len(text) % MULTIPLE
        largest = model.axes_lens
        if length + grid[0] >= largest[0] or grid[1] > largest[1] or grid[2] > largest[2]:
            raise DataError(f"{len(text)} caption rows and an image of {grid} tokens exceed {largest} positions")
        image = grid_positions(grid, (length + 1, 0, 0))
        return torch.cat((grid_positions((length, 1, 1), (1, 0, 0)), self.pad(image)))

    def check_config(self, model: Any) -> None:
        if len(model.all_patch_size) != 1:
            self.refuse(f"several patch sizes {tuple(model.all_patch_size)}; one is known")
        if model.siglip_embedder is not None:
            self.refuse("SigLIP features (siglip_feat_dim)")

    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        return [(block, _block) for block in (*model.noise_refiner, *model.context_refiner, *model.layers)]

    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        layout, name = inputs.layout, f"{model.all_patch_size[0]}-{model.all_f_patch_size[0]}"
        embed, final = model.all_x_embedder[name], model.all_final_layer[name]
        dtype = embed.weight.dtype
        vec = model.t_embedder(inputs.timestep * model.t_scale).to(dtype)
        rotation = _rotation(model, inputs.positions)
        img = _or_padding(embed, inputs.image, model.x_pad_token, dtype)
        visual = BlockContext(layout, rotation.take(layout.image_index), visual=True)
        for block in model.noise_refiner:
            img = run_block(model, block, visual, img, vec)
        txt = _or_padding(model.cap_embedder, inputs.text, model.cap_pad_token, dtype)
        texts = BlockContext.texts(layout, _rotation(model, _caption_positions(layout.context.lens, txt.device)))
        for block in model.context_refiner:
            txt = run_block(model, block, texts, txt, vec)
        x = merge_streams(txt.index_select(0, inputs.text_rows), img, layout)
        ctx = BlockContext(layout, rotation)
        for block in model.layers:
            x = run_block(model, block, ctx, x, vec)
        x = final.norm_final(x.index_select(0, layout.image_index))
        return final.linear(modulate(x, None, final.adaLN_modulation(vec), ctx.image_vector))


def _or_padding(embed: Any, rows: Tensor, padding: Tensor, dtype: torch.dtype) -> Tensor:
    """Embedded rows, and the learned padding in place of rows marked so."""
    return torch.where(rows[:, -1:] > 0, padding, embed(rows[:, :-1].to(dtype)))


def _rotation(model: Any, positions: Tensor) -> Rotation:
    angles = model.rope_embedder(positions)
    return Rotation(angles.real, angles.imag)


def _caption_positions(lens: np.ndarray, device: torch.device) -> Tensor:
    """(N, 3) positions of whole captions."""
    counted = [np.arange(1, count + 1, dtype=np.int32) for count in lens.tolist()]
    at = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *counted]))
    return nn.functional.pad(at[:, None], (0, 2)).to(device)


def _block(block: Any, ctx: BlockContext, x_TD: Tensor, vec_SD: Tensor) -> Tensor:
    index, attn = ctx.vector, block.attention
    hidden = block.attention_norm1(x_TD)
    if not block.modulation:
        x_TD = x_TD + block.attention_norm2(project_out(attn.to_out, ctx.attend(*project_qkv(attn, hidden))))
        return x_TD + block.ffn_norm2(block.feed_forward(block.ffn_norm1(x_TD)))
    scale, gate, scale_mlp, gate_mlp = block.adaLN_modulation(vec_SD).chunk(4, dim=-1)
    attended = project_out(attn.to_out, ctx.attend(*project_qkv(attn, modulate(hidden, None, scale, index))))
    x_TD = add_gated(x_TD, block.attention_norm2(attended), gate.tanh(), index)
    hidden = block.feed_forward(modulate(block.ffn_norm1(x_TD), None, scale_mlp, index))
    return add_gated(x_TD, block.ffn_norm2(hidden), gate_mlp.tanh(), index)
