"""What a packed model knows about sequences: the layout protocol.

Packed means: no batch axis. The tokens of all sequences on this rank lie one after another in one tensor, and whatever
depends on "which sequence" goes through a layout. Models ask a layout for six things only, so they run unchanged on
one device, behind a balancer, or in a test with twenty lines of plain attention.

    packed     t t i i i | t i i      text_index  = [0, 1, 5]
    sequence   0 0 0 0 0 | 1 1 1      image_index = [2, 3, 4, 6, 7]

Legend: T tokens on this rank, T_txt and T_img its text and visual tokens, H heads, K head dim.
"""

from typing import NamedTuple, Protocol, Self

from torch import Tensor

from knapformer.attention.rows import StreamIndex
from knapformer.errors import SpecError


class PackedLayout(StreamIndex, Protocol):
    """What models ask of a layout; `knapformer.attention` has the real one.

    Every rank calls `attend` equally often and in the same order, on zero rows if it has no tokens, because the call
    may exchange tokens with other ranks. `attend` must keep its inputs in the autograd graph even then.
    """

    @property
    def num_tokens(self) -> int:
        """T, tokens on this rank [tokens]."""
        ...

    @property
    def num_sequences(self) -> int:
        """S, sequences that have tokens on this rank; per-sequence vectors have S rows."""
        ...

    @property
    def sequence_index(self) -> Tensor:
        """(T,) int64: the row of each packed token's sequence in per-sequence vectors, 0..S-1."""
        ...

    def attend(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, /, *, scale: float | None = None) -> Tensor:
        """Full attention inside each sequence: three (T, H, K) tensors to one of the same shape. Collective."""
        ...


class TokenIndex(NamedTuple):
    """The index tensors of a layout, for code that is compiled: it cannot take the layout itself."""

    sequence_index: Tensor
    text_index: Tensor
    image_index: Tensor

    @classmethod
    def of(cls, layout: PackedLayout) -> Self:
        return cls(layout.sequence_index, layout.text_index, layout.image_index)


def check_rows(name: str, value: Tensor, shape: tuple[int, ...], rows_are: str) -> None:
    """Reject an input whose shape does not fit the layout.

    Reads shapes only, never data, so it costs no device synchronisation. A wrong row count is worth a clear message:
    one row in place of S would otherwise fail far away, as an index error inside a kernel.

    Raises:
        SpecError: `value` has another shape than `shape`.
    """
    if tuple(value.shape) != shape:
        raise SpecError(
            f"{name} has shape {tuple(value.shape)}; expected {shape}: one row per {rows_are}. "
            "Pass packed tensors without a batch axis, in the order of the layout"
        )
