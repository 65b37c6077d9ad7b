"""The library's own layout serves the models as the plain reference does."""

import pytest
import torch

from knapformer.attention import Layout
from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, PackedLayout
from tests.models.reference import LoopLayout, errors, make_samples, run_alone, run_packed

MODELS = {
    "mmdit": lambda: MMDiT(MMDiTConfig.tiny(num_heads=7, axes_dims=(2, 2, 4), num_single=2, guidance=True)),
    "dit": lambda: DiT(DiTConfig.tiny()),
}


class LibraryLayout(LoopLayout):
    """Builds the library's layout where the reference builds its own."""

    @classmethod
    def build(cls, lengths, permutation=None) -> PackedLayout:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Layout.local([text + image for text, image in lengths], [text for text, _ in lengths])


@pytest.mark.parametrize("lengths", [[(3, 7), (0, 1), (1, 12), (5, 0)], [(0, 1)]], ids=str)
@pytest.mark.parametrize("model_name", MODELS)
def test_library_layout(model_name, lengths):
    model = MODELS[model_name]().double()
    if isinstance(model, DiT):
        lengths = [(0, text + image) for text, image in lengths]
    samples = make_samples(model.config, lengths)
    assert (
        max(errors(run_packed(model, samples, layout_type=LibraryLayout), run_alone(model, samples)).values()) < 1e-12
    )


@pytest.mark.parametrize("model_name", MODELS)
def test_library_layout_without_tokens(model_name):
    model = MODELS[model_name]().double()
    for name, grad in run_packed(model, [], layout_type=LibraryLayout).param_grads.items():
        assert grad is not None, name
        assert not grad.any(), name


def test_index_tensors_agree():
    lengths = [(3, 7), (0, 1), (5, 0)]
    got, expected = LibraryLayout.build(lengths), LoopLayout.build(lengths)
    for name in ("sequence_index", "text_index", "image_index"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert (got.num_tokens, got.num_sequences) == (expected.num_tokens, expected.num_sequences)
