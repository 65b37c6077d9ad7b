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
        qkv: from the rank's split q, k, v rows, laid end to end, to the segments' q, k, v rows, laid end to end.
        out: from the segments' output rows to the rank's split token rows.
        head_group: heads c that travel together; a token has H / c rows.
        q_lens: (N,) queries of each segment.
        k_lens: (N,) keys of each segment.
        num_split_tokens: split tokens of this rank, the last ones in packed order.
    """

    qkv: Exchange
    out: Exchange
    head_group: int
    q_lens: Int64Array
    k_lens: Int64Array
    num_split_tokens: int


def head_group(placement: Placement) -> int:
    """Most neighbouring heads c such that every attention cut of a split sequence lies on a multiple of c heads."""
    shards = placement.attention_shards
    here = placement.split[shards.seq]
    stop, length = shards.stop[here], placement.sequences.length[shards.seq[here]]
    if np.any(stop % length):
        return 1
    return int(np.gcd.reduce(stop // length, initial=placement.num_heads))


def attention_exchange(placement: Placement, rank: int, *, token_major: bool = False) -> AttentionExchange:
    """Build the tables of `rank`.

    Args:
        placement: the step's placement, for the heads the model has (`Placement.with_num_heads`).
        rank: whose view.
        token_major: order a shard's rows (token, head) instead of (head, token), as one segment per shard. For
            shards of whole heads only (what `pre_attn` of bag topologies returns).
    """
    group = head_group(placement)
    placement = placement.with_num_heads(placement.num_heads // group)
    heads, length = placement.num_heads, placement.sequences.length
    tokens, shards = placement.token_shards, placement.attention_shards
    here = np.flatnonzero(placement.split[shards.seq] & (shards.rank == rank))

    # The segments of this rank: shard x head.
    seq = shards.seq[here]
    first_head, num_segments = _heads(placement, here)
    shard = np.repeat(here, num_segments)
    head = ranges(first_head, num_segments)
    q_lens, k_lens = _queries(placement, shard, head)[1], length[shards.seq[shard]]
    segment_of_head_0 = np.zeros(len(shards), dtype=np.int64)
    segment_of_head_0[here] = exclusive_cumsum(num_segments) - first_head

    # The moves: (attention shard, token shard) pairs of one sequence that touch this rank, for each head of the shard.
    pair_shard, pair_token = split_pairs(placement)
    touches = (shards.rank[pair_shard] == rank) | (tokens.rank[pair_token] == rank)
    pair_shard, pair_token = pair_shard[touches], pair_token[touches]
    pair_first, pair_heads = _heads(placement, pair_shard)
    move_head = ranges(pair_first, pair_heads)
    move_shard, move_token = np.repeat(pair_shard, pair_heads), np.repeat(pair_token, pair_heads)
    first_query, num_queries = _queries(placement, move_shard, move_head)
    lo = np.maximum(tokens.start[move_token], first_query)
    q_count = np.maximum(np.minimum(tokens.stop[move_token], first_query + num_queries) - lo, 0)

    # Where moves begin: at split tokens, the last ones of a rank's packed order, and at segments of this rank.
    num_whole, num_split = (
        int(tokens.count[(tokens.rank == rank) & (placement.split[tokens.seq] == split)].sum())
        for split in (False, True)
    )
    source = (placement.packed_start()[move_token] - num_whole) * heads + move_head
    receives = shards.rank[move_shard] == rank
    segment = np.where(receives, segment_of_head_0[move_shard] + move_head, 0)
    if token_major:
        q_start = k_start = _token_major_starts(num_segments, k_lens, segment)
        stride = np.where(receives, np.repeat(pair_heads, pair_heads), 1)
    else:
        q_start, k_start = (exclusive_cumsum(lens)[segment] if len(lens) else segment for lens in (q_lens, k_lens))
        stride = np.ones_like(segment)

    ends = tokens.rank[move_token], shards.rank[move_shard]
    from_lo, from_first = lo - tokens.start[move_token], lo - first_query
    q = Moves(ends[0], source + from_lo * heads, ends[1], q_start + from_first * stride, q_count, heads, stride)
    k_start = k_start + tokens.start[move_token] * stride
    k = Moves(ends[0], source, ends[1], k_start, tokens.count[move_token], heads, stride)
    rows, num_q, num_k = num_split * heads, int(q_lens.sum()), int(k_lens.sum())
    if token_major:
        q_lens = k_lens = length[seq]
    return AttentionExchange(
        _concatenate((q, k, k), source_rows=rows, target_rows=(num_q, num_k, num_k)).exchange(
            rank, placement.world_size, 3 * rows, num_q + 2 * num_k
        ),
        q.exchange(rank, placement.world_size, rows, num_q).inverse(),
        group,
        column(q_lens, "q_lens"),
        column(k_lens, "k_lens"),
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


def _token_major_starts(num_segments: Int64Array, lens: Int64Array, segment: Int64Array) -> Int64Array:
    """Target row of token 0 of each move's segment when a shard's rows are laid out (token, head)."""
    if not len(lens):
        return segment
    shard_start = exclusive_cumsum(lens)[exclusive_cumsum(num_segments)]
    head_in_shard = np.arange(len(lens)) - np.repeat(exclusive_cumsum(num_segments), num_segments)
    return (np.repeat(shard_start, num_segments) + head_in_shard)[segment]


def _concatenate(parts: tuple[Moves, ...], *, source_rows: int, target_rows: tuple[int, ...]) -> Moves:
    """Moves between arrays laid end to end. Sources are equally long; targets have `target_rows`."""
    offsets = exclusive_cumsum(np.array(target_rows, dtype=np.int64))
    return Moves(
        np.concatenate([p.source_rank for p in parts]),
        np.concatenate([p.source_row + i * source_rows for i, p in enumerate(parts)]),
        np.concatenate([p.target_rank for p in parts]),
        np.concatenate([p.target_row + offsets[i] for i, p in enumerate(parts)]),
        np.concatenate([p.count for p in parts]),
        parts[0].source_stride,
        np.concatenate([p.target_stride for p in parts]),  # type: ignore[arg-type]
    )
