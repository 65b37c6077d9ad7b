"""The timeline: phases and waits by hand, what always holds, and that it describes the executor's exchanges."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.plan import Cluster, CostModel, Links, Placement, Sequences, Shards, attention_exchange, make_planner
from knapformer.plan.predict import rank_loads, row_prices
from knapformer.plan.timeline import LayerWork, Messages, first_runs, layer_work, order, run, timeline
from tests.plan.strategies import placements

COST = CostModel(num_heads=4, token=1000, per_qk_pair=10, head_dim=8)
LINKS = Links(intra_node=16e15, inter_node=2e15, element_bytes=2)  # a row of 16 bytes: 1 tick inside a node, 8 across


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def work(**changes: np.ndarray | Messages) -> LayerWork:
    """Two ranks, one stage; rank 0 sends q, k, v to rank 1 and gets outputs back."""
    there = Messages(array(0), array(1), array(30)[None])
    plain = LayerWork(
        before=array(10, 10),
        first=array(40, 0),
        split=array(0, 50)[None],
        second=array(20, 0),
        after=array(5, 5),
        qkv=there,
        out=Messages(array(1), array(0), array(10)[None]),
        num_first=array(1, 0),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def ends(layer: LayerWork) -> dict[tuple[str, int], list[int]]:
    return {(span.what, span.stage): span.end.tolist() for span in run(layer, np.zeros_like(layer.before))}


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_the_order_of_a_layer() -> None:
    words = [" ".join(str(word) for word in action if word != -1) for action in order(2)]
    assert words == [
        "compute before",
        *["start qkv 0", "start qkv 1", "compute first"],
        *["wait qkv 0", "compute split 0", "start out 0"],
        *["wait qkv 1", "compute split 1", "start out 1"],
        *["compute second", "wait out 0", "wait out 1", "compute after"],
    ]


def test_traffic_hides_behind_whole_sequences() -> None:
    got = ends(work())
    assert got["qkv", 0] == [40, 40]
    assert got["split", 0] == [50, 90]  # rank 0 attends whole sequences until 50, rank 1 waits until 40
    assert got["out", 0] == [100, 100]
    assert got["second", -1] == [70, 90]
    assert got["after", -1] == [105, 105]  # both wait for the outputs


def test_a_late_sender_is_waited_for_and_its_link_counts() -> None:
    late = ends(work(before=array(25, 10)))
    assert late["qkv", 0] == [55, 55]
    busy = Messages(array(0, 0), array(1, 2), array(30, 70)[None])
    three = work(
        before=array(10, 10, 10),
        first=array(40, 0, 0),
        split=array(0, 50, 0)[None],
        second=array(20, 0, 0),
        after=array(5, 5, 5),
        qkv=busy,
        num_first=array(1, 0, 0),
    )
    assert ends(three)["qkv", 0] == [110, 110, 110]  # rank 0 sends both messages for 100


def test_who_takes_no_part_waits_for_nobody() -> None:
    alone = ends(
        work(
            before=array(99, 10, 1),
            first=array(0, 0, 7),
            split=array(0, 50, 0)[None],
            second=array(0, 0, 0),
            after=array(5, 5, 5),
            num_first=array(0, 0, 1),
        )
    )
    assert alone["after", -1][2] == 1 + 7 + 5
    assert alone["split", 0] == [129, 179, 8]  # rank 1 waits until rank 0 has sent, at 99 + 30


def test_stages_travel_one_after_another() -> None:
    layer = work(
        split=np.array([[0, 25], [0, 25]]),
        qkv=Messages(array(0), array(1), np.array([[15], [15]])),
        out=Messages(array(1), array(0), np.array([[5], [5]])),
    )
    got = ends(layer)
    assert (got["qkv", 0], got["qkv", 1]) == ([25, 25], [40, 40])
    assert (got["split", 0][1], got["split", 1][1]) == (50, 75)
    assert (got["out", 0][1], got["out", 1][1]) == (55, 80)
    assert got["after", -1] == [85, 85]


def test_backward_is_the_mirror() -> None:
    mirrored = work().mirrored()
    assert (mirrored.before.tolist(), mirrored.after.tolist()) == ([5, 5], [10, 10])
    assert (mirrored.first.tolist(), mirrored.second.tolist()) == ([20, 0], [40, 0])
    assert (mirrored.qkv.source.tolist(), mirrored.qkv.time.tolist()) == ([0], [[10]])  # gradients of outputs
    assert (mirrored.out.source.tolist(), mirrored.out.time.tolist()) == ([1], [[30]])  # of q, k, v


@pytest.mark.parametrize(
    ("times", "there", "back", "number"),
    [
        ([50, 50, 50, 50], 10, 5, 3),  # plenty to hide behind: three quarters
        ([50, 50], 40, 40, 1),
        ([90, 5], 40, 4, 1),
        ([5, 90], 40, 4, 2),  # 5 would hide too little of 40
        ([100], 40, 10, 1),  # one cannot be cut: the longer exchange is hidden
        ([100], 10, 40, 0),
        ([], 10, 10, 0),
    ],
)
def test_the_first_run_hides_what_it_can(times: list[int], there: int, back: int, number: int) -> None:
    got = first_runs(array(*times), np.zeros(len(times), dtype=np.int64), array(there), array(back))
    assert got.tolist() == [number]


# -- what always holds -------------------------------------------------------------------------------------------------


def clusters(world: int) -> st.SearchStrategy[Cluster]:
    speeds = st.one_of(st.just(()), st.lists(st.integers(500, 2000), min_size=world, max_size=world).map(tuple))
    return st.builds(lambda per_node, s: Cluster(world, per_node, LINKS, speeds=s), st.integers(1, world), speeds)


@settings(deadline=None, max_examples=60)
@given(placements(), st.data())
def test_never_earlier_than_work_and_later_with_slower_links(placement: Placement, data: st.DataObject) -> None:
    cluster = data.draw(clusters(placement.world_size))
    cost = CostModel(placement.num_heads, token=50, per_qk_pair=7, sequence=3, head_dim=8)
    stages = data.draw(st.integers(1, 5))
    got = timeline(placement, cluster, cost, num_stages=stages)
    assert (got.waited >= 0).all()
    assert (got.end >= 2 * rank_loads(placement, cost, cluster)).all()
    slow = replace(cluster, links=Links(LINKS.intra_node / 3, LINKS.inter_node / 7, LINKS.element_bytes))
    later = timeline(placement, slow, cost, num_stages=stages)
    if got.work.num_first.tolist() == later.work.num_first.tolist():
        assert (later.end >= got.end).all()
    assert timeline(placement, cluster, cost).step <= timeline(placement, cluster, cost, num_stages=1).step


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 50), max_size=4), min_size=1, max_size=5), st.integers(1, 8))
def test_without_split_sequences_it_is_the_sum_of_the_work(lens: list[list[int]], grid: int) -> None:
    sequences, cluster = Sequences.from_ranks(lens), Cluster(len(lens), links=LINKS)
    placement = make_planner("local")(sequences, cluster, COST)
    got = timeline(placement, cluster, COST, token_grid=grid)
    padding = -placement.tokens() % grid
    load = rank_loads(placement, COST) + COST.load(padding, 4 * padding * padding)
    assert got.end.tolist() == (2 * load).tolist()
    assert got.num_stages == 1
    assert not got.waited.any()


# -- the executor ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(placements(), st.integers(1, 4))
def test_messages_are_those_of_the_exchange_tables(placement: Placement, stages: int) -> None:
    """Stage by stage, the time of what each rank sends to each other one is that of the rows in its tables."""
    cost, world = replace(COST, num_heads=placement.num_heads), placement.world_size
    cluster = Cluster(world, 2, LINKS)
    layer = layer_work(placement, cluster, cost, stages)
    in_node, between = row_prices(cluster, cost)
    price = np.where(cluster.node_of[:, None] == cluster.node_of, in_node, between)
    np.fill_diagonal(price, 0)
    for rank in range(world):
        table = attention_exchange(placement, rank, num_stages=stages)
        for messages, exchange in ((layer.qkv, table.qkv), (layer.out, table.out)):
            rows = exchange.input_split_sizes.reshape(stages, world) * table.head_group
            sent = np.zeros((stages, world), dtype=np.int64)
            mine = messages.source == rank
            for stage in range(stages):
                np.add.at(sent[stage], messages.target[mine], messages.time[stage, mine])
            assert sent.tolist() == (rows * price[rank]).tolist()
        area = [int((q * k).sum()) * table.head_group for q, k in table.segment_lens()]
        assert layer.split[:, rank].tolist() == [COST.per_qk_pair * a for a in area]


def test_a_wrong_stage_would_be_noticed() -> None:
    """The check above can fail: one stage's times are not the other's."""
    rows = Shards.sorted([0, 0], [0, 1], [0, 70], [70, 100])
    placement = Placement(Sequences.from_ranks([[20], []]), 2, 5, Shards.sorted([0, 0], [0, 1], [0, 9], [9, 20]), rows)
    layer = layer_work(placement.validate(), Cluster(2, 2, LINKS), replace(COST, num_heads=5), 2)
    assert layer.split[0].tolist() != layer.split[1].tolist()
    assert layer.qkv.time[0].tolist() != layer.qkv.time[1].tolist()
