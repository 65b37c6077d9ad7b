"""Where the rows of one rank lie in a message: the index tensors of one side of an exchange, made once per plan.

    array_row      message row -> row of the array        copies a message together from one array
    message_row    row of the array -> message row        takes an array out of a message, or spreads it over one

A row that goes to several ranks is in the message several times: `message_row` has the first, `copies` the others.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from knapformer.plan.arrays import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Message rows that hold a row once more.

    Attributes:
        first: (F,) message row where each row that has copies is first.
        of: (N,) which of those each copy is of.
        rows: (N,) message row of each copy.
    """

    first: Tensor
    of: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackIndex:
    """The rows of one rank on one side of an exchange.

    Attributes:
        array_row: (message rows,) row of the array in each message row; None if these are all in order.
        message_row: (array rows,) message row of each row, the first one of several; None if these are all in order.
        stacked: `message_row` of each tensor, if several are stacked to make the array.
        copies: further times that rows are in the message; None if there are none.
        splits: message rows to, or from, each rank.
    """

    array_row: Tensor | None
    message_row: Tensor | None
    stacked: tuple[Tensor, ...]
    copies: Copies | None
    splits: list[int]

    @classmethod
    def of(
        cls,
        array_row: Int64Array,
        num_rows: int,
        splits: Int64Array,
        stacked_rows: tuple[int, ...],
        device: torch.device,
    ) -> Self:
        """From the row of the array in each message row.

        Args:
            array_row: (message rows,); has every row of the array.
            num_rows: rows of the array.
            splits: message rows of each rank.
            stacked_rows: rows of each of several stacked tensors; empty for a single array.
            device: of the index tensors.
        """

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

        in_order = np.arange(len(array_row))
        message_row = np.empty(num_rows, dtype=np.int64)
        message_row[array_row[::-1]] = in_order[::-1]  # of several, the first is written last
        again = np.flatnonzero(message_row[array_row] != in_order)
        first, of = np.unique(message_row[array_row[again]], return_inverse=True)
        copies = Copies(tensor(first), tensor(of), tensor(again)) if len(again) else None
        if not stacked_rows and num_rows == len(array_row) and np.array_equal(array_row, in_order):
            return cls(None, None, (), copies, splits.tolist())
        placed = tensor(message_row)
        stacked = placed.split(stacked_rows) if stacked_rows else ()
        return cls(tensor(array_row), placed, stacked, copies, splits.tolist())
