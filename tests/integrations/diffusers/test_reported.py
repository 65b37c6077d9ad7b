"""Sizes, head counts and rank mixes that users of other tools report as failing, on the adapted models."""

from dataclasses import replace

import pytest

pytest.importorskip("diffusers", reason="needs pip install knapformer[diffusers]")

import torch

from knapformer import CostModel, SequenceBalancer
from tests.integrations.diffusers.families import CASES
from tests.integrations.diffusers.test_balanced import full_grads, reference, run
from tests.ranks import run_ranks
from tests.replicate import replicate


def difference(rank, world_size, name, changes, grids, texts, homes):
    """Largest error of outputs and gradients where every sequence is shared by all ranks."""
    case = replace(CASES[name], grids=grids, texts=texts)
    case = replace(case, config={**case.config, **changes})
    alone = case.build()
    mine = [sample for sample, home in zip(case.samples(alone), homes, strict=True) if home == rank]
    expected, wanted = reference(case, alone, mine)
    model = replicate(case.build())
    balancer = SequenceBalancer(cost=CostModel.from_shapes(48, 3), bag_specs=f"g{world_size}n1")
    outputs, step = run(model, mine, balancer, wrong=False)
    grads = full_grads(model, world_size)
    assert step.placement.split.all()
    pairs = [*zip(outputs, expected, strict=True), *((grads[key], wanted[key]) for key in wanted)]
    return max(float((a - b).abs().max()) / max(1, float(b.abs().max())) for a, b in pairs)


SMALL = {"attention_head_dim": 8, "axes_dims_rope": (2, 2, 4), "num_layers": 1}


def check(world_size, *case):
    assert max(run_ranks(world_size, difference, *case)) <= 1e-5


def test_an_odd_image_and_an_odd_prompt_on_two_ranks():
    """1328 x 1328 pixels are 83 x 83 tokens, and the prompt has 57."""
    check(2, "qwen-image", {**SMALL, "num_attention_heads": 2}, [(1, 83, 83)], [57], [0])


@pytest.mark.parametrize("heads", [12, 20, 30, 38])
def test_heads_that_four_ranks_do_not_divide(heads):
    changes = {**SMALL, "num_single_layers": 1, "num_attention_heads": heads}
    check(4, "flux-dev", changes, [(1, 3, 3), (1, 1, 7)], [7, 2], [0, 2])


def test_frames_that_ranks_do_not_divide_and_a_text_of_300_rows():
    """21 latent frames; a text that is not the 512 rows that some code takes for granted."""
    check(4, "wan", {"num_layers": 1}, [(21, 3, 3)], [300], [1])


def test_clips_on_one_rank_and_an_image_on_another():
    """Conditioned clips beside an unconditioned image: every rank runs the same modules all the same."""
    check(2, "wan-ti2v", {}, [(1, 2, 2), *[(2, 2, 3)] * 8], [3, *[5] * 8], [0, *[1] * 8])


def test_the_comparison_can_fail():
    changes = {**SMALL, "num_attention_heads": 2}
    case = replace(CASES["qwen-image"], config={**CASES["qwen-image"].config, **changes}, grids=[(1, 9, 9)], texts=[5])
    model = case.build()
    (sample,) = case.samples(model)
    with torch.no_grad():
        right = case.alone(model, sample)
        wrong = case.alone(model, replace(sample, grid=(1, 27, 3)))
    assert float((right - wrong).abs().max()) > 1e-3
