"""One training step's forward: route, run the model where the tokens are, and sum the weighted loss."""

from torch import Tensor, nn

from knapformer.balancer import PackedBatch, RoutingStep
from knapformer.models import CrossDiT
from knapformer.train.loss import LossMode, loss_weights


def flow_loss(
    model: nn.Module, step: RoutingStep, batch: PackedBatch, text_table: Tensor, *, mode: LossMode = "token"
) -> Tensor:
    """This rank's part of the batch's loss: a sum with global weights. Collective.

    Args:
        model: an `MMDiT`, or a `CrossDiT` for batches whose text is context.
        step: planned for the batch.
        batch: what this rank loaded, from `collate`.
        text_table: (vocabulary, text channels) features of the text tokens.
        mode: what counts the same; see `loss_weights`.
    """
    weight = loss_weights(batch.seq_lens, batch.tokens["pixels"], mode)
    here, layout = batch.replace(pixels=None, weight=weight).route(step), step.layout
    visual = {n: here.tokens[n].index_select(0, layout.image_index) for n in ("noisy", "target", "weight")}
    if isinstance(model, CrossDiT):
        text = here.context["text"]
    else:
        text = here.tokens["text"].index_select(0, layout.text_index)
    velocity = model(
        visual["noisy"],
        text_table.index_select(0, text),
        here.vectors["timestep"],
        here.vectors["pooled"],
        layout.positions(here.vectors["grids"]),
        layout,
    )
    error = (velocity - visual["target"].to(velocity.dtype)).square().mean(dim=1)
    return (error * visual["weight"].to(error.dtype)).sum()  # weights of padding are zero
