"""Bag specs: the paper's fixed groups of ranks, `g1n8+g2n4+g8n2` = 8 bags of 1 rank, 4 of 2, 2 of 8.

Bags take consecutive ranks, smaller bags first. A spec covers a *balancing group*; a world that is a multiple of it
holds several such groups side by side, each balanced on its own.
"""

import re
from dataclasses import dataclass
from typing import Self

from knapformer.errors import SpecError

_TERM = re.compile(r"g([0-9]+)n([0-9]+)")


@dataclass(frozen=True, slots=True)
class BagSpec:
    """Sizes and numbers of bags, ordered by size.

    Attributes:
        terms: (size, count) pairs by rising size.
    """

    terms: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise SpecError("a bag spec needs at least one term like 'g2n4'")
        ordered = tuple(sorted(self.terms))
        for size, count in ordered:
            if size < 1 or count < 1:
                raise SpecError(f"bag spec term 'g{size}n{count}': bag size and count must be at least 1")
        sizes = [size for size, _ in ordered]
        for size in sizes:
            if sizes.count(size) > 1:
                total = sum(count for other, count in ordered if other == size)
                raise SpecError(
                    f"bag spec names bags of size {size} more than once; write them as one term 'g{size}n{total}'"
                )
        object.__setattr__(self, "terms", ordered)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a spec such as `g1n8+g2n4`. Raises `SpecError` that names the column (from 1) of what it cannot read."""
        terms: list[tuple[int, int]] = []
        at = 0
        while True:
            match = _TERM.match(text, at)
            stop = match.end() if match else at
            if match is None or (stop < len(text) and text[stop] != "+"):
                bad = text[stop:].split("+", 1)[0] or text[stop:]
                raise SpecError(
                    f"bag spec {text!r}: cannot read {bad!r} at column {stop + 1}; "
                    "expected terms like 'g2n4' (4 bags of 2 ranks) joined by '+'"
                )
            size, count = int(match[1]), int(match[2])
            if size < 1 or count < 1:
                raise SpecError(
                    f"bag spec {text!r}: {match[0]!r} at column {at + 1}: size and count must be at least 1"
                )
            if any(size == other for other, _ in terms):
                raise SpecError(
                    f"bag spec {text!r}: bags of size {size} again at column {at + 1}; write each size once, e.g. "
                    f"'g{size}n{count + dict(terms)[size]}'"
                )
            terms.append((size, count))
            if stop == len(text):
                return cls(tuple(terms))
            at = stop + 1

    @property
    def num_ranks(self) -> int:
        """Ranks of one balancing group."""
        return sum(size * count for size, count in self.terms)

    def bags(self) -> list[range]:
        """The ranks of each bag within its balancing group, smaller bags first."""
        bags: list[range] = []
        first = 0
        for size, count in self.terms:
            for _ in range(count):
                bags.append(range(first, first + size))
                first += size
        return bags

    def num_groups(self, world_size: int) -> int:
        """Balancing groups in a world. Raises `SpecError` if the spec does not divide it."""
        if world_size % self.num_ranks:
            raise SpecError(
                f"bag spec '{self}' covers {self.num_ranks} ranks, which does not divide the world size {world_size}; "
                f"use a spec whose sizes times counts add up to a divisor of {world_size}, e.g. 'g1n{world_size}'"
            )
        return world_size // self.num_ranks

    def __str__(self) -> str:
        return "+".join(f"g{size}n{count}" for size, count in self.terms)
