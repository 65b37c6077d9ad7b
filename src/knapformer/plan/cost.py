"""What work costs, in whole ticks, so that every CPU computes the same plan from the same lengths.

The modelled forward time of one layer over a sequence of L tokens with H heads is

    sequence + token * L + per_qk_pair * H * L * L

where a *row* is one (head, query) pair and `per_qk_pair` the price of that row against one key. From model shapes
(KnapFormer, arXiv 2508.06001, section 3): token-wise FLOP are `linear_coeff * d_model**2` per token (24 for an MMDiT
with mlp_ratio 4: q, k, v and output projections 8, MLP 16), attention FLOP `attention_coeff * d_model` per pair of
tokens (4), and `gamma` says how much slower an attention FLOP runs than a token-wise one. Only ratios matter to the
balance; `token_flops` turns them into seconds, which traffic is compared with.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Self

from knapformer.errors import PlanError, SpecError
from knapformer.plan.arrays import Int64Array

TICKS_PER_SECOND = 10**15
"""One tick is a femtosecond: fine enough for one row against one key, and two hours of a rank fit 64 bits."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Integer prices of one layer's forward pass.

    Attributes:
        num_heads: query heads H; fixes the rows of a sequence.
        token: price of a token's token-wise work [tick].
        per_qk_pair: price of one attention row against one key [tick].
        sequence: price of having any token of a sequence on a rank [tick].
        head_dim: width of a head, used to price traffic [elements].
    """

    num_heads: int
    token: int
    per_qk_pair: int
    sequence: int = 0
    head_dim: int = 128

    def __post_init__(self) -> None:
        for name in ("num_heads", "token", "per_qk_pair", "sequence", "head_dim"):
            value = getattr(self, name)
            least = 1 if name in ("num_heads", "head_dim") else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SpecError(f"CostModel.{name} is {value!r}; it must be an integer of at least {least}")
        if self.token == 0 and self.per_qk_pair == 0:
            raise SpecError("CostModel needs a positive price per token or per row and key; both are 0")

    @classmethod
    def from_shapes(
        cls,
        d_model: int = 3072,
        num_heads: int = 24,
        *,
        mlp_ratio: float = 4.0,
        gamma: float = 1.25,
        linear_coeff: float | None = None,
        attention_coeff: float = 4.0,
        sequence_flop: float = 0.0,
        token_flops: float = 500e12,
    ) -> Self:
        """Prices from a model's shapes.

        Args:
            d_model: width of a token.
            num_heads: query heads; `d_model` need not be divisible by it for planning.
            mlp_ratio: hidden width of the MLP over `d_model`; gives `linear_coeff = 8 + 4 * mlp_ratio`.
            gamma: time of an attention FLOP over the time of a token-wise FLOP (1.25: 500 against 400 TFLOP/s).
            linear_coeff: token-wise FLOP per token over `d_model**2`, where the MLP formula does not hold.
            attention_coeff: attention FLOP per pair of tokens over `d_model`.
            sequence_flop: FLOP per sequence and layer (modulation).
            token_flops: token-wise work a rank does per second [FLOP/s].
        """
        figures = (gamma, attention_coeff, token_flops, sequence_flop, linear_coeff if linear_coeff else mlp_ratio)
        if d_model < 1 or num_heads < 1 or not all(0 <= x < inf for x in figures) or token_flops == 0:
            raise SpecError(
                "CostModel.from_shapes needs d_model and num_heads of at least 1, finite coefficients from 0 and "
                f"positive token_flops, got d_model={d_model}, num_heads={num_heads}, gamma={gamma}, "
                f"mlp_ratio={mlp_ratio}, linear_coeff={linear_coeff}, attention_coeff={attention_coeff}, "
                f"sequence_flop={sequence_flop}, token_flops={token_flops}"
            )
        coeff = 8 + 4 * mlp_ratio if linear_coeff is None else linear_coeff
        tick = TICKS_PER_SECOND / token_flops
        return cls(
            num_heads=num_heads,
            token=round(coeff * d_model * d_model * tick),
            per_qk_pair=round(gamma * attention_coeff * d_model / num_heads * tick),
            sequence=round(sequence_flop * tick),
            head_dim=max(1, round(d_model / num_heads)),
        )

    def with_num_heads(self, num_heads: int) -> Self:
        """The same prices of tokens, whole sequences and traffic, for another number of heads, to the nearest tick."""
        return replace(
            self,
            num_heads=num_heads,
            per_qk_pair=round(self.per_qk_pair * self.num_heads / num_heads),
            head_dim=max(1, round(self.head_dim * self.num_heads / num_heads)),
        )

    def work(self, length: Int64Array) -> Int64Array:
        """Work of whole sequences of `length` tokens [tick]. Raises `PlanError` where one is more than int64 counts."""
        longest = int(length.max(initial=0))
        if self.sequence + longest * (self.token + self.per_qk_pair * self.num_heads * longest) >= 2**63:
            raise PlanError(
                f"a sequence of {longest} tokens costs more femtoseconds than 64 bits count; check the lengths, or "
                "scale all prices of the cost model down"
            )
        return self.sequence + self.token * length + (self.per_qk_pair * self.num_heads) * length * length

    def load(self, tokens: Int64Array, area: Int64Array, num_shards: Int64Array | int = 0) -> Int64Array:
        """Load of ranks that hold `tokens`, attention `area` and token shards of `num_shards` sequences [tick]."""
        return self.token * tokens + self.per_qk_pair * area + self.sequence * num_shards
