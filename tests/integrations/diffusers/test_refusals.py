"""What the packed forward would not reproduce is refused by name, before or when it is called."""

import pytest

pytest.importorskip("diffusers", reason="needs pip install knapformer[diffusers]")

import diffusers
import torch

from knapformer.errors import DataError, SpecError
from knapformer.integrations.diffusers import ModelSample, TextPadding, adapt, family_of, pack
from knapformer.integrations.diffusers.patches import grid_of
from tests.integrations.diffusers.families import CASES


def plain(name, **changes):
    case = CASES[name]
    return getattr(diffusers, case.model_class)(**{**case.config, **changes})


class Unknown(torch.nn.Module):
    pass


def test_an_unknown_model():
    with pytest.raises(SpecError, match=r"no packed forward is known for Unknown.*FluxTransformer2DModel"):
        adapt(Unknown())


def test_a_model_without_a_module_it_needs():
    model = plain("flux-dev")
    del model.context_embedder
    with pytest.raises(SpecError, match=r"has no module 'context_embedder'"):
        adapt(model)


def test_fused_projections():
    model = plain("flux-dev")
    model.fuse_qkv_projections()
    with pytest.raises(SpecError, match=r"fused projections \(transformer_blocks.0.attn\); call unfuse"):
        adapt(model)


def test_projections_fused_later():
    case = CASES["flux-dev"]
    model = case.build()
    inputs = pack(model, case.samples(model)).local()
    model.fuse_qkv_projections()
    with pytest.raises(SpecError, match=r"FluxAttention has fused projections"):
        model(inputs)


def test_an_attention_processor_of_somebody_else():
    model = plain("flux-dev")
    model.transformer_blocks[0].attn.processor = Unknown()
    with pytest.raises(SpecError, match=r"processor Unknown \(transformer_blocks.0.attn\).*FluxAttnProcessor"):
        adapt(model)


def test_quantised_attention():
    model = plain("wan")
    model.blocks[1].attn1.processor._attention_backend = "sage_varlen"
    with pytest.raises(SpecError, match=r"quantised attention backend 'sage_varlen' \(blocks.1.attn1\)"):
        adapt(model)


def test_context_parallelism_of_diffusers():
    model = plain("wan")
    model.blocks[0].attn1.processor._parallel_config = object()
    with pytest.raises(SpecError, match=r"own context parallelism \(blocks.0.attn1\)"):
        adapt(model)


def test_hooks():
    model = plain("flux-dev")
    model.transformer_blocks[1].forward = lambda *args: args
    with pytest.raises(SpecError, match=r"forward of a FluxTransformerBlock has been replaced before"):
        adapt(model)


def test_chunked_layers():
    model = plain("sd3")
    model.enable_forward_chunking()
    with pytest.raises(SpecError, match=r"chunked feed-forward layers \(transformer_blocks.0\)"):
        adapt(model)


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("wan", {"image_dim": 12, "added_kv_proj_dim": 48}, "CLIP image tokens"),
        ("qwen-image", {"use_layer3d_rope": True}, "positions by QwenEmbedLayer3DRope"),
        ("qwen-image", {"use_additional_t_cond": True}, "an additional time condition"),
        ("cogvideox-5b", {"use_learned_positional_embeddings": True}, "learned positions"),
        ("cogvideox-1.5", {"ofs_embed_dim": 24}, "the offset embedding"),
        ("sd3", {"pos_embed_max_size": None}, "a position table that is interpolated"),
        ("z-image", {"siglip_feat_dim": 8}, "SigLIP features"),
        ("z-image", {"all_patch_size": (1, 2), "all_f_patch_size": (1, 1)}, "several patch sizes"),
    ],
)
def test_configurations(name, changes, what):
    with pytest.raises(SpecError, match=f"{CASES[name].model_class} does not support {what}"):
        adapt(plain(name, **changes))


@pytest.mark.parametrize("name", ["controlnet_block_samples", "joint_attention_kwargs"])
def test_arguments_beside_packed_inputs(name):
    case = CASES["flux-dev"]
    model = case.build()
    inputs = pack(model, case.samples(model)).local()
    with pytest.raises(SpecError, match=f"does not support {name} beside PackedInputs"):
        model(inputs, **{name: []})


def test_a_wrapped_model():
    wrapped = Unknown()
    wrapped.module = plain("flux-dev")
    with pytest.raises(SpecError, match="adapt takes the model itself, got it wrapped in Unknown"):
        adapt(wrapped)


def test_adapting_twice_changes_nothing():
    model = CASES["flux-dev"].build()
    forward = model.forward
    assert adapt(model) is model
    assert model.forward == forward


SAMPLE = {"latent": torch.zeros(6, 6), "text": torch.zeros(3, 20), "timestep": 0.5, "grid": (1, 2, 3)}
GIVEN = {**SAMPLE, "pooled": torch.zeros(10), "guidance": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": (1, 2, 2)}, r"shape \(6, 6\) and grid \(1, 2, 2\)"),
        ({"grid": None}, r"grid None"),
        ({"latent": torch.zeros(6, 7)}, r"the latent of a sample becomes rows of shape \(6, 7\).*expects \(6, 6\)"),
        ({"text": torch.zeros(3, 21)}, r"the text of a sample becomes rows of shape \(3, 21\)"),
        ({"positions": torch.zeros(6, 3)}, r"the positions of a sample becomes rows of shape \(6, 3\).*\(9, 3\)"),
        ({"text_mask": torch.ones(4)}, r"text has shape \(3, 20\) and its mask \(4,\)"),
        ({"guidance": None}, "the model takes guidance, but a sample has none"),
        ({"pooled": None}, "the model takes pooled, but a sample has none"),
        ({"clean": torch.ones(6)}, "modulates all tokens alike"),
        ({"loss_mask": torch.ones(5)}, r"clean and loss_mask .* \(6,\) and \(5,\)"),
    ],
)
def test_samples_that_do_not_fit(changes, message):
    model = CASES["flux-dev"].build()
    pack(model, [ModelSample(**GIVEN)])
    with pytest.raises(DataError, match=message):
        pack(model, [ModelSample(**{**GIVEN, **changes})])


def test_targets_that_are_missing():
    with pytest.raises(DataError, match="targets=True, but a sample has no target"):
        pack(CASES["flux-dev"].build(), [ModelSample(**GIVEN)], targets=True)


def test_latents_that_are_no_multiple_of_a_patch():
    with pytest.raises(DataError, match=r"\(3, 1, 5, 4\).*multiples of \(1, 2, 2\)"):
        grid_of(torch.zeros(3, 1, 5, 4), (1, 2, 2))


@pytest.mark.parametrize(
    ("name", "grid"), [("sd3", (1, 10, 1)), ("wan", (1, 33, 1)), ("z-image", (1, 41, 1)), ("qwen-image", (1, 1, 4097))]
)
def test_sizes_beyond_a_models_positions(name, grid):
    model = CASES[name].build()
    with pytest.raises(DataError, match=r"ends? at|exceed"):
        family_of(model).positions(model, grid, torch.arange(1))


@pytest.mark.parametrize("spec", ["pad", "pad_to()", "pad_to(0)", "pad_to(-1)", "strip ", 7])
def test_text_padding_that_cannot_be_read(spec):
    with pytest.raises(SpecError, match=r"text padding .* is unknown"):
        TextPadding.parse(spec)
