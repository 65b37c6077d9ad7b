"""Bag specs smaller than the world: 2 to 4 balancing groups side by side, each of which must be balanced.

A world of one group hides faults that only ranks of a second group have: numbers counted over the world where a group's
are meant, or the reverse. So whatever compares balanced with unbalanced also runs in these worlds.
"""

from knapformer.plan import make_planner
from knapformer.plan.metrics import measure

SIDE_BY_SIDE = [
    (4, "g1n2"),
    (4, "g2n1"),
    (6, "g1n2"),
    (6, "g2n1"),
    (8, "g1n2"),
    (8, "g2n1"),
    (8, "g1n2+g2n1"),
]


def balance(step):
    """Imbalance of this rank's balancing group with every sequence at home, and as planned."""
    before = make_planner("local")(step.placement.sequences, step.cluster, step.cost)
    return measure(before, step.cluster, step.cost).time_imbalance, step.metrics.time_imbalance


def assert_each_group_is_balanced(spec, balances):
    """Whole groups that are bags are level, but for a token of each sequence; groups of bags are no worse than before.

    Args:
        spec: the bag spec.
        balances: what `balance` gave on each rank.
    """
    group = 4 if "+" in spec else 2
    for first in range(0, len(balances), group):
        assert len(set(balances[first : first + group])) == 1  # the ranks of a group have one plan
    if spec == "g2n1":
        assert max(after for _, after in balances) < 1.2
    assert all(after <= before for before, after in balances)
    assert any(after < before for before, after in balances)
