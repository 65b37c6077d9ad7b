"""The model stays the user's: names, files, PEFT adapters, gradient checkpointing, copies and plain inference."""

import copy

import pytest

pytest.importorskip("diffusers", reason="needs pip install knapformer[diffusers]")

import diffusers
import torch

from knapformer.integrations.diffusers import adapt, pack
from tests.integrations.diffusers.families import CASES
from tests.integrations.diffusers.test_packed import ONE_EACH, error, gradients, packed


@pytest.mark.parametrize("name", ONE_EACH)
def test_files_do_not_change(name, tmp_path):
    case = CASES[name]
    plain = getattr(diffusers, case.model_class)(**case.config)
    model = case.build()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    samples = case.samples(model)
    with torch.no_grad():
        expected, got = case.alone(model, samples[0]), case.alone(loaded, samples[0])
        assert torch.equal(got, expected)
        assert error(packed(adapt(loaded), samples[:1])[0][0], expected) < 1e-5


@pytest.mark.parametrize("name", ONE_EACH)
def test_gradient_checkpointing(name):
    case = CASES[name]
    model = case.build()
    samples = case.samples(model)
    wanted = gradients(model, packed(model, samples)[1])
    model.enable_gradient_checkpointing()
    calls = []
    checkpoint = model._gradient_checkpointing_func
    model._gradient_checkpointing_func = lambda block, *args: (calls.append(block), checkpoint(block, *args))[1]
    grads = gradients(model, packed(model, samples)[1])
    assert len(calls) >= 2
    assert max(error(grads[key], wanted[key]) for key in wanted) < 1e-6


def lora(targets=("to_q", "to_k", "to_v", "to_out.0")):
    peft = pytest.importorskip("peft", reason="needs pip install knapformer[peft]")
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=list(targets), init_lora_weights=False)


def train(model, samples, parameters):
    """Three steps of the packed forward; the loss before each."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(3):
        loss = packed(model, samples)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ONE_EACH)
def test_lora_trains_and_reloads(name, tmp_path):
    """Adapters by `add_adapter`: they train alone, and their file loads into a fresh model with the same outputs."""
    case = CASES[name]
    torch.manual_seed(0)
    config = lora()
    model = case.build()
    samples = case.samples(model)
    model.add_adapter(config)
    with torch.no_grad():
        for sample, out in zip(samples, packed(model, samples)[0], strict=True):
            assert error(out, case.alone(model, sample)) < 1e-5
    adapters = {key: p for key, p in model.named_parameters() if "lora_" in key}
    frozen = {key: p.detach().clone() for key, p in model.named_parameters() if key not in adapters}
    before = {key: p.detach().clone() for key, p in adapters.items()}
    losses = train(model, samples, [p for p in model.parameters() if p.requires_grad])
    assert losses[-1] < losses[0]
    moved = [key for key, p in adapters.items() if not torch.equal(p, before[key])]
    # Queries of a last text stream reach no output.
    assert len(moved) >= len(adapters) - 4
    assert all(torch.equal(p, frozen[key]) for key, p in model.named_parameters() if key in frozen)

    model.save_lora_adapter(tmp_path)
    fresh = case.build()
    fresh.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors", prefix=None)
    with torch.no_grad():
        for out, wanted in zip(packed(fresh, samples)[0], packed(model, samples)[0], strict=True):
            assert error(out, wanted) < 1e-6


def test_lora_by_get_peft_model():
    """PEFT's own wrapper around an adapted model, and samples packed for the wrapper."""
    peft = pytest.importorskip("peft", reason="needs pip install knapformer[peft]")
    case = CASES["flux-dev"]
    inner = case.build()
    samples = case.samples(inner)
    model = peft.get_peft_model(inner, lora())
    batch = pack(model, samples)
    inputs = batch.local()
    with torch.no_grad():
        for sample, out in zip(samples, batch.unpack(model, model(inputs), inputs), strict=True):
            assert error(out, case.alone(model, sample)) < 1e-5
    losses = train(model, samples, [p for p in model.parameters() if p.requires_grad])
    assert losses[-1] < losses[0]


def test_a_copy_computes_with_its_own_weights():
    case = CASES["flux-dev"]
    model = case.build()
    samples = case.samples(model)
    with torch.no_grad():
        before, _ = packed(model, samples)
        twin = copy.deepcopy(model)
        model.proj_out.weight.zero_()
        after, _ = packed(twin, samples)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
