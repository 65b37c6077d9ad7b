"""Who sends which rows to whom: one kind of table behind routing, per-sequence vectors and split attention.

A *move* is a run of rows, evenly strided in a rank's source array, neighbours in a rank's target array. All moves of a
step are known on every rank; an `Exchange` is one rank's view of them, ready for one all-to-all with uneven splits:

    source rows --send_index--> [to 0 | to 1 | ...] --all-to-all--> [from 0 | from 1 | ...] --recv_index--> target rows

Every target row is written exactly once. A source row may be sent more than once (a key that several ranks need, a
vector of a sequence that several ranks hold); the adjoint then adds up what comes back. Where each source row is
sent exactly once the exchange has an inverse, which is the way back: route and reverse route are one function.

An exchange may go in several *stages*, each an all-to-all of its own, so that one travels while another is worked on.
Its rows are then grouped by stage first: [stage 0 to 0 | stage 0 to 1 | ... | stage 1 to 0 | ...].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from knapformer.errors import PlanInvariantError
from knapformer.plan.arrays import Int64Array, exclusive_cumsum, ranges, starts_within
from knapformer.plan.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One rank's rows to send and to receive.

    Attributes:
        send_index: source row of each row sent, grouped by stage and target rank.
        recv_index: target row of each row received, grouped by stage and source rank.
        input_split_sizes: (num_stages * world_size,) rows sent to each rank, stage by stage.
        output_split_sizes: (num_stages * world_size,) rows received from each rank, stage by stage.
        num_source_rows, num_target_rows: sizes of the two arrays.
        num_stages: all-to-alls.
    """

    send_index: Int64Array
    recv_index: Int64Array
    input_split_sizes: Int64Array
    output_split_sizes: Int64Array
    num_source_rows: int
    num_target_rows: int
    num_stages: int = 1

    def inverse(self) -> "Exchange":
        """The way back. Raises `PlanInvariantError` if a source row is sent to several ranks or to none."""
        if not self.is_bijective:
            raise PlanInvariantError(
                f"this exchange sends {len(self.send_index)} rows of {self.num_source_rows}, some more than once or "
                "never, so it has an adjoint but no inverse"
            )
        return Exchange(
            self.recv_index,
            self.send_index,
            self.output_split_sizes,
            self.input_split_sizes,
            self.num_target_rows,
            self.num_source_rows,
            self.num_stages,
        )

    def narrow(self, ranks: range) -> "Exchange":
        """The same exchange within a group of consecutive ranks. Raises `PlanInvariantError` if it reaches others."""
        splits = self.input_split_sizes, self.output_split_sizes
        inside = [sizes.reshape(self.num_stages, -1)[:, ranks.start : ranks.stop].ravel() for sizes in splits]
        if any(kept.sum() != sizes.sum() for kept, sizes in zip(inside, splits, strict=True)):
            raise PlanInvariantError(f"an exchange within ranks {ranks.start} to {ranks.stop - 1} reaches others")
        return replace(self, input_split_sizes=inside[0], output_split_sizes=inside[1])

    @property
    def is_bijective(self) -> bool:
        """Whether each source row is sent exactly once."""
        if len(self.send_index) != self.num_source_rows:
            return False
        return bool((np.bincount(self.send_index, minlength=self.num_source_rows) == 1).all())


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Runs of rows between ranks, in one order that every rank shares.

    `source_row` is only meaningful where the rank at hand sends, `target_row` where it receives. `stage` is the
    all-to-all that a move is made by, the same for all where it is a number.
    """

    source_rank: Int64Array
    source_row: Int64Array
    target_rank: Int64Array
    target_row: Int64Array
    count: Int64Array
    source_stride: int = 1
    stage: Int64Array | int = 0

    def exchange(
        self, rank: int, world_size: int, num_source_rows: int, num_target_rows: int, num_stages: int = 1
    ) -> Exchange:
        """The view of `rank`; rows between two ranks keep the order of the moves on both sides."""
        to, of = self.target_rank + self.stage * world_size, self.source_rank + self.stage * world_size
        out = np.flatnonzero(self.source_rank == rank)
        out = out[np.argsort(to[out], kind="stable")]
        into = np.flatnonzero(self.target_rank == rank)
        into = into[np.argsort(of[into], kind="stable")]
        return Exchange(
            ranges(self.source_row[out], self.count[out], self.source_stride),
            ranges(self.target_row[into], self.count[into]),
            _split_sizes(to[out], self.count[out], num_stages * world_size),
            _split_sizes(of[into], self.count[into], num_stages * world_size),
            num_source_rows,
            num_target_rows,
            num_stages,
        )


def token_exchange(placement: Placement, rank: int) -> Exchange:
    """Tokens from their home rank's packed order to this step's shards. Its inverse brings them home."""
    shards, sequences = placement.token_shards, placement.sequences
    home = sequences.home[shards.seq]
    moves = Moves(
        home, sequences.home_start[shards.seq] + shards.start, shards.rank, placement.packed_start(), shards.count
    )
    num_here = int(shards.count[shards.rank == rank].sum())
    return moves.exchange(rank, placement.world_size, int(sequences.length[sequences.home == rank].sum()), num_here)


def sequence_exchange(placement: Placement, rank: int, rows: Int64Array | None = None) -> Exchange:
    """Rows of each sequence (a timestep, its context) from its home to every rank that has tokens of it.

    Target rows are in the order in which the rank's packed tokens first meet each sequence.

    Args:
        placement: the step's placement.
        rank: whose view.
        rows: (S,) rows of each sequence; default one.
    """
    order, shards, sequences = placement.packed_order(), placement.token_shards, placement.sequences
    seq, target = shards.seq[order], shards.rank[order]
    first = (np.diff(seq, prepend=-1) != 0) | (np.diff(target, prepend=-1) != 0)  # shards of one sequence are adjacent
    seq, target = seq[first], target[first]
    rows = np.ones_like(sequences.length) if rows is None else rows
    count, home_row = rows[seq], starts_within(sequences.home, rows)
    target_row = starts_within(target, count)
    by_sequence = np.lexsort((target, seq))
    seq, target, target_row, count = (column[by_sequence] for column in (seq, target, target_row, count))
    moves = Moves(sequences.home[seq], home_row[seq], target, target_row, count)
    num_home, num_here = int(rows[sequences.of_rank(rank)].sum()), int(count[target == rank].sum())
    return moves.exchange(rank, placement.world_size, num_home, num_here)


def apply(exchanges: Sequence[Exchange], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run the exchanges of all ranks on their arrays without processes: what the collective does, for tests and tools.

    Args:
        exchanges: one per rank.
        arrays: one per rank, (num_source_rows, ...).

    Returns:
        One array per rank, (num_target_rows, ...). Rows never written keep a filler of ones' complement bits.
    """
    world = len(exchanges)
    sent = [array[exchange.send_index] for exchange, array in zip(exchanges, arrays, strict=True)]
    starts = [exclusive_cumsum(exchange.input_split_sizes) for exchange in exchanges]
    sends = np.stack([exchange.input_split_sizes.reshape(-1, world) for exchange in exchanges])
    expects = np.stack([exchange.output_split_sizes.reshape(-1, world) for exchange in exchanges])
    wrong = np.argwhere(sends != expects.transpose(2, 1, 0))
    if len(wrong):
        source, stage, rank = wrong[0]
        raise PlanInvariantError(
            f"rank {source} sends {sends[source, stage, rank]} rows to rank {rank}, not {expects[rank, stage, source]}"
        )
    received = []
    for rank, exchange in enumerate(exchanges):
        pieces = []
        for stage, source in np.argwhere(expects[rank]):
            start = starts[source][stage * world + rank]
            pieces.append(sent[source][start : start + expects[rank, stage, source]])
        like = arrays[rank]
        target = np.full((exchange.num_target_rows, *like.shape[1:]), 0, dtype=like.dtype)
        target.view(np.uint8)[...] = 0xFF
        if pieces:
            target[exchange.recv_index] = np.concatenate(pieces)
        received.append(target)
    return received


def _split_sizes(rank: Int64Array, count: Int64Array, world_size: int) -> Int64Array:
    sizes = np.zeros(world_size, dtype=np.int64)
    np.add.at(sizes, rank, count)
    return sizes
