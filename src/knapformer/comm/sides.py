"""Where the rows of one rank lie in a message: the index tensors of an exchange, made once per plan.

    order    message row -> row of the array        to copy a message together from one array
    place    row of the array -> message row        to take an array out of a message; to spread several over one

A row that goes to several ranks is in the message several times; `place` has the first, `copies` the others.
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
class Side:
    """The rows of one rank on one side of an exchange.

    Attributes:
        order: (message rows,) row of the array in each message row; None if these are all in order.
        place: (array rows,) message row of each row, the first one of several; None if these are all in order.
        lanes: `place` of each tensor, if several are stacked to make the array.
        copies: further times that rows are in the message; None if there are none.
        splits: message rows to, or from, each rank.
    """

    order: Tensor | None
    place: Tensor | None
    lanes: tuple[Tensor, ...]
    copies: Copies | None
    splits: list[int]

    @classmethod
    def of(
        cls, index: Int64Array, num_rows: int, splits: Int64Array, lanes: tuple[int, ...], device: torch.device
    ) -> Self:
        """From the row of the array in each message row.

        Args:
            index: (message rows,); has every row of the array.
            num_rows: rows of the array.
            splits: message rows of each rank.
            lanes: rows of each of several stacked tensors; empty for a single array.
            device: of the index tensors.
        """

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

        rows = np.arange(len(index))
        place = np.empty(num_rows, dtype=np.int64)
        place[index[::-1]] = rows[::-1]  # of several, the first is written last
        again = np.flatnonzero(place[index] != rows)
        first, of = np.unique(place[index[again]], return_inverse=True)
        copies = Copies(tensor(first), tensor(of), tensor(again)) if len(again) else None
        if not lanes and len(place) == len(index) and np.array_equal(index, rows):
            return cls(None, None, (), copies, splits.tolist())
        at = tensor(place)
        return cls(tensor(index), at, at.split(lanes) if lanes else (), copies, splits.tolist())
