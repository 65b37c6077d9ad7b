"""Placements: what validate refuses, one spelling, packed order, digests that rank compare, and JSON."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import PlanError, PlanInvariantError
from knapformer.plan import BagSpec, Cluster, CostModel, Placement, Sequences, Shards, make_planner
from tests.plan.strategies import placements

SEQUENCES = Sequences.from_ranks([[5, 2], [], [7]], [[1, 0], [], [7]])
TOKENS = [(0, 0, 0, 3), (0, 2, 3, 5), (1, 1, 0, 2), (2, 2, 0, 7)]
ROWS = [(0, 2, 0, 5), (0, 1, 5, 9), (0, 0, 9, 10), (1, 1, 0, 4), (2, 2, 0, 14)]  # 2 heads


def shards(rows: list[tuple[int, int, int, int]]) -> Shards:
    return Shards(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def placement(tokens=TOKENS, rows=ROWS, **changes) -> Placement:
    fields = {"sequences": SEQUENCES, "world_size": 3, "num_heads": 2, "planner": "by hand", **changes}
    return Placement(token_shards=shards(tokens), attention_shards=shards(rows), **fields)


def owners(table: Shards) -> dict[tuple[int, int], list[int]]:
    """Every (sequence, item) and the ranks that have it, the slow way."""
    result: dict[tuple[int, int], list[int]] = {}
    for seq, rank, start, stop in zip(table.seq, table.rank, table.start, table.stop, strict=True):
        for item in range(int(start), int(stop)):
            result.setdefault((int(seq), item), []).append(int(rank))
    return result


# -- validate -------------------------------------------------------------------------------------------------------


def test_a_placement_that_partitions_everything_is_valid() -> None:
    good = placement()
    assert good.validate() is good
    assert good.split.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("tokens", "rows", "message"),
    [
        (TOKENS[:3], ROWS, "sequence 2 has no token shard; its tokens would be lost"),
        ([], ROWS, "sequence 0 has no token shard"),
        (TOKENS, ROWS[:3] + ROWS[4:], "sequence 1 has no attention shard"),
        ([(0, 0, 1, 3), *TOKENS[1:]], ROWS, r"token shards of sequence 0 do not partition \[0, 5\).*\[1, 3\)"),
        ([TOKENS[0], (0, 2, 4, 5), *TOKENS[2:]], ROWS, r"token shards of sequence 0.*\[4, 5\).*should start at 3"),
        ([TOKENS[0], (0, 2, 2, 5), *TOKENS[2:]], ROWS, r"token shards of sequence 0.*\[2, 5\).*should start at 3"),
        ([TOKENS[0], (0, 2, 3, 6), *TOKENS[2:]], ROWS, r"token shards of sequence 0.*\[3, 6\)"),
        ([*TOKENS[:3], (2, 2, 0, 6)], ROWS, r"token shards of sequence 2 do not partition \[0, 7\)"),
        ([*TOKENS[:1], (0, 1, 3, 3), *TOKENS[1:]], ROWS, r"token shards of sequence 0.*\[3, 3\) on rank 1"),
        (TOKENS, [*ROWS[:4], (2, 2, 0, 7)], r"attention shards of sequence 2 do not partition \[0, 14\)"),
        ([TOKENS[0], (0, 3, 3, 5), *TOKENS[2:]], ROWS, "token shards name ranks outside 0 to 2"),
        (TOKENS, [*ROWS[:4], (2, -1, 0, 14)], "attention shards name ranks outside 0 to 2"),
        ([TOKENS[0], (0, 0, 3, 5), *TOKENS[2:]], ROWS, "neighbouring token shards lie on one rank"),
        ([TOKENS[1], TOKENS[0], *TOKENS[2:]], ROWS, "token shards of sequence 0 do not partition"),  # not in order
    ],
)
def test_validate_names_what_is_wrong(tokens: list, rows: list, message: str) -> None:
    with pytest.raises(PlanInvariantError, match=message):
        placement(tokens, rows).validate()


def test_a_sequence_placed_twice_is_noticed() -> None:
    seqs = Sequences.from_ranks([[5], [7]])
    twice, once = [(0, 0, 0, 5), (1, 1, 0, 7), (0, 1, 0, 5)], [(0, 0, 0, 5), (1, 1, 0, 7)]
    for tokens, rows in ((twice, once), (once, twice)):
        p = Placement(seqs, 2, 1, shards(tokens), shards(rows))
        assert p.tokens().sum() + p.area().sum() > 12 + 74  # more than there is
        with pytest.raises(PlanInvariantError):
            p.validate()


@pytest.mark.parametrize("seq", [-1, 3])
def test_a_shard_of_no_sequence(seq: int) -> None:
    with pytest.raises(PlanInvariantError, match="a shard names a sequence outside 0 to 2"):
        placement([*TOKENS, (seq, 0, 0, 1)])


@pytest.mark.parametrize("changes", [{"world_size": 0}, {"num_heads": 0}])
def test_no_ranks_or_no_heads(changes: dict) -> None:
    with pytest.raises(PlanError, match="world_size and num_heads must be at least 1"):
        placement(**changes)


def test_a_home_rank_outside_of_the_world() -> None:
    with pytest.raises(PlanError, match="home rank 2, but the cluster has ranks 0 to 1"):
        placement(world_size=2)


@settings(deadline=None)
@given(placements(), st.data())
def test_every_damaged_table_is_noticed(good: Placement, data: st.DataObject) -> None:
    """Move one bound of one shard by one: some token or row is then lost, doubled or outside of its sequence."""
    name = data.draw(st.sampled_from(["token_shards", "attention_shards"]))
    table = getattr(good, name)
    if not len(table):
        return
    at = data.draw(st.integers(0, len(table) - 1))
    bound = data.draw(st.sampled_from(["start", "stop"]))
    values = getattr(table, bound).copy()
    values[at] += data.draw(st.sampled_from([-1, 1]))
    with pytest.raises(PlanInvariantError):
        replace(good, **{name: replace(table, **{bound: values})}).validate()


def test_no_sequences() -> None:
    empty = Placement(Sequences.from_ranks([[], []]), 2, 3, shards([]), shards([])).validate()
    assert empty.tokens().tolist() == empty.area().tolist() == empty.num_shards().tolist() == [0, 0]
    assert len(empty.packed_order()) == len(empty.packed_start()) == 0
    assert Placement.from_json(json.loads(json.dumps(empty.to_json()))).digest() == empty.digest()


# -- one spelling ---------------------------------------------------------------------------------------------------


def test_sorted_drops_empty_ranges_sorts_and_joins() -> None:
    table = Shards.sorted(
        [1, 0, 0, 0, 0, 1], [4, 2, 1, 1, 1, 4], [0, 6, 4, 2, 5, 3], [3, 9, 6, 4, 5, 3]
    )  # (0, 1, 2, 4) and (0, 1, 4, 6) are neighbours on rank 1; two ranges are empty
    assert table.equals(shards([(0, 1, 2, 6), (0, 2, 6, 9), (1, 4, 0, 3)]))
    assert table.count.tolist() == [4, 3, 3]


def test_sorted_joins_no_ranges_of_two_sequences_or_with_a_gap() -> None:
    rows = [(0, 1, 0, 4), (1, 1, 4, 6), (1, 1, 7, 9)]
    assert Shards.sorted(*np.array(rows).T).equals(shards(rows))


@settings(deadline=None)
@given(placements(), st.randoms(use_true_random=False))
def test_sorted_does_not_depend_on_the_order(good: Placement, random) -> None:
    table = good.attention_shards
    order = list(range(len(table)))
    random.shuffle(order)
    # Cut every range in two as well: neighbours on one rank are joined again.
    middle = (table.start + table.stop) // 2
    seq, rank = np.tile(table.seq[order], 2), np.tile(table.rank[order], 2)
    start, stop = np.append(table.start[order], middle[order]), np.append(middle[order], table.stop[order])
    assert Shards.sorted(seq, rank, start, stop).equals(table)


def test_equals_looks_at_every_column() -> None:
    for column in range(4):
        changed = [list(row) for row in TOKENS]
        changed[1][column] += 1
        assert not shards(TOKENS).equals(shards([tuple(row) for row in changed]))
    assert not shards(TOKENS).equals(shards(TOKENS[:-1]))
    assert shards(TOKENS).equals(shards(TOKENS))


# -- whole, sums, packing -------------------------------------------------------------------------------------------


def test_whole() -> None:
    rank = np.array([2, 0, 0])
    whole = Placement.whole(SEQUENCES, rank, world_size=3, num_heads=4, planner="p", skip_reason="why").validate()
    assert whole.token_shards.equals(shards([(0, 2, 0, 5), (1, 0, 0, 2), (2, 0, 0, 7)]))
    assert whole.attention_shards.equals(shards([(0, 2, 0, 20), (1, 0, 0, 8), (2, 0, 0, 28)]))
    assert not whole.split.any()
    assert (whole.planner, whole.skip_reason) == ("p", "why")


def test_sums_by_hand() -> None:
    p = placement()
    assert p.tokens().tolist() == [3, 2, 2 + 7]
    assert p.area().tolist() == [1 * 5, 4 * 5 + 4 * 2, 5 * 5 + 14 * 7]
    assert p.num_shards().tolist() == [1, 1, 2]


def test_a_sequence_is_split_if_only_its_rows_are_elsewhere() -> None:
    whole = Placement.whole(SEQUENCES, np.array([0, 1, 2]), world_size=3, num_heads=2, planner="")
    rows = [(0, 1, 0, 10), (1, 1, 0, 4), (2, 2, 0, 14)]
    assert replace(whole, attention_shards=shards(rows)).split.tolist() == [True, False, False]


def test_areas_beyond_floats_are_exact() -> None:
    """np.bincount with weights would lose the last digits."""
    seqs = Sequences.from_ranks([[30_000_001], [2]])
    p = Placement.whole(seqs, np.array([1, 1]), world_size=2, num_heads=13, planner="")
    exact = 13 * 30_000_001**2 + 13 * 4
    assert p.area().tolist() == [0, exact]
    assert int(float(exact)) != exact


@settings(deadline=None)
@given(placements())
def test_sums_the_slow_way(p: Placement) -> None:
    tokens, area = [0] * p.world_size, [0] * p.world_size
    for (_, _), (rank,) in owners(p.token_shards).items():
        tokens[rank] += 1
    for (seq, _), (rank,) in owners(p.attention_shards).items():
        area[rank] += int(p.sequences.length[seq])
    assert p.tokens().tolist() == tokens
    assert p.area().tolist() == area
    assert p.num_shards().tolist() == [int((p.token_shards.rank == r).sum()) for r in range(p.world_size)]
    for seq in range(len(p.sequences)):
        tables = (p.token_shards, p.attention_shards)
        ranks = {rank for table in tables for rank in table.rank[table.seq == seq].tolist()}
        assert p.split[seq] == (len(ranks) > 1)


def test_packed_order_by_hand() -> None:
    seqs = Sequences.from_ranks([[6, 3, 4, 2]])
    tokens = [(0, 1, 0, 2), (0, 0, 2, 3), (0, 1, 3, 6), (1, 1, 0, 3), (2, 0, 0, 1), (2, 1, 1, 4), (3, 1, 0, 2)]
    rows = [(0, 1, 0, 6), (1, 1, 0, 3), (2, 1, 0, 4), (3, 1, 0, 2)]
    p = Placement(seqs, 2, 1, shards(tokens), shards(rows)).validate()
    # Rank 0: parts of the split sequences 0 and 2. Rank 1: the whole sequences 1 and 3 first, then parts of 0 and 2.
    assert p.packed_order().tolist() == [1, 4, 3, 6, 0, 2, 5]
    assert p.packed_start().tolist() == [5, 0, 7, 0, 1, 10, 3]


@settings(deadline=None)
@given(placements())
def test_packed_order_the_slow_way(p: Placement) -> None:
    t = p.token_shards
    order = sorted(range(len(t)), key=lambda i: (t.rank[i], bool(p.split[t.seq[i]]), t.seq[i], t.start[i]))
    assert p.packed_order().tolist() == order
    start = p.packed_start()
    for rank in range(p.world_size):
        position = 0
        for i in order:
            if t.rank[i] == rank:
                assert start[i] == position
                position += int(t.count[i])
        assert position == p.tokens()[rank]


# -- heads ----------------------------------------------------------------------------------------------------------


def test_with_num_heads_by_hand() -> None:
    assert placement().with_num_heads(2).attention_shards.equals(shards(ROWS))
    four = placement().with_num_heads(4)
    assert four.num_heads == 4
    assert four.attention_shards.equals(shards([(s, r, 2 * a, 2 * b) for s, r, a, b in ROWS]))
    three = placement().with_num_heads(3).validate()  # 10 rows become 15, cuts at 7.5 and 13.5 fall to 7 and 13
    rows = [(0, 2, 0, 7), (0, 1, 7, 13), (0, 0, 13, 15), (1, 1, 0, 6), (2, 2, 0, 21)]
    assert three.attention_shards.equals(shards(rows))
    assert three.token_shards.equals(shards(TOKENS))


def test_with_num_heads_drops_shares_of_nothing() -> None:
    seqs = Sequences.from_ranks([[1]])
    p = Placement(seqs, 2, 4, shards([(0, 0, 0, 1)]), shards([(0, 0, 0, 3), (0, 1, 3, 4)])).validate()
    one = p.with_num_heads(1).validate()
    assert one.attention_shards.equals(shards([(0, 1, 0, 1)]))
    assert p.with_num_heads(8).attention_shards.equals(shards([(0, 0, 0, 6), (0, 1, 6, 8)]))


@settings(deadline=None)
@given(placements(), st.integers(1, 9))
def test_with_num_heads_keeps_shares(p: Placement, factor: int) -> None:
    more = p.with_num_heads(p.num_heads * factor).validate()
    assert more.area().tolist() == (p.area() * factor).tolist()
    assert more.split.tolist() == p.split.tolist()
    assert more.with_num_heads(p.num_heads).digest() == p.digest()


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 48))
def test_whole_heads_stay_whole_heads(size: int, heads: int) -> None:
    seqs = Sequences.from_ranks([[40]] + [[]] * (size - 1))
    bags = make_planner("bags", BagSpec(((size, 1),)))(seqs, Cluster(size), CostModel(size, 1, 1))
    rows = bags.with_num_heads(size * heads).attention_shards
    assert (rows.stop % 40 == 0).all()
    assert rows.count.tolist() == [heads * 40] * size


# -- identity -------------------------------------------------------------------------------------------------------


def test_golden_digest() -> None:
    """Changes only with the tables' meaning; raise the schema number then. Ranks of all CPU types must agree on it."""
    assert placement().digest() == 541860824363281671
    seqs = Sequences.from_ranks([[100, 7], [], [23], [512]], [[3, 7], [], [0], [300]])
    bags = make_planner("bags", "g1n2+g2n1")(seqs, Cluster(4, 2), CostModel.from_shapes(3072, 24, gamma=0.49))
    assert bags.token_shards.equals(
        shards([(0, 0, 0, 100), (1, 1, 0, 7), (2, 1, 0, 23), (3, 2, 0, 256), (3, 3, 256, 512)])
    )
    assert bags.digest() == 6539030665895983845


def test_the_digest_sees_every_number() -> None:
    digests = {placement().digest()}
    count = 1
    text = Sequences.from_ranks([[5, 2], [], [7]], [[1, 0], [], [6]])
    home = Sequences.from_ranks([[5], [2], [7]], [[1], [0], [7]])
    length = Sequences.from_ranks([[5, 2], [], [8]], [[1, 0], [], [7]])
    contexts = [
        Sequences.from_ranks([[5, 2], [], [7]], [[1, 0], [], [7]], c) for c in ([[0, 1], [], [0]], [[1, 0], [], [0]])
    ]
    for changes in (
        {"sequences": text},
        {"sequences": home},
        {"sequences": length},
        *({"sequences": context} for context in contexts),
        {"world_size": 4},
        {"num_heads": 3},
    ):
        digests.add(placement(**changes).digest())
        count += 1
    for name, rows in (("tokens", TOKENS), ("rows", ROWS)):
        for row in range(len(rows)):
            for column in range(4):
                changed = [list(r) for r in rows]
                changed[row][column] += -1 if column == 0 and row == len(rows) - 1 else 1
                digests.add(placement(**{name: [tuple(r) for r in changed]}).digest())
                count += 1
    assert len(digests) == count
    assert all(-(2**63) <= digest < 2**63 for digest in digests)


def test_the_digest_knows_which_table_a_shard_is_in() -> None:
    seqs = Sequences.from_ranks([[4, 4]])
    one, two = [(0, 0, 0, 4), (1, 1, 0, 4)], [(0, 1, 0, 4), (1, 0, 0, 4)]
    a = Placement(seqs, 2, 1, shards(one), shards(two)).digest()
    b = Placement(seqs, 2, 1, shards(two), shards(one)).digest()
    assert a != b


def test_the_digest_ignores_who_made_the_plan() -> None:
    assert placement(planner="other", skip_reason="why").digest() == placement().digest()


@settings(deadline=None)
@given(placements())
def test_equal_plans_have_equal_digests(p: Placement) -> None:
    s = p.sequences
    tables = [
        Shards(*(np.array(column.tolist(), dtype=np.int64) for column in (t.seq, t.rank, t.start, t.stop)))
        for t in (p.token_shards, p.attention_shards)
    ]
    copy = Placement(
        Sequences(s.length.copy(), s.home.copy(), s.text_length.copy()), p.world_size, p.num_heads, *tables
    )
    assert copy.digest() == p.digest()


# -- JSON -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(placements())
def test_json_round_trip(p: Placement) -> None:
    back = Placement.from_json(json.loads(json.dumps(p.to_json())))
    assert back.sequences == p.sequences
    assert (back.world_size, back.num_heads, back.planner, back.skip_reason) == (
        p.world_size,
        p.num_heads,
        "random",
        "",
    )
    assert back.token_shards.equals(p.token_shards) and back.attention_shards.equals(p.attention_shards)
    assert back.digest() == p.digest()
    assert back.to_json() == p.to_json()


def test_json_without_context_lengths_is_read() -> None:
    """As it was written before there were any."""
    data = placement().to_json()
    assert data["sequences"].pop("context_length") == [0, 0, 0]
    assert Placement.from_json(data).digest() == placement().digest()


def test_json_says_what_it_is() -> None:
    data = placement(skip_reason="why").to_json()
    assert data == {
        "schema": 1,
        "kind": "placement",
        "planner": "by hand",
        "skip_reason": "why",
        "world_size": 3,
        "num_heads": 2,
        "sequences": {"length": [5, 2, 7], "home": [0, 0, 2], "text_length": [1, 0, 7], "context_length": [0] * 3},
        "token_shards": [list(row) for row in TOKENS],
        "attention_shards": [list(row) for row in ROWS],
    }
    assert all(type(x) is int for row in data["token_shards"] for x in row)  # plain integers, not NumPy's


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "not a placement of schema 1: kind 'placement', schema 2; write it again"),
        ({"schema": None}, "schema None"),
        ({"kind": "run"}, "kind 'run', schema 1"),
        ({"world_size": "3"}, "placement JSON is incomplete"),
        ({"sequences": {"length": [5]}}, "placement JSON is incomplete: KeyError.*home"),
        ({"sequences": {"length": [5.5, 2, 7], "home": [0, 0, 2], "text_length": [0, 0, 0]}}, "length must be a flat"),
        ({"world_size": 2}, "home rank 2, but the cluster has ranks 0 to 1"),
    ],
)
def test_json_that_is_no_placement(changes: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Placement.from_json({**placement().to_json(), **changes})


@pytest.mark.parametrize("key", ["sequences", "token_shards", "attention_shards", "world_size", "num_heads", "planner"])
def test_json_with_a_part_missing(key: str) -> None:
    data = placement().to_json()
    del data[key]
    with pytest.raises(PlanError, match=f"placement JSON is incomplete: KeyError.*{key}"):
        Placement.from_json(data)


@pytest.mark.parametrize("table", [[[0, 0, 0], [1, 2]], [[0, 0, 0, 3.9], *TOKENS[1:]]])
def test_json_with_a_table_that_is_none(table: list) -> None:
    with pytest.raises(PlanError):
        Placement.from_json({**placement().to_json(), "token_shards": table})


def test_json_is_validated_when_it_is_read() -> None:
    data = placement().to_json()
    data["token_shards"][0][3] -= 1
    with pytest.raises(PlanInvariantError, match="token shards of sequence 0 do not partition"):
        Placement.from_json(data)
