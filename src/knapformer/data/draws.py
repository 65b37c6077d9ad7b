"""Random numbers by address: the same (seed, stream, index) gives the same bits on every machine, in any order.

A counter-based generator (Philox) is asked for its raw 64-bit words, whose values NumPy guarantees; everything else
here is integer arithmetic and one exact conversion to a fraction. Asking for more words keeps the first ones, so the
first 32 ranks of a generated 512-rank step equal those of a 32-rank step. No generator has a state to save.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knapformer.errors import DataError

UInt64Array = NDArray[np.uint64]

_MASK = (1 << 64) - 1


def raw_words(count: int, *, seed: int, stream: str, index: int = 0) -> UInt64Array:
    """`count` random 64-bit words of one stream; `index` picks an independent block of it: a step, an epoch."""
    name = int.from_bytes(hashlib.blake2b(stream.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    key = np.array([seed & _MASK, name], dtype=np.uint64)
    counter = np.array([0, 0, index & _MASK, 0], dtype=np.uint64)  # 2**128 draws of room below the index
    return np.asarray(np.random.Philox(key=key, counter=counter).random_raw(count), dtype=np.uint64)


def fractions(count: int, *, seed: int, stream: str, index: int = 0) -> NDArray[np.float64]:
    """`count` uniform numbers in [0, 1), multiples of 2**-53."""
    words = raw_words(count, seed=seed, stream=stream, index=index)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(size: int, *, seed: int, stream: str, index: int = 0) -> NDArray[np.int64]:
    """A random order of `range(size)`: the ranks of random words (ties, if ever, keep their order)."""
    return np.argsort(raw_words(size, seed=seed, stream=stream, index=index), kind="stable").astype(np.int64)


class EpochOrders:
    """The random order of `range(size)` in each epoch; the last two orders are kept, as steps go forward."""

    def __init__(self, size: int, stream: str) -> None:
        self.size, self._stream = size, stream
        self._kept: dict[tuple[int, int], NDArray[np.int64]] = {}

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """(size,) the order of one epoch."""
        if (seed, epoch) not in self._kept:
            if len(self._kept) == 2:
                self._kept.pop(next(iter(self._kept)))
            self._kept[seed, epoch] = permutation(self.size, seed=seed, stream=self._stream, index=epoch)
        return self._kept[seed, epoch]


def check_state(state: Mapping[str, Any], **most: int | None) -> None:
    """Raise `DataError` unless a sampler's state is a whole `seed`, and each named count from 0 to its most."""
    valid = set(state) == {"seed", *most} and all(type(value) is int for value in state.values())
    if not valid or any(not 0 <= state[name] <= (state[name] if top is None else top) for name, top in most.items()):
        counts = " and ".join(f"{name} from 0" + ("" if top is None else f" to {top}") for name, top in most.items())
        raise DataError(
            f"sampler state {dict(state)!r} does not fit; expected whole numbers: seed, {counts}. Is it of another "
            "sampler, or of a larger data set?"
        )
