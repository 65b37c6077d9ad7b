"""Sequences: ids, homes and offsets, and the lengths that are refused."""

import numpy as np
import pytest
from hypothesis import given, settings

from knapformer.errors import PlanError
from knapformer.plan import Sequences
from knapformer.plan.sequences import MAX_LENGTH
from tests.plan.strategies import sequences

RANKS = [[5, 1], [], [7], [2, 2, 9], []]


def test_ids_follow_home_rank_and_position() -> None:
    seqs = Sequences.from_ranks(RANKS)
    assert seqs.length.tolist() == [5, 1, 7, 2, 2, 9]
    assert seqs.home.tolist() == [0, 0, 2, 3, 3, 3]
    assert seqs.text_length.tolist() == [0] * 6
    assert seqs.home_start.tolist() == [0, 5, 0, 0, 2, 4]
    assert [seqs.of_rank(r).tolist() for r in range(5)] == [[0, 1], [], [2], [3, 4, 5], []]
    assert seqs.tokens_at_home(5).tolist() == [6, 0, 7, 13, 0]
    assert (len(seqs), seqs.num_tokens) == (6, 26)


def test_text_lengths() -> None:
    seqs = Sequences.from_ranks([[5, 1], [7]], [[5, 0], [3]])
    assert seqs.text_length.tolist() == [5, 0, 3]
    assert seqs.length.tolist() == [5, 1, 7]  # text is part of the length


@pytest.mark.parametrize("world_size", [1, 4])
def test_no_sequences_at_all(world_size: int) -> None:
    seqs = Sequences.from_ranks([[]] * world_size)
    assert (len(seqs), seqs.num_tokens) == (0, 0)
    assert seqs.tokens_at_home(world_size).tolist() == [0] * world_size
    assert all(len(seqs.of_rank(r)) == 0 for r in range(world_size))
    assert seqs.home_start.dtype == seqs.length.dtype == np.int64
    seqs.check_world(1)


@settings(deadline=None)
@given(sequences())
def test_home_start_is_where_a_sequence_lies_among_its_rank_s_tokens(case: tuple[Sequences, int]) -> None:
    seqs, world = case
    for rank in range(world):
        before = 0
        for i in seqs.of_rank(rank):
            assert seqs.home[i] == rank
            assert seqs.home_start[i] == before
            before += int(seqs.length[i])
        assert seqs.tokens_at_home(world)[rank] == before
    assert seqs.tokens_at_home(world).sum() == seqs.num_tokens


def test_columns_are_read_only_copies() -> None:
    length = np.array([4, 6])
    seqs = Sequences(length, np.array([0, 1]), np.array([0, 0]))
    length[0] = 99
    assert seqs.length.tolist() == [4, 6]
    for name in ("length", "home", "text_length", "home_start"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(seqs, name)[0] = 1
    with pytest.raises(AttributeError):
        seqs.length = length  # type: ignore[misc]


def test_equality_and_hash() -> None:
    one = Sequences.from_ranks([[3, 4], [5]], [[1, 0], [0]])
    assert one == Sequences.from_ranks([np.array([3, 4]), np.array([5], dtype=np.int32)], [[1, 0], [0]])
    assert hash(one) == hash(Sequences.from_ranks([[3, 4], [5]], [[1, 0], [0]]))
    others = [
        Sequences.from_ranks([[3, 4], [6]], [[1, 0], [0]]),
        Sequences.from_ranks([[3], [4, 5]], [[1], [0, 0]]),  # the same lengths, another home
        Sequences.from_ranks([[3, 4], [5]], [[0, 0], [0]]),
        Sequences.from_ranks([[3, 4], [5], [1]]),
    ]
    assert all(one != other for other in others)
    assert len({one, *others}) == 5
    assert one != [3, 4, 5]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[4, 0]], r"sequence 1 \(home rank 0\) has length 0; allowed is from 1 to 2147483647 tokens"),
        ([[4], [], [3, -2]], r"sequence 2 \(home rank 2\) has length -2"),
        ([[MAX_LENGTH + 1]], r"sequence 0 \(home rank 0\) has length 2147483648"),
        ([[2**70]], "length must be a flat list of whole numbers"),
    ],
)
def test_impossible_lengths(ranks: list[list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Sequences.from_ranks(ranks)


@pytest.mark.parametrize("lens", [[2.7], [np.float64(3.0)], ["3"], [True]])
def test_from_ranks_takes_whole_numbers_only(lens: list) -> None:
    """As the constructor does: a length that is cut silently is a token lost."""
    with pytest.raises(PlanError, match="whole numbers"):
        Sequences.from_ranks([lens])


def test_the_longest_length_is_allowed() -> None:
    assert Sequences.from_ranks([[MAX_LENGTH, 1]]).length.tolist() == [2147483647, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([[1, 5], [0]], r"sequence 1 \(home rank 0\) has text_length 5; allowed is from 0 to its length"),
        ([[1, -1], [0]], r"sequence 1 \(home rank 0\) has text_length -1"),
        ([[1], [0, 0]], r"text_lens must match seq_lens rank by rank; seq_lens has \[2, 1\] sequences per rank"),
        ([[1, 1]], "text_lens must match seq_lens rank by rank"),
    ],
)
def test_text_that_does_not_fit(text: list[list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Sequences.from_ranks([[3, 4], [6]], text)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([3, 4], [0], [0, 0]), "must be equally long, got 2, 1 and 2"),
        (([3, 4], [0, 1], [0]), "must be equally long, got 2, 2 and 1"),
        (([3, 4], [1, 0], [0, 0]), "must be ordered by home rank"),
        (([3, 4], [-1, 0], [0, 0]), r"sequence 0 \(home rank -1\) has home -1"),
        (([3.0, 4.0], [0, 0], [0, 0]), "length must be a flat list of whole numbers, got shape .* of float64"),
        (([[3, 4]], [0, 0], [0, 0]), r"length must be a flat list of whole numbers, got shape \(1, 2\)"),
        ((["3", "4"], [0, 0], [0, 0]), "length must be a flat list of whole numbers"),
        (([True, True], [0, 0], [0, 0]), "length must be a flat list of whole numbers, got shape .* of bool"),
    ],
)
def test_columns_that_are_no_sequences(columns: tuple[list, list, list], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Sequences(*columns)


def test_context() -> None:
    """Rows beside the sequence: any number, also more than it has tokens; none unless given."""
    seqs = Sequences.from_ranks([[3, 4], [], [6]], None, [[512, 0], [], [7]])
    assert seqs.context_length.tolist() == [512, 0, 7] and not seqs.context_length.flags.writeable
    plain = Sequences.from_ranks([[3, 4], [], [6]])
    assert plain.context_length.tolist() == [0, 0, 0]
    assert seqs != plain and len({seqs, plain}) == 2
    with pytest.raises(PlanError, match=r"sequence 1 \(home rank 0\) has context_length -1; allowed is from 0 to 2147"):
        Sequences.from_ranks([[3, 4]], None, [[5, -1]])
    with pytest.raises(PlanError, match="context_lens must match seq_lens rank by rank"):
        Sequences.from_ranks([[3, 4]], None, [[5]])
    with pytest.raises(PlanError, match="context_length must be as long as length, got 1 and 2"):
        Sequences(seqs.length[:2], seqs.home[:2], seqs.text_length[:2], seqs.context_length[:1])


def test_check_world() -> None:
    seqs = Sequences.from_ranks([[1], [], [2]])
    seqs.check_world(3)
    seqs.check_world(7)
    with pytest.raises(PlanError, match="home rank 2, but the cluster has ranks 0 to 1"):
        seqs.check_world(2)
