"""Messages: tensors of any dtypes as rows of raw words, and the memory they and what comes out of them lie in.

    beside     row = [x 128 bytes | pos 12 bytes + 4 unused | tag 1 byte + 7 unused]      tensors share their rows
    stacked    rows of q, then rows of k, then rows of v                                  tensors share their columns

A `MessageLayout` copies rows in and out, each byte once. Words are as wide as the tensors allow, because copies by
index move one word at a time.
"""

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from knapformer.comm.pack_index import Copies, PackIndex
from knapformer.comm.rows_triton import put_all_rows, put_rows, take_rows

RowKind = tuple[torch.dtype, torch.Size]
"""Dtype and trailing shape of a tensor's rows."""
_WORDS = ((8, torch.int64), (4, torch.int32), (1, torch.uint8))  # gloo and NCCL carry all three


class BufferPool:
    """Memory on the CPU that is used again: fresh memory costs several times the copy that fills it.

    What is taken comes back by itself when the last tensor on it is gone, whoever holds it: autograd, a user, a
    collective under way. So it may be handed out for good. Never more is kept than was in use at once.
    On other devices torch's caching allocator does this already.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []  # longest unused first
        self.bytes_held = 0  # free or in use
        self._most = 0  # in use at once

    def take(self, rows: int, width: int, word: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised (rows, width) words."""
        size = rows * width * word.itemsize
        if device.type != "cpu" or size < _GRAIN:
            return torch.empty((rows, width), dtype=word, device=device)
        memory = self._find(size)
        lease = memory[:size]
        # The lease lives as long as a tensor's memory does; then the memory may be used again.
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=word).view(rows, width)

    def _find(self, size: int) -> np.ndarray:
        size = -(-size // _GRAIN) * _GRAIN
        fitting = [i for i, memory in enumerate(self._free) if size <= len(memory) <= size * 9 // 8]
        if fitting:  # of those of one size the last one, which is most likely in the caches
            memory = self._free.pop(min(reversed(fitting), key=lambda i: len(self._free[i])))
        else:
            memory = np.empty(size + _ALIGN, dtype=np.uint8)
            memory = memory[-memory.ctypes.data % _ALIGN :][:size]
            self.bytes_held += size
        self._most = max(self._most, self.bytes_held - sum(map(len, self._free)))
        while self._free and self.bytes_held > self._most:
            self.bytes_held -= len(self._free.pop(0))
        return memory


_GRAIN = 1 << 16
"""Bytes; sizes are multiples of it, so that they fit again where lengths have changed a little. Less is left to malloc,
which does as well there."""
_ALIGN = 64


class MessageLayout:
    """How tensors of given dtypes and trailing shapes lie in a message.

    Args:
        kinds: dtype and trailing shape of each tensor.
        stacked: for stacked tensors, which of the stacked tensors of the `PackIndex` each is. They share columns, so
            their rows are equally wide.
        rows_per_token: rows of the message in a row of a tensor: tokens of H heads are H / c rows of c heads.
    """

    _made: ClassVar[dict[Any, "MessageLayout"]] = {}

    @classmethod
    def of(
        cls, kinds: Sequence[RowKind], stacked: Sequence[int] | None = None, rows_per_token: int = 1
    ) -> "MessageLayout":
        """The one that was made before, if there is one: layers ask for the same ones over and over."""
        key = tuple(kinds), None if stacked is None else tuple(stacked), rows_per_token
        if key not in cls._made:
            cls._made[key] = cls(*key)
        return cls._made[key]

    def __init__(self, kinds: Sequence[RowKind], stacked: Sequence[int] | None = None, rows_per_token: int = 1) -> None:
        self._kinds, self._stacked, self._rows_per_token = kinds, stacked, rows_per_token
        widths = [dtype.itemsize * shape.numel() // rows_per_token for dtype, shape in kinds]
        is_alone = bool(stacked) or len(widths) == 1
        padded = [width if is_alone else -(-width // 8) * 8 for width in widths]
        starts = [0] * len(widths) if stacked else [sum(padded[:i]) for i in range(len(widths))]
        self._spans = [(start, start + width) for start, width in zip(starts, widths, strict=True)]
        row = max((start + width for start, width in zip(starts, padded, strict=True)), default=0)
        size, self.word = _widest_word(row)
        self.width = row // size

    def pack(self, tensors: Sequence[Tensor], index: PackIndex, pool: BufferPool, skip: int = 0) -> Tensor:
        """A message of the tensors' rows, but for the first `skip` of each."""
        words = [self._words(tensor[skip:] if skip else tensor, i) for i, tensor in enumerate(tensors)]
        if self._stacked is None and len(words) == 1 and index.array_row is None:
            return words[0]  # is the message
        message = pool.take(sum(index.splits), self.width, self.word, tensors[0].device)
        if self._stacked is None:
            for i, rows in enumerate(words):
                take_rows(rows, index.array_row, self._column(message, i))
            return message
        put_all_rows(message, [index.stacked[i] for i in self._stacked], words)
        if index.copies is not None:
            again = take_rows(message, index.copies.first.index_select(0, index.copies.of))
            put_rows(message, index.copies.rows, again)
        return message

    def unpack(self, message: Tensor, index: PackIndex, pool: BufferPool, room: int = 0) -> list[Tensor]:
        """The tensors, in memory of their own, behind `room` rows to be filled in each."""
        room *= self._rows_per_token
        if self._stacked is None:
            outputs = []
            for i in range(len(self._kinds)):
                column = self._column(message, i)
                rows = room + (len(message) if index.message_row is None else len(index.message_row))
                memory = pool.take(rows, column.shape[1], column.dtype, message.device)
                take_rows(column, index.message_row, memory[room:])
                outputs += self._tensors(memory, [i], [rows])
            return outputs
        placed = [index.stacked[i] for i in self._stacked]
        counts = [room + len(rows) for rows in placed]
        memory = pool.take(sum(counts), self.width, self.word, message.device)
        if not room and len(placed) == len(index.stacked):
            take_rows(message, index.message_row, memory)  # of all stacked tensors at once
        else:
            for block, rows in zip(memory.split(counts), placed, strict=True):
                take_rows(message, rows, block[room:])
        return self._tensors(memory, range(len(counts)), counts)

    def add_copies(self, message: Tensor, copies: Copies) -> None:
        """Add what stands in further copies to the first one. Half precision is summed in fp32."""
        for i in range(1 if self._stacked else len(self._kinds)):
            column = self._column(message, i)
            first, more = (self._restore(take_rows(column, rows), i) for rows in (copies.first, copies.rows))
            wide = torch.promote_types(first.dtype, torch.float32)
            total = first.to(wide).index_add_(0, copies.of, more.to(wide)).to(first.dtype)
            put_rows(column, copies.first, self._words(total, i))

    def _column(self, message: Tensor, i: int) -> Tensor:
        """The columns of tensor `i` in a (rows, width) message, as words."""
        start, stop = self._spans[i]
        size, word = _widest_word(stop - start)
        return message.view(word)[:, start // size : stop // size]

    def _words(self, tensor: Tensor, i: int) -> Tensor:
        """A tensor as (rows, words), without a copy where it is contiguous and aligned."""
        width = self._spans[i][1] - self._spans[i][0]
        size, word = _widest_word(width)
        flat = tensor.detach().contiguous().flatten()
        if flat.storage_offset() * flat.dtype.itemsize % size:
            flat = flat.clone()
        rows = flat.numel() * flat.dtype.itemsize // width if width else len(tensor)
        return flat.view(word).view(rows, width // size)

    def _restore(self, words: Tensor, i: int) -> Tensor:
        """Tensor `i` from its words."""
        dtype, shape = self._kinds[i]
        return words.flatten().view(dtype).view(len(words), shape.numel() // self._rows_per_token)

    def _tensors(self, memory: Tensor, numbers: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
        """Tensors one after another in `memory`. For autograd none is a view, so that they may be changed in place."""
        tensors, row = [], 0
        for i, count in zip(numbers, counts, strict=True):
            dtype, shape = self._kinds[i]
            tensor = torch.empty(0, dtype=dtype, device=memory.device)
            place = (
                memory.untyped_storage(),
                row * shape.numel() // self._rows_per_token,
                (count // self._rows_per_token, *shape),
            )
            tensors.append(tensor.set_(*place))  # pyright: ignore[reportCallIssue]
            row += count
        return tensors


def _widest_word(num_bytes: int) -> tuple[int, torch.dtype]:
    return next((size, word) for size, word in _WORDS if num_bytes % size == 0)
