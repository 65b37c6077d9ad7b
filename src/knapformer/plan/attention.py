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

In several parts, one travels while another is computed: part p of n has every shard's segments s with s * n // (its
segments) = p, and so a share of every rank's work. Each part's q, k and v are then arrays of their own.
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
        qkv: from the rank's split q, k, v rows, laid end to end, to the segments' rows: of each part q, then k, then v.
        out: from the segments' output rows to the rank's split token rows.
        head_group: heads c that travel together; a token has H / c rows.
        q_lens: (N,) queries of each segment, part by part.
        k_lens: (N,) keys of each segment.
        num_segments: (num_parts,) segments of each part.
        q_rows, k_rows: (num_parts,) rows of q, and of k, in each part.
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
    def num_parts(self) -> int:
        return len(self.num_segments)

    def segment_lens(self) -> list[tuple[Int64Array, Int64Array]]:
        """Queries and keys of the segments of each part."""
        cuts = np.cumsum(self.num_segments)[:-1]
        return list(zip(np.split(self.q_lens, cuts), np.split(self.k_lens, cuts), strict=True))


def head_group(placement: Placement, num_parts: int = 1) -> int:
    """Most neighbouring heads c such that every attention cut of a split sequence lies on a multiple of c heads.

    In several parts, c is less where a shard would otherwise have fewer head groups than there are parts.
    """
    shards = placement.attention_shards
    here = placement.split[shards.seq]
    start, stop, length = shards.start[here], shards.stop[here], placement.sequences.length[shards.seq[here]]
    if np.any(stop % length):
        return 1
    group = int(np.gcd.reduce(stop // length, initial=placement.num_heads))
    fewest = int(((stop - start) // length).min(initial=placement.num_heads))
    most = group if num_parts == 1 else max(1, min(group, fewest // num_parts))
    return next(c for c in range(most, 0, -1) if group % c == 0)


def attention_exchange(
    placement: Placement, rank: int, *, num_parts: int = 1, token_major: bool = False
) -> AttentionExchange:
    """Build the tables of `rank`.

    Args:
        placement: the step's placement, for the heads the model has (`Placement.with_num_heads`).
        rank: whose view.
        num_parts: all-to-alls to make of it.
        token_major: order a shard's rows (token, head) instead of (head, token), as one segment per shard. For
            shards of whole heads only (what `pre_attn` of bag topologies returns).
    """
    group = head_group(placement, num_parts)
    placement = placement.with_num_heads(placement.num_heads // group)
    heads, length = placement.num_heads, placement.sequences.length
    tokens, shards = placement.token_shards, placement.attention_shards
    here = np.flatnonzero(placement.split[shards.seq] & (shards.rank == rank))

    # The segments of this rank: shard x head.
    seq = shards.seq[here]
    first_head, num_segments = _heads(placement, here)
    shard = np.repeat(here, num_segments)
    head = ranges(first_head, num_segments)
    part = _part(placement, shard, head, num_parts)
    by_part = np.argsort(part, kind="stable")
    shard, head, in_part = shard[by_part], head[by_part], np.bincount(part, minlength=num_parts)
    q_lens, k_lens = _queries(placement, shard, head)[1], length[shards.seq[shard]]
    place = np.empty_like(by_part)  # of a segment, in the order of shards and heads, among those ordered by part
    place[by_part] = np.arange(len(by_part))
    segment_of_head_0 = np.zeros(len(shards), dtype=np.int64)
    segment_of_head_0[here] = exclusive_cumsum(num_segments) - first_head

    # The moves: (attention shard, token shard) pairs of one sequence that touch this rank, for each head of the shard.
    pair_shard, pair_token = split_pairs(placement)
    touches = (shards.rank[pair_shard] == rank) | (tokens.rank[pair_token] == rank)
    pair_shard, pair_token = pair_shard[touches], pair_token[touches]
    pair_first, pair_heads = _heads(placement, pair_shard)
    move_head = ranges(pair_first, pair_heads)
    move_shard, move_token = np.repeat(pair_shard, pair_heads), np.repeat(pair_token, pair_heads)
    move_part = _part(placement, move_shard, move_head, num_parts)
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
    segment = place[segment] if len(place) else segment
    if token_major:
        q_start = k_start = _token_major_starts(num_segments, k_lens, segment)
        stride = np.where(receives, np.repeat(pair_heads, pair_heads), 1)
    else:
        q_start, k_start = (exclusive_cumsum(lens)[segment] if len(lens) else segment for lens in (q_lens, k_lens))
        stride = np.ones_like(segment)

    ends = tokens.rank[move_token], shards.rank[move_shard]
    from_lo, from_first = lo - tokens.start[move_token], lo - first_query
    q = Moves(
        ends[0], source + from_lo * heads, ends[1], q_start + from_first * stride, q_count, heads, stride, move_part
    )
    k_start = k_start + tokens.start[move_token] * stride
    k = Moves(ends[0], source, ends[1], k_start, tokens.count[move_token], heads, stride, move_part)
    rows, num_q, num_k = num_split * heads, int(q_lens.sum()), int(k_lens.sum())
    cuts = np.cumsum(in_part)[:-1]
    part_q, part_k = (np.array([x.sum() for x in np.split(lens, cuts)], dtype=np.int64) for lens in (q_lens, k_lens))
    if token_major:
        q_lens, k_lens, in_part = length[seq], length[seq], np.array([len(seq)])
    qkv = _stacked(q, k, rows, part_q, part_k)
    return AttentionExchange(
        qkv.exchange(rank, placement.world_size, 3 * rows, num_q + 2 * num_k, num_parts),
        q.exchange(rank, placement.world_size, rows, num_q, num_parts).inverse(),
        group,
        column(q_lens, "q_lens"),
        column(k_lens, "k_lens"),
        column(in_part, "num_segments"),
        column(part_q, "q_rows"),
        column(part_k, "k_rows"),
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


def _stacked(q: Moves, k: Moves, source_rows: int, part_q: Int64Array, part_k: Int64Array) -> Moves:
    """Moves of q, of k, and of v, which go like k, from arrays laid end to end to arrays laid end to end, by part.

    Args:
        q, k: each from an array of `source_rows` rows to one of its own.
        source_rows: rows of each source array.
        part_q, part_k: (num_parts,) rows of q and of k in each part.
    """
    moves = (q, k, k)
    behind = exclusive_cumsum(part_q + 2 * part_k)  # where a part begins, and within it q, k and v
    begins = behind, behind + part_q, behind + part_q + part_k
    shift = [b - exclusive_cumsum(lens) for b, lens in zip(begins, (part_q, part_k, part_k), strict=True)]
    return Moves(
        np.concatenate([m.source_rank for m in moves]),
        np.concatenate([m.source_row + i * source_rows for i, m in enumerate(moves)]),
        np.concatenate([m.target_rank for m in moves]),
        np.concatenate([m.target_row + by[m.part] for by, m in zip(shift, moves, strict=True)]),
        np.concatenate([m.count for m in moves]),
        q.source_stride,
        np.concatenate([m.target_stride for m in moves]),  # type: ignore[arg-type]
        np.concatenate([m.part for m in moves]),  # type: ignore[arg-type]
    )


def _part(placement: Placement, shard: Int64Array, head: Int64Array, num_parts: int) -> Int64Array:
    """Part that each head of an attention shard belongs to."""
    first, count = _heads(placement, shard)
    return (head - first) * num_parts // count
