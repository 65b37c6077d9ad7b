"""The modules that blocks of all packed models are made of: projections to heads, MLP, output layer, base class.

Nothing here knows about sequences except through the row index that modulation takes. Norms before modulation have no
parameters of their own: shift and scale come from the conditioning.

Legend: T tokens on this rank, S sequences that have tokens here, D width, H heads, K head dim, C channels.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knapformer.attention.rotation import Rotation
from knapformer.attention.rows import add_gated, compute_dtype, modulate
from knapformer.models.conditioning import Conditioner, Modulation
from knapformer.models.config import BackboneConfig, CostShape
from knapformer.models.init import fill_parameters
from knapformer.models.packed import PackedLayout, check_rows
from knapformer.models.rope import rotation_from_ids

NORM_EPS = 1e-6


def layer_norm(x_TD: Tensor) -> Tensor:
    """LayerNorm over channels, without parameters."""
    return F.layer_norm(x_TD, x_TD.shape[-1:], eps=NORM_EPS)


class QKNorm(nn.Module):
    """RMSNorm on queries and keys, per head, with scales shared by all heads; the identity if switched off."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.q_norm = nn.RMSNorm(config.head_dim, eps=NORM_EPS) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=NORM_EPS) if config.qk_norm else nn.Identity()

    def forward(self, q_THK: Tensor, k_THK: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q_THK), self.k_norm(k_THK)


class HeadProjection(nn.Module):
    """Tokens (T, D) to normalised queries, keys and values, (T, H, K) each."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.norm = QKNorm(config)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_THK, k_THK, v_THK = split_heads(self.qkv(x_TD), self.num_heads, self.head_dim)
        q_THK, k_THK = self.norm(q_THK, k_THK)
        return q_THK, k_THK, v_THK


def split_heads(qkv: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, 3 H K), laid out as q, k, v, to three (T, H, K). All sizes are given: zero rows leave none to infer."""
    q_THK, k_THK, v_THK = qkv.unflatten(-1, (3, num_heads, head_dim)).unbind(1)
    return q_THK, k_THK, v_THK


class Mlp(nn.Module):
    """Two linear layers around a tanh-approximated GELU, per token."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.fc_in = nn.Linear(config.width, config.mlp_width)
        self.fc_out = nn.Linear(config.mlp_width, config.width)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.fc_out(F.gelu(self.fc_in(x_TD), approximate="tanh"))


class AdaLNLayer(nn.Module):
    """The weights of attention and MLP; shift, scale and gate of each come from the conditioning vector."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.mod = Modulation(config.width, 6)
        self.attn = HeadProjection(config)
        self.proj = nn.Linear(config.width, config.width)
        self.mlp = Mlp(config)

    def start(self, x_TD: Tensor, vec_SD: Tensor, index_T: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """What comes before attention: modulation, which `finish` needs too, and queries, keys and values."""
        mod_S6D = self.mod(vec_SD)
        shift, scale = mod_S6D[:, :2].unbind(1)
        return mod_S6D, self.attn(modulate(layer_norm(x_TD), shift, scale, index_T))

    def finish(self, x_TD: Tensor, attended_THK: Tensor, mod_S6D: Tensor, index_T: Tensor) -> Tensor:
        """What follows attention: its output projection and the MLP, each gated into the residual stream."""
        x_TD = add_gated(x_TD, self.proj(attended_THK.flatten(1)), mod_S6D[:, 2], index_T)
        return self.feed(x_TD, mod_S6D, index_T)

    def feed(self, x_TD: Tensor, mod_S6D: Tensor, index_T: Tensor) -> Tensor:
        """The MLP, gated into the residual stream."""
        shift, scale, gate = mod_S6D[:, 3:].unbind(1)
        return add_gated(x_TD, self.mlp(modulate(layer_norm(x_TD), shift, scale, index_T)), gate, index_T)


class FinalLayer(nn.Module):
    """Norm, modulation by the conditioning vector, and the projection to output channels."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.mod = Modulation(config.width, 2)
        self.linear = nn.Linear(config.width, config.num_out_channels)

    def forward(self, x_TD: Tensor, vec_SD: Tensor, index_T: Tensor) -> Tensor:
        shift_SD, scale_SD = self.mod(vec_SD).unbind(1)
        return self.linear(modulate(layer_norm(x_TD), shift_SD, scale_SD, index_T))


class PackedModel(nn.Module, ABC):
    """Base of the packed transformers: what a trainer and a cost model ask of any of them.

    Subclasses build their layers inside `deferred_init(self)`.
    """

    conditioner: Conditioner
    final_layer: FinalLayer

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.backbone = config

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in the order they run: the units to shard and to checkpoint."""

    def condition(
        self, timestep: Tensor, pooled: Tensor, guidance: Tensor | None, ids: Tensor, layout: PackedLayout
    ) -> tuple[Tensor, Rotation]:
        """What all blocks take besides tokens: the conditioning vectors (S, D) and the rotation of each token.

        Raises:
            SpecError: an input does not fit the layout or the configuration.
        """
        check_rows("ids", ids, (layout.num_tokens, 3), "packed token")
        config, dtype = self.backbone, compute_dtype(self.final_layer.linear.weight.dtype)
        rotation = rotation_from_ids(ids, config.axes_dims, config.theta, dtype)
        return self.conditioner(timestep, pooled, guidance, layout.num_sequences), rotation

    def identity_layers(self) -> list[nn.Module]:
        """The layers that are zero at the start with `zero_init`, so that every block is the identity."""
        return [module.linear for module in self.modules() if isinstance(module, (Modulation, FinalLayer))]

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Fill all weights from a generator (seed 0 if None), never from torch's global random state.

        On the meta device, call `to_empty(device=...)` first; FSDP2 may have sharded the model by then.

        Raises:
            SpecError: the model is still on the meta device.
        """
        zeroed = self.identity_layers() if self.backbone.zero_init else ()
        fill_parameters(self, generator, zeroed=zeroed, zero_bias=self.backbone.zero_init)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; on a sharded model, of all shards together."""
        return sum(param.numel() for param in self.parameters())

    def cost_shape(self) -> CostShape:
        """(d_model, num_heads, linear_coeff, attention_coeff, num_layers) for the cost model."""
        return self.backbone.cost_shape()
