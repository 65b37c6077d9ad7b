"""Hypothesis strategies and builders shared by the planning tests."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from knapformer.plan import Placement, Sequences, Shards


@st.composite
def sequences(
    draw: st.DrawFn, max_world: int = 9, max_length: int = 60, max_per_rank: int = 4
) -> tuple[Sequences, int]:
    """Sequences of a step and its world size; ranks may have none."""
    world = draw(st.integers(1, max_world))
    lens = [draw(st.lists(st.integers(1, max_length), max_size=max_per_rank)) for _ in range(world)]
    text = [[draw(st.integers(0, length)) for length in rank] for rank in lens]
    return Sequences.from_ranks(lens, text), world


@st.composite
def placements(draw: st.DrawFn, max_world: int = 7, max_heads: int = 5) -> Placement:
    """Any placement at all: token cuts and row cuts anywhere, ranks in any order, several shards on one rank."""
    seqs, world = draw(sequences(max_world=max_world, max_length=24, max_per_rank=3))
    heads = draw(st.integers(1, max_heads))
    seed = draw(st.integers(0, 2**32 - 1))
    return random_placement(seqs, world, heads, np.random.default_rng(seed))


def random_placement(seqs: Sequences, world: int, heads: int, rng: np.random.Generator) -> Placement:
    def table(totals: np.ndarray) -> Shards:
        rows = []
        for seq, total in enumerate(totals.tolist()):
            cuts = sorted({0, total, *rng.integers(0, total + 1, size=rng.integers(0, 4)).tolist()})
            rows += [(seq, int(rng.integers(world)), a, b) for a, b in pairwise(cuts)]
        return Shards.sorted(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)

    return Placement(seqs, world, heads, table(seqs.length), table(seqs.length * heads), "random").validate()
