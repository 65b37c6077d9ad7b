"""One training step's forward: route, run the model where the tokens are, and sum the weighted loss."""

from torch import Tensor, nn

from knapformer.balancer import LossMode, PackedBatch, RoutingStep
from knapformer.models import CrossDiT


def flow_loss(
    model: nn.Module, step: RoutingStep, batch: PackedBatch, text_table: Tensor, *, mode: LossMode = "token"
) -> Tensor:
    """This rank's loss, the mean of which over ranks is the loss of the batch. Collective.

    Where gradients are averaged over ranks, as FSDP and DDP do, its backward gives the gradient of the whole batch.

    Args:
        model: an `MMDiT`, or a `CrossDiT` for batches whose text is context.
        step: planned for the batch.
        batch: what this rank loaded, from `collate`.
        text_table: (vocabulary, text channels) features of the text tokens.
        mode: what counts the same; see `PackedBatch.weighted`.
    """
    here, layout = batch.weighted(mode).replace(pixels=None).route(step), step.layout
    if isinstance(model, CrossDiT):
        text = here.context["text"]
    else:
        text = here.tokens["text"].index_select(0, layout.text_index)
    velocity = model(
        here.visual("noisy"),
        text_table.index_select(0, text),
        here.vectors["timestep"],
        here.vectors["pooled"],
        layout.positions(here.vectors["grids"]),
        layout,
    )
    error = (velocity - here.visual("target").to(velocity.dtype)).square().mean(dim=1)
    return (error * here.visual("weight").to(error.dtype)).sum()  # weights of padding are zero
