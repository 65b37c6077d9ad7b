"""Rows by index, as fast as memory allows on CUDA: Triton kernels there, torch's index operations elsewhere.

    take_rows    out[i] = source[index[i]]           unpack: rows of the message, in the order they are wanted
    put_rows     target[index[i]] = source[i]        pack: rows of a tensor, to where they lie in the message

torch's index operations move one word of the tensor's dtype per thread, at an address worked out for each. Here a
program moves a tile of rows in accesses of 16 bytes where addresses allow, and q, k and v go in one launch.

`Format` of `message.py` packs and unpacks with these. Nothing here is differentiable: the exchange has its own
backward. Checked under Triton's interpreter and, on each device, against torch once before the first use.

Tensors are (rows, words) with neighbouring words; rows may lie apart, as in columns of a message. An index is int64, on
the same device, within bounds, which CUDA does not check, and for `put_rows` without repetition.
"""

# pyright: reportInvalidTypeForm=false
# (triton is optional, so that its types are not known here)

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knapformer.errors import KnapFormerWarning, PlanInvariantError

triton: Any
tl: Any
try:
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
except ImportError:
    triton = tl = None


def take_rows(source: Tensor, index: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`source[index]` in memory of its own, or in `out`.

    Args:
        source: (rows, words).
        index: (n,) rows of `source`; None for all of them in order.
        out: (n, words) of the same dtype.
    """
    if out is None:
        out = source.new_empty(source.shape[0] if index is None else index.shape[0], source.shape[1])
    _check(source, index, out)
    if index is None:
        return out.copy_(source)
    if _has_kernel(source):
        _move([out], [index], source, into_indexed=False)
        return out
    return torch.index_select(source, 0, index, out=out)


def put_rows(target: Tensor, index: Tensor | None, source: Tensor) -> None:
    """`target[index] = source`; other rows of `target` stay.

    Args:
        target: (rows, words).
        index: (n,) distinct rows of `target`; None for all of them in order.
        source: (n, words) of the same dtype.
    """
    _check(target, index, source)
    if index is None:
        target.copy_(source)
    elif _has_kernel(target):
        _move([source], [index], target, into_indexed=True)
    else:
        # torch copies a word at a time, so that wide ones take half as long.
        unit = _words_per_access((target, source))
        wide = unit > 1 and not any(x.storage_offset() % unit for x in (target, source))
        target, source = (x.view(_WIDE) if wide else x for x in (target, source))
        target.index_copy_(0, index, source)


def put_all_rows(target: Tensor, indices: Sequence[Tensor | None], sources: Sequence[Tensor]) -> None:
    """`put_rows` of each source, in as few launches as possible; the indices are distinct together."""
    known = [index for index in indices if index is not None]
    if len(known) < len(indices) or not _has_kernel(target):
        for index, source in zip(indices, sources, strict=True):
            put_rows(target, index, source)
        return
    for index, source in zip(known, sources, strict=True):
        _check(target, index, source)
    _move(sources, known, target, into_indexed=True)


def _has_kernel(tensor: Tensor) -> bool:
    if triton is None or not tensor.is_cuda:
        return False
    index = tensor.device.index
    if index not in _runs_on:
        _runs_on[index] = _try_out(tensor.device)
    return _runs_on[index]


def _try_out(device: torch.device) -> bool:
    """Whether Triton works on a device and moves rows as torch does; a trial of a few shapes, once per device.

    It needs a C compiler when it starts, which slim containers lack.
    """
    try:
        return all(_moves_as_torch(words, device) for words in (3, 16, 130))
    except Exception as error:  # of any kind: compiler, driver, cache folder; torch's operations do without them
        warnings.warn(
            f"Triton cannot run on {device} ({type(error).__name__}: {error}); rows are moved by torch's slower index "
            "operations instead",
            KnapFormerWarning,
            stacklevel=4,
        )
        return False


def _moves_as_torch(words: int, device: torch.device) -> bool:
    source = torch.arange(7 * words, device=device).view(7, words)
    index = torch.tensor([5, 0, 6, 2], device=device)
    taken = source.new_empty(4, words)
    _move([taken], [index], source, into_indexed=False)
    target = torch.zeros_like(source)
    _move([taken], [index], target, into_indexed=True)
    same = torch.equal(taken, source[index]) and torch.equal(target[index], taken)
    if not same:
        warnings.warn(
            f"Triton moves rows wrongly on {device}; torch's slower index operations are used instead",
            KnapFormerWarning,
            stacklevel=5,
        )
    return same


_runs_on: dict[int | None, bool] = {}


def _check(indexed: Tensor, index: Tensor | None, plain: Tensor) -> None:
    rows = indexed.shape[0] if index is None else index.shape[0]
    if plain.shape != (rows, indexed.shape[1]) or plain.dtype != indexed.dtype or plain.device != indexed.device:
        raise PlanInvariantError(
            f"{rows} rows of {indexed.shape[1]} words of {indexed.dtype} on {indexed.device} do not fit a tensor "
            f"{tuple(plain.shape)} of {plain.dtype} on {plain.device}"
        )


# ---- the kernel ----

_LANES = 3
"""Tensors in one launch: q, k and v."""
_TILE_BYTES = 8192
"""Moved by one program of 128 threads: four accesses of 16 bytes each, all under way at once."""
_ACCESS_BYTES = 16
_WIDE = torch.complex128  # nothing is computed with it


def _move(plain: Sequence[Tensor], indices: Sequence[Tensor], indexed: Tensor, *, into_indexed: bool) -> None:
    """Copy between row i of `plain[l]` and row `indices[l][i]` of `indexed`, for every lane l."""
    for first in range(0, len(plain), _LANES):
        _launch(plain[first : first + _LANES], indices[first : first + _LANES], indexed, into_indexed)


def _launch(plain: Sequence[Tensor], indices: Sequence[Tensor], indexed: Tensor, into_indexed: bool) -> None:
    words = indexed.shape[1]
    most = max(len(index) for index in indices)
    if not most or not words:
        return
    unit = _words_per_access((*plain, indexed))
    # Strides count accesses, which tells the compiler that every row begins at one.
    strides = [x.stride(0) // unit for x in plain]
    block_words = min(triton.next_power_of_2(words), _TILE_BYTES // indexed.element_size())
    block_rows = max(1, _TILE_BYTES // indexed.element_size() // block_words)
    grid = (triton.cdiv(most, block_rows), triton.cdiv(words, block_words), len(plain))
    lanes: list[Any] = []
    for lane in range(_LANES):
        lane = min(lane, len(plain) - 1)
        lanes += [plain[lane], indices[lane], len(indices[lane]), strides[lane]]
    _move_rows[grid](
        *lanes,
        indexed,
        indexed.stride(0) // unit,
        words // unit,
        UNIT=unit,
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=block_words,
        INTO_INDEXED=into_indexed,
    )


def _words_per_access(tensors: Sequence[Tensor]) -> int:
    """Words that are moved together: 16 bytes' worth if all rows of all tensors begin and end at multiples of that."""
    size = tensors[0].element_size()
    unit = _ACCESS_BYTES // size
    for x in tensors:
        if x.stride(1) != 1 and x.shape[1] > 1:
            raise PlanInvariantError(f"the words of a row must be neighbours, got strides {x.stride()}")
        if x.shape[1] % unit or x.stride(0) % unit or x.data_ptr() % _ACCESS_BYTES:
            return 1
    return unit


if triton is not None:
    # Not compiled anew for numbers of rows, which differ from step to step, or for where an index lies.
    @triton.jit(
        do_not_specialize=["rows_0", "rows_1", "rows_2"],
        do_not_specialize_on_alignment=["index_0", "index_1", "index_2"],
    )
    def _move_rows(
        plain_0, index_0, rows_0, stride_0,
        plain_1, index_1, rows_1, stride_1,
        plain_2, index_2, rows_2, stride_2,
        indexed, indexed_stride, row_units,
        UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr, INTO_INDEXED: tl.constexpr,
    ):  # fmt: skip
        """The third axis of the grid is the lane. A lane's code is written out, so that its alignment stays known."""
        lane = tl.program_id(2)
        if lane == 0:
            _move_tile(
                plain_0, index_0, rows_0, stride_0, indexed, indexed_stride, row_units,
                UNIT, BLOCK_ROWS, BLOCK_WORDS, INTO_INDEXED,
            )  # fmt: skip
        elif lane == 1:
            _move_tile(
                plain_1, index_1, rows_1, stride_1, indexed, indexed_stride, row_units,
                UNIT, BLOCK_ROWS, BLOCK_WORDS, INTO_INDEXED,
            )  # fmt: skip
        else:
            _move_tile(
                plain_2, index_2, rows_2, stride_2, indexed, indexed_stride, row_units,
                UNIT, BLOCK_ROWS, BLOCK_WORDS, INTO_INDEXED,
            )  # fmt: skip

    @triton.jit
    def _move_tile(
        plain, index, rows, stride, indexed, indexed_stride, row_units,
        UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr, INTO_INDEXED: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        word = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        there = tl.load(index + row, mask=row < rows, other=0)
        mask = (row < rows)[:, None] & (word < row_units * UNIT)[None, :]
        here = plain + (row * stride * UNIT)[:, None] + word[None, :]
        away = indexed + (there * indexed_stride * UNIT)[:, None] + word[None, :]
        if INTO_INDEXED:
            tl.store(away, tl.load(here, mask=mask), mask=mask)
        else:
            tl.store(here, tl.load(away, mask=mask), mask=mask)
