"""`EpochSampler`: every sample once per epoch, in whole global batches, dealt to ranks in any number, also none.

An epoch is one random order of all samples, by (seed, epoch). A step takes the next ones of it: `batch` samples, or as
many as fit `max_tokens`. There are no buckets, and the last step of an epoch takes what is left, so nothing is dropped
or repeated, and fewer samples than ranks train too.

    order     7 2 9 4 | 0 8 5 1 | 6 3          10 samples, batch 4: three steps
    4 ranks   7 2 9 4   0 8 5 1   6 . 3 .
    2 ranks   72 94     08 51     6 3

State is (seed, epoch, samples taken): the same for any number of ranks and any batch, so a run that was saved on 4
ranks goes on with 3. It moves with `advance`, which the training loop calls after each step, and not with iteration,
which data loaders let run ahead.

For `DataLoader(dataset, batch_sampler=sampler, collate_fn=...)`; the collate function must accept an empty list. NumPy
only.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from knapformer.data.draws import EpochOrders, check_state
from knapformer.data.sampler import loader_ranks
from knapformer.errors import SpecError

Int64 = NDArray[np.int64]


class EpochSampler:
    """A batch sampler: iterating gives this rank's sample indices of each step, to the end of the epoch.

    Args:
        num_samples: of the data set.
        batch: samples of a step, over all ranks.
        max_tokens: instead of `batch`, most tokens of a step, over all ranks; a longer sample is a step of its own.
        lengths: (num_samples,) tokens of each sample, for `max_tokens`.
        rank, world_size: of this process.
        seed: of the order.

    Raises:
        SpecError: for arguments that make no sense.
    """

    def __init__(
        self,
        num_samples: int,
        batch: int | None = None,
        *,
        max_tokens: int | None = None,
        lengths: ArrayLike | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        if num_samples < 1:
            raise SpecError(f"a sampler needs at least one sample, got {num_samples}")
        if (batch is None) == (max_tokens is None) or (batch or max_tokens or 0) < 1:
            raise SpecError(f"give either batch or max_tokens, of at least 1; got batch={batch}, {max_tokens=}")
        if not 0 <= rank < world_size:
            raise SpecError(f"rank {rank} is not in a world of {world_size} ranks")
        self._lengths = None if lengths is None else np.asarray(lengths, dtype=np.int64)
        if self._lengths is None and max_tokens is not None:
            raise SpecError("max_tokens needs the lengths of all samples")
        if self._lengths is not None and self._lengths.shape != (num_samples,):
            raise SpecError(
                f"lengths has shape {self._lengths.shape}; it must have one entry for each of {num_samples}"
            )
        self.num_samples, self.batch, self.max_tokens = num_samples, batch, max_tokens
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch = self.taken = 0
        self._orders = EpochOrders(num_samples, "samples of an epoch")

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's samples of each step that is left of the epoch; may be none."""
        order, start = self._order(), self.taken
        while start < self.num_samples:
            stop = self._stop(order, start)
            yield self.deal(order[start:stop])[self.rank]
            start = stop

    def __len__(self) -> int:
        """Steps left of the epoch."""
        if self.max_tokens is None:
            return -(-(self.num_samples - self.taken) // (self.batch or 1))
        order, start, steps = self._order(), self.taken, 0
        while start < self.num_samples:
            start, steps = self._stop(order, start), steps + 1
        return steps

    def global_batch(self) -> Int64:
        """The samples of the next step, on all ranks."""
        order = self._order()
        return order[self.taken : self._stop(order, self.taken)]

    def deal(self, samples: Int64) -> list[list[int]]:
        """The samples of a step by rank: neighbours together on few ranks, spread evenly over many."""
        ranks = loader_ranks(len(samples), self.world_size)
        return [samples[ranks == rank].tolist() for rank in range(self.world_size)]

    def advance(self) -> None:
        """One step has been taken; after the last step of an epoch the next epoch begins."""
        self.taken = self._stop(self._order(), self.taken)
        if self.taken == self.num_samples:
            self.epoch, self.taken = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`; in it already, go on. Trainers call it."""
        if epoch != self.epoch:
            self.epoch, self.taken = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """All there is to save, for any number of ranks."""
        return {"seed": self.seed, "epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved. Raises `DataError` if it is not such a state, or of a larger data set."""
        check_state(state, epoch=None, taken=self.num_samples - 1)
        self.seed, self.epoch, self.taken = state["seed"], state["epoch"], state["taken"]

    def fingerprint(self) -> str:
        """A short digest of what all ranks must agree on: ranks that differ in it see other samples."""
        told = (self.num_samples, self.batch, self.max_tokens, self.world_size, self.state_dict())
        lengths = b"" if self._lengths is None else self._lengths.astype("<i8").tobytes()
        return hashlib.blake2b(repr(told).encode() + lengths, digest_size=8).hexdigest()

    def _order(self) -> Int64:
        return self._orders.order(self.seed, self.epoch)

    def _stop(self, order: Int64, start: int) -> int:
        """Where the step that begins at `start` ends."""
        if self.batch is not None:
            return min(start + self.batch, self.num_samples)
        if self._lengths is None or self.max_tokens is None:
            raise SpecError("max_tokens needs the lengths of all samples")
        tokens = self._lengths[order[start : start + self.max_tokens]].cumsum()
        return start + max(1, int(np.searchsorted(tokens, self.max_tokens, side="right")))
