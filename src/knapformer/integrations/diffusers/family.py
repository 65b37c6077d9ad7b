"""What a family of diffusers models has in common: what it reads, its modules, its packed forward, what it refuses.

A family is a stateless object per model class. It knows the model by the names of its modules, not by versions: a
missing name, a fused projection or a processor it has never seen is refused by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knapformer.errors import DataError, SpecError
from knapformer.integrations.diffusers.inputs import ModelSample, PackedInputs
from knapformer.integrations.diffusers.patches import Extent, after_text, grid_of, grid_positions, patchify, unpatchify

PackedBlock = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Widths:
    """Channels of what a model reads and writes, so that a rank without samples knows them too.

    Attributes:
        image, out: of a visual row in and out.
        text: of a text row.
        pooled: of the pooled text vector; None if the model takes none.
        guidance: whether it takes a guidance strength.
        axes: columns of a position.
    """

    image: int
    text: int
    out: int
    pooled: int | None = None
    guidance: bool = False
    axes: int = 3


class Family(ABC):
    """One family of models; see the module's docstring.

    Attributes:
        model_class: name of the diffusers class.
        modules: dotted names of those that the packed forward calls, separated by blanks.
        processors: attention processors whose computation it reproduces.
        patch: of the latents it reads; None where it reads rows.
        channels_last: whether channels vary fastest within a row that it writes.
        reads_channels_last: the same for a row that it reads.
        masks_text: whether it hides invalid text from attention.
        joint: whether text is part of the sequence. Otherwise tokens cross-attend to it.
        own_positions: whether samples may bring positions of their own.
        position_dtype: of positions.
    """

    model_class: ClassVar[str]
    modules: ClassVar[str]
    processors: ClassVar[tuple[str, ...]]
    channels_last: ClassVar[bool] = False
    reads_channels_last: ClassVar[bool] = False
    masks_text: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    own_positions: ClassVar[bool] = True
    position_dtype: ClassVar[torch.dtype] = torch.int32

    # -- what it reads ---------------------------------------------------------------------------------------------

    @abstractmethod
    def widths(self, model: Any) -> Widths:
        """Channels of the model's inputs and outputs."""

    def patch(self, model: Any) -> Extent | None:
        """Patch of the latents that the model reads; None if it reads rows."""
        return None

    def grid(self, model: Any, sample: ModelSample) -> Extent:
        """Visual tokens of a sample as (frames, rows, columns)."""
        patch = self.patch(model)
        if patch is not None:
            return grid_of(self.video(sample.latent), patch)
        rows = sample.latent.shape[0]
        grid = sample.grid if sample.positions is None or sample.grid is not None else (1, 1, rows)
        if sample.latent.ndim != 2 or grid is None or grid[0] * grid[1] * grid[2] != rows:
            raise DataError(
                f"a latent of {self.model_class} has shape {tuple(sample.latent.shape)} and grid {sample.grid}; "
                "expected (tokens, channels) and (frames, rows, columns) of as many tokens, or positions of your own"
            )
        return grid

    def video(self, latent: Tensor) -> Tensor:
        """A latent as this model's forward takes it, without batch axis, as (C, F, H, W)."""
        return latent

    def latent(self, video: Tensor) -> Tensor:
        """Inverse of `video`."""
        return video

    def rows(self, model: Any, latent: Tensor, *, output: bool = False) -> Tensor:
        """Visual rows of a latent, in the order in which the model reads them or writes them."""
        patch = self.patch(model)
        last = self.channels_last if output else self.reads_channels_last
        return latent if patch is None else patchify(self.video(latent), patch, channels_last=last)

    def unpack(self, model: Any, rows: Tensor, grid: Extent) -> Tensor:
        """A latent from the rows that the model wrote."""
        patch = self.patch(model)
        if patch is None:
            return rows
        return self.latent(unpatchify(rows, grid, patch, channels_last=self.channels_last))

    def takes_clean(self, model: Any) -> bool:
        """Whether some visual tokens may be clean: conditioning frames, or reference images, at time 0."""
        return False

    def pad(self, rows: Tensor) -> Tensor:
        """Rows with those that the model itself appends to a text or an image; none by default."""
        return rows

    def mark(self, rows: Tensor) -> Tensor:
        """The same for rows that the model reads, if it has to tell appended rows from others."""
        return self.pad(rows)

    def positions(self, model: Any, grid: Extent, text: Tensor) -> Tensor:
        """Positions of a sample's tokens, text first where it is part of the sequence; by default text is at 0.

        Args:
            model: the model.
            grid: visual tokens (frames, rows, columns).
            text: position of each text row that is kept, among all rows of its text.
        """
        return after_text(len(text) if self.joint else 0, grid_positions(grid))

    # -- what it computes ------------------------------------------------------------------------------------------

    @abstractmethod
    def blocks(self, model: Any) -> list[tuple[nn.Module, PackedBlock]]:
        """Modules that get a packed forward of their own, since wrappers such as FSDP2 act on their calls."""

    @abstractmethod
    def forward(self, model: Any, inputs: PackedInputs) -> Tensor:
        """The packed forward: (T_img, C_out) rows in the order of `layout.image_index`."""

    # -- what it refuses -------------------------------------------------------------------------------------------

    def check(self, model: Any) -> None:
        """Raise `SpecError` for a model that the packed forward would not reproduce."""
        for name in self.modules.split():
            try:
                model.get_submodule(name)
            except AttributeError:
                raise SpecError(
                    f"this {self.model_class} has no module {name!r}, which the packed forward calls; its diffusers "
                    "release lays the model out in a way that is not known here"
                ) from None
        for name, module in model.named_modules():
            self._check_module(name, module)
        self.check_config(model)

    def check_config(self, model: Any) -> None:  # noqa: B027
        """Refuse configurations; none by default."""

    def refuse(self, what: str) -> None:
        """Raise the error for a feature that is not reproduced."""
        raise SpecError(f"the packed forward of {self.model_class} does not support {what}")

    def _check_module(self, name: str, module: nn.Module) -> None:
        if getattr(module, "fused_projections", False):
            self.refuse(f"fused projections ({name}); call unfuse_qkv_projections() first")
        if getattr(module, "_chunk_size", None) is not None:
            self.refuse(f"chunked feed-forward layers ({name}); call disable_forward_chunking() first")
        if getattr(module, "_diffusers_hook", None) is not None:
            self.refuse(f"diffusers hooks such as offloading or caching ({name})")
        processor = getattr(module, "processor", None)
        if processor is None:
            return
        if type(processor).__name__ not in self.processors:
            known = ", ".join(self.processors)
            self.refuse(f"the attention processor {type(processor).__name__} ({name}); known are {known}")
        if getattr(processor, "_parallel_config", None) is not None:
            self.refuse(f"diffusers' own context parallelism ({name}); the balancer takes its place")
        backend = getattr(processor, "_attention_backend", None)
        backend = str(getattr(backend, "value", backend or "")).lower()
        if "sage" in backend or "fp8" in backend:
            self.refuse(f"the quantised attention backend {backend!r} ({name}); attention here is exact")
