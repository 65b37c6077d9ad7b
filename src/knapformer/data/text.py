"""Captions as bytes: a tokenizer without files, and text features without a pretrained model.

As in ByT5, a token is a UTF-8 byte plus 3, after the special ids 0 (padding), 1 (end) and 2 (unknown). Every caption
in every script survives the round trip, and an empty caption has no tokens at all: zero text is legal everywhere.

`pooled_features` stands in for the pooled vector of a text encoder: each 1-, 2- and 3-byte piece of the caption picks
a row of fixed random signs, and the rows are added up. Similar captions get similar vectors; nothing is learned.
NumPy only.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from knapformer.data.draws import raw_words
from knapformer.errors import SpecError

PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2
VOCAB_SIZE = 256 + 3

_NUM_SPECIAL = 3
_NUM_ROWS = 4096
_MAX_PIECE = 3


def tokenize(caption: str, max_tokens: int = 392) -> NDArray[np.int32]:
    """Token ids of a caption, cut to `max_tokens` at the last whole character that fits."""
    if max_tokens < 0:
        raise SpecError(f"max_tokens is {max_tokens}; it must be 0 or more")
    data = caption.encode("utf-8", "surrogatepass")
    stop = min(len(data), max_tokens)
    while stop < len(data) and data[stop] & 0xC0 == 0x80:  # inside a character
        stop -= 1
    return np.frombuffer(data[:stop], dtype=np.uint8).astype(np.int32) + np.int32(_NUM_SPECIAL)


def detokenize(tokens: ArrayLike) -> str:
    """The caption again; special ids are left out, bytes that are no UTF-8 become U+FFFD."""
    ids = np.asarray(tokens, dtype=np.int64).reshape(-1)
    if ((ids < 0) | (ids >= VOCAB_SIZE)).any():
        bad = int(ids[(ids < 0) | (ids >= VOCAB_SIZE)][0])
        raise SpecError(f"token {bad} is not in the vocabulary; ids are 0 to {VOCAB_SIZE - 1}")
    data = (ids[ids >= _NUM_SPECIAL] - _NUM_SPECIAL).astype(np.uint8).tobytes()
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def pooled_features(tokens: ArrayLike, dim: int, seed: int = 0) -> NDArray[np.float32]:
    """A fixed vector (dim,) for a caption, about unit variance per element; zeros if there are no tokens.

    Equal on all machines: it is a sum of signs, divided by one square root.
    """
    if dim < 1:
        raise SpecError(f"dim is {dim}; it must be at least 1")
    ids = np.asarray(tokens, dtype=np.uint64).reshape(-1)
    table = _signs(dim, seed)
    total = np.zeros(dim, dtype=np.int64)
    pieces = 0
    for size in range(1, _MAX_PIECE + 1):
        count = len(ids) - size + 1
        if count < 1:
            break
        code = np.full(count, size, dtype=np.uint64)
        for offset in range(size):
            code = code * np.uint64(VOCAB_SIZE) + ids[offset : offset + count]
        rows = (code * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _NUM_ROWS.bit_length() + 1)
        total += table[rows.astype(np.int64)].sum(axis=0, dtype=np.int64)
        pieces += count
    return (total / np.sqrt(max(1, pieces))).astype(np.float32)


@lru_cache(maxsize=8)
def _signs(dim: int, seed: int) -> NDArray[np.int8]:
    words = raw_words(-(-_NUM_ROWS * dim // 64), seed=seed, stream="text features")
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[: _NUM_ROWS * dim]
    return (2 * bits.astype(np.int8) - 1).reshape(_NUM_ROWS, dim)
