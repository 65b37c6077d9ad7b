"""Replay does what the placement says: every rank's tokens and attention rows, with copies for exchanges."""

import json
from collections import defaultdict
from unittest import mock

import numpy as np
import pytest
import torch

from knapformer.attention.kernels import KERNELS, Segments, register_kernel
from knapformer.attention.kernels.sdpa import sdpa_loop
from knapformer.data.trace import decode_trace
from knapformer.errors import SpecError
from knapformer.models import MMDiT, MMDiTConfig
from knapformer.plan import Placement, Sequences, Shards, make_planner
from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.tools.replay.replay import Replay, Replayed, ReplayShape, replay_model, scaled

SEQUENCES = Sequences.from_ranks([[37, 5], [], [11]], [[3, 5], [], [0]])
DEVICE = torch.device("cpu")


def _uneven() -> Placement:
    """Sequence 0: tokens on ranks 0 and 2, rows on ranks 1 and 2 with a cut inside a head; the others whole."""
    return Placement(
        SEQUENCES,
        3,
        4,
        Shards.sorted([0, 0, 1, 2], [0, 2, 0, 2], [0, 30, 0, 0], [30, 37, 5, 11]),
        Shards.sorted([0, 0, 1, 2], [1, 2, 0, 2], [0, 60, 0, 0], [60, 148, 20, 44]),
        "uneven",
    ).validate()


def _placements() -> list[Placement]:
    cost, cluster = CostModel.from_shapes(16, 4), Cluster(3)
    planned = [make_planner("local"), make_planner("bags", "g3n1"), make_planner("balanced")]
    return [_uneven(), *(plan(SEQUENCES, cluster, cost) for plan in planned)]


@pytest.mark.parametrize("placement", _placements(), ids=lambda p: p.planner)
def test_each_rank_attends_its_area_and_has_its_tokens(placement: Placement) -> None:
    model = MMDiT(MMDiTConfig.tiny(num_heads=4))
    area, tokens, forward = defaultdict(int), [], model.forward

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float | None) -> torch.Tensor:
        q_lens, k_lens = (np.diff(cu.numpy()) for cu in (segments.cu_q, segments.cu_k))
        area[len(tokens) - 1] += int((q_lens * k_lens).sum()) * q.shape[1]
        return sdpa_loop(q, k, v, segments, scale)

    def noted(*inputs: object) -> torch.Tensor:
        tokens.append(inputs[5].num_tokens)  # type: ignore[attr-defined]
        return forward(*inputs)  # type: ignore[arg-type]

    with mock.patch.dict(KERNELS), mock.patch.object(model, "forward", noted):
        register_kernel("spy", spy)
        result = Replay(model, DEVICE, repeats=1, kernel="spy")(placement)
    # Each rank runs twice, once for warm-up; the model has two layers.
    assert tokens == np.repeat(placement.tokens(), 2).tolist()
    assert [area[i] for i in range(6)] == np.repeat(2 * placement.area(), 2).tolist()
    assert len(result.seconds) == 3
    assert min(result.seconds) > 0


def test_figures_of_a_replay() -> None:
    result = Replayed([1.0, 2.0, 3.0])
    assert (result.imbalance, result.step_seconds) == (1.5, 3.0)


def test_lengths_are_scaled_and_keep_a_visual_token() -> None:
    step = {"seq_lens": [[100, 7], []], "text_lens": [[20, 6], []]}
    trace = decode_trace(json.dumps({"meta": {"world": 2}, "steps": [step]}).encode(), origin="here")
    sequences = scaled(trace, 0, 10)
    assert (sequences.length.tolist(), sequences.text_length.tolist()) == ([10, 1], [2, 0])
    with pytest.raises(SpecError, match="scale is 0"):
        scaled(trace, 0, 0)
    with pytest.raises(SpecError, match="repeats is 0"):
        Replay(MMDiT(MMDiTConfig.tiny()), DEVICE, repeats=0)


def test_a_shape_is_the_device_s_but_for_what_is_given() -> None:
    shape = ReplayShape.of(DEVICE, {"width": 64, "num_heads": 2, "scale": None})
    assert shape == ReplayShape(64, 2, 1, 1, 16.0)
    model = replay_model(shape, DEVICE)
    assert (model.config.width, model.config.num_heads, sum(model.config.axes_dims)) == (64, 2, 32)
    assert ReplayShape.of(torch.device("cuda"), {}).width == 3072
