"""The cross-attention DiT against its formulas, packed against alone, and what it costs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from knapformer.attention import Layout
from knapformer.errors import SpecError
from knapformer.models import CrossDiT, CrossDiTConfig
from knapformer.models.conditioning import Modulation
from tests.models.reference import error
from tests.models.test_formulas import Formulas, norm, with_norm_scales

LENGTHS = [(5, 7), (0, 3), (1, 1), (12, 4)]  # (text, visual tokens)
INPUTS = ("x", "text", "timestep", "pooled")


def make(lengths, config, seed=0):
    """Inputs of all sequences, packed, and weights of the outputs in the loss."""
    g = torch.Generator().manual_seed(seed)
    num_text, num_tokens = (sum(lens) for lens in zip(*lengths, strict=True))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    inputs = {
        "x": normal(num_tokens, config.in_channels),
        "text": normal(num_text, config.text_channels),
        "timestep": torch.rand(len(lengths), generator=g, dtype=torch.float64),
        "pooled": normal(len(lengths), config.pooled_channels),
        "ids": torch.randint(0, 50, (num_tokens, 3), generator=g),
    }
    return inputs, normal(num_tokens, config.num_out_channels)


def one_by_one(lengths, inputs, weight):
    """The same, cut into one batch per sequence."""
    text, tokens = zip(*lengths, strict=True)
    sizes = {"x": tokens, "text": text, "ids": tokens}
    cut = {name: value.split(sizes.get(name, [1] * len(lengths))) for name, value in inputs.items()}
    alone = [{name: parts[i] for name, parts in cut.items()} for i in range(len(lengths))]
    return zip(lengths, alone, weight.split(tokens), strict=True)


def run(model, lengths, inputs, weight, layout=None):
    """Output, and the gradients of inputs and parameters, of one packed call."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in INPUTS}
    layout = layout or Layout.local([n for _, n in lengths], context_lens=[n for n, _ in lengths])
    out = model(**leaves, ids=inputs["ids"], layout=layout)
    (out * weight).sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return out.detach(), [leaf.grad for leaf in leaves.values()], grads


def formulas(model, inputs):
    """One sequence, without packing."""
    f, config = Formulas(model, inputs["ids"]), model.config
    vec, text = f.vec(inputs["timestep"], inputs["pooled"]), f.embed("text_in", inputs["text"])
    x = f.linear("x_in", inputs["x"])
    for i in range(config.depth):
        name = f"dit_blocks.{i}"
        m = f.mod(name, vec)
        heads = f.qkv(f"{name}.attn.norm", f.linear(f"{name}.attn.qkv", norm(x) * (1 + m[1]) + m[0]))
        x = x + m[2] * f.linear(f"{name}.proj", f.attention(*heads))
        kv = f.linear(f"{name}.cross_kv", text)
        q, _, _ = f.qkv(f"{name}.cross_norm", f.linear(f"{name}.cross_q", norm(x)).repeat(1, 3))
        _, k, v = f.qkv(f"{name}.cross_norm", torch.cat((kv[:, : config.width], kv), dim=1))
        crossed = (q @ k.transpose(1, 2) / config.head_dim**0.5).softmax(-1) @ v
        x = x + f.linear(f"{name}.cross_proj", torch.cat(list(crossed), dim=-1))
        x = x + m[5] * f.mlp(name, norm(x) * (1 + m[4]) + m[3])
    return f.final(x, vec)


@torch.no_grad()
def test_formulas():
    config = CrossDiTConfig.tiny(num_heads=3)
    model = with_norm_scales(CrossDiT(config).double())
    inputs, weight = make(LENGTHS, config)
    expected = torch.cat([formulas(model, alone) for _, alone, _ in one_by_one(LENGTHS, inputs, weight)])
    layout = Layout.local([n for _, n in LENGTHS], context_lens=[n for n, _ in LENGTHS])
    assert error(model(**inputs, layout=layout), expected) < 1e-12
    # Mutations: the text of another sequence, and weights of another block.
    moved = {**inputs, "text": inputs["text"].roll(1, dims=0)}
    assert error(model(**moved, layout=layout), expected) > 1e-3
    model.state_dict()["dit_blocks.1.cross_q.weight"].mul_(1.01)
    assert error(model(**inputs, layout=layout), expected) > 1e-6


def test_packed_equals_alone():
    config = CrossDiTConfig.tiny(num_heads=7, axes_dims=(2, 2, 4))
    model = CrossDiT(config).double()
    inputs, weight = make(LENGTHS, config)
    out, grads, param_grads = run(model, LENGTHS, inputs, weight)
    alone = [run(model, [lens], part, w) for lens, part, w in one_by_one(LENGTHS, inputs, weight)]
    assert error(out, torch.cat([a[0] for a in alone])) < 1e-12
    for got, *expected in zip(grads, *(a[1] for a in alone), strict=True):
        assert error(got, torch.cat(expected)) < 1e-12
    for name, grad in param_grads.items():
        assert error(grad, sum(a[2][name] for a in alone)) < 1e-12, name
    # Mutation: the boundary between two texts is off by one.
    wrong = Layout.local([n for _, n in LENGTHS], context_lens=[4, 1, 1, 12])
    out, grads, _ = run(model, LENGTHS, inputs, weight, wrong)
    assert error(out, torch.cat([a[0] for a in alone])) > 1e-3


@pytest.mark.parametrize("lengths", [[], [(0, 3), (0, 2)], [(2, 3)]], ids=str)
def test_every_parameter_has_a_gradient(lengths):
    """Also on a rank without tokens, and where no sequence has text; then none of them depends on text."""
    config = CrossDiTConfig.tiny()
    model = CrossDiT(config)
    inputs, weight = make(lengths or [(0, 0)], config)
    if not lengths:
        inputs = {name: value[:0] for name, value in inputs.items()}
    out, grads, param_grads = run(model.double(), lengths, inputs, weight)
    assert out.shape == weight.shape and out.isfinite().all()
    for name, grad in [*param_grads.items(), *zip(INPUTS, grads, strict=True)]:
        assert grad is not None and grad.isfinite().all(), name
        if not lengths or (sum(n for n, _ in lengths) == 0 and ("cross_kv" in name or "text" in name)):
            assert not grad.any(), name
    if lengths == [(2, 3)]:
        assert all(grad.any() for grad in param_grads.values())


def test_zero_init_starts_as_the_identity():
    config = CrossDiTConfig.tiny(zero_init=True)
    model = CrossDiT(config).double()
    inputs, weight = make(LENGTHS, config)
    seen = []
    model.dit_blocks[-1].register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    out, _, _ = run(model, LENGTHS, inputs, weight)
    assert not out.any()
    assert torch.equal(*seen[0])


class MatmulLayout(Layout):
    """One sequence, with attention as two products that the counter sees on every device."""

    def attend(self, q, k, v, *, scale=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.einsum("hqk,khd->qhd", torch.einsum("qhd,khd->hqk", q, k).softmax(-1), v)

    def cross_attend(self, q, k, v, *, scale=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.attend(q, k, v)


def test_cost_shape_equals_counted_flops():
    """Keys and values of the context cost per context row, not per token, and are left out like modulation."""
    config = replace(CrossDiTConfig.tiny(depth=1), typical_text=6)
    model = CrossDiT(config).double()
    inputs, _ = make([(6, 13)], config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, layout=MatmulLayout.local([13], context_lens=[6]))
    (block,) = model.blocks()
    counted = sum(counter.get_flop_counts()["CrossDiT.dit_blocks.0"].values())
    per_sequence = sum(2 * m.linear.weight.numel() for m in block.modules() if isinstance(m, Modulation))
    per_context = 6 * 4 * config.width**2
    assert counted - per_sequence - per_context == model.cost_shape().flops_per_sequence(13)
    assert model.cost_shape().linear_coeff == 24 + 4 + 4 * 6 / config.width


def test_invalid_fields_and_inputs():
    config = CrossDiTConfig.tiny()
    for change, message in (
        ({"text_channels": 0}, "text_channels is 0; expected an integer of at least 1"),
        ({"typical_text": -1}, "typical_text is -1; expected an integer of at least 0"),
        ({"depth": 0}, "depth is 0"),
    ):
        with pytest.raises(SpecError, match=message):
            replace(config, **change)
    inputs, _ = make([(6, 13)], config)
    with pytest.raises(SpecError, match=r"text has shape \(6, 12\); expected \(5, 12\): one row per context row"):
        CrossDiT(config)(**inputs, layout=Layout.local([13], context_lens=[5]))
