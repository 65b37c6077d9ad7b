"""The configuration of a training run: one TOML file, checked as it is read, defaults for a small run on a CPU.

[data]                              [model]                    [balancer]
manifest = "photos/"                width = 256                planner = "balanced"
[[data.loaders]]                    num_heads = 4
source = "images"                   num_double = 2             [train]
num_loaders = 2                     num_single = 4             steps = 100
batch = 4
"""

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from knapformer.balancer import LossMode
from knapformer.data import LoaderGroup, MediaOptions, shipped_profiles
from knapformer.errors import SpecError
from knapformer.files import read_toml
from knapformer.models import CrossDiTConfig, MMDiTConfig


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Typed, frozen, and strict: an unknown key is an error."""


class LoaderConfig(_Section, frozen=True):
    """Loaders that draw from one source of the manifest."""

    source: str
    num_loaders: int = 1
    batch: int = 1


class DataConfig(_Section, frozen=True):
    """Where samples come from and how pixels become tokens."""

    manifest: str = ""
    """Folder of media files, or a JSONL manifest. Relative to the configuration file."""
    loaders: list[LoaderConfig] = []
    patch: int = 16
    """Side of a patch [pixels]."""
    max_pixels: int | None = 65_536
    """Largest frame; larger ones are scaled down [pixels]."""
    fps: float | None = 8.0
    max_frames: int | None = 16
    max_text: int = 392
    """Longest caption [tokens]."""
    clean_frames: int = 0
    """Leading frames of a clip that are given without noise and carry no loss."""


class ModelConfig(_Section, frozen=True):
    """Kind and shape of the model."""

    kind: Literal["mmdit", "cross"] = "mmdit"
    """MMDiT: text is part of the sequences. Cross: a `CrossDiT`, whose visual tokens cross-attend to text."""
    width: int = 256
    num_heads: int = 4
    num_double: int = 2
    num_single: int = 4
    depth: int = 6
    """Blocks of a `CrossDiT`; an MMDiT has `num_double` and `num_single`."""
    mlp_ratio: float = 4.0
    axes_dims: tuple[int, int, int] = (16, 24, 24)
    text_channels: int = 64
    pooled_channels: int = 64
    zero_init: bool = False


class BalancerConfig(_Section, frozen=True):
    """How steps are balanced."""

    planner: str = "balanced"
    topology: str | None = None
    """Bag spec, for planner "bags"."""
    gamma: float = 1.0
    profile: str | None = None
    """Measured prices, instead of `gamma`: a file, relative to the configuration file, or a shipped profile's name."""
    recalibrate: int = 0
    """Steps between estimates of the ranks' speeds, which the planner then takes into account; 0: never."""
    ranks_per_node: int | None = None
    max_tokens_per_rank: int | None = None
    kernel: str | None = None
    token_grid: int = 1
    """Ranks pad their tokens to a multiple of it."""


class OptimConfig(_Section, frozen=True):
    """AdamW."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0


class RunConfig(_Section, frozen=True):
    """The run itself."""

    steps: int = 20
    seed: int = 0
    loss: LossMode = "token"
    checkpointing: bool | Literal["keep-attention"] = False
    """Recompute blocks in backward; "keep-attention" keeps attention, with its exchanges, from being run again."""
    compile: bool | str = False
    """Whether blocks are compiled, or the backend of torch.compile to do it with."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    replicas: int = 1
    """Sharding groups side by side (HSDP)."""
    ranks: int = 2
    """Ranks to start when not under torchrun."""
    record: str = "runs/train.jsonl"
    checkpoints: str | None = None
    """Folder of checkpoints; a run found there is resumed."""
    save_every: int = 0
    """Steps between checkpoints; 0: at the end only."""
    tensorboard: str | None = None
    """Folder for TensorBoard."""
    timeline: str | None = None
    """Folder for a timeline of the second step, a file per rank."""


class TrainConfig(_Section, frozen=True):
    """All sections."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    balancer: BalancerConfig = BalancerConfig()
    optim: OptimConfig = OptimConfig()
    train: RunConfig = RunConfig()

    def media_options(self) -> MediaOptions:
        d = self.data
        return MediaOptions(patch=d.patch, max_pixels=d.max_pixels, fps=d.fps, max_frames=d.max_frames)

    def loader_groups(self) -> tuple[LoaderGroup, ...]:
        return tuple(LoaderGroup(g.source, num_loaders=g.num_loaders, batch=g.batch) for g in self.data.loaders)

    def shape(self) -> MMDiTConfig | CrossDiTConfig:
        """Of the model. Raises `SpecError` if it makes no sense."""
        m = self.model
        same = ("text_channels", "pooled_channels", "width", "num_heads", "mlp_ratio", "axes_dims", "zero_init")
        shared: dict[str, Any] = {name: getattr(m, name) for name in same}
        shared["in_channels"] = 3 * self.data.patch**2
        if m.kind == "cross":
            return CrossDiTConfig(depth=m.depth, **shared)
        return MMDiTConfig(num_double=m.num_double, num_single=m.num_single, **shared)

    def to_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


def read_config(path: str | os.PathLike[str]) -> TrainConfig:
    """Read a TOML file. Paths in it are relative to it.

    Raises:
        SpecError: naming the file and the key, for what cannot be read or is not known.
    """
    path = Path(path)
    config = read_toml(path, TrainConfig, error=SpecError)
    if not config.data.manifest or not config.data.loaders:
        raise SpecError(f"{path}: [data] needs 'manifest' (a folder or JSONL file) and at least one [[data.loaders]]")
    data = msgspec.structs.replace(config.data, manifest=str(path.parent / config.data.manifest))
    balancer = config.balancer
    if balancer.profile is not None and balancer.profile not in shipped_profiles():
        balancer = msgspec.structs.replace(balancer, profile=str(path.parent / balancer.profile))
    return msgspec.structs.replace(config, data=data, balancer=balancer)
