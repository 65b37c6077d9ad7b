"""Cross-attention DiT, packed: visual tokens attend to each other and then to text, as in Wan, PixArt and LTX.

    x (T, C) -> x_in -> [ attention, cross-attention, MLP ] x depth -> final_layer -> (T, C_out)
                                       ^
    text (N, C) -> text_in ------------'   keys and values of every block

Sequences are the visual tokens alone; the text is their context, delivered once a step (`step.deliver_context`). As in
Wan, attention and MLP are modulated and gated by timestep and pooled vector, cross-attention is not. Unlike there, each
block has a modulation of its own, and norms of queries and keys are per head. A sequence without text cross-attends to
nothing, which adds the bias of the projection.

Legend: T tokens and N context rows on this rank, S sequences that have tokens here, D width, H heads, K head dim.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from knapformer.attention.rotation import Rotation
from knapformer.attention.rows import add_gated
from knapformer.models.compiled import piece
from knapformer.models.conditioning import Conditioner, Embedder
from knapformer.models.config import CostShape, check_at_least
from knapformer.models.dit import DiTBlock, DiTConfig
from knapformer.models.init import deferred_init
from knapformer.models.layers import FinalLayer, PackedModel, QKNorm, layer_norm
from knapformer.models.packed import PackedLayout, check_rows


class CrossLayout(PackedLayout, Protocol):
    """What a model with cross-attention asks of a layout besides."""

    @property
    def num_context_rows(self) -> int:
        """N, context rows on this rank: those of all sequences that have tokens here."""
        ...

    def cross_attend(self, q_THK: Tensor, k_NHK: Tensor, v_NHK: Tensor, /, *, scale: float | None = None) -> Tensor:
        """Attention of each packed token to the context of its sequence, (T, H, K); zeros where there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossDiTConfig(DiTConfig):
    """Shape of a `CrossDiT`; the other fields are `DiTConfig`'s.

    Attributes:
        text_channels: Channels of a context row.
        typical_text: Context rows of a usual sequence, for prices only: a token's cross-attention costs in proportion
            to them, so that they are part of the price of a token.
    """

    text_channels: int
    typical_text: int = 128

    TINY: ClassVar[dict[str, Any]] = {**DiTConfig.TINY, "text_channels": 12}

    def __post_init__(self) -> None:
        DiTConfig.__post_init__(self)
        check_at_least(self, 1, "text_channels")
        check_at_least(self, 0, "typical_text")

    def cost_shape(self) -> CostShape:
        """Per token, queries and outputs of cross-attention cost 4 D^2 more, its logits and sums 4 D a context row."""
        shape = DiTConfig.cost_shape(self)
        return shape._replace(linear_coeff=shape.linear_coeff + 4.0 + 4.0 * self.typical_text / self.width)


class CrossDiTBlock(DiTBlock):
    """Attention, cross-attention, MLP."""

    def __init__(self, config: CrossDiTConfig):
        super().__init__(config)
        self.cross_q = nn.Linear(config.width, config.width, bias=config.qkv_bias)
        self.cross_kv = nn.Linear(config.width, 2 * config.width, bias=config.qkv_bias)
        self.cross_norm = QKNorm(config)
        self.cross_proj = nn.Linear(config.width, config.width)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_TD: Tensor, text_ND: Tensor, vec_SD: Tensor, rotation: Rotation, layout: CrossLayout
    ) -> Tensor:
        """Packed tokens (T, D) and context rows (N, D) to packed tokens."""
        index_T = layout.sequence_index
        mod_S6D, *qkv = self.before_attention(x_TD, vec_SD, rotation, index_T)
        x_TD, *qkv = self.before_cross(x_TD, layout.attend(*qkv), text_ND, mod_S6D, index_T)
        return self.after_cross(x_TD, layout.cross_attend(*qkv), mod_S6D, index_T)

    @piece
    def before_cross(
        self, x_TD: Tensor, attended_THK: Tensor, text_ND: Tensor, mod_S6D: Tensor, index_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Attention's output, gated into the residual stream, and queries of it; keys and values of the context."""
        x_TD = add_gated(x_TD, self.proj(attended_THK.flatten(1)), mod_S6D[:, 2], index_T)
        heads = attended_THK.shape[1:]
        q_THK = self.cross_q(layer_norm(x_TD)).unflatten(-1, heads)
        k_NHK, v_NHK = self.cross_kv(text_ND).unflatten(-1, (2, *heads)).unbind(1)
        return x_TD, *self.cross_norm(q_THK, k_NHK), v_NHK

    @piece
    def after_cross(self, x_TD: Tensor, crossed_THK: Tensor, mod_S6D: Tensor, index_T: Tensor) -> Tensor:
        """Cross-attention's output projection, and the MLP."""
        return self.feed(x_TD + self.cross_proj(crossed_THK.flatten(1)), mod_S6D, index_T)


class CrossDiT(PackedModel):
    """Packed diffusion transformer with text by cross-attention; built and initialised like `MMDiT`."""

    def __init__(self, config: CrossDiTConfig):
        super().__init__(config)
        self.config = config
        with deferred_init(self):
            self.x_in = nn.Linear(config.in_channels, config.width)
            self.text_in = Embedder(config.text_channels, config.width)
            self.conditioner = Conditioner(config.pooled_channels, config.width)
            self.dit_blocks = nn.ModuleList(CrossDiTBlock(config) for _ in range(config.depth))
            self.final_layer = FinalLayer(config)

    def blocks(self) -> list[nn.Module]:
        return [*self.dit_blocks]

    def identity_layers(self) -> list[nn.Module]:
        cross = [block.cross_proj for block in self.dit_blocks if isinstance(block, CrossDiTBlock)]
        return [*super().identity_layers(), *cross]

    def forward(
        self, x: Tensor, text: Tensor, timestep: Tensor, pooled: Tensor, ids: Tensor, layout: CrossLayout
    ) -> Tensor:
        """Predict all tokens; inputs, output and errors as of `DiT`, and besides

        Args:
            text: (N, text_channels), context rows as `step.deliver_context` gives them.
        """
        check_rows("x", x, (layout.num_tokens, self.config.in_channels), "packed token")
        check_rows("text", text, (layout.num_context_rows, self.config.text_channels), "context row")
        vec_SD, rotation = self.condition(timestep, pooled, None, ids, layout)
        x_TD, text_ND = self.x_in(x.to(self.x_in.weight.dtype)), self.text_in(text)
        for block in self.dit_blocks:
            x_TD = block(x_TD, text_ND, vec_SD, rotation, layout)
        return self.final_layer(x_TD, vec_SD, layout.sequence_index)
