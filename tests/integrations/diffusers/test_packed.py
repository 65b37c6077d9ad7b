"""The packed forward equals diffusers' own, sample by sample: outputs and the gradient of every parameter."""

from contextlib import nullcontext

import pytest

pytest.importorskip("diffusers", reason="needs pip install knapformer[diffusers]")

import torch

from knapformer import SequenceBalancer
from knapformer.integrations.diffusers import adapt, pack
from tests.integrations.diffusers.families import CASES, exact, loss

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
VISIBLE = 1e-3
ONE_EACH = [
    *("flux-dev", "flux2", "sd3.5-medium", "qwen-image", "hunyuan-video"),
    *("cogvideox-5b", "wan", "ltx-video", "z-image"),
]


def gradients(model, total):
    total.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return grads


def error(got, expected):
    assert got.shape == expected.shape
    return float((got - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1))


def packed(model, samples, change=lambda inputs: None):
    """Outputs of the samples, and the loss of the packed rows."""
    batch = pack(model, samples, targets=True)
    inputs = batch.local()
    change(inputs)
    rows = model(inputs)
    return batch.unpack(model, rows, inputs), loss([rows], [inputs.target])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_packed_equals_alone(name, dtype):
    case = CASES[name]
    with exact() if dtype == torch.float64 else nullcontext():
        model = case.build(dtype)
        samples = case.samples(model, dtype)
        expected = [case.alone(model, sample) for sample in samples]
        wanted = gradients(model, loss(expected, [sample.target for sample in samples]))
        outputs, total = packed(model, samples)
        grads = gradients(model, total)
    for out, reference in zip(outputs, expected, strict=True):
        assert error(out, reference) <= TOLERANCE[dtype]
        assert bool((reference.abs() > 0.1).any())
    for key, grad in grads.items():
        assert grad is not None, f"{key} has no gradient: DDP and FSDP would wait for it"
        if wanted[key] is None:
            assert key.startswith(case.idle), key
            assert not grad.any()
        else:
            assert error(grad, wanted[key]) <= TOLERANCE[dtype], key


@pytest.mark.parametrize("name", ONE_EACH)
def test_bf16_is_as_close_to_fp64_as_diffusers_bf16(name, tmp_path):
    """Loaded from a file, so that what a family keeps in fp32 is in fp32."""
    case = CASES[name]
    exact_model = case.build(torch.float64)
    samples = case.samples(exact_model, torch.float64)
    with torch.no_grad(), exact():
        wanted = [case.alone(exact_model, sample) for sample in samples]
    case.build().save_pretrained(tmp_path)
    model = adapt(type(exact_model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16))
    half = case.samples(model, torch.bfloat16)
    with torch.no_grad():
        alone = [case.alone(model, sample) for sample in half]
        outputs, _ = packed(model, half)
    assert {out.dtype for out in outputs} == {torch.bfloat16}

    def worst(got):
        return max(error(a.double(), b) for a, b in zip(got, wanted, strict=True))

    assert 0 < worst(outputs) <= 2 * worst(alone)


def shift_positions(inputs):
    """One token's place too far, so that neighbours swap and text meets other distances."""
    inputs.tokens["positions"] = inputs.positions.roll(1, 0)


def swap_times(inputs):
    inputs.vectors["timestep"] = inputs.timestep.flip(0)


def swap_texts(inputs):
    inputs.context["text"] = inputs.text.roll(1, 0)


def leak(inputs):
    """Attention over all samples as if they were one."""
    attend = inputs.layout.attend

    def attend_all(q, k, v, scale=None):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)

    assert attend is not None
    inputs.layout.attend = attend_all


@pytest.mark.parametrize("change", [shift_positions, swap_times, swap_texts, leak], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ONE_EACH)
def test_a_wrong_input_is_visible(name, change):
    """The comparison above would notice a position, a vector, a text or a key that is not the sample's own."""
    case = CASES[name]
    model = case.build()
    samples = case.samples(model)
    with torch.no_grad():
        right, wrong = packed(model, samples)[0], packed(model, samples, change)[0]
    assert max(error(a, b) for a, b in zip(wrong, right, strict=True)) > VISIBLE


@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_samples(name):
    """Every module runs on no rows, and every parameter gets a gradient of zeros."""
    case = CASES[name]
    model = case.build()
    batch = pack(model, [], targets=True)
    inputs = batch.local()
    out = model(inputs)
    assert out.shape == inputs.target.shape
    out.sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert not parameter.grad.any(), key
    assert batch.unpack(model, out, inputs) == []


@pytest.mark.parametrize("name", CASES)
def test_targets_are_in_the_order_of_outputs(name):
    """Rows of a target, unpacked, are the target again: the loss compares what belongs together."""
    case = CASES[name]
    model = case.build()
    samples = case.samples(model)
    batch = pack(model, samples, targets=True)
    inputs = batch.local()
    for back, sample in zip(batch.unpack(model, inputs.target, inputs), samples, strict=True):
        assert torch.equal(back, sample.target)
    tokens = int(batch.vectors["grids"].prod(dim=1).sum())
    clean = sum(0 if sample.clean is None else int(sample.clean.sum()) for sample in samples)
    assert int(inputs.loss_mask.sum()) == tokens - clean


def test_a_prefetched_batch():
    """Packed in the loader, planned ahead."""
    case = CASES["wan"]
    model = case.build()
    samples = case.samples(model)
    loader = [pack(model, samples[:2]), pack(model, samples[2:])]
    got = []
    with torch.no_grad():
        for batch, step in SequenceBalancer().prefetch(loader):
            inputs = batch.route(step)
            got += batch.unpack(model, model(inputs), inputs, step)
        expected = [case.alone(model, sample) for sample in samples]
    assert max(error(a, b) for a, b in zip(got, expected, strict=True)) < 1e-5
