"""Sequences to the ranks of their group: whole first, the rest shared so that tokens and area both are level.

The ranks of a group stand in a line, and each has a budget of tokens and of attention area.

1. A sequence that no rank can hold must be split. It gets a stretch of the line, and what it needs is set aside there.
   Stretches fill the line in proportion to need, so that every rank has some whole work left to hide traffic behind.
2. The other sequences are placed whole, longest first, each on the rank whose remaining budgets fit it best (largest
   inner product of need and room: vector bin packing). Small ones stay at home where that is at least half as good.
3. A rank that got too much gives sequences back, which are split as well.
4. Tokens and rows of the split sequences fill, separately and in one order, what every rank has free of each:

       amounts   |--- seq 0 ---|------- seq 1 -------|- seq 2 -|
       budgets   |- rank 0 -|- rank 1 -|- rank 2 -|- rank 3 ---|
       cuts      |          |  |       |          |  |         |

   (wrap-around filling, McNaughton 1959). All budgets are met exactly, with at most one cut a rank.

All groups are done at once.
"""

from typing import NamedTuple

import numpy as np

from knapformer.plan.arrays import Int64Array

UNIT = 1 << 20
"""Fixed point for needs and room: the budget of a mean rank of the group."""

SMALL = UNIT // 4
"""Sequences that need less than this of a rank prefer their home."""

LARGE = UNIT // 2
"""Sequences that need more than this of a rank's area get a rank of their own, at the end of the line."""

SLIVER = 2000
"""A cut of rows moves to the end of a head if that changes a rank's area by less than 1/SLIVER: for any row of a head
a rank needs all its keys and values."""

NO_RANK = -(1 << 40)
"""Room where a group has fewer ranks than another."""

NOWHERE = -1
"""Place of a sequence that is not whole."""


class Line(NamedTuple):
    """The ranks of all groups in a row, each at a *place*.

    Attributes:
        rank: (W,) rank at each place.
        group: (W,) its group, never decreasing.
        first: (G + 1,) first place of each group.
        budget: (2, W) exact tokens and area of each rank; their sums are those of all sequences.
    """

    rank: Int64Array
    group: Int64Array
    first: Int64Array
    budget: Int64Array


class Cuts(NamedTuple):
    """`num` of `item` from `start` on, which go to `place`; (N,) each."""

    item: Int64Array
    place: Int64Array
    start: Int64Array
    num: Int64Array


class Shares(NamedTuple):
    """Place of each whole sequence (`NOWHERE` for the others), and cuts of the others' tokens and rows."""

    whole: Int64Array
    tokens: Cuts
    rows: Cuts


def share(length: Int64Array, num_heads: int, group: Int64Array, home: Int64Array, line: Line) -> Shares:
    """Share sequences among the ranks of their groups.

    Args:
        length: (S,) tokens, sorted by group and falling within.
        num_heads: of the model.
        group: (S,) group of each sequence.
        home: (S,) place of its home rank.
        line: the ranks, and what each has room for.
    """
    amount = np.array((length, length * length * num_heads))
    need, room = _scaled(amount, group, line)
    most = np.maximum(*need)
    must_split = most > np.maximum.reduceat(np.minimum(*room), line.first[:-1])[group]
    whole = np.full(len(length), NOWHERE)
    position = np.zeros(len(length), dtype=np.int64)  # of split sequences on the line

    _place_large(whole, ((need[1] >= LARGE) & ~must_split).nonzero()[0], need, room, group, line)
    split = must_split.nonzero()[0]
    if len(split):
        split = split[np.lexsort((-most[split], group[split]))]
        position[split] = _set_aside(need[:, split], np.maximum(most[split], 1), group[split], room, line)
    rest = ((whole == NOWHERE) & ~must_split).nonzero()[0]
    whole[rest] = pack(need[:, rest], group[rest], home[rest], room, line.first)
    free = _evict(whole, position, amount, line.budget)

    split = (whole == NOWHERE).nonzero()[0]
    split = split[np.lexsort((-length[split], position[split], group[split]))]
    tokens, area = (fill(of[split], budget) for of, budget in zip(amount, free, strict=True))
    rows = _in_rows(area, length[split], line.budget[1])
    return Shares(whole, tokens._replace(item=split[tokens.item]), rows._replace(item=split[rows.item]))


def spread(length: int, num_heads: int, places: Int64Array, speed: Int64Array) -> tuple[Cuts, Cuts]:
    """Tokens and rows of one sequence, evenly by `speed` over `places`, or over some of them.

    For any row of a head a rank needs all its keys and values. So that this is one head, the ranks are as many as
    there are heads, or a multiple, where they then receive less.
    """
    num = len(places) // num_heads * num_heads
    if num and _heads_received(num, num_heads) < _heads_received(len(places), num_heads):
        kept = np.arange(num) * len(places) // num
        places, speed = places[kept], speed[kept]
    stop = speed.cumsum()

    def cuts(amount: int) -> Cuts:
        ends = amount * stop // stop[-1]
        starts = np.append(0, ends[:-1])
        return Cuts(np.zeros_like(places), places, starts, ends - starts)

    return cuts(length), cuts(length * num_heads)


def _heads_received(num_ranks: int, num_heads: int) -> float:
    """Most heads of q, k and v together that one of `num_ranks` equal ranks needs."""
    cuts = np.arange(num_ranks + 1) * num_heads
    touched = -(-cuts[1:] // num_ranks) - cuts[:-1] // num_ranks
    return num_heads / num_ranks + 2 * int(touched.max())


def fill(amounts: Int64Array, budgets: Int64Array) -> Cuts:
    """Cut `amounts`, in order, over `budgets`, in order. Both are non-negative and have the same sum."""
    item_stop, budget_stop = amounts.cumsum(), budgets.cumsum()
    stop = np.concatenate((item_stop, budget_stop))
    stop.sort(kind="stable")
    num = np.diff(stop, prepend=0)
    stop, num = stop[num > 0], num[num > 0]
    item = item_stop.searchsorted(stop)
    return Cuts(item, budget_stop.searchsorted(stop), stop - num - (item_stop - amounts)[item], num)


def apportion(total: Int64Array, weight: Int64Array, group: Int64Array) -> Int64Array:
    """Share each group's `total` (G,) among its members by `weight` (M,), in whole numbers that add up.

    `group` (M,) is the group of each member, never decreasing. Exact while `weight` sums to less than 2**31 per group.
    """
    first = group.searchsorted(np.arange(len(total)))
    sums = np.add.reduceat(weight, first)[group]
    after = weight.cumsum()
    after -= (after - weight)[first][group]
    quotient, rest = np.divmod(total[group], sums)
    return quotient * weight + rest * after // sums - rest * (after - weight) // sums


def _scaled(amount: Int64Array, group: Int64Array, line: Line) -> tuple[Int64Array, Int64Array]:
    """What sequences need (2, S) and ranks have room for (2, W), in `UNIT`s of the mean rank of their group."""
    mean = np.add.reduceat(line.budget, line.first[:-1], axis=1) // np.diff(line.first)
    largest = np.maximum(amount.max(axis=1, initial=1), line.budget.max(axis=1)).tolist()
    shift = np.array([[max(0, x.bit_length() - 42)] for x in largest])  # so that the products below fit 64 bits
    mean = np.maximum(mean >> shift, 1)
    return (amount >> shift) * UNIT // mean[:, group], (line.budget >> shift) * UNIT // mean[:, line.group]


def _place_large(
    whole: Int64Array, large: Int64Array, need: Int64Array, room: Int64Array, group: Int64Array, line: Line
) -> None:
    """Sequences that take most of a rank's area: one each on the last ranks, the largest on the last."""
    large = large[np.lexsort((-need[1, large], group[large]))]
    turn = np.arange(len(large)) - group[large].searchsorted(group[large])
    place = line.first[group[large] + 1] - 1 - turn
    exists = place >= line.first[group[large]]
    large, place = large[exists], place[exists]
    fits = (need[:, large] <= room[:, place]).all(axis=0)
    large, place = large[fits], place[fits]
    whole[large] = place
    room[:, place] -= need[:, large]


def _set_aside(need: Int64Array, most: Int64Array, group: Int64Array, room: Int64Array, line: Line) -> Int64Array:
    """Take from `room` what split sequences need, each on its stretch of the line.

    Args:
        need: (2, K) tokens and area of each, sorted by group.
        most: (K,) the larger of both.
        group: (K,) its group.
        room: (2, W) of the ranks; changed.
        line: the ranks.

    Returns:
        (K,) position of each on the line, rising with its place.
    """
    opens = np.diff(group, prepend=-1) != 0
    first, run = opens.nonzero()[0], opens.cumsum() - 1
    has_split = np.zeros(len(line.first) - 1, dtype=bool)
    has_split[group] = True
    length = np.maximum(np.minimum(*room), 1) * has_split[line.group]  # of the line that a rank is
    total = np.add.reduceat(length, line.first[:-1])[group]
    wanted = np.add.reduceat(most, first)[run]
    stop = most.cumsum()
    stop -= (stop - most)[first][run]
    shift = max(0, int(stop.max()).bit_length() + int(total.max()).bit_length() - 62)  # so that products fit 64 bits
    before, stop, wanted = (stop - most) >> shift, stop >> shift, np.maximum(wanted >> shift, 1)
    stretch = stop * total // wanted - before * total // wanted
    cuts = fill(stretch, length)
    for left, needed in zip(room, need, strict=True):
        np.subtract.at(left, cuts.place, cuts.num * needed[cuts.item] // stretch[cuts.item])
    begin = np.full(len(group), len(length))
    np.minimum.at(begin, cuts.item, cuts.place)
    return begin * UNIT + np.arange(len(group))


def pack(need: Int64Array, group: Int64Array, home: Int64Array, room: Int64Array, first: Int64Array) -> Int64Array:
    """Place of each whole sequence. Step j places the j-th sequence of every group.

    Args:
        need: (2, M) tokens and area of each sequence, sorted by group.
        group: (M,) its group.
        home: (M,) place of its home rank.
        room: (2, W) tokens and area each rank has room for.
        first: (G + 1,) first place of each group.
    """
    sizes = np.diff(first)
    num_groups, width = len(sizes), int(sizes.max())
    rooms = np.full((2, num_groups, width), NO_RANK)
    rooms[:, np.arange(width) < sizes[:, None]] = room
    turn = np.arange(len(group)) - group.searchsorted(group)
    steps = int(turn.max(initial=-1)) + 1
    needs = np.zeros((steps, 2, num_groups, 1), dtype=np.int64)
    needs[turn, 0, group, 0], needs[turn, 1, group, 0] = need
    product = np.zeros(rooms.size + 1, dtype=np.int64)  # the last entry is nobody's
    both = product[:-1].reshape(rooms.shape)
    score, other = both
    at_home = np.full((steps, num_groups), rooms.size)
    stays = (home >= first[group]) & (home < first[group + 1]) & (np.maximum(*need) < SMALL)
    at_home[turn[stays], group[stays]] = (group * width + home - first[group])[stays]
    chosen = np.empty((steps, num_groups), dtype=np.int64)
    flat, offset = rooms.reshape(-1), (np.arange(2 * num_groups) * width).reshape(2, num_groups)
    for best, wanted, prefers in zip(chosen, needs, at_home, strict=True):
        np.multiply(rooms, wanted, out=both)
        score += other
        np.multiply.at(product, prefers, 2)
        score.argmax(axis=1, out=best)
        np.subtract.at(flat, (best + offset).ravel(), wanted.ravel())
    return first[group] + np.minimum(chosen[turn, group], sizes[group] - 1)


def _evict(whole: Int64Array, position: Int64Array, amount: Int64Array, budget: Int64Array) -> Int64Array:
    """Split what does not fit after all; return the (2, W) tokens and area that are free then, none below 0.

    Of each rank that has too much, the smallest sequence that makes it fit, or else its largest.
    """
    free = budget.copy()
    kept = (whole >= 0).nonzero()[0]
    for left, taken in zip(free, amount, strict=True):
        np.subtract.at(left, whole[kept], taken[kept])
    while int(free.min(initial=0)) < 0:
        items = kept[(free[:, whole[kept]] < 0).any(axis=0)]
        place, area = whole[items], amount[1, items]
        enough = (free[:, place] + amount[:, items] >= 0).all(axis=0)
        order = np.lexsort((np.where(enough, area, -area), ~enough, place))
        first = order[np.diff(place[order], prepend=-1) != 0]
        out, place = items[first], place[first]
        position[out] = place * UNIT + UNIT - 1  # next to the rank that it was on
        whole[out] = NOWHERE
        free[:, place] += amount[:, out]
        kept = kept[whole[kept] >= 0]
    return free


def _in_rows(cuts: Cuts, length: Int64Array, budget: Int64Array) -> Cuts:
    """Cuts of area as cuts of whole rows, at the end of a head where that is near."""
    least = np.full(len(length), budget.max(initial=0))
    np.minimum.at(least, cuts.item, budget[cuts.place])
    tokens, most = length[cuts.item], least[cuts.item] // SLIVER

    def row(area: Int64Array) -> Int64Array:
        exact = area // tokens
        head = (2 * exact + tokens) // (2 * tokens) * tokens
        return np.where(np.abs(head - exact) * tokens < most, head, exact)

    start, stop = row(cuts.start), row(cuts.start + cuts.num)
    return Cuts(cuts.item, cuts.place, start, stop - start)
