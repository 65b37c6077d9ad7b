"""What can be measured: the layers of our DiT and MMDiT, and a user's own module.

A few real layers with random weights, in the dtype of training, and the inputs they take. Embeddings, conditioning and
the output layer are left out: they run once a step, not once a layer.

Your own module is named by its import path, package.module:Class or path/to/file.py:Class. `Class()` must give a module
with

    width, num_heads       ints; what it hands to `layout.attend` has num_heads heads
    forward(x, layout)     packed tokens (T, width) of all sequences to packed tokens; attends by `layout.attend`

and may have num_layers (layers inside it, default 1) and mlp_ratio (default 4.0).
"""

from typing import Any

import torch
from torch import Tensor, nn

from knapformer.attention import Layout
from knapformer.attention.rows import compute_dtype
from knapformer.data.profile import LayerShape
from knapformer.errors import CalibrationError, SpecError
from knapformer.models import DiTConfig, MMDiTConfig, Rotation, merge_streams, rotation_from_ids
from knapformer.models.dit import DiTBlock
from knapformer.models.init import fill_parameters
from knapformer.models.mmdit import DoubleStreamBlock, SingleStreamBlock
from knapformer.train.named import load_named

TEXT_SHARE = 8
"""One token in this many is text, in layers that tell text from image."""


class Layers:
    """Layers to measure; this class itself is for a user's module.

    Attributes:
        shape: of a layer.
        module: the layers, on the device and in the dtype of `shape`.
    """

    def __init__(self, shape: LayerShape, module: nn.Module) -> None:
        self.shape, self.module = shape, module

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    def layout(self, lengths: tuple[int, ...], kernel: str | None) -> Layout:
        """Whole sequences of these lengths, some tokens of each of them text."""
        return Layout.local(lengths, [length // TEXT_SHARE for length in lengths], device=self.device, kernel=kernel)

    def inputs(self, layout: Layout) -> tuple[Any, ...]:
        """Random inputs of `run`."""
        return (self.rows(layout.num_tokens),)

    def run(self, layout: Layout, *inputs: Any) -> Tensor:
        """All layers."""
        return self.module(*inputs, layout)

    def leaves(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        """What backward computes gradients of: the inputs that need one, and the weights."""
        return [x for x in inputs if isinstance(x, Tensor) and x.requires_grad] + [*self.module.parameters()]

    def rows(self, number: int) -> Tensor:
        """Random (number, width) that need a gradient."""
        return torch.randn(number, self.shape.d_model, device=self.device, dtype=self.dtype, requires_grad=True)

    def rotation(self, layout: Layout) -> Rotation:
        """Of the tokens' places in their sequences."""
        ids_T3, axes_dims = layout.position[:, None].expand(-1, 3), (0, 0, self.shape.head_dim)
        return rotation_from_ids(ids_T3, axes_dims, 1e4, compute_dtype(self.dtype))


class DiTLayers(Layers):
    """One DiT block."""

    def inputs(self, layout: Layout) -> tuple[Any, ...]:
        return self.rows(layout.num_tokens), self.rows(layout.num_sequences), self.rotation(layout)


class MMDiTLayers(Layers):
    """One double-stream and two single-stream blocks, FLUX's proportion."""

    def inputs(self, layout: Layout) -> tuple[Any, ...]:
        img, txt = (self.rows(len(index)) for index in (layout.image_index, layout.text_index))
        return img, txt, self.rows(layout.num_sequences), self.rotation(layout)

    def run(self, layout: Layout, *inputs: Any) -> Tensor:
        img, txt, vec, rotation = inputs
        double, *singles = self.module.children()
        img, txt = double(img, txt, vec, rotation, layout)
        x = merge_streams(txt, img, layout)
        for block in singles:
            x = block(x, vec, rotation, layout)
        return x


def make_layers(
    block: str,
    *,
    d_model: int = 192,
    num_heads: int = 4,
    mlp_ratio: float = 4.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Layers:
    """Layers by name.

    Args:
        block: "dit", "mmdit", or the import path of your own module, which knows its own sizes.
        d_model, num_heads, mlp_ratio: of our blocks.
        dtype, device: as in training.

    Raises:
        CalibrationError: for a path that does not lead to a module as described above.
        SpecError: for sizes that do not fit together.
    """
    if ":" in block:
        return _own(block, dtype, torch.device(device))
    head_dim = d_model // max(num_heads, 1)
    sizes: dict[str, Any] = {
        "in_channels": 1,
        "pooled_channels": 1,
        "width": d_model,
        "num_heads": num_heads,
        "mlp_ratio": mlp_ratio,
        "axes_dims": (0, 0, head_dim),
    }
    with torch.device("meta"):
        if block == "dit":
            kind, num_layers, module = DiTLayers, 1, DiTBlock(DiTConfig(**sizes, depth=1))
        elif block == "mmdit":
            config = MMDiTConfig(**sizes, text_channels=1, num_double=1, num_single=2)
            kind, num_layers = MMDiTLayers, 3
            module = nn.Sequential(DoubleStreamBlock(config), *(SingleStreamBlock(config) for _ in range(2)))
        else:
            raise SpecError(
                f"block {block!r} is not known; use dit, mmdit, or the import path of your own, 'package.module:Class'"
            )
    shape = LayerShape(block, d_model, num_heads, head_dim, float(mlp_ratio), num_layers, _name(dtype))
    module = module.to(dtype).to_empty(device=device)
    fill_parameters(module)
    return kind(shape, module)


def _own(path: str, dtype: torch.dtype, device: torch.device) -> Layers:
    make = load_named(path, error=CalibrationError)
    try:
        built = make()
    except TypeError as error:
        raise CalibrationError(
            f"cannot build {path!r}: {error}; it must name a class that can be called without arguments, such as "
            "'my_package.blocks:Block'"
        ) from error
    sizes: dict[str, Any] = {name: getattr(built, name, None) for name in ("width", "num_heads")}
    sizes["num_layers"] = getattr(built, "num_layers", 1)
    wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
    if not isinstance(built, nn.Module) or wrong or not list(built.parameters()):
        what = f"its {', '.join(f'{n} is {s!r}' for n, s in wrong.items())}" if wrong else f"it is a {type(built)}"
        raise CalibrationError(
            f"{path!r} cannot be measured: {what}; it must be a torch module with parameters, whose width, num_heads "
            "and, where it has it, num_layers are integers of at least 1"
        )
    width, heads, layers = sizes["width"], sizes["num_heads"], sizes["num_layers"]
    ratio = float(getattr(built, "mlp_ratio", 4.0))
    shape = LayerShape(path, width, heads, max(1, width // heads), ratio, layers, _name(dtype))
    return Layers(shape, built.to(device=device, dtype=dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
