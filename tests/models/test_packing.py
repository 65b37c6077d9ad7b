"""A packed call equals one call per sequence: outputs, input gradients and every parameter gradient."""

import pytest
import torch

from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig
from tests.models.reference import (
    LateStreamLayout,
    LeakyLayout,
    LoopLayout,
    Result,
    ShiftedIndexLayout,
    errors,
    forward_packed,
    make_samples,
    run_alone,
    run_packed,
)

SEVEN_HEADS = {"num_heads": 7, "axes_dims": (2, 2, 4)}
MODELS = {
    "mmdit": lambda: MMDiT(MMDiTConfig.tiny()),
    "mmdit-7-heads-guidance": lambda: MMDiT(MMDiTConfig.tiny(**SEVEN_HEADS, num_double=2, num_single=2, guidance=True)),
    "mmdit-double-only": lambda: MMDiT(MMDiTConfig.tiny(num_double=2, num_single=0)),
    "mmdit-single-only": lambda: MMDiT(MMDiTConfig.tiny(num_double=0, num_single=2)),
    "dit": lambda: DiT(DiTConfig.tiny()),
    "dit-7-heads": lambda: DiT(DiTConfig.tiny(**SEVEN_HEADS)),
}
LENGTHS = {
    "mixed": [(3, 7), (5, 1), (1, 12)],
    "one-token": [(0, 1)],
    "one-and-seven": [(1, 0), (0, 7), (0, 1), (2, 5)],
    "no-text": [(0, 7), (0, 4)],
    "text-only": [(4, 0), (7, 0)],
    "text-only-beside-image": [(4, 0), (0, 3), (2, 2)],
}
MUTATIONS = {"leak": LeakyLayout, "wrong-vectors": ShiftedIndexLayout, "wrong-rows": LateStreamLayout}
EXACT = 1e-12
VISIBLE = 1e-4


def build(model_name, lengths_name, dtype=torch.float64):
    model = MODELS[model_name]().to(dtype)
    lengths = LENGTHS[lengths_name]
    if isinstance(model, DiT):
        lengths = [(0, text + image) for text, image in lengths]
    return model, make_samples(model.config, lengths, dtype=dtype)


def shuffle(samples, seed=3):
    total = sum(sum(sample.lengths) for sample in samples)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lengths_name", LENGTHS)
@pytest.mark.parametrize("model_name", MODELS)
def test_packed_equals_alone(model_name, lengths_name):
    model, samples = build(model_name, lengths_name)
    assert max(errors(run_packed(model, samples), run_alone(model, samples)).values()) < EXACT


@pytest.mark.parametrize("model_name", MODELS)
def test_any_token_order(model_name):
    model, samples = build(model_name, "mixed")
    shuffled = run_packed(model, samples, shuffle(samples))
    assert max(errors(shuffled, run_alone(model, samples)).values()) < EXACT


@pytest.mark.parametrize(
    ("model_name", "mutation"),
    # A model of one stream does not read image_index.
    [(m, w) for m in MODELS for w in MUTATIONS if not (m.startswith("dit") and w == "wrong-rows")],
)
def test_wrong_layout_is_visible(model_name, mutation):
    model, samples = build(model_name, "mixed")
    wrong = errors(run_packed(model, samples, layout_type=MUTATIONS[mutation]), run_alone(model, samples))
    assert min(wrong.values()) > VISIBLE


@pytest.mark.parametrize("model_name", ["mmdit-7-heads-guidance", "dit"])
def test_fp32(model_name):
    model, samples = build(model_name, "mixed", torch.float32)
    assert max(errors(run_packed(model, samples), run_alone(model, samples)).values()) < 1e-5


@pytest.mark.parametrize("model_name", ["mmdit-7-heads-guidance", "dit"])
def test_bf16_is_as_close_to_fp64_as_unpacked_bf16(model_name):
    exact = run_alone(*build(model_name, "mixed"))
    packed = errors(run_packed(*build(model_name, "mixed", torch.bfloat16)), exact)
    alone = errors(run_alone(*build(model_name, "mixed", torch.bfloat16)), exact)
    for name, value in packed.items():
        assert 0 < value <= 2 * alone[name]


@pytest.mark.parametrize("model_name", MODELS)
def test_order_of_sequences(model_name):
    model, _ = build(model_name, "mixed")
    samples = make_samples(model.config, [(0 if isinstance(model, DiT) else 2, 5)] * 3)
    order = [2, 0, 1]
    expected = run_packed(model, samples)
    permuted = run_packed(model, [samples[i] for i in order])
    restored = Result(
        [permuted.outputs[order.index(i)] for i in range(3)],
        [permuted.input_grads[order.index(i)] for i in range(3)],
        permuted.param_grads,
    )
    assert max(errors(restored, expected).values()) < EXACT
    assert errors(permuted, expected)["outputs"] > VISIBLE
    assert errors(permuted, expected)["input_grads"] > VISIBLE


@pytest.mark.parametrize("model_name", MODELS)
def test_every_input_matters(model_name):
    """No weight and no input is idle: gradients of a generic batch are nowhere zero as a whole."""
    model, samples = build(model_name, "mixed")
    result = run_packed(model, samples)
    for name, grad in result.param_grads.items():
        assert grad is not None, name
        # The last text stream ends nowhere; of it, only keys and values reach the loss.
        if model_name != "mmdit-double-only" or not name.startswith("double_blocks.1.txt."):
            assert float(grad.abs().max()) > 1e-6, name
    used = [True, not isinstance(model, DiT), True, True, getattr(model.config, "guidance", False)]
    for grads in result.input_grads:
        for grad, is_used in zip(grads, used, strict=True):
            assert (grad is not None and float(grad.abs().max()) > 1e-8) == is_used


@pytest.mark.parametrize("model_name", MODELS)
def test_positions_matter(model_name):
    model, samples = build(model_name, "mixed")
    expected = forward_packed(model, samples)
    moved = [type(s)(*s.leaves, ids=s.ids * 2, loss_weight=s.loss_weight) for s in samples]
    assert float((forward_packed(model, moved)[0] - expected[0]).detach().abs().max()) > VISIBLE


def test_reference_layouts_differ_where_they_should():
    lengths = LENGTHS["mixed"]
    right, shifted = LoopLayout.build(lengths), ShiftedIndexLayout.build(lengths)
    assert torch.equal(shifted.text_index, right.text_index)
    assert not torch.equal(shifted.sequence_index, right.sequence_index)
