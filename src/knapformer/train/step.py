"""One training step's forward: route, run the model where the tokens are, and weigh the loss by global counts.

Every rank knows the global counts from the plan, so each rank sums its tokens' losses with global weights and the sum
over ranks is the loss of the whole batch, however it was cut. Modes:

    token     every visual token of the batch counts the same       weight 1 / (visual tokens of the batch)
    sample    every sample counts the same                          weight 1 / (samples * visual tokens of the sample)
"""

from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from knapformer.attention import Layout
from knapformer.balancer import RoutingStep
from knapformer.errors import SpecError
from knapformer.models import CrossDiT
from knapformer.plan import Sequences
from knapformer.train.batch import HomeBatch

LossMode = Literal["token", "sample"]


def flow_loss(
    model: nn.Module, step: RoutingStep, batch: HomeBatch, text_table: Tensor, *, mode: LossMode = "token"
) -> Tensor:
    """This rank's part of the batch's loss: a sum with global weights. Collective.

    Args:
        model: an `MMDiT`, or a `CrossDiT` for batches whose text is context.
        step: planned for the batch.
        batch: what this rank loaded.
        text_table: (vocabulary, text channels) features of the text tokens.
        mode: how tokens are weighted.
    """
    layout, cross = step.layout, isinstance(model, CrossDiT)
    _, noisy, features = step.route(batch.noisy, [batch.target] if cross else [batch.target, batch.text])
    target, *text = features or []
    timestep, pooled, grids = step.deliver(batch.timestep, batch.pooled, batch.grids)
    (text,) = step.deliver_context(batch.text) if cross else (text[0].index_select(0, layout.text_index),)
    velocity = model(
        noisy.index_select(0, layout.image_index),
        text_table.index_select(0, text),
        timestep,
        pooled,
        layout.positions(grids),
        layout,
    )
    error = (velocity - target.index_select(0, layout.image_index).to(velocity.dtype)).square().mean(dim=1)
    weight = _token_weights(step, layout, mode).to(error.dtype)
    return (error * weight).sum()


def _token_weights(step: RoutingStep, layout: Layout, mode: LossMode) -> Tensor:
    """(T_img,) weight of each visual token here."""
    sequences = step.placement.sequences
    visual = sequences.length - sequences.text_length
    tokens, samples = _global_counts(sequences, step)
    if mode == "token":
        per_sequence = np.full(len(visual), 1 / max(1, tokens))
    elif mode == "sample":
        per_sequence = 1 / (max(1, samples) * np.maximum(1, visual))
    else:
        raise SpecError(f"unknown loss mode {mode!r}; known modes are 'token' and 'sample'")
    local = torch.from_numpy(per_sequence[np.asarray(layout.sequence_ids, dtype=np.int64)]).to(
        layout.image_index.device
    )
    weight = local.index_select(0, layout.sequence_index.index_select(0, layout.image_index))
    return weight * layout.token_mask.index_select(0, layout.image_index) if layout.padding else weight


def _global_counts(sequences: Sequences, step: RoutingStep) -> tuple[int, int]:
    """Visual tokens, and samples with any, of the whole batch: of all balancing groups together."""
    visual = sequences.length - sequences.text_length
    counts = torch.tensor([int(visual.sum()), int((visual > 0).sum())], device=step.device)
    if dist.is_initialized() and step.group.size != dist.get_world_size():
        dist.all_reduce(counts)  # every group contributes once per rank
        counts = counts // step.group.size
    tokens, samples = counts.tolist()
    return tokens, samples
