"""Messages: tensors of any dtypes as rows of raw words, and the buffers they are kept in.

    beside     row = [x 128 bytes | pos 12 bytes + 4 unused | tag 1 byte + 7 unused]      tensors share their rows
    stacked    rows of q, then rows of k, then rows of v                                  tensors share their columns

Words are as wide as the tensors allow, because copies by index move one word at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from knapformer.comm.rows_triton import put_all_rows, put_rows, take_all_rows, take_rows

_WORDS = ((8, torch.int64), (4, torch.int32), (1, torch.uint8))  # gloo and NCCL carry all three


class Format:
    """How tensors of given dtypes and trailing shapes lie in a message.

    Args:
        like: (dtype, trailing shape) of each tensor.
        stacked: whether they share columns; their rows are then equally wide.
    """

    def __init__(self, like: Sequence[tuple[torch.dtype, torch.Size]], *, stacked: bool) -> None:
        self._like, self._stacked = like, stacked
        widths = [dtype.itemsize * shape.numel() for dtype, shape in like]
        padded = [width if stacked or len(widths) == 1 else -(-width // 8) * 8 for width in widths]
        starts = [0] * len(widths) if stacked else [sum(padded[:i]) for i in range(len(widths))]
        self._spans = [(start, start + width) for start, width in zip(starts, widths, strict=True)]
        row = max((start + width for start, width in zip(starts, padded, strict=True)), default=0)
        size, self.word = _widest_word(row)
        self.width = row // size

    def view(self, message: Tensor, i: int) -> Tensor:
        """The columns of tensor `i` in a (rows, width) message, as words."""
        start, stop = self._spans[i]
        size, word = _widest_word(stop - start)
        return message.view(word)[:, start // size : stop // size]

    def words(self, tensor: Tensor, i: int) -> Tensor:
        """A tensor as (rows, words), without a copy where it is contiguous and aligned."""
        width = self._spans[i][1] - self._spans[i][0]
        size, word = _widest_word(width)
        flat = tensor.detach().contiguous().flatten()
        if flat.storage_offset() * flat.dtype.itemsize % size:
            flat = flat.clone()
        return flat.view(word).view(len(tensor), width // size)

    def put(self, message: Tensor, indices: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> None:
        """Copy tensors into the message: the rows of each to those in its index, or to all in order."""
        words = [self.words(tensor, i) for i, tensor in enumerate(tensors)]
        if self._stacked:
            put_all_rows(message, indices, words)
            return
        for i, (index, rows) in enumerate(zip(indices, words, strict=True)):
            put_rows(self.view(message, i), index, rows)

    def take(self, message: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor]:
        """The tensors, each with the rows in its index, or all in order, in memory of their own."""
        if self._stacked:
            taken = take_all_rows(message, indices)
        else:
            taken = [take_rows(self.view(message, i), index) for i, index in enumerate(indices)]
        return [self.restore(rows, i) for i, rows in enumerate(taken)]

    def restore(self, words: Tensor, i: int) -> Tensor:
        """Tensor `i` from its words."""
        dtype, shape = self._like[i]
        return words.flatten().view(dtype).view(len(words), *shape)


class BufferPool:
    """Keeps message buffers on the CPU between exchanges: fresh memory costs more than the copy that fills it.

    On other devices torch's caching allocator does this already.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, rows: int, format: Format, device: torch.device) -> Tensor:
        """An uninitialised (rows, width) message."""
        size = rows * format.width * format.word.itemsize
        if device.type != "cpu" or not size:
            return torch.empty((rows, format.width), dtype=format.word, device=device)
        fitting = (i for i, buffer in enumerate(self._free) if len(buffer) >= size)  # sorted: the smallest comes first
        at = next(fitting, None)
        buffer = torch.empty(size, dtype=torch.uint8) if at is None else self._free.pop(at)
        self._lent[buffer.data_ptr()] = buffer
        return buffer[:size].view(format.word).view(rows, format.width)

    def give(self, message: Tensor) -> None:
        """Take back a message that nothing refers to any more; ignores what is not from here."""
        buffer = self._lent.pop(message.data_ptr(), None) if message.numel() else None
        if buffer is not None:
            self._free.append(buffer)
            self._free.sort(key=len)
            del self._free[:-_KEPT]


_KEPT = 6
"""Buffers kept: two each of the exchanges that a layer has under way, and of those of the backward pass."""


def _widest_word(num_bytes: int) -> tuple[int, torch.dtype]:
    return next((size, word) for size, word in _WORDS if num_bytes % size == 0)
