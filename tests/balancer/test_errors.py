"""A mistake on one rank raises the same error on every rank, within seconds."""

import pytest
import torch

from knapformer import SequenceBalancer
from knapformer.errors import PlanError
from knapformer.plan import BagSpec, Sequences, make_planner
from knapformer.plan.planners import BagsPlanner
from tests.ranks import run_ranks


def build(rank, world_size, specs, gammas=(None,)):
    SequenceBalancer(specs[rank % len(specs)], gammas[rank % len(gammas)])


def plan(rank, world_size, lens, text=None, context=(None, None)):
    balancer = SequenceBalancer("g1n2")
    balancer.plan_routing(lens[rank], 64, text_lens=None if text is None else text[rank], context_lens=context[rank])


def plan_with_permuted_lengths(rank, world_size):
    balancer = SequenceBalancer("g2n1")
    gather = balancer._gather

    def permuted(*args):
        sequences = gather(*args)
        return Sequences.from_ranks([[9, 4], [2]]) if rank == 1 else sequences

    balancer._gather = permuted
    balancer.plan_routing([[4, 9], [2]][rank], 64)


def calls_differ(rank, world_size):
    balancer = SequenceBalancer("g2n1")
    if rank == 0:
        balancer._gather._calls += 1
    balancer.plan_routing([3], 64)


def route(rank, world_size, rows, dtypes=(torch.float32,), ndim=(2,)):
    step = SequenceBalancer("g2n1").plan_routing([4], 64)
    step.route(torch.zeros((rows[rank], 3)[: ndim[rank % len(ndim)]], dtype=dtypes[rank % len(dtypes)]))


def deliver_context(rank, world_size, rows, widths=(3,)):
    step = SequenceBalancer("g2n1").plan_routing([4], 64, context_lens=[7])
    step.deliver_context(torch.zeros(rows[rank], widths[rank % len(widths)]))


def failing_planner(rank, world_size, ranks):
    class Planner:
        name = "failing"

        def __call__(self, *args):
            if rank in ranks:
                raise MemoryError("no memory for a plan")
            return make_planner("local")(*args)

    SequenceBalancer(planner=Planner()).plan_routing([4], 64)


CASES = [
    (build, (["g2n1", "g1n2"],), "RankMismatchError", "ranks disagree on the bag spec: not as the others: rank 1"),
    (build, (["g2n1", "g1n2junk"],), "RankMismatchError", "ranks disagree on the bag spec"),
    (build, (["g2n1junk"],), "SpecError", "cannot read 'junk' at column 5"),
    (build, (["g3n1"],), "SpecError", "does not divide the world size 2"),
    (build, (["g2n1"], (1.0, 0.5)), "RankMismatchError", "ranks disagree on gamma"),
    (plan, ([[5], [0]],), "PlanError", "rank 1: sequence 0 has length 0; allowed is 1 to 2147483647 tokens"),
    (plan, ([[5], [3, -2]],), "PlanError", "rank 1: sequence 1 has length -2"),
    (plan, ([[5.5], [3]],), "PlanError", "rank 0: seq_lens is not a flat list of whole numbers"),
    (plan, ([[5], "abc"],), "PlanError", "rank 1: seq_lens is not a flat list"),
    (plan, ([[5], [3]], [[1], [4]]), "PlanError", "rank 1: sequence 0 has text length 4"),
    (plan, ([[5], [3]], [[1], [1, 2]]), "PlanError", "rank 1: text_lens has 2 entries for 1 sequences"),
    (plan, ([[5], [3]], None, [[9], [-1]]), "PlanError", "rank 1: sequence 0 has context length -1; allowed is 0 to 2"),
    (plan, ([[5], [3]], None, [[9], [1, 2]]), "PlanError", "rank 1: context_lens has 2 entries for 1 sequences"),
    (plan, ([[5], [3]], None, [[9.5], None]), "PlanError", "rank 0: context_lens is not a flat list of whole numbers"),
    (plan_with_permuted_lengths, (), "RankMismatchError", "ranks disagree on the plan"),
    (calls_differ, (), "RankMismatchError", "ranks disagree on the number of plan_routing calls"),
    (route, ([4, 5],), "PlanError", "rank 1: route got 5 rows, the step has 4 on this rank"),
    (route, ([4, 4], (torch.float32, torch.bfloat16)), "RankMismatchError", "dtypes or trailing shapes"),
    (route, ([4, 4], (torch.float32,), (2, 1)), "RankMismatchError", "dtypes or trailing shapes"),
    (deliver_context, ([7, 8],), "PlanError", "rank 1: deliver_context got 8 rows, the step has 7 on this rank"),
    (deliver_context, ([7, 7], (3, 4)), "RankMismatchError", "dtypes or trailing shapes"),
    (failing_planner, ([0, 1],), "MemoryError", "no memory for a plan"),
]


@pytest.mark.parametrize(("function", "args", "kind", "message"), CASES)
def test_every_rank_raises_the_same_error(function, args, kind, message):
    errors = run_ranks(2, function, *args, expect_errors=True)
    assert [type(e).__name__ for e in errors] == [kind] * 2
    assert all(message in str(e) for e in errors)
    assert len({str(e) for e in errors}) == 1


def planners_of_different_bags(rank, world_size):
    spec = BagSpec.parse("g4n1" if rank == 3 else "g2n2")
    SequenceBalancer(planner=BagsPlanner(spec)).plan_routing([4], 64)


def test_bag_specs_are_compared_before_groups_are_made_from_them():
    errors = run_ranks(4, planners_of_different_bags, expect_errors=True)
    assert {type(e).__name__ for e in errors} == {"RankMismatchError"}
    assert all("not as the others: rank 3" in str(e) for e in errors)


def test_a_planner_that_fails_on_one_rank_stops_all():
    errors = run_ranks(3, failing_planner, [1], expect_errors=True)
    assert [type(e).__name__ for e in errors] == ["RankMismatchError", "MemoryError", "RankMismatchError"]
    assert "planning failed on rank 1" in str(errors[0])


def good_after_bad(rank, world_size):
    balancer = SequenceBalancer("g2n1")
    with pytest.raises(PlanError):
        balancer.plan_routing([0] if rank else [3], 64)
    return len(balancer.plan_routing([7] * 50, 64).placement.sequences), balancer.latest.placement.digest()


def test_nothing_is_lost_after_an_error_and_digests_agree():
    results = run_ranks(3 - 1, good_after_bad)
    assert results[0] == results[1]
    assert results[0][0] == 100
