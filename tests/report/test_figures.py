"""Figures of a report: what is drawn is what the records say, read back from the axes; what is missing is left out."""

from typing import Any

import pytest

from knapformer.report.figures import group_figures
from knapformer.report.records import RunRecord
from knapformer.report.tables import grouped, report_data
from tests.report.test_tables import record, records

TIMES, LOADS, SHARES, LOSSES = "Step time", "Time each rank computes", "Where the time", "Loss of the first seed"


def drawn(found: list[RunRecord]) -> dict[str, Any]:
    """First words of the caption -> the axes, of the only group."""
    (group,), (planners,) = report_data(found, "t")["groups"], grouped(found).values()
    figures = group_figures(group, planners)
    starts = (TIMES, LOADS, SHARES, LOSSES)
    return {next(s for s in starts if caption.startswith(s)): figure.axes[0] for caption, figure in figures}


def bars(axes: Any) -> list[list[tuple[float, float]]]:
    """(left, width) of each container's horizontal bars."""
    return [[(bar.get_x(), bar.get_width()) for bar in container] for container in axes.containers if container.patches]


def labels(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_step_times_are_means_over_seeds_with_their_interval() -> None:
    axes = drawn(records())[TIMES]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["local", "balanced"]
    assert [bar.get_width() for bar in axes.patches] == [6.75, 2.75]
    assert axes.patches[0].get_facecolor() != axes.patches[1].get_facecolor()
    (low, high), *_ = (segment[:, 0] for segment in axes.collections[0].get_segments())
    assert (low, high) == pytest.approx((6.75 - 12.706 * 0.25, 6.75 + 12.706 * 0.25))


def test_loads_are_one_step_of_the_baseline_and_of_the_last_planner() -> None:
    found = [record("local", 0, [4.0]), record("g2n1", 0, [3.0]), record("balanced", 0, [2.0])]
    axes = drawn(found)[LOADS]
    assert labels(axes) == ["local", "balanced"]
    assert [bar.get_height() for bar in axes.patches] == [2.0, 1.0, 1.0, 0.5]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert centres == pytest.approx([-0.2, 0.8, 0.2, 1.2])


def test_shares_add_up_to_all_time() -> None:
    axes = drawn(records())[SHARES]
    assert labels(axes) == ["computing", "waiting for ranks", "waiting for bytes", "update and launches"]
    for planner in range(2):
        ends = 0.0
        for left, width in (container[planner] for container in bars(axes)):
            assert left == pytest.approx(ends)
            ends += width
        assert ends == pytest.approx(100)
    computing, waiting, exposed, rest = (container[0][1] for container in bars(axes))
    assert (computing, waiting, exposed) == pytest.approx((37.5, 12.5, 6.25)) and rest == pytest.approx(43.75)


def test_shares_of_records_without_waiting_are_computing_and_the_rest() -> None:
    found = records()
    for run in found:
        for step in run.steps:
            del step["waiting_seconds"]
    axes = drawn(found)[SHARES]
    assert labels(axes) == ["computing", "waiting and all else"]
    assert [container[0][1] for container in bars(axes)] == pytest.approx([37.5, 62.5])


def test_losses_are_those_of_the_first_seed_each_thinner_than_those_below() -> None:
    found = records()
    for run in found:
        for step in run.steps:
            step["loss"] += 7.0 * run.header["config"]["cell"]["seed"]
    axes = drawn(found)[LOSSES]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1.0, 0.5], [1.0, 0.5]]
    assert axes.lines[0].get_linewidth() > axes.lines[1].get_linewidth()
    assert labels(axes) == ["local", "balanced"]


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"seconds": None}, {LOADS, LOSSES}),
        ({"busy_seconds": None}, {TIMES, LOSSES}),
        ({"busy_seconds": []}, {TIMES, LOSSES}),
        ({"exposed_seconds": None}, {TIMES, LOADS, LOSSES}),
        ({"loss": None}, {TIMES, LOADS, SHARES}),
    ],
)
def test_a_figure_whose_values_are_missing_is_left_out(changes: dict[str, Any], left: set[str]) -> None:
    found = records()
    for run in found:
        for step in run.steps:
            step.update(changes)
    assert set(drawn(found)) == left


def test_one_run_has_no_before_and_after() -> None:
    assert set(drawn([record("local", 0, [4.0])])) == {TIMES, SHARES, LOSSES}
    assert set(drawn([record("balanced", 0, [4.0])])) == {TIMES, SHARES, LOSSES}  # there is no baseline


def test_runs_without_steps_have_no_figures() -> None:
    assert grouped([record("local", 0, [])]) == {}
