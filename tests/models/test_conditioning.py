"""Conditioning: sinusoids, modulation vectors, guidance."""

import math

import pytest
import torch

from knapformer.errors import SpecError
from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig
from knapformer.models.conditioning import Conditioner, Modulation, timestep_embedding
from tests.models.reference import LoopLayout, forward_packed, make_samples


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_timestep_embedding_by_definition():
    times = [0.0, 0.25, 1.0]
    got = timestep_embedding(torch.tensor(times, dtype=torch.float64), torch.float64, channels=6)
    frequencies = [10_000 ** (-j / 3) for j in range(3)]
    expected = [
        [math.cos(1000 * t * w) for w in frequencies] + [math.sin(1000 * t * w) for w in frequencies] for t in times
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    # Mutation: sines first must not pass.
    assert float((got.roll(3, dims=1) - torch.tensor(expected)).abs().max()) > 0.1


def test_timestep_embedding_dtype_and_no_rows():
    assert timestep_embedding(torch.rand(2), torch.float64).dtype == torch.float64
    assert timestep_embedding(torch.empty(0), torch.float32).shape == (0, 256)


def test_modulation_splits_in_order():
    mod = Modulation(4, 3).double()
    vec = normal(2, 4)
    parts = mod(vec).unbind(1)
    assert [tuple(part.shape) for part in parts] == [(2, 4)] * 3
    torch.testing.assert_close(torch.cat(list(parts), dim=1), mod.linear(torch.nn.functional.silu(vec)))


def test_guidance_is_used():
    model = MMDiT(MMDiTConfig.tiny(guidance=True)).double()
    samples = make_samples(model.config, [(2, 3), (1, 4)])
    expected = forward_packed(model, samples)
    with torch.no_grad():
        samples[1].guidance.add_(1)
    changed = forward_packed(model, samples)
    assert torch.equal(changed[0], expected[0])
    assert not torch.equal(changed[1], expected[1])


def test_guidance_given_or_missing_in_error():
    timestep, pooled = torch.rand(2), torch.rand(2, 5)
    with pytest.raises(SpecError, match="guidance was given, but the model has no guidance embedding"):
        Conditioner(5, 8)(timestep, pooled, torch.rand(2), 2)
    with pytest.raises(SpecError, match="guidance is None, but the model has a guidance embedding"):
        Conditioner(5, 8, guidance=True)(timestep, pooled, None, 2)
    with pytest.raises(SpecError, match=r"guidance has shape \(1,\); expected \(2,\): one row per local sequence"):
        Conditioner(5, 8, guidance=True)(timestep, pooled, torch.rand(1), 2)


@pytest.mark.parametrize("name", ["img", "txt", "timestep", "pooled", "ids"])
def test_wrong_shape_names_the_input(name):
    """One row for a batch of two would broadcast or fail deep inside; batch axes are a habit from other models."""
    model = MMDiT(MMDiTConfig.tiny())
    inputs = {
        "img": torch.zeros(7, 8),
        "txt": torch.zeros(3, 12),
        "timestep": torch.zeros(2),
        "pooled": torch.zeros(2, 10),
        "ids": torch.zeros(10, 3),
    }
    layout = LoopLayout.build([(2, 3), (1, 4)])
    model(**inputs, layout=layout)
    for wrong in (inputs[name][:1], inputs[name][None]):
        with pytest.raises(SpecError, match=f"{name} has shape .* expected .*one row per .*without a batch axis"):
            model(**{**inputs, name: wrong}, layout=layout)


def test_dit_wrong_shape():
    model = DiT(DiTConfig.tiny())
    layout = LoopLayout.build([(0, 3)])
    with pytest.raises(SpecError, match=r"x has shape \(4, 8\); expected \(3, 8\)"):
        model(torch.zeros(4, 8), torch.zeros(1), torch.zeros(1, 10), torch.zeros(3, 3), layout)
