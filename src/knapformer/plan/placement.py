"""A placement says, for one step, which rank holds which tokens and which rank computes which attention rows.

Two tables of contiguous ranges, one for each kind of work of a transformer layer:

    token shards       (seq, rank, start, stop)    tokens [start, stop) of a sequence, for all token-wise layers
    attention shards   (seq, rank, start, stop)    rows [start, stop) of its H * L attention rows, head-major:
                                                   row = head * L + query

Each sequence's shards partition [0, L) and [0, H * L). A sequence is *whole* when one rank has all of both: its
attention then needs no communication. Every scheme (no balancing, bags, Ulysses, the balanced planner) is a filling
of these two tables, and one executor runs all of them.

On its rank, shards are packed whole sequences first, then split ones, each by (sequence id, start): kernels then see
whole sequences as one contiguous run and nothing has to be copied out of the way.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from knapformer.errors import PlanError, PlanInvariantError
from knapformer.plan.arrays import Int64Array, column, starts_within
from knapformer.plan.sequences import COLUMNS, Sequences

SCHEMA = 1


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Contiguous ranges of sequences on ranks, sorted by (seq, start), none empty, neighbours on different ranks.

    Attributes:
        seq, rank, start, stop: (N,) columns; the range is [start, stop).
    """

    seq: Int64Array
    rank: Int64Array
    start: Int64Array
    stop: Int64Array

    def __post_init__(self) -> None:
        for name in ("seq", "rank", "start", "stop"):
            object.__setattr__(self, name, column(getattr(self, name), name))

    @classmethod
    def sorted(cls, seq: Any, rank: Any, start: Any, stop: Any) -> Self:
        """Drop empty ranges, sort, and join neighbours on one rank, so that a placement has one spelling."""
        seq, rank, start, stop = (np.asarray(a, dtype=np.int64) for a in (seq, rank, start, stop))
        keep = np.flatnonzero(stop > start)
        keep = keep[np.lexsort((start[keep], seq[keep]))]
        seq, rank, start, stop = seq[keep], rank[keep], start[keep], stop[keep]
        joins = (seq[1:] == seq[:-1]) & (rank[1:] == rank[:-1]) & (start[1:] == stop[:-1])
        if joins.any():
            opens, closes = np.append(True, ~joins), np.append(~joins, True)
            seq, rank, start, stop = seq[opens], rank[opens], start[opens], stop[closes]
        return cls(seq, rank, start, stop)

    @property
    def count(self) -> Int64Array:
        """(N,) items in each shard."""
        return self.stop - self.start

    def __len__(self) -> int:
        return len(self.seq)

    def equals(self, other: "Shards") -> bool:
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in ("seq", "rank", "start", "stop"))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """All token shards and attention shards of one step, for all ranks.

    Attributes:
        sequences: what is placed.
        world_size: number of ranks.
        num_heads: query heads H that `attention_shards` are expressed in.
        token_shards, attention_shards: the two tables.
        planner: who made it.
        skip_reason: why a planner returned the identity, where it did.
        split: (S,) whether a sequence has shards on several ranks (derived).
    """

    sequences: Sequences
    world_size: int
    num_heads: int
    token_shards: Shards
    attention_shards: Shards
    planner: str = ""
    skip_reason: str = ""
    split: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.num_heads < 1:
            raise PlanError(f"world_size and num_heads must be at least 1, got {self.world_size} and {self.num_heads}")
        self.sequences.check_world(self.world_size)
        lowest = np.full(len(self.sequences), self.world_size, dtype=np.int64)
        highest = np.full(len(self.sequences), -1, dtype=np.int64)
        for shards in (self.token_shards, self.attention_shards):
            if len(shards) and not 0 <= int(shards.seq.min()) <= int(shards.seq.max()) < len(self.sequences):
                raise PlanInvariantError(f"a shard names a sequence outside 0 to {len(self.sequences) - 1}")
            np.minimum.at(lowest, shards.seq, shards.rank)
            np.maximum.at(highest, shards.seq, shards.rank)
        split = lowest != highest
        split.flags.writeable = False
        object.__setattr__(self, "split", split)

    @classmethod
    def whole(
        cls,
        sequences: Sequences,
        rank: Int64Array,
        *,
        world_size: int,
        num_heads: int,
        planner: str,
        skip_reason: str = "",
    ) -> Self:
        """Every sequence whole on the rank given for it."""
        ids = np.arange(len(sequences))
        zero = np.zeros_like(ids)
        return cls(
            sequences,
            world_size,
            num_heads,
            Shards(ids, rank, zero, sequences.length),
            Shards(ids, rank, zero, sequences.length * num_heads),
            planner,
            skip_reason,
        )

    def validate(self) -> Self:
        """Check that both tables partition every sequence over existing ranks; return self.

        Raises:
            PlanInvariantError: naming the table, the sequence and the first range that is wrong.
        """
        length = self.sequences.length
        for name, shards, total in (
            ("token", self.token_shards, length),
            ("attention", self.attention_shards, length * self.num_heads),
        ):
            if len(shards) and not 0 <= int(shards.rank.min()) <= int(shards.rank.max()) < self.world_size:
                raise PlanInvariantError(f"{name} shards name ranks outside 0 to {self.world_size - 1}")
            if np.any(np.diff(shards.seq) < 0):
                raise PlanInvariantError(f"{name} shards are not ordered by sequence; build tables with Shards.sorted")
            missing = np.bincount(shards.seq, minlength=len(length)) == 0
            if missing.any():
                raise PlanInvariantError(
                    f"sequence {int(np.argmax(missing))} has no {name} shard; its tokens would be lost"
                )
            first = np.diff(shards.seq, prepend=-1) != 0
            expected = np.where(first, 0, np.roll(shards.stop, 1))
            last = np.roll(first, -1)
            bad = (
                (shards.start != expected) | (shards.stop <= shards.start) | (last & (shards.stop != total[shards.seq]))
            )
            if bad.any():
                at = int(np.argmax(bad))
                seq, start, stop = int(shards.seq[at]), int(shards.start[at]), int(shards.stop[at])
                wrong = f"start at {int(expected[at])}" if start != expected[at] else f"end by {int(total[seq])}"
                raise PlanInvariantError(
                    f"{name} shards of sequence {seq} do not partition [0, {int(total[seq])}): range [{start}, {stop}) "
                    f"on rank {int(shards.rank[at])} should {wrong}"
                )
            if np.any(~first[1:] & (np.diff(shards.rank) == 0)):
                raise PlanInvariantError(f"neighbouring {name} shards lie on one rank; build tables with Shards.sorted")
        return self

    def with_num_heads(self, num_heads: int) -> "Placement":
        """The same shares for another number of heads: row cuts are scaled, so whole shares stay whole.

        A cut at a head boundary stays one if `num_heads * cut / (H * L)` is a whole number; other cuts fall inside a
        head, which the executor handles.
        """
        if num_heads == self.num_heads:
            return self
        rows = self.attention_shards
        scaled = Shards.sorted(
            rows.seq, rows.rank, rows.start * num_heads // self.num_heads, rows.stop * num_heads // self.num_heads
        )
        return replace(self, num_heads=num_heads, attention_shards=scaled)

    # -- what one rank holds --------------------------------------------------------------------------------------

    def packed_order(self) -> Int64Array:
        """(N,) token shards in (rank, packed position) order."""
        shards = self.token_shards
        return np.lexsort((shards.start, shards.seq, self.split[shards.seq], shards.rank))

    def packed_start(self) -> Int64Array:
        """(N,) packed position of the first token of each token shard on its rank."""
        order, shards = self.packed_order(), self.token_shards
        position = np.empty_like(order)
        position[order] = starts_within(shards.rank[order], shards.count[order])
        return position

    def tokens(self) -> Int64Array:
        """(world_size,) tokens T_r each rank holds."""
        return per_rank(self.token_shards.rank, self.token_shards.count, self.world_size)

    def area(self) -> Int64Array:
        """(world_size,) attention area A_r: each row of a sequence of L tokens counts L."""
        rows = self.attention_shards
        return per_rank(rows.rank, rows.count * self.sequences.length[rows.seq], self.world_size)

    def num_shards(self) -> Int64Array:
        """(world_size,) token shards each rank holds."""
        return np.bincount(self.token_shards.rank, minlength=self.world_size).astype(np.int64)

    # -- identity -------------------------------------------------------------------------------------------------

    def digest(self) -> int:
        """64-bit digest of sequences and both tables; equal on two ranks only if their plans are."""
        state = hashlib.blake2b(digest_size=8)
        state.update(np.array([SCHEMA, self.world_size, self.num_heads], dtype="<i8").tobytes())
        s, t, a = self.sequences, self.token_shards, self.attention_shards
        context = (s.context_length,) if s.context_length.any() else ()  # plans without keep their digests
        for values in (s.length, s.home, s.text_length, *_columns(t), *_columns(a), *context):
            state.update(np.array([len(values)], dtype="<i8").tobytes())
            state.update(values.astype("<i8", copy=False).tobytes())
        return int.from_bytes(state.digest(), "little", signed=True)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`; `from_json` reads it back."""
        s = self.sequences
        return {
            "schema": SCHEMA,
            "kind": "placement",
            "planner": self.planner,
            "skip_reason": self.skip_reason,
            "world_size": self.world_size,
            "num_heads": self.num_heads,
            "sequences": {name: getattr(s, name).tolist() for name in COLUMNS},
            "token_shards": np.stack(_columns(self.token_shards), axis=1).tolist(),
            "attention_shards": np.stack(_columns(self.attention_shards), axis=1).tolist(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read `to_json`'s data. Raises `PlanError` on another schema or missing parts, and validates."""
        if data.get("schema") != SCHEMA or data.get("kind") != "placement":
            raise PlanError(
                f"not a placement of schema {SCHEMA}: kind {data.get('kind')!r}, schema {data.get('schema')!r}; "
                "write it again with this version's Placement.to_json"
            )
        try:
            s = {"context_length": None, **data["sequences"]}  # which older files do not have
            sequences = Sequences(**{name: s[name] for name in COLUMNS})
            tables = [
                Shards(*(column([row[i] for row in data[name]], name) for i in range(4)))
                for name in ("token_shards", "attention_shards")
            ]
            placement = cls(
                sequences,
                data["world_size"],
                data["num_heads"],
                token_shards=tables[0],
                attention_shards=tables[1],
                planner=data["planner"],
                skip_reason=data.get("skip_reason", ""),
            )
        except (KeyError, IndexError, TypeError) as error:
            raise PlanError(f"placement JSON is incomplete: {error!r}") from error
        return placement.validate()


def _columns(shards: Shards) -> tuple[Int64Array, ...]:
    return shards.seq, shards.rank, shards.start, shards.stop


def per_rank(rank: Int64Array, amount: Int64Array, world_size: int) -> Int64Array:
    """(world_size,) exact sums of `amount` by rank."""
    total = np.zeros(world_size, dtype=np.int64)
    np.add.at(total, rank, amount)  # bincount's weights are floats, which lose the last digits of an area
    return total
