"""What `selfcheck` checks where no model is given, and how a model is named on the command line.

(nothing)                   an MMDiT and a CrossDiT, tiny, with random weights
package.module:factory      called without arguments; gives a module that `selfcheck` takes
path/to/file.py:factory     likewise
path/to/folder              a model of diffusers as `save_pretrained` wrote it, or its config.json alone
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from knapformer.balancer import PackedBatch
from knapformer.errors import BackendUnavailableError, SpecError
from knapformer.files import read_json
from knapformer.models import CrossDiT, CrossDiTConfig, MMDiT, MMDiTConfig
from knapformer.train.named import load_named

BUILT_IN = ("mmdit", "cross")


class BuiltIn(nn.Module):
    """A tiny model of this library, with samples of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        config = MMDiTConfig.tiny() if kind == "mmdit" else CrossDiTConfig.tiny()
        self.config = config
        self.inner = MMDiT(config) if isinstance(config, MMDiTConfig) else CrossDiT(config)

    def example(self, length: int, generator: torch.Generator) -> PackedBatch:
        """A sample of `length` visual tokens and a third as much text."""
        joint, num_text = isinstance(self.config, MMDiTConfig), length // 3

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        text = normal(num_text, self.config.text_channels)
        x = normal(length + num_text * joint, self.config.in_channels)
        tokens = {"x": x}
        if joint:
            tokens["text"] = torch.cat([text, text.new_zeros(length, text.shape[1])])
        vectors = {
            "time": torch.rand(1, generator=generator),
            "pooled": normal(1, self.config.pooled_channels),
            "grid": torch.tensor([[1, 1, length]], dtype=torch.int32),
        }
        return PackedBatch(tokens, vectors, {} if joint else {"text": text}, text_lens=[num_text * joint])

    def forward(self, batch: PackedBatch) -> Tensor:
        layout, vectors = batch.layout, batch.vectors
        beside = vectors["time"], vectors["pooled"], layout.positions(vectors["grid"]), layout
        if isinstance(self.inner, CrossDiT):
            return self.inner(batch.tokens["x"], batch.context["text"], *beside)
        image, text = batch.tokens["x"][layout.image_index], batch.tokens["text"][layout.text_index]
        return self.inner(image, text, *beside)


def load_model(name: str) -> nn.Module:
    """The model that a name stands for, with random weights unless they are stored with it.

    Raises:
        SpecError: naming what cannot be found.
    """
    torch.manual_seed(0)
    if name in BUILT_IN:
        return BuiltIn(name)
    if Path(name).is_dir():
        return _from_folder(Path(name))
    if ":" not in name:
        raise SpecError(
            f"no model {name!r}; give a folder of diffusers, package.module:factory or path/to/file.py:factory"
        )
    make = load_named(name)
    if not callable(make):
        raise SpecError(f"{name!r} is a {type(make).__name__} and makes no model")
    model = make()
    if not isinstance(model, nn.Module):
        raise SpecError(f"{name!r} made a {type(model).__name__}, not a torch.nn.Module")
    return model


def diffusers_batch(model: Any, lengths: Sequence[int], generators: Sequence[torch.Generator]) -> Any:
    """Packed random samples of about these lengths, for an adapted model of diffusers."""
    try:
        from knapformer.integrations.diffusers import ModelSample, family_of, pack

        family = family_of(model)
    except (ImportError, SpecError) as error:
        raise SpecError(
            f"{type(model).__name__} has no method example(length, generator), which makes a sample to check it with, "
            "and is no model of diffusers that is known here"
        ) from error
    widths, patch = family.widths(model), family.patch(model)
    flags = len(family.mark(torch.zeros(1, 1))[0]) - 1  # columns that the family adds itself
    num_text = getattr(model.config, "max_text_seq_length", 7)
    samples = []
    for length, generator in zip(lengths, generators, strict=False):
        rows = max(1, int(length**0.5))
        grid = 1, rows, max(1, length // rows)
        if patch is None:
            latent = torch.randn(grid[1] * grid[2], widths.image, generator=generator)
        else:
            channels = (widths.image - flags) // (patch[0] * patch[1] * patch[2])
            sizes = [g * p for g, p in zip(grid, patch, strict=True)]
            latent = family.latent(torch.randn(channels, *sizes, generator=generator))
        text = torch.randn(num_text, widths.text - flags, generator=generator)
        pooled = torch.randn(widths.pooled, generator=generator) if widths.pooled else None
        guidance = 3.5 if widths.guidance else None
        samples.append(ModelSample(latent, text, 0.5, grid, pooled=pooled, guidance=guidance))
    return pack(model, samples)


def _from_folder(folder: Path) -> nn.Module:
    try:
        import diffusers
    except ImportError as error:
        raise BackendUnavailableError(
            "reading a folder of diffusers needs diffusers, which is not installed; install it with: "
            "pip install 'knapformer[diffusers]'"
        ) from error
    from knapformer.integrations.diffusers import adapt

    config = read_json(folder / "config.json", dict[str, Any], error=SpecError)
    name = config.get("_class_name")
    cls = getattr(diffusers, str(name), None)
    if cls is None:
        raise SpecError(f"{folder} holds no model of diffusers: _class_name in its config.json is {name!r}")
    weights = list(folder.glob("*.safetensors")) + list(folder.glob("*.bin"))
    return adapt(cls.from_pretrained(folder) if weights else cls.from_config(config))
