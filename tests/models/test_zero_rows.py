"""A rank with nothing, or with one kind of token only, runs every module and gets gradients for every parameter."""

import pytest
import torch

from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, merge_streams, split_streams
from tests.models.reference import LoopLayout, make_samples, run_packed

MODELS = {
    "mmdit": lambda: MMDiT(MMDiTConfig.tiny(num_double=2, num_single=2, guidance=True)),
    "mmdit-double-only": lambda: MMDiT(MMDiTConfig.tiny(num_double=2, num_single=0)),
    "mmdit-single-only": lambda: MMDiT(MMDiTConfig.tiny(num_double=0, num_single=2)),
    "dit": lambda: DiT(DiTConfig.tiny()),
}


class CountingLayout(LoopLayout):
    calls = 0

    def attend(self, q, k, v, *, scale=None):
        type(self).calls += 1
        return super().attend(q, k, v, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_name", MODELS)
def test_no_tokens_at_all(model_name, dtype):
    model = MODELS[model_name]().to(dtype)
    result = run_packed(model, [])
    assert [tuple(out.shape) for out in result.outputs] == [(0, model.config.num_out_channels)]
    for name, param in model.named_parameters():
        grad = result.param_grads[name]
        assert grad is not None, name
        assert torch.equal(grad, torch.zeros_like(param)), name


@pytest.mark.parametrize("lengths", [[(4, 0)], [(0, 4)], [(4, 0), (0, 4)], [(1, 1)]], ids=str)
@pytest.mark.parametrize("model_name", MODELS)
def test_one_kind_only(model_name, lengths):
    model = MODELS[model_name]().double()
    if isinstance(model, DiT):
        lengths = [(0, image) for _, image in lengths]
    result = run_packed(model, make_samples(model.config, lengths))
    for name, grad in result.param_grads.items():
        assert grad is not None, name
        assert bool(grad.isfinite().all()), name
        if name == "txt_in.weight":
            # A text token reaches the loss only through visual tokens of its own sequence.
            assert bool(grad.any()) == any(text and image for text, image in lengths)
        if not any(image for _, image in lengths):
            assert not grad.any(), name


@pytest.mark.parametrize("model_name", MODELS)
def test_same_number_of_attention_calls(model_name):
    """The layout's call is collective, so it must not depend on what a rank has."""
    model = MODELS[model_name]().double()
    for lengths in ([], [(0, 3)], [(0, 1), (0, 0)]):
        CountingLayout.calls = 0
        run_packed(model, make_samples(model.config, lengths), layout_type=CountingLayout)
        assert CountingLayout.calls == model.config.num_layers


def test_detached_stream_is_noticed():
    """What the tests above guard against: skipping a stream without rows leaves its parameters without gradients."""

    class SkippingLayout(LoopLayout):
        def attend(self, q, k, v, *, scale=None):
            return super().attend(q, k, v, scale=scale) if self.num_tokens else torch.zeros_like(q)

    model = MODELS["mmdit"]().double()
    result = run_packed(model, [], layout_type=SkippingLayout)
    missing = [name for name, grad in result.param_grads.items() if grad is None]
    assert "double_blocks.0.img.attn.qkv.weight" in missing


@pytest.mark.parametrize("lengths", [[], [(3, 0)], [(0, 3)], [(2, 3), (1, 4)]], ids=str)
def test_merge_and_split_are_inverse(lengths):
    total = sum(map(sum, lengths))
    layout = LoopLayout.build(lengths, torch.randperm(total, generator=torch.Generator().manual_seed(0)))
    txt = torch.arange(layout.text_index.numel() * 2.0).reshape(-1, 2).requires_grad_()
    img = -1 - torch.arange(layout.image_index.numel() * 2.0).reshape(-1, 2)
    img.requires_grad_()
    merged = merge_streams(txt, img, layout)
    assert merged.shape == (total, 2)
    for got, expected in zip(split_streams(merged, layout), (txt, img), strict=True):
        assert torch.equal(got, expected)
    weight = torch.arange(total * 2.0).reshape(total, 2)
    (merged * weight).sum().backward()
    assert txt.grad is not None
    assert img.grad is not None
    assert torch.equal(txt.grad, weight[layout.text_index])
    assert torch.equal(img.grad, weight[layout.image_index])
