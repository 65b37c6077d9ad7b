"""A rank's batches, and what it says of each in the gather: lengths, an error, or that it has no more. Raises nothing.

Runs in the prefetch thread. What ends the iterators of all ranks is decided in `prefetch`, from what all ranks said.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from knapformer.comm.gather import Contribution, Status
from knapformer.errors import PlanError

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, slots=True, eq=False)
class Source(Generic[BatchT]):
    """Where a rank's batches come from; see `SequenceBalancer.prefetch`."""

    loader: Iterable[BatchT]
    lengths: Callable[[BatchT], Any]
    empty: Callable[[], BatchT] | None


class RankBatches(Generic[BatchT]):
    """This rank's batches and what it says of them: the loader's, then empty ones."""

    def __init__(self, source: Source[BatchT]) -> None:
        self._source = source
        self._iterator: Iterator[BatchT] | None = None
        self._ended = False

    def make(self) -> tuple[Contribution, BatchT | None, BaseException | None]:
        """The contribution to the gather, the batch, and the exception if making it failed. Raises nothing."""
        try:
            batch = self._load()
            if self._ended and self._source.empty is None:
                return Contribution(Status.ENDED), None, None
            lens, *others = _split_lengths(self._source.lengths(cast(BatchT, batch)))
            mine = Contribution.of(lens, *others)
            if self._ended:
                if mine.status != Status.OK or len(mine.lens):
                    raise PlanError(
                        f"`empty` must make batches without sequences; `lengths` of its batch gave {lens!r}"
                    )
                mine = Contribution(Status.ENDED)
            return mine, batch, None
        except StopIteration as error:  # raised again by the iterator, it would pass for the end of the data
            stop = RuntimeError("`lengths` or `empty` raised StopIteration")
            stop.__cause__ = error
            return Contribution.failed(stop), None, stop
        except BaseException as error:
            return Contribution.failed(error), None, error

    def _load(self) -> BatchT | None:
        if not self._ended:
            if self._iterator is None:
                self._iterator = iter(self._source.loader)
            try:
                return next(self._iterator)
            except StopIteration:
                self._ended = True
        return None if self._source.empty is None else self._source.empty()


def default_lengths(batch: Any) -> tuple[Any, ...]:
    """(seq_lens, text_lens, context_lens) of a batch that has these attributes, all but the first optional."""
    try:
        return batch.seq_lens, getattr(batch, "text_lens", None), getattr(batch, "context_lens", None)
    except AttributeError:
        raise PlanError(
            f"a batch of type {type(batch).__name__} has no attribute seq_lens; pass lengths=, a function of the batch "
            "that returns seq_lens, (seq_lens, text_lens) or (seq_lens, text_lens, context_lens)"
        ) from None


def _split_lengths(lengths: Any) -> tuple[Any, ...]:
    """What `lengths` returned, as a tuple of lists; a tuple of two or three numbers is that many lengths."""
    if isinstance(lengths, tuple) and len(lengths) in (2, 3):
        first = lengths[0]
        if first.ndim > 0 if hasattr(first, "ndim") else isinstance(first, Iterable):
            return lengths
    return (lengths,)
