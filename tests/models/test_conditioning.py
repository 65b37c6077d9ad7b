"""Conditioning: sinusoids, per-sequence rows reaching their tokens, guidance."""

import math

import pytest
import torch

from knapformer.errors import SpecError
from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, conditioning
from knapformer.models.conditioning import Conditioner, Modulation, add_gated, modulate, timestep_embedding
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


def test_modulate_and_add_gated_by_definition():
    x, branch, index = normal(5, 3), normal(5, 3, seed=1), torch.tensor([1, 0, 1, 2, 0])
    shift, scale, gate = normal(3, 3, seed=2), normal(3, 3, seed=3), normal(3, 3, seed=4)
    modulated, added = modulate(x, shift, scale, index), add_gated(x, branch, gate, index)
    for token, row in enumerate(index.tolist()):
        torch.testing.assert_close(modulated[token], x[token] * (1 + scale[row]) + shift[row], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(added[token], x[token] + gate[row] * branch[token], rtol=1e-12, atol=1e-12)
    # Mutation: the rows of another sequence must not pass.
    assert float((modulate(x, shift, scale, (index + 1) % 3) - modulated).abs().max()) > 0.1
    assert float((add_gated(x, branch, gate, (index + 1) % 3) - added).abs().max()) > 0.1


def test_gradients_of_rows_sum_over_their_tokens():
    x, index = normal(5, 3), torch.tensor([1, 0, 1, 1, 0])
    shift, scale = normal(3, 3, seed=2).requires_grad_(), normal(3, 3, seed=3).requires_grad_()
    modulate(x, shift, scale, index).sum().backward()
    assert shift.grad is not None
    assert scale.grad is not None
    assert shift.grad[:, 0].tolist() == [2, 3, 0]
    torch.testing.assert_close(scale.grad[1], x[index == 1].sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_blocks_of_rows_change_nothing(monkeypatch, block):
    """Against autograd of the expanded formula; one sequence without tokens, and as many sequences as tokens."""
    monkeypatch.setattr(conditioning, "BLOCK_ROWS", block)
    for index in (torch.tensor([1, 0, 1, 2, 0]), torch.arange(5), torch.empty(0, dtype=torch.int64)):
        x, branch = (normal(len(index), 3, seed=n).requires_grad_() for n in (0, 1))
        shift, scale, gate = (normal(5, 3, seed=n).requires_grad_() for n in (2, 3, 4))
        expected = x * (1 + scale[index]) + shift[index] + gate[index] * branch
        got = add_gated(modulate(x, shift, scale, index), branch, gate, index)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        grad = normal(len(index), 3, seed=5)
        inputs = x, branch, shift, scale, gate
        for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (got, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_nothing_is_expanded_for_backward():
    x, branch, index = normal(40, 3).requires_grad_(), normal(40, 3, seed=1), torch.arange(40) % 3
    shift, scale, gate = (normal(3, 3, seed=n).requires_grad_() for n in (2, 3, 4))

    def kept(compute):
        storages = {tensor.untyped_storage().data_ptr() for tensor in (x, branch, index)}
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            compute()
        return [len(t) for t in saved if t.untyped_storage().data_ptr() not in storages and len(t) == 40]

    assert not kept(lambda: add_gated(modulate(x, shift, scale, index), branch, gate, index))
    assert kept(lambda: x * (1 + scale[index]) + shift[index])  # the measure notices expansion


def test_gradients_of_rows_add_up_in_full_precision():
    """4,096 ones in bf16 add up to 256."""
    shift = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(4096, 2, dtype=torch.bfloat16)
    modulate(x, shift, shift.detach(), torch.zeros(4096, dtype=torch.int64)).sum().backward()
    assert shift.grad is not None
    assert shift.grad.tolist() == [[4096, 4096]]


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
