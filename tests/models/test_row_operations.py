"""Models keep little for backward and sum modulation gradients in full precision."""

import pytest
import torch

from knapformer.models import (
    DiT,
    DiTBlock,
    DiTConfig,
    MMDiT,
    MMDiTConfig,
    SingleStreamBlock,
    rotation_from_ids,
)
from tests.attention.expanded import check_nothing_is_expanded, check_sums_are_precise
from tests.models.reference import forward_packed, make_samples


@pytest.mark.parametrize("model", [MMDiT(MMDiTConfig.tiny()), DiT(DiTConfig.tiny())], ids=["mmdit", "dit"])
def test_nothing_is_expanded(model):
    text = 40 if isinstance(model, MMDiT) else 0
    samples = make_samples(model.config, [(text, 120), (text, 80)], dtype=torch.float32)
    check_nothing_is_expanded(lambda: torch.cat(forward_packed(model, samples)))


class OneSequence:
    """A layout of one sequence, in which attention gives the values back."""

    def __init__(self, num_tokens):
        self.num_tokens, self.num_sequences = num_tokens, 1
        self.sequence_index = torch.zeros(num_tokens, dtype=torch.int64)

    def attend(self, q, k, v):
        return v + 0 * (q + k)


@pytest.mark.parametrize(
    ("kind", "config"), [(DiTBlock, DiTConfig.tiny(num_heads=2)), (SingleStreamBlock, MMDiTConfig.tiny(num_heads=2))]
)
def test_modulation_gradients_of_a_long_sequence(kind, config):
    torch.manual_seed(0)
    rotation = rotation_from_ids(torch.zeros(4096, 3), config.axes_dims, config.theta, torch.float32)

    def run(block, x, vec):
        return block(x, vec, rotation, OneSequence(len(x)))

    check_sums_are_precise(kind(config), run, 4096, config.width, ("mod.linear.bias",))
