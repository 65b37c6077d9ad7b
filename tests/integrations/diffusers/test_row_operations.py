"""Adapted models keep as little for backward as the library's own, and sum modulation gradients as precisely."""

from dataclasses import replace

import pytest

pytest.importorskip("diffusers", reason="needs pip install knapformer[diffusers]")

import torch

from knapformer.attention import Layout
from knapformer.integrations.diffusers import pack
from knapformer.integrations.diffusers.flux import double_block, single_block
from knapformer.integrations.diffusers.ops import BlockContext
from tests.attention.expanded import check_nothing_is_expanded, check_sums_are_precise
from tests.integrations.diffusers.families import CASES
from tests.integrations.diffusers.test_packed import ONE_EACH

TOKENS = 4096


@pytest.mark.parametrize("name", ONE_EACH)
def test_nothing_is_expanded(name):
    case = replace(CASES[name], grids=[(1, 9, 9)], texts=[40])
    model = case.build()
    inputs = pack(model, case.samples(model)).local()
    check_nothing_is_expanded(lambda: model(inputs))


class ValuesBack(Layout):
    """Attention that gives the values back."""

    def attend(self, q, k, v, *, scale=None):
        return v + 0 * (q + k)


@pytest.mark.parametrize("kind", ["single", "double"])
def test_modulation_gradients_of_a_long_sequence(kind):
    model = CASES["flux-dev"].build(torch.float64)
    ctx = BlockContext(ValuesBack.local([TOKENS], [TOKENS // 2]))

    def run(block, x, vec):
        if kind == "single":
            return single_block(block, ctx, x, vec)
        return torch.cat(double_block(block, ctx, x[TOKENS // 2 :], x[: TOKENS // 2], vec))

    blocks = model.single_transformer_blocks if kind == "single" else model.transformer_blocks
    names = ("norm.linear.bias", "norm1.linear.bias", "norm1_context.linear.bias")
    check_sums_are_precise(blocks[0], run, TOKENS, 48, names)
