"""DiT, packed: one stream of visual tokens with adaLN-zero blocks, conditioned by timestep and a pooled vector.

    x (T, C) -> x_in -> [ attention, MLP, each modulated and gated per sequence ] x depth -> final_layer -> (T, C_out)

For class- or embedding-conditioned models whose sequences have no text tokens. `layout.text_index` is not used.

Legend: T tokens on this rank, S sequences that have tokens here, D width, H heads, K head dim, C channels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from knapformer.attention.rotation import Rotation, rotate
from knapformer.models.compiled import piece
from knapformer.models.conditioning import Conditioner
from knapformer.models.config import BackboneConfig, check_at_least
from knapformer.models.init import deferred_init
from knapformer.models.layers import AdaLNLayer, FinalLayer, PackedModel
from knapformer.models.packed import PackedLayout, check_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DiTConfig(BackboneConfig):
    """Shape of a `DiT`; the other fields are `BackboneConfig`'s.

    Attributes:
        depth: Number of blocks.
    """

    depth: int

    TINY: ClassVar[dict[str, Any]] = {**BackboneConfig.TINY, "depth": 2}

    def __post_init__(self) -> None:
        BackboneConfig.__post_init__(self)  # no super(): slots make the decorator replace the class it would find
        check_at_least(self, 1, "depth")

    @property
    def num_layers(self) -> int:
        return self.depth


class DiTBlock(AdaLNLayer):
    """Attention, then MLP."""

    def forward(self, x_TD: Tensor, vec_SD: Tensor, rotation: Rotation, layout: PackedLayout) -> Tensor:
        """Packed tokens (T, D) to packed tokens."""
        index_T = layout.sequence_index
        mod_S6D, *qkv = self.before_attention(x_TD, vec_SD, rotation, index_T)
        return self.after_attention(x_TD, layout.attend(*qkv), mod_S6D, index_T)

    @piece
    def before_attention(
        self, x_TD: Tensor, vec_SD: Tensor, rotation: Rotation, index_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Modulation, which is needed again after attention, and queries, keys and values."""
        mod_S6D, (q_THK, k_THK, v_THK) = self.start(x_TD, vec_SD, index_T)
        return mod_S6D, rotate(q_THK, rotation), rotate(k_THK, rotation), v_THK

    @piece
    def after_attention(self, x_TD: Tensor, attended_THK: Tensor, mod_S6D: Tensor, index_T: Tensor) -> Tensor:
        """Attention's output projection and the MLP."""
        return self.finish(x_TD, attended_THK, mod_S6D, index_T)


class DiT(PackedModel):
    """Packed diffusion transformer over visual tokens; built and initialised like `MMDiT`."""

    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.config = config
        with deferred_init(self):
            self.x_in = nn.Linear(config.in_channels, config.width)
            self.conditioner = Conditioner(config.pooled_channels, config.width)
            self.dit_blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
            self.final_layer = FinalLayer(config)

    def blocks(self) -> list[nn.Module]:
        return [*self.dit_blocks]

    def forward(self, x: Tensor, timestep: Tensor, pooled: Tensor, ids: Tensor, layout: PackedLayout) -> Tensor:
        """Predict all tokens.

        Inputs may have any floating-point dtype; they are cast to that of the weights where precision allows.

        Args:
            x: (T, in_channels), in packed order.
            timestep: (S,), in [0, 1].
            pooled: (S, pooled_channels).
            ids: (T, 3) positions in packed order.
            layout: Where each token belongs, and attention.

        Returns:
            (T, C_out), in packed order.

        Raises:
            SpecError: an input does not fit the layout or the configuration.
        """
        check_rows("x", x, (layout.num_tokens, self.config.in_channels), "packed token")
        vec_SD, rotation = self.condition(timestep, pooled, None, ids, layout)
        x_TD = self.x_in(x.to(self.x_in.weight.dtype))
        for block in self.dit_blocks:
            x_TD = block(x_TD, vec_SD, rotation, layout)
        return self.final_layer(x_TD, vec_SD, layout.sequence_index)
