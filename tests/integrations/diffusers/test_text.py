"""Text padding: the default is what the released model does with the text and mask it is given."""

from dataclasses import replace

import pytest

pytest.importorskip("diffusers", reason="needs pip install knapformer[diffusers]")

import torch

from knapformer.errors import DataError
from knapformer.integrations.diffusers import pack
from tests.integrations.diffusers.families import CASES
from tests.integrations.diffusers.test_packed import error

ATTENDS = ["flux-dev", "flux2", "sd3.5-medium", "cogvideox-5b", "wan"]
MASKS = ["qwen-image", "hunyuan-video", "ltx-video"]


def padded(case, model, rows=3):
    """Samples with `rows` rows of padding behind their text, which are no zeros, and a mask."""
    out = []
    for sample in case.samples(model):
        mask = torch.arange(len(sample.text) + rows) < len(sample.text)
        padding = torch.randn(rows, sample.text.shape[1], generator=torch.Generator().manual_seed(0))
        out.append(replace(sample, text=torch.cat((sample.text, padding)), text_mask=mask))
    return out


def outputs(model, samples, **options):
    batch = pack(model, samples, **options)
    inputs = batch.local()
    with torch.no_grad():
        return batch.unpack(model, model(inputs), inputs), batch


def largest(got, expected):
    return max(error(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ATTENDS + MASKS)
def test_keep_is_the_models_own_forward(name):
    """Masked models see the mask, the others cannot; either way the outputs are diffusers' own."""
    case = CASES[name]
    model = case.build()
    samples = padded(case, model)
    with torch.no_grad():
        expected = [case.alone(model, sample) for sample in samples]
    got, batch = outputs(model, samples)
    assert largest(got, expected) < 1e-5
    rows = [len(s.text) if name in ATTENDS else int(s.text_mask.sum()) for s in samples]
    assert batch.context_lens == rows  # masked rows cost nothing


@pytest.mark.parametrize("name", ATTENDS + MASKS)
def test_strip_is_the_true_length(name):
    case = CASES[name]
    model = case.build()
    with torch.no_grad():
        expected = [case.alone(model, sample) for sample in case.samples(model)]
    stripped, _ = outputs(model, padded(case, model), text_padding="strip")
    assert largest(stripped, expected) < 1e-5
    kept, _ = outputs(model, padded(case, model))
    assert (largest(kept, expected) > 1e-3) == (name in ATTENDS)


@pytest.mark.parametrize("name", ["flux-dev", "wan"])
def test_pad_to_adds_rows_that_are_attended_to(name):
    case = CASES[name]
    model = case.build()
    samples = case.samples(model)
    with torch.no_grad():
        zeros = [replace(s, text=torch.nn.functional.pad(s.text, (0, 0, 0, 9 - len(s.text)))) for s in samples]
        expected = [case.alone(model, sample) for sample in zeros]
    got, batch = outputs(model, samples, text_padding="pad_to(9)")
    assert batch.context_lens == [9] * len(samples)
    assert largest(got, expected) < 1e-5
    with pytest.raises(DataError, match=r"7 rows, more than 'pad_to\(6\)'"):
        pack(model, samples, text_padding="pad_to(6)")


def test_strip_needs_a_mask():
    case = CASES["flux-dev"]
    model = case.build()
    with pytest.raises(DataError, match="needs text_mask"):
        pack(model, case.samples(model), text_padding="strip")


def test_a_mask_with_a_hole_keeps_the_others_positions():
    """Qwen-Image counts text rows before it hides some."""
    case = CASES["qwen-image"]
    model = case.build()
    samples = [replace(s, text_mask=torch.arange(len(s.text)) != 1) for s in case.samples(model)]
    with torch.no_grad():
        expected = [case.alone(model, sample) for sample in samples]
    got, _ = outputs(model, samples)
    assert largest(got, expected) < 1e-5


@pytest.mark.parametrize("name", ["flux-dev", "hunyuan-video", "wan", "ltx-video", "z-image"])
def test_texts_of_50_and_55_rows_in_one_batch(name):
    """Concatenating texts of different lengths fails in many trainers, and padding one corrupts it."""
    case = replace(CASES[name], texts=[50, 55], grids=[(1, 2, 3), (1, 4, 2)])
    model = case.build()
    samples = case.samples(model)
    with torch.no_grad():
        expected = [case.alone(model, sample) for sample in samples]
    got, _ = outputs(model, samples)
    assert largest(got, expected) < 1e-5


@pytest.mark.parametrize("rows", [1, 31, 32, 33])
def test_z_image_learned_padding(rows):
    """Captions and images end at multiples of 32 with learned rows, which all attend to."""
    case = replace(CASES["z-image"], texts=[rows], grids=[(1, rows, 1)])
    model = case.build()
    samples = case.samples(model)
    got, batch = outputs(model, samples)
    assert batch.seq_lens == [2 * (rows + -rows % 32)]
    assert batch.context_lens == [rows + -rows % 32]
    with torch.no_grad():
        expected = case.alone(model, samples[0])
        assert error(got[0], expected) < 1e-5
        if rows % 32:
            model.cap_pad_token.zero_()
            changed, _ = outputs(model, samples)
            assert error(changed[0], expected) > 1e-3
    # Appended rows carry no loss.
    assert int(batch.local().loss_mask.sum()) == rows


def test_no_text_at_all():
    case = replace(CASES["hunyuan-video"], texts=[0, 3], grids=[(1, 2, 3), (2, 2, 1)])
    model = case.build()
    got, _ = outputs(model, case.samples(model))
    assert all(bool(out.isfinite().all()) for out in got)
    with torch.no_grad():
        assert error(got[1], case.alone(model, case.samples(model)[1])) < 1e-5
