"""What all packed transformers share in their configuration, and the figures a cost model needs.

Per layer and token the four width x width products of attention and the two of an MLP of ratio r cost

    2 (4 + 2 r) D^2 = (8 + 4 r) D^2 [FLOP],    24 D^2 for r = 4,

and each of the H * L attention rows of a sequence of L tokens costs 4 K L (q.k and p.v). Modulation costs per sequence,
not per token, and is left out: it is a third of the parameters and a vanishing part of the work.

Legend: D width, H heads, K = D / H head dim, L tokens of one sequence.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from knapformer.errors import SpecError
from knapformer.models.rope import check_axes


class CostShape(NamedTuple):
    """The figures of a model that decide its forward work; all layers are alike."""

    d_model: int
    num_heads: int
    linear_coeff: float
    attention_coeff: float
    num_layers: int

    @property
    def flops_per_token(self) -> float:
        """Token-wise forward work of one layer [FLOP per token]."""
        return self.linear_coeff * self.d_model**2

    def flops_per_row(self, seq_len: int) -> float:
        """Forward work of one attention row of one layer in a sequence of `seq_len` tokens [FLOP per row]."""
        return self.attention_coeff * (self.d_model / self.num_heads) * seq_len

    def flops_per_sequence(self, seq_len: int) -> float:
        """Forward work of one layer for a whole sequence [FLOP]."""
        return seq_len * (self.flops_per_token + self.num_heads * self.flops_per_row(seq_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneConfig(ABC):
    """Shape of a packed transformer.

    Attributes:
        in_channels: Channels of a visual input token.
        out_channels: Channels of a visual output token; as `in_channels` if None.
        pooled_channels: Channels of the pooled conditioning vector, one vector per sequence.
        width: D, channels inside the model.
        num_heads: H; must divide the width. No relation to the number of ranks is needed.
        mlp_ratio: Hidden MLP channels over the width.
        axes_dims: Head channels that rotate with frame, row and column position.
        theta: Base of the rotary wavelengths.
        qk_norm: RMSNorm on the queries and keys of each head.
        qkv_bias: Bias in query, key and value projections; fused projections (`SingleStreamBlock`) always have one.
        zero_init: Start as published: modulation, output layer and biases at zero, so that every block is the
            identity and the model returns zeros. False starts with no zero anywhere.
    """

    in_channels: int
    out_channels: int | None = None
    pooled_channels: int
    width: int
    num_heads: int
    mlp_ratio: float = 4.0
    axes_dims: tuple[int, int, int] = (16, 56, 56)
    theta: float = 10_000.0
    qk_norm: bool = True
    qkv_bias: bool = True
    zero_init: bool = False

    TINY: ClassVar[dict[str, Any]] = {"in_channels": 8, "pooled_channels": 10}
    """Fields of `tiny` models that have no default."""

    @classmethod
    def tiny(cls, *, num_heads: int = 4, axes_dims: tuple[int, int, int] = (4, 6, 6), **others: Any) -> Self:
        """A small model (0.2 M parameters by default) for tests and demos, with any number of heads.

        Args:
            num_heads: H.
            axes_dims: channels of a head by axis; their sum is the head dim.
            others: further fields of the configuration.
        """
        width = num_heads * sum(axes_dims)
        return cls(**{**cls.TINY, "width": width, "num_heads": num_heads, "axes_dims": axes_dims, **others})

    def __post_init__(self) -> None:
        check_at_least(self, 1, "in_channels", "pooled_channels", "width", "num_heads")
        if self.out_channels is not None:
            check_at_least(self, 1, "out_channels")
        if self.width % self.num_heads:
            raise SpecError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}; "
                f"use a width such as {self.num_heads * (self.width // self.num_heads + 1)}"
            )
        if not self.mlp_ratio > 0 or self.mlp_width < 1:
            raise SpecError(f"mlp_ratio is {self.mlp_ratio}; expected a number above 0 that leaves a hidden channel")
        check_axes(self.axes_dims, self.head_dim, self.theta)

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def mlp_width(self) -> int:
        return int(self.width * self.mlp_ratio)

    @property
    def num_out_channels(self) -> int:
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Blocks that attend."""

    def cost_shape(self) -> CostShape:
        """The figures for a cost model."""
        linear_coeff = 8.0 + 4.0 * self.mlp_width / self.width
        return CostShape(self.width, self.num_heads, linear_coeff, 4.0, self.num_layers)


def check_at_least(config: object, minimum: int, *names: str) -> None:
    """Check integer fields of a configuration.

    Raises:
        SpecError: a field is not an int, or is below `minimum`.
    """
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise SpecError(f"{name} is {value!r}; expected an integer of at least {minimum}")
