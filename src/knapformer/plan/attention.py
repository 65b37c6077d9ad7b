"""Tables of split attention: which q, k and v rows reach the rank that computes an attention shard, and the way back.

A rank that has rows [a, b) of a sequence needs those queries, and the keys and values of the heads it touches. Full
attention over query rows needs no merging of softmax statistics, so any cut of the H * L rows is exact: whole heads
(Ulysses), uneven heads, or a part of a head's queries.

Rows of the source array are (token, head) of the rank's split tokens; rows of the target are grouped into *segments*,
one per (attention shard, head), each a variable-length attention problem of its own:

    split tokens of this rank           segments of this rank
    q (T, H) --.                        q [seq 3 head 5 | seq 3 head 6 part | seq 8 head 0 ...]
    k (T, H) ---+-- one all-to-all -->  k [seq 3 head 5 | seq 3 head 6      | seq 8 head 0 ...]   all L keys each
    v (T, H) --'                        v [...]
                <-- one all-to-all ---  o like q

Where every cut of the step lies on a multiple of c heads, c neighbouring heads travel and are computed as one *head
group*: rows are c times wider and c times fewer.

In several *stages*, one travels while another is computed: stage p of n has every shard's segments s with
s * n // (its segments) = p, and so a share of every rank's work. Each stage's q, k and v are arrays of their own.
"""

from dataclasses import dataclass

import numpy as np

from knapformer.plan.arrays import Int64Array, column, exclusive_cumsum, ranges
from knapformer.plan.exchange import Exchange, Moves
from knapformer.plan.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class AttentionExchange:
    """One rank's tables of split attention.

    Attributes:
        qkv: from the rank's split q, k, v rows, laid end to end, to the segments' rows: q, k, v of each stage.
        out: from the segments' output rows to the rank's split token rows.
        head_group: heads c that travel together; a token has H / c rows.
        q_lens: (N,) queries of each segment, stage by stage.
        k_lens: (N,) keys of each segment.
        num_segments: (num_stages,) segments of each stage.
        q_rows, k_rows: (num_stages,) rows of q, and of k, in each stage.
        num_split_tokens: split tokens of this rank, the last ones in packed order.
    """

    qkv: Exchange
    out: Exchange
    head_group: int
    q_lens: Int64Array
    k_lens: Int64Array
    num_segments: Int64Array
    q_rows: Int64Array
    k_rows: Int64Array
    num_split_tokens: int

    @property
    def num_stages(self) -> int:
        return len(self.num_segments)

    def segment_lens(self) -> list[tuple[Int64Array, Int64Array]]:
        """Queries and keys of the segments of each stage."""
        cuts = np.cumsum(self.num_segments)[:-1]
        return list(zip(np.split(self.q_lens, cuts), np.split(self.k_lens, cuts), strict=True))


def head_group(placement: Placement, num_stages: int = 1) -> int:
    """Most neighbouring heads c such that every attention cut of a split sequence lies on a multiple of c heads.

    In several stages, c is less where a shard would otherwise have fewer head groups than there are stages.
    """
    shards = placement.attention_shards
    here = placement.split[shards.seq]
    start, stop, length = shards.start[here], shards.stop[here], placement.sequences.length[shards.seq[here]]
    if np.any(stop % length):
        return 1
    group = int(np.gcd.reduce(stop // length, initial=placement.num_heads))
    fewest = int(((stop - start) // length).min(initial=placement.num_heads))
    most = group if num_stages == 1 else max(1, min(group, fewest // num_stages))
    return next(c for c in range(most, 0, -1) if group % c == 0)


def attention_exchange(placement: Placement, rank: int, *, num_stages: int = 1) -> AttentionExchange:
    """Build the tables of `rank`.

    Args:
        placement: the step's placement, for the heads the model has (`Placement.with_num_heads`).
        rank: whose view.
        num_stages: all-to-alls to make of it.
    """
    group = head_group(placement, num_stages)
    placement = placement.with_num_heads(placement.num_heads // group)
    tokens = placement.token_shards
    num_whole, num_split = (
        int(tokens.count[(tokens.rank == rank) & (placement.split[tokens.seq] == split)].sum())
        for split in (False, True)
    )
    segments = _Segments.of(placement, rank, num_stages)
    q, k = _moves(placement, rank, num_whole, segments, num_stages)
    q_rows, k_rows = segments.rows_by_stage()
    rows, num_q, num_k = num_split * placement.num_heads, int(q_rows.sum()), int(k_rows.sum())
    qkv = _stacked(q, k, rows, q_rows, k_rows)
    return AttentionExchange(
        qkv.exchange(rank, placement.world_size, 3 * rows, num_q + 2 * num_k, num_stages),
        q.exchange(rank, placement.world_size, rows, num_q, num_stages).inverse(),
        group,
        column(segments.q_lens, "q_lens"),
        column(segments.k_lens, "k_lens"),
        column(segments.of_stage, "num_segments"),
        column(q_rows, "q_rows"),
        column(k_rows, "k_rows"),
        num_split,
    )


def split_pairs(placement: Placement) -> tuple[Int64Array, Int64Array]:
    """All pairs (attention shard, token shard) of the same split sequence, as indices into the two tables."""
    tokens, shards = placement.token_shards, placement.attention_shards
    split = np.flatnonzero(placement.split[shards.seq])
    first = np.searchsorted(tokens.seq, shards.seq[split])
    count = np.searchsorted(tokens.seq, shards.seq[split], side="right") - first
    token = np.arange(int(count.sum())) - np.repeat(exclusive_cumsum(count) - first, count)
    return np.repeat(split, count), token


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """The segments of one rank, one per head of each of its attention shards, ordered by stage.

    Attributes:
        q_lens, k_lens: (N,) queries and keys of each.
        of_stage: (num_stages,) how many each stage has.
        first: (attention shards,) number of a shard's segment of head 0, had it that head, in the order (shard, head).
        place: (N,) where the segments of that order are in the order by stage.
    """

    q_lens: Int64Array
    k_lens: Int64Array
    of_stage: Int64Array
    first: Int64Array
    place: Int64Array

    @classmethod
    def of(cls, placement: Placement, rank: int, num_stages: int) -> "_Segments":
        shards = placement.attention_shards
        mine = np.flatnonzero(placement.split[shards.seq] & (shards.rank == rank))
        first_head, num_heads = _heads(placement, mine)
        shard, head = np.repeat(mine, num_heads), ranges(first_head, num_heads)
        stage = _stage(placement, shard, head, num_stages)
        by_stage = np.argsort(stage, kind="stable")
        place = np.empty_like(by_stage)
        place[by_stage] = np.arange(len(by_stage))
        first = np.zeros(len(shards), dtype=np.int64)
        first[mine] = exclusive_cumsum(num_heads) - first_head
        shard, head = shard[by_stage], head[by_stage]
        q_lens, k_lens = _queries(placement, shard, head)[1], placement.sequences.length[shards.seq[shard]]
        return cls(q_lens, k_lens, np.bincount(stage, minlength=num_stages), first, place)

    def starts(self, shard: Int64Array, head: Int64Array) -> tuple[Int64Array, Int64Array]:
        """First row of q, and of k, of the segments of shards of this rank; of other ranks' shards anything."""
        if not len(self.place):
            return np.zeros_like(shard), np.zeros_like(shard)
        segment = self.place[np.clip(self.first[shard] + head, 0, len(self.place) - 1)]
        return exclusive_cumsum(self.q_lens)[segment], exclusive_cumsum(self.k_lens)[segment]

    def rows_by_stage(self) -> tuple[Int64Array, Int64Array]:
        """(num_stages,) rows of q, and of k, in each stage."""
        stage = np.repeat(np.arange(len(self.of_stage)), self.of_stage)
        rows = np.zeros((2, len(self.of_stage)), dtype=np.int64)
        np.add.at(rows[0], stage, self.q_lens)
        np.add.at(rows[1], stage, self.k_lens)
        return rows[0], rows[1]


def _moves(
    placement: Placement, rank: int, num_whole: int, segments: _Segments, num_stages: int
) -> tuple[Moves, Moves]:
    """Moves of q and of k that touch `rank`: one per head of every pair (attention shard, token shard) of a sequence.

    They begin at split tokens, which are the last ones of a rank's packed order, and end at segments.
    """
    tokens, shards, heads = placement.token_shards, placement.attention_shards, placement.num_heads
    pair_shard, pair_token = split_pairs(placement)
    touches = (shards.rank[pair_shard] == rank) | (tokens.rank[pair_token] == rank)
    pair_shard, pair_token = pair_shard[touches], pair_token[touches]
    first_head, num_heads = _heads(placement, pair_shard)
    head = ranges(first_head, num_heads)
    shard, token = np.repeat(pair_shard, num_heads), np.repeat(pair_token, num_heads)

    # Of the queries that the shard has in this head, those among the token shard's.
    first_query, num_queries = _queries(placement, shard, head)
    first = np.maximum(tokens.start[token], first_query)
    count = np.maximum(np.minimum(tokens.stop[token], first_query + num_queries) - first, 0)

    ends = tokens.rank[token], shards.rank[shard]
    source = (placement.packed_start()[token] - num_whole) * heads + head
    q_start, k_start = segments.starts(shard, head)
    stage = _stage(placement, shard, head, num_stages)
    source_q = source + (first - tokens.start[token]) * heads
    q = Moves(ends[0], source_q, ends[1], q_start + first - first_query, count, heads, stage=stage)
    k = Moves(ends[0], source, ends[1], k_start + tokens.start[token], tokens.count[token], heads, stage=stage)
    return q, k


def _heads(placement: Placement, shard: Int64Array) -> tuple[Int64Array, Int64Array]:
    """First head and number of heads that attention shards touch."""
    shards = placement.attention_shards
    length = placement.sequences.length[shards.seq[shard]]
    first = shards.start[shard] // length
    return first, (shards.stop[shard] - 1) // length + 1 - first


def _queries(placement: Placement, shard: Int64Array, head: Int64Array) -> tuple[Int64Array, Int64Array]:
    """First query and number of queries that attention shard `shard` has in `head`."""
    shards = placement.attention_shards
    length = placement.sequences.length[shards.seq[shard]]
    first = np.maximum(shards.start[shard] - head * length, 0)
    return first, np.minimum(shards.stop[shard] - head * length, length) - first


def _stage(placement: Placement, shard: Int64Array, head: Int64Array, num_stages: int) -> Int64Array:
    """Stage in which attention shard `shard` computes `head`."""
    first, count = _heads(placement, shard)
    return (head - first) * num_stages // count


def _stacked(q: Moves, k: Moves, source_rows: int, q_rows: Int64Array, k_rows: Int64Array) -> Moves:
    """Moves of q, of k, and of v, which go like k, from arrays laid end to end to arrays laid end to end, by stage.

    Args:
        q, k: each from an array of `source_rows` rows to one of its own.
        source_rows: rows of each source array.
        q_rows, k_rows: (num_stages,) rows of q and of k in each stage.
    """
    moves = (q, k, k)
    stage_begins = exclusive_cumsum(q_rows + 2 * k_rows)
    begins = stage_begins, stage_begins + q_rows, stage_begins + q_rows + k_rows
    shift = [b - exclusive_cumsum(rows) for b, rows in zip(begins, (q_rows, k_rows, k_rows), strict=True)]
    return Moves(
        np.concatenate([m.source_rank for m in moves]),
        np.concatenate([m.source_row + i * source_rows for i, m in enumerate(moves)]),
        np.concatenate([m.target_rank for m in moves]),
        np.concatenate([m.target_row + by[m.stage] for by, m in zip(shift, moves, strict=True)]),
        np.concatenate([m.count for m in moves]),
        q.source_stride,
        stage=np.concatenate([np.broadcast_to(m.stage, m.count.shape) for m in moves]),
    )
