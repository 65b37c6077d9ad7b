"""Tiny models of every family with random weights everywhere, samples of different sizes, and diffusers' own forward.

`alone(model, sample)` is the reference: one sample, a batch of one, the model's own code. diffusers rotates and
normalises in fp32 whatever the dtype; `exact()` lets it stay in fp64, so that fp64 comparisons mean something.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from knapformer.integrations.diffusers import ModelSample, adapt, family_of
from knapformer.integrations.diffusers.patches import grid_positions

HEADS, HEAD_DIM = 3, 16
IMAGES = [(1, 2, 3), (1, 1, 1), (1, 5, 3), (1, 4, 4), (1, 1, 7)]
CLIPS = [(1, 2, 3), (1, 1, 1), (3, 2, 2), (2, 5, 1), (1, 4, 4)]
TEXTS = [4, 1, 7, 2, 5]


@dataclass(frozen=True)
class Case:
    """A variant of a family.

    Attributes:
        model_class: diffusers class.
        config: its arguments.
        alone: output of the model's own forward for one sample, without batch axis.
        grids: visual tokens of the samples.
        texts: text rows of the samples.
        own: more fields of a sample, from (model, sample index, sample).
        idle: parameters that diffusers itself leaves without gradient.
    """

    model_class: str
    config: dict[str, Any]
    alone: Callable[[Any, ModelSample], Tensor]
    grids: list[tuple[int, int, int]] = field(default_factory=lambda: CLIPS)
    texts: list[int] = field(default_factory=lambda: TEXTS)
    own: Callable[[Any, int, ModelSample], dict[str, Any]] = lambda model, index, sample: {}
    idle: tuple[str, ...] = ()

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
        """The adapted model; no weight is zero or one."""
        import diffusers

        model = getattr(diffusers, self.model_class)(**{**self.config, **changes})
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
            if name.endswith("weight") and parameter.ndim == 1:
                values = values + 1
            parameter.data.copy_(values)
        return adapt(model.to(dtype))

    def samples(self, model: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[ModelSample]:
        """Five samples, or as many as there are grids. Their targets are the weights of their outputs in `loss`."""
        family = family_of(model)
        widths, patch = family.widths(model), family.patch(model)
        generator = torch.Generator().manual_seed(100 + seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        out = []
        for index, (grid, rows) in enumerate(zip(self.grids, self.texts, strict=True)):
            flags = len(family.mark(torch.zeros(1, 1))[0]) - 1
            if patch is None:
                latent = normal(grid[0] * grid[1] * grid[2], widths.image)
            else:
                sizes = [g * p for g, p in zip(grid, patch, strict=True)]
                channels = (widths.image - flags) // (patch[0] * patch[1] * patch[2])
                latent = family.latent(normal(channels, *sizes))
            # A thousand times these are exact in bf16, to which diffusers rounds the times of some models.
            time = torch.tensor(2.0 ** -(1 + index % 4), dtype=dtype)
            sample = ModelSample(
                latent,
                normal(rows, widths.text - flags),
                time,
                grid,
                pooled=normal(widths.pooled) if widths.pooled else None,
                guidance=time * 2 ** (index % 3) if widths.guidance else None,
            )
            sample = replace(sample, **self.own(model, index, sample))
            wanted = family.grid(model, sample)
            rows = normal(wanted[0] * wanted[1] * wanted[2], widths.out)
            out.append(replace(sample, target=family.unpack(model, rows, wanted)))
        return out


def loss(outputs: Iterable[Tensor], targets: Iterable[Tensor]) -> Tensor:
    """A sum in which every element of the outputs has another weight."""
    return sum(((out * target).sum() for out, target in zip(outputs, targets, strict=True)), torch.zeros(()))


@contextmanager
def exact() -> Iterator[None]:
    """`x.float()` and `x.to(torch.float32)` leave fp64 alone."""
    to_fp32, to = torch.Tensor.float, torch.Tensor.to

    def convert(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if args == (torch.float32,) and x.dtype == torch.float64 else to(x, *args, **kwargs)

    with (
        mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_fp32(x)),
        mock.patch.object(torch.Tensor, "to", convert),
    ):
        yield


def _flux(model: Any, sample: ModelSample) -> Tensor:
    guidance = {} if sample.guidance is None else {"guidance": sample.guidance[None]}
    return model(
        hidden_states=sample.latent[None],
        encoder_hidden_states=sample.text[None],
        pooled_projections=sample.pooled[None],
        timestep=sample.timestep[None],
        txt_ids=torch.zeros(len(sample.text), 3),
        img_ids=grid_positions(sample.grid).float(),
        **guidance,
    ).sample[0]


def _flux2(model: Any, sample: ModelSample) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int64)
    image = [torch.arange(size) for size in sample.grid]
    return model(
        hidden_states=sample.latent[None],
        encoder_hidden_states=sample.text[None],
        timestep=sample.timestep[None],
        txt_ids=torch.cartesian_prod(zero, zero, zero, torch.arange(len(sample.text)))[None],
        img_ids=torch.cartesian_prod(*image, zero)[None],
        guidance=sample.guidance[None],
    ).sample[0]


def _sd3(model: Any, sample: ModelSample) -> Tensor:
    return model(
        hidden_states=sample.latent[None],
        encoder_hidden_states=sample.text[None],
        pooled_projections=sample.pooled[None],
        timestep=sample.timestep[None],
    ).sample[0]


def _qwen(model: Any, sample: ModelSample) -> Tensor:
    shapes = [sample.grid] if sample.clean is None else _qwen_shapes(sample)
    mask = None if sample.text_mask is None else sample.text_mask[None]
    return model(
        hidden_states=sample.latent[None],
        encoder_hidden_states=sample.text[None],
        encoder_hidden_states_mask=mask,
        timestep=sample.timestep[None],
        img_shapes=[shapes],
    ).sample[0]


def _qwen_shapes(sample: ModelSample) -> list[tuple[int, int, int]]:
    """The image, and the reference image of two tokens behind it."""
    return [(1, 1, len(sample.latent) - 2), (1, 1, 2)]


def _qwen_edit(model: Any, index: int, sample: ModelSample) -> dict[str, Any]:
    """Two reference tokens more, of a second image: frame 1, and text after the longer side of either."""
    extra = torch.randn(2, sample.latent.shape[1], generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    columns = len(sample.latent)
    first = max(columns // 2, 1)
    text = (first + torch.arange(len(sample.text)))[:, None].expand(-1, 3)
    images = [
        torch.stack((torch.full((n,), frame), torch.full((n,), -1), torch.arange(n) - (n - n // 2)), 1)
        for frame, n in ((0, columns), (1, 2))
    ]
    return {
        "latent": torch.cat((sample.latent, extra.to(sample.latent.dtype))),
        "positions": torch.cat((text, *images)),
        "clean": torch.arange(columns + 2) >= columns,
        "grid": None,
    }


def _hunyuan(model: Any, sample: ModelSample) -> Tensor:
    mask = torch.ones(len(sample.text), dtype=torch.bool) if sample.text_mask is None else sample.text_mask
    return model(
        hidden_states=sample.latent[None],
        timestep=sample.timestep[None],
        encoder_hidden_states=sample.text[None],
        encoder_attention_mask=mask[None],
        pooled_projections=sample.pooled[None],
        guidance=sample.guidance[None],
    ).sample[0]


def _cogvideox(model: Any, sample: ModelSample) -> Tensor:
    rotation = None
    if model.config.use_rotary_positional_embeddings:
        from diffusers.models.embeddings import get_3d_rotary_pos_embed
        from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

        frames, rows, columns = sample.grid
        p, config = model.config.patch_size, model.config
        size = config.sample_height // p, config.sample_width // p
        if config.patch_size_t:
            place = {"crops_coords": None, "grid_type": "slice", "max_size": size}
        else:
            place = {"crops_coords": get_resize_crop_region_for_grid((rows, columns), size[1], size[0])}
        rotation = get_3d_rotary_pos_embed(
            embed_dim=config.attention_head_dim, grid_size=(rows, columns), temporal_size=frames, **place
        )
    return model(
        hidden_states=sample.latent[None],
        encoder_hidden_states=sample.text[None],
        timestep=sample.timestep[None],
        image_rotary_emb=rotation,
    ).sample[0]


def _wan(model: Any, sample: ModelSample) -> Tensor:
    time = sample.timestep[None]
    if sample.clean is not None:
        time = torch.where(sample.clean, 0, sample.timestep)[None]
    return model(hidden_states=sample.latent[None], timestep=time, encoder_hidden_states=sample.text[None]).sample[0]


def _ltx(model: Any, sample: ModelSample) -> Tensor:
    time = sample.timestep[None]
    if sample.clean is not None:
        time = torch.where(sample.clean, 0, sample.timestep)[None]
    mask = torch.ones(len(sample.text)) if sample.text_mask is None else sample.text_mask.float()
    frames, height, width = sample.grid
    return model(
        hidden_states=sample.latent[None],
        encoder_hidden_states=sample.text[None],
        timestep=time,
        encoder_attention_mask=mask[None],
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=(8 / 25, 32, 32),
    ).sample[0]


def _first_frame(model: Any, index: int, sample: ModelSample) -> dict[str, Any]:
    frames, rows, columns = sample.grid
    return {"clean": torch.arange(frames * rows * columns) < (rows * columns if index % 2 else 0)}


def _z_image(model: Any, sample: ModelSample) -> Tensor:
    return model([sample.latent], sample.timestep[None], [sample.text]).sample[0]


_SHAPE = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM}
_FLUX = {
    **_SHAPE,
    "in_channels": 6,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}
_SD3 = {
    **_SHAPE,
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 4,
    "num_layers": 3,
    "joint_attention_dim": 20,
    "caption_projection_dim": HEADS * HEAD_DIM,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 9,
}
_QWEN = {
    **_SHAPE,
    "in_channels": 6,
    "out_channels": 2,
    "num_layers": 2,
    "joint_attention_dim": 20,
    "axes_dims_rope": (4, 6, 6),
}
_QWEN_IDLE = ("transformer_blocks.1.attn.to_add_out.", "transformer_blocks.1.txt_mlp.")
_HUNYUAN = {
    **_SHAPE,
    "in_channels": 3,
    "out_channels": 2,
    "num_layers": 2,
    "num_single_layers": 1,
    "num_refiner_layers": 2,
    "text_embed_dim": 20,
    "pooled_projection_dim": 10,
    "rope_axes_dim": (4, 6, 6),
}
_COG = {
    **_SHAPE,
    "in_channels": 3,
    "out_channels": 2,
    "time_embed_dim": 24,
    "text_embed_dim": 20,
    "num_layers": 2,
    "sample_width": 12,
    "sample_height": 10,
    "sample_frames": 9,
    "max_text_seq_length": 4,
}
_WAN = {
    **_SHAPE,
    "in_channels": 3,
    "out_channels": 2,
    "text_dim": 20,
    "freq_dim": 32,
    "ffn_dim": 40,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
_LTX = {
    **_SHAPE,
    "in_channels": 6,
    "out_channels": 5,
    "cross_attention_dim": HEADS * HEAD_DIM,
    "num_layers": 2,
    "caption_channels": 20,
}
_Z_IMAGE = {
    "in_channels": 3,
    "dim": HEADS * HEAD_DIM,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": HEADS,
    "n_kv_heads": HEADS,
    "cap_feat_dim": 20,
    "axes_dims": [4, 6, 6],
    "axes_lens": [128, 40, 32],
}

CASES = {
    "flux-dev": Case("FluxTransformer2DModel", {**_FLUX, "guidance_embeds": True}, _flux, IMAGES),
    "flux-schnell": Case("FluxTransformer2DModel", _FLUX, _flux, IMAGES),
    "flux2": Case(
        "Flux2Transformer2DModel",
        {
            **{k: v for k, v in _FLUX.items() if k != "pooled_projection_dim"},
            "axes_dims_rope": (4, 4, 4, 4),
            "timestep_guidance_channels": 16,
        },
        _flux2,
        IMAGES,
    ),
    "sd3": Case("SD3Transformer2DModel", _SD3, _sd3, IMAGES),
    "sd3.5-medium": Case(
        "SD3Transformer2DModel", {**_SD3, "qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}, _sd3, IMAGES
    ),
    "qwen-image": Case("QwenImageTransformer2DModel", _QWEN, _qwen, IMAGES, idle=_QWEN_IDLE),
    "qwen-image-edit": Case(
        "QwenImageTransformer2DModel",
        {**_QWEN, "zero_cond_t": True},
        _qwen,
        [(1, 1, n) for n in (6, 1, 15, 16, 7)],
        own=_qwen_edit,
        idle=_QWEN_IDLE,
    ),
    "hunyuan-video": Case("HunyuanVideoTransformer3DModel", _HUNYUAN, _hunyuan),
    "hunyuan-video-i2v": Case(
        "HunyuanVideoTransformer3DModel", {**_HUNYUAN, "image_condition_type": "token_replace"}, _hunyuan
    ),
    # Its own table takes texts of one length only.
    "cogvideox-2b": Case("CogVideoXTransformer3DModel", _COG, _cogvideox, texts=[4] * 5),
    "cogvideox-5b": Case("CogVideoXTransformer3DModel", {**_COG, "use_rotary_positional_embeddings": True}, _cogvideox),
    "cogvideox-1.5": Case(
        "CogVideoXTransformer3DModel",
        {**_COG, "use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False},
        _cogvideox,
    ),
    "wan": Case("WanTransformer3DModel", _WAN, _wan),
    "wan-ti2v": Case("WanTransformer3DModel", _WAN, _wan, own=_first_frame),
    "ltx-video": Case("LTXVideoTransformer3DModel", _LTX, _ltx),
    "ltx-video-i2v": Case("LTXVideoTransformer3DModel", _LTX, _ltx, own=_first_frame),
    "z-image": Case("ZImageTransformer2DModel", _Z_IMAGE, _z_image, IMAGES),
}
"""Name -> variant."""
