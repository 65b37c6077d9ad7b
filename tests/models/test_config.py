"""Configurations: presets, validation messages, parameter counts, cost figures."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from knapformer.errors import SpecError
from knapformer.models import BackboneConfig, CostShape, DiT, DiTConfig, MMDiT, MMDiTConfig, PackedModel
from knapformer.models.conditioning import Modulation
from knapformer.plan import CostModel
from tests.models.reference import LoopLayout, forward_packed, make_samples


@pytest.mark.parametrize(("guidance", "num_params"), [(True, 11_901_408_320), (False, 11_891_178_560)])
def test_flux_is_the_published_size(guidance, num_params):
    with torch.device("meta"):
        model = MMDiT(MMDiTConfig.flux(guidance=guidance))
    assert model.num_params == num_params
    assert len(model.blocks()) == 19 + 38
    assert all(param.is_meta for param in model.parameters())
    assert not list(model.buffers())


def test_cost_shape():
    assert MMDiTConfig.flux().cost_shape() == (3072, 24, 24.0, 4.0, 57)
    assert DiT(DiTConfig.tiny(depth=3)).cost_shape() == CostShape(64, 4, 24.0, 4.0, 3)
    assert replace(DiTConfig.tiny(), mlp_ratio=2.5).cost_shape().linear_coeff == 18.0


def test_cost_shape_fits_the_cost_model():
    shape = MMDiTConfig.flux().cost_shape()
    fields = shape._asdict()
    fields.pop("num_layers")
    assert CostModel.from_shapes(**fields, gamma=1.0) == CostModel.from_shapes(3072, 24, gamma=1.0)


class MatmulLayout(LoopLayout):
    """One sequence, with attention as two products that the counter sees on every device."""

    def attend(self, q, k, v, *, scale=None):
        return torch.einsum("hqk,khd->qhd", torch.einsum("qhd,khd->hqk", q, k).softmax(-1), v)


@pytest.mark.parametrize("model_name", ["mmdit", "dit"])
def test_cost_shape_equals_counted_flops(model_name):
    model: MMDiT | DiT = MMDiT(MMDiTConfig.tiny(num_single=2)) if model_name == "mmdit" else DiT(DiTConfig.tiny())
    lengths = (5, 8) if model_name == "mmdit" else (0, 13)
    samples = make_samples(model.config, [lengths], dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward_packed(model, samples, layout_type=MatmulLayout)
    counts = counter.get_flop_counts()
    blocks = dict(zip([name for name, m in model.named_modules() if m in model.blocks()], model.blocks(), strict=True))
    shape = model.cost_shape()
    for name, block in blocks.items():
        per_sequence = sum(2 * m.linear.weight.numel() for m in block.modules() if isinstance(m, Modulation))
        counted = sum(counts[f"{type(model).__name__}.{name}"].values()) - per_sequence
        assert counted == shape.flops_per_sequence(13)
    assert len(blocks) == shape.num_layers


def test_flops_by_hand():
    shape = CostShape(d_model=8, num_heads=2, linear_coeff=24.0, attention_coeff=4.0, num_layers=1)
    assert shape.flops_per_token == 24 * 64
    assert shape.flops_per_row(10) == 4 * 4 * 10
    assert shape.flops_per_sequence(10) == 24 * 64 * 10 + 4 * 10 * 10 * 8


INVALID = [
    ({"width": 65}, r"width 65 is not a multiple of num_heads 4; use a width such as 68"),
    ({"width": 0}, r"width is 0; expected an integer of at least 1"),
    ({"num_heads": 0}, r"num_heads is 0; expected an integer of at least 1"),
    ({"in_channels": 1.5}, r"in_channels is 1.5; expected an integer of at least 1"),
    ({"pooled_channels": True}, r"pooled_channels is True; expected an integer"),
    ({"out_channels": 0}, r"out_channels is 0; expected an integer of at least 1"),
    ({"mlp_ratio": 0.0}, r"mlp_ratio is 0.0; expected a number above 0"),
    ({"mlp_ratio": float("nan")}, r"mlp_ratio is nan"),
    ({"axes_dims": (4, 6)}, r"axes_dims \(4, 6\) has 2 entries; expected 3"),
    ({"axes_dims": (5, 5, 6)}, r"axes_dims \(5, 5, 6\) must be even"),
    ({"axes_dims": (-2, 12, 6)}, r"must be even and not negative"),
    ({"axes_dims": (4, 4, 4)}, r"sum to 12; expected the head dim 16"),
    ({"theta": 1.0}, r"theta is 1.0; expected a number above 1"),
]


@pytest.mark.parametrize(("change", "message"), INVALID, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("config", [MMDiTConfig.tiny(), DiTConfig.tiny()], ids=["mmdit", "dit"])
def test_invalid_shared_fields(config, change, message):
    with pytest.raises(SpecError, match=message):
        replace(config, **change)


def test_invalid_own_fields():
    with pytest.raises(SpecError, match="text_channels is 0"):
        replace(MMDiTConfig.tiny(), text_channels=0)
    with pytest.raises(SpecError, match="num_double is -1; expected an integer of at least 0"):
        replace(MMDiTConfig.tiny(), num_double=-1)
    with pytest.raises(SpecError, match="expected at least one block"):
        replace(MMDiTConfig.tiny(), num_double=0, num_single=0)
    with pytest.raises(SpecError, match="depth is 0"):
        replace(DiTConfig.tiny(), depth=0)


def test_bases_are_abstract():
    with pytest.raises(TypeError, match="abstract"):
        BackboneConfig(in_channels=1, pooled_channels=1, width=128, num_heads=1)  # pyright: ignore[reportAbstractUsage]
    with pytest.raises(TypeError, match="abstract"):
        PackedModel(DiTConfig.tiny())  # pyright: ignore[reportAbstractUsage]


def test_optional_parts():
    config = replace(MMDiTConfig.tiny(), qk_norm=False, qkv_bias=False, out_channels=5, mlp_ratio=1.5)
    model = MMDiT(config).double()
    names = model.state_dict().keys()
    assert not [name for name in names if "q_norm" in name or "qkv.bias" in name or "guidance" in name]
    (out,) = forward_packed(model, make_samples(config, [(2, 3)]))
    assert out.shape == (3, 5)
