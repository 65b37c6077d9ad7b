"""Loss weights: one denominator for the whole batch, whoever holds the tokens; masks; the three modes by hand."""

import pytest
import torch
import torch.distributed as dist

from knapformer import CostModel, PackedBatch, SequenceBalancer
from knapformer.balancer import LossMode, loss_weights
from knapformer.data import Grid, MediaOptions
from knapformer.data.grid import token_pixels
from knapformer.data.media import Sample
from knapformer.errors import SpecError
from knapformer.train import collate
from tests.ranks import run_ranks

# Pixels of each token of each sample. A clip whose first frame is a condition, a picture of one such frame, a caption
# with nothing to learn, a single token, and a clip of a coarser encoder.
PIXELS = [[0] * 12 + [4] * 36, [1] * 12, [0] * 5, [1], [1] * 6 + [4] * 18]
HOMES = {1: [0] * 5, 2: [0, 1, 1, 0, 0], 3: [2, 2, 0, 2, 2], 4: [3, 0, 0, 1, 3]}
MODES = ["token", "sample", "pixel"]
LENS, FLAT = [len(p) for p in PIXELS], torch.tensor([n for p in PIXELS for n in p])


def weights_by_hand(mode):
    """Of all tokens with a loss, the share of each, sample by sample."""
    samples = [torch.tensor(p, dtype=torch.float64) for p in PIXELS]
    if mode == "sample":
        samples = [(p > 0) / max(1, int((p > 0).sum())) for p in samples]
    elif mode == "token":
        samples = [(p > 0).double() for p in samples]
    total = sum(float(p.sum()) for p in samples)
    return [p / total for p in samples]


def samples():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(len(p), 6, generator=generator, dtype=torch.float64) for p in PIXELS]


def model():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(6, 6, generator=generator, dtype=torch.float64).requires_grad_()


def error(x, weight, attend):
    """A squared error per token, of something that needs the whole sequence."""
    q = (x @ weight)[:, None]
    return attend(q, q, x[:, None])[:, 0].sin().square().mean(dim=1)


def by_hand(mode):
    weight = model()
    loss = sum(
        (w * error(x, weight, attend_alone(len(x)))).sum()
        for x, w in zip(samples(), weights_by_hand(mode), strict=True)
    )
    loss.backward()
    return float(loss.detach()), weight.grad


def attend_alone(length):
    return PackedBatch({"x": torch.zeros(length, 1)}).local().layout.attend


def on_ranks(rank, world_size, mode, wrong):
    homes = HOMES[world_size]
    like = PackedBatch({"x": torch.zeros(1, 6, dtype=torch.float64), "pixels": torch.zeros(1, dtype=torch.int64)})
    mine = [
        PackedBatch({"x": x, "pixels": torch.tensor(p)})
        for x, p, home in zip(samples(), PIXELS, homes, strict=True)
        if home == rank
    ]
    batch = PackedBatch.join(mine, like=like)
    found = []
    bags = [f"g{size}n{world_size // size}" for size in (2, world_size) if world_size % size == 0]
    bags += ["g2n1", "g1n2"] if world_size == 4 else []  # balancing groups side by side
    for planner in ("local", "balanced", *bags):
        options = {"bag_specs": planner} if planner[0] == "g" else {"planner": planner}
        step = SequenceBalancer(cost=CostModel.from_shapes(6, 1), **options).plan_routing(**batch.lengths)
        weights = loss_weights(batch.seq_lens, batch.tokens["pixels"], mode)
        if wrong == "local mean":  # what a loss averaged on each rank, and gradients averaged over ranks, come to
            weights = (batch.tokens["pixels"] > 0) / (batch.tokens["pixels"] > 0).sum().clamp_min(1) / world_size
        if wrong == "no mask":
            weights = torch.full_like(weights, 1 / sum(LENS))
        here, weight = batch.replace(weight=weights.float(), pixels=None).route(step), model()
        loss = (error(here.tokens["x"], weight, step.layout.attend) * here.tokens["weight"]).sum()
        loss.backward()
        both = torch.cat([loss.detach()[None], weight.grad.flatten()])
        dist.all_reduce(both)
        found.append(both)
    return found


def largest_error(world_size, mode, wrong=""):
    loss, grad = by_hand(mode)
    expected = torch.cat([torch.tensor([loss], dtype=torch.float64), grad.flatten()])
    found = run_ranks(world_size, on_ranks, mode, wrong)
    return max(float((one - expected).abs().max() / expected.abs().max()) for rank in found for one in rank)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_loss_and_gradients_are_those_of_the_whole_batch(world_size, mode):
    assert largest_error(world_size, mode) < 1e-6  # weights are fp32


@pytest.mark.parametrize("wrong", ["local mean", "no mask"])
def test_the_comparison_can_fail(wrong):
    assert largest_error(3, "token", wrong) > 1e-2


def test_modes_by_hand():
    """A clip with a masked first frame, and a picture (the mix of which effective tokens differ by 10 times)."""
    for mode in MODES:
        weights = loss_weights(LENS, FLAT, mode)
        assert weights.dtype == torch.float32 and float(weights.sum()) == pytest.approx(1)
        for got, expected in zip(weights.split(LENS), weights_by_hand(mode), strict=True):
            assert torch.allclose(got.double(), expected.double(), rtol=1e-6)
    by_sample = loss_weights(LENS, FLAT, "sample")
    assert [float(w.sum()) for w in by_sample.split(LENS)] == pytest.approx([0.25, 0.25, 0, 0.25, 0.25])


def reported(rank, world_size):
    """Mixes on ranks that a mean of means gets wrong: weights of each sample, on 2 ranks."""
    token = {"5 tokens and 1": [[5], [1]][rank], "100 tokens each": [[100], [100]][rank]}
    found = {name: loss_weights(lens, torch.ones(sum(lens)), "token") for name, lens in token.items()}
    mixed = [[1] * 130, [65, 65]][rank]
    found["130 pictures and 2 clips"] = loss_weights(mixed, torch.ones(130), "sample")
    clip = torch.arange(21 * 1560) >= 1560  # of 21 latent frames the first is a condition
    lens, pixels = [([21 * 1560], clip.long()), ([1560], torch.ones(1560))][rank]
    found["condition and picture"] = loss_weights(lens, pixels, "token")
    return {name: (float(w.double().sum()), float(w.max())) for name, w in found.items()}


def test_reported_rank_mixes():
    first, second = run_ranks(2, reported)
    for name, parts in {
        "5 tokens and 1": (5 / 6, 1 / 6),  # not one half each
        "100 tokens each": (1 / 2, 1 / 2),  # a loss of 1 on every token is a loss of 1, on any number of ranks
        "130 pictures and 2 clips": (130 / 132, 2 / 132),  # not one half each, 65 times as much for a clip
        "condition and picture": (20 / 21, 1 / 21),
    }.items():
        assert (first[name][0], second[name][0]) == pytest.approx(parts, rel=1e-5)
    assert first["5 tokens and 1"][1] == second["5 tokens and 1"][1]


def test_a_batch_without_a_loss_and_without_tokens():
    for mode in MODES:
        assert not loss_weights([3], torch.zeros(3, dtype=torch.int64), mode).any()
        assert len(loss_weights([], torch.zeros(0, dtype=torch.int64), mode)) == 0
    wrong: LossMode = "batch"  # type: ignore[assignment]
    with pytest.raises(SpecError, match="unknown loss mode 'batch'; known modes are 'token', 'sample', 'pixel'"):
        loss_weights([1], torch.ones(1), wrong)


def test_pixels_of_tokens():
    causal = MediaOptions(patch=2, vae_spatial=8, vae_temporal=4)
    assert token_pixels((3, 1, 2), causal).tolist() == [256, 256, 1024, 1024, 1024, 1024]
    assert token_pixels((2, 1, 1), MediaOptions(patch=2, temporal_patch=2)).tolist() == [8, 8]


def test_clean_frames_have_no_noise_and_no_loss():
    clip = Sample(7, torch.ones(6, 4), Grid(3, 1, 2), "ab")
    picture = Sample(8, torch.ones(2, 4), Grid(1, 1, 2), "")
    batch = collate([clip, picture], step=0, seed=0, channels=4, pooled_channels=3, clean_frames=1)
    noisy, pixels = batch.tokens["noisy"], batch.tokens["pixels"]
    assert pixels.tolist() == [0, 0] + [0, 0] + [256] * 4 + [256] * 2
    assert (noisy[2:4] == 1).all() and not (noisy[4:] == 1).any()
    assert batch.seq_lens == [8, 2] and batch.text_lens == [2, 0]
