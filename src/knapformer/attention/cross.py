"""Cross-attention: tokens of a sequence attend to rows beside it, its context, such as text that is no part of it.

    seq 4, split       rank 1: tokens 0..90         rank 2: tokens 90..200        context at home: rank 0, 77 rows
                       queries 91 x keys 77         queries 110 x keys 77         delivered to ranks 1 and 2

The context of a sequence goes to every rank that has tokens of it, once a step, and its gradients add up at home. Then
each rank attends for its own tokens: no layer exchanges anything. Segments are one per local sequence, with as many
queries as it has tokens here and as many keys as it has context rows, which may be none: its outputs are zeros.
"""

import numpy as np
import torch
from torch import Tensor

from knapformer.attention.kernels import Segments
from knapformer.plan.arrays import Int64Array, exclusive_cumsum, ranges


class Context:
    """The context rows of one rank, sequence by sequence. Immutable; a plain class for the reason `Layout` is one.

    Args:
        num_queries: (S,) packed tokens here of each local sequence, in packed order.
        lens: (S,) context rows of each.
        device: of the index tensors.
    """

    def __init__(self, num_queries: Int64Array, lens: Int64Array, device: torch.device) -> None:
        self.lens = lens
        self.num_rows = int(lens.sum())
        self.segments = Segments.of(num_queries, lens, device)
        self._num_queries = num_queries

    def rows(self, start: int, stop: int | None = None) -> tuple[Tensor, "Context"]:
        """Rows `start` to `stop` of each sequence's context, for models that attend to some of it separately.

        Returns:
            The index of these rows, and a context of them alone. Make both once a step, not in every layer.
        """
        kept = np.maximum((self.lens if stop is None else np.minimum(self.lens, stop)) - start, 0)
        rows = ranges(exclusive_cumsum(self.lens) + start, kept)
        device = self.segments.cu_q.device
        return torch.from_numpy(rows).to(device), Context(self._num_queries, kept, device)
