"""Bag specs: the whole grammar, what it refuses and where, and which ranks a bag has."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.errors import SpecError
from knapformer.plan import BagSpec


@pytest.mark.parametrize(
    ("text", "terms", "num_ranks"),
    [
        ("g1n1", ((1, 1),), 1),
        ("g4n8", ((4, 8),), 32),
        ("g1n8+g2n4+g8n2", ((1, 8), (2, 4), (8, 2)), 32),
        ("g8n2+g1n8+g2n4", ((1, 8), (2, 4), (8, 2)), 32),  # any order; bags are smaller first
        ("g3n5+g7n1", ((3, 5), (7, 1)), 22),
        ("g10n12", ((10, 12),), 120),
    ],
)
def test_parse(text: str, terms: tuple[tuple[int, int], ...], num_ranks: int) -> None:
    spec = BagSpec.parse(text)
    assert (spec.terms, spec.num_ranks) == (terms, num_ranks)
    assert spec == BagSpec(terms)


@pytest.mark.parametrize(
    ("text", "column", "bad"),
    [
        ("", 1, "''"),
        ("junk", 1, "'junk'"),
        ("g4", 1, "'g4'"),
        ("g4n", 1, "'g4n'"),
        ("n4g2", 1, "'n4g2'"),
        ("G4N2", 1, "'G4N2'"),
        (" g4n2", 1, "' g4n2'"),
        ("g-4n2", 1, "'g-4n2'"),
        ("g2n1junk", 5, "'junk'"),
        ("g2n1 ", 5, "' '"),
        ("g2n1\n", 5, "'\\n'"),
        ("g2n1,g4n1", 5, "',g4n1'"),
        ("g2n1.5", 5, "'.5'"),
        ("g2n1+", 6, "''"),
        ("g2n1++g4n1", 6, "'+g4n1'"),
        ("g2n1+x+g4n1", 6, "'x'"),
        ("g2n1+g4n1x", 10, "'x'"),
        ("g0n4", 1, "'g0n4'"),
        ("g2n1+g4n0", 6, "'g4n0'"),
        ("g1n4+g2n1+g1n2", 11, "'g1n6'"),  # a size twice: the message has the one term to write
    ],
)
def test_errors_name_the_column(text: str, column: int, bad: str) -> None:
    with pytest.raises(SpecError) as error:
        BagSpec.parse(text)
    assert f"bag spec {text!r}: " in str(error.value)
    assert f"at column {column}" in str(error.value)
    assert bad in str(error.value)


@pytest.mark.parametrize("text", ["g٢n1", "g2n１"])
def test_only_ascii_digits_are_numbers(text: str) -> None:
    """As in data codes."""
    with pytest.raises(SpecError, match="cannot read"):
        BagSpec.parse(text)


def test_the_message_says_what_is_allowed() -> None:
    with pytest.raises(SpecError) as error:
        BagSpec.parse("g2n1junk")
    assert str(error.value) == (
        "bag spec 'g2n1junk': cannot read 'junk' at column 5; "
        "expected terms like 'g2n4' (4 bags of 2 ranks) joined by '+'"
    )


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ((), "at least one term"),
        (((2, 0),), "'g2n0'.*at least 1"),
        (((0, 2),), "'g0n2'.*at least 1"),
        (((2, -1),), "'g2n-1'.*at least 1"),
        (((2, 1), (4, 1), (2, 3)), "size 2 more than once; write them as one term 'g2n4'"),
    ],
)
def test_terms_are_checked_without_a_string_too(terms: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        BagSpec(terms)


def test_bags_are_consecutive_ranks_smaller_bags_first() -> None:
    assert BagSpec.parse("g4n1+g1n2+g2n2").bags() == [range(1), range(1, 2), range(2, 4), range(4, 6), range(6, 10)]


def test_num_groups() -> None:
    spec = BagSpec.parse("g1n4+g2n2")
    assert [spec.num_groups(8 * n) for n in (1, 2, 7)] == [1, 2, 7]
    for world_size in (4, 9, 12):
        with pytest.raises(SpecError, match=f"covers 8 ranks, which does not divide the world size {world_size}"):
            spec.num_groups(world_size)


TERMS = st.dictionaries(st.integers(1, 40), st.integers(1, 40), min_size=1, max_size=5)


@settings(deadline=None)
@given(TERMS)
def test_a_spec_reads_back_and_its_bags_cover_each_rank_once(terms: dict[int, int]) -> None:
    spec = BagSpec(tuple(terms.items()))
    assert BagSpec.parse(str(spec)) == spec
    bags = spec.bags()
    assert [rank for bag in bags for rank in bag] == list(range(spec.num_ranks))
    assert {size: sum(len(bag) == size for bag in bags) for size in terms} == terms
    assert [len(bag) for bag in bags] == sorted(len(bag) for bag in bags)


@settings(deadline=None)
@given(TERMS, st.text(alphabet="gn+0123456789 x", min_size=1, max_size=4))
def test_nothing_that_follows_a_spec_is_ignored(terms: dict[int, int], more: str) -> None:
    """A spec with more text behind it is another spec or an error, never the same one."""
    spec = BagSpec(tuple(terms.items()))
    with suppress(SpecError):
        assert BagSpec.parse(str(spec) + more) != spec
