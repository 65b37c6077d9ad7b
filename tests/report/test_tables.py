"""Reports: every number is what the records say, in the same form everywhere, and opens in a browser offline."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from knapformer.errors import DataError
from knapformer.report.pages import report_markdown, report_page
from knapformer.report.records import RunRecord
from knapformer.report.statistics import Estimate, t_quantile
from knapformer.report.tables import COLUMNS, COMPARED, compare_data, grouped, report_data, table
from tests.browser import needs_browser, open_in_browser, width_in_browser

ENVIRONMENT = {"time": "now", "python": "3", "versions": {"numpy": "2", "torch": None}, "device": "paper <x>"}
SECONDS = {("local", 0): [4.0, 9.0], ("local", 1): [6.0, 8.0], ("balanced", 0): [2.0, 3.0], ("balanced", 1): [2.0, 4.0]}


def record(planner: str, seed: int, seconds: list[float], **changes: Any) -> RunRecord:
    cell = {"workload": "w<1>", "model": None, "planner": planner, "seed": seed, "engine": "simulate", "warmup": 0}
    cell |= {"baseline": "local", "ranks": 2, **changes.pop("cell", {})}
    config = {"cell": cell, "model": "m", "peak_flops": 10.0}
    steps = [
        {
            "step": number,
            "seconds": s,
            "busy_seconds": [s / 2, s / 4],
            "waiting_seconds": s / 8,
            "exposed_seconds": s / 16,
            "measured_imbalance": 4 / 3,
            "tokens": 100,
            "rank_tokens": [75, 25],
            "flop": 3.0 * s,
            "split_traffic": 0.25,
            "routed_fraction": 0.5,
            "loss": 1.0 / (number + 1),
            **changes,
        }
        for number, s in enumerate(seconds)
    ]
    return RunRecord(
        f"{planner} {seed}", {"environment": ENVIRONMENT, "command": ["run", "<it>"], "config": config}, steps
    )


def records(**changes: Any) -> list[RunRecord]:
    return [record(planner, seed, seconds, **changes) for (planner, seed), seconds in SECONDS.items()]


def test_quantiles_of_t() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 7, 30, 31, 40, 200):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=3e-4)
    assert Estimate.of([1.0, 3.0]).half == pytest.approx(12.706)
    assert Estimate.of([2.0]).half is None


def test_figures_are_those_of_the_records() -> None:
    (group,) = report_data(records(), "t")["groups"]
    local, balanced = group["rows"]
    assert (group["title"], group["baseline"], local["planner"]) == ("w<1>, m", "local", "local")
    assert local["step_seconds"] == {"mean": 6.75, "half": pytest.approx(12.706 * 0.25), "least": 6.5, "most": 7.0}
    # Paired by step, then averaged over steps and seeds: not the ratio of means, 2.4545.
    assert balanced["speedup"]["mean"] == pytest.approx(((4 / 2 + 9 / 3) / 2 + (6 / 2 + 8 / 4) / 2) / 2)
    assert balanced["speedup"]["half"] == 0.0
    assert local["speedup"] == {"mean": 1.0, "half": 0.0, "least": 1.0, "most": 1.0}
    assert balanced["tokens_per_second"]["mean"] == pytest.approx((200 / 5 + 200 / 6) / 2)
    assert balanced["hfu"]["mean"] == pytest.approx(0.15)
    assert balanced["rank_tokens"]["mean"] == 75 and balanced["token_imbalance"]["mean"] == 1.5
    assert balanced["exposed_seconds"]["mean"] == pytest.approx((2.5 + 3.0) / 2 / 16)
    assert balanced["seeds"] == [0, 1]


def test_warm_up_is_left_out_and_missing_values_are_not_made_up() -> None:
    found = records(cell={"warmup": 1}, exposed_seconds=None, flop=None)
    (group,) = report_data(found, "t")["groups"]
    assert group["rows"][0]["step_seconds"]["mean"] == 8.5
    assert group["rows"][0]["hfu"] is None and group["rows"][0]["exposed_seconds"] is None
    assert "HFU" not in table(group, COLUMNS)[0]
    assert all(column.text(None) == "-" for column in (*COLUMNS, *COMPARED))


def test_imbalance_before_is_the_baselines() -> None:
    found = [record("local", 0, [4.0], measured_imbalance=1.9), record("balanced", 0, [2.0], measured_imbalance=1.1)]
    (group,) = report_data(found, "t")["groups"]
    assert [(row["imbalance_before"]["mean"], row["imbalance"]["mean"]) for row in group["rows"]] == [
        (1.9, 1.9),
        (1.9, 1.1),
    ]


def test_failures_are_told_and_leave_the_tables() -> None:
    found = records()
    found[3].failures.append("PlanError: <no> room")
    data = report_data(found, "t")
    assert data["failures"] == [{"run": "balanced 1", "cause": "PlanError: <no> room"}]
    assert data["groups"][0]["rows"][1]["seeds"] == [0]
    assert "PlanError: &lt;no&gt; room" in report_page(data, grouped(found))
    assert "PlanError: <no> room" in report_markdown(data)


def test_runs_of_the_same_cell_are_not_mixed() -> None:
    with pytest.raises(DataError, match=r"both of 'w<1>', planner 'local', seed 0.*--against"):
        report_data([*records(), records()[0]], "t")
    with pytest.raises(DataError, match="no runs"):
        report_data([], "t")


def numbers(data: dict[str, Any], columns: Any) -> list[list[str]]:
    return [row for group in data["groups"] for row in table(group, columns)[1]]


@pytest.mark.parametrize("compared", [False, True])
def test_html_markdown_and_json_have_the_same_numbers(compared: bool) -> None:
    found = records()
    if compared:
        columns, runs = COMPARED, None
        data = compare_data(found, records(loss=1.5), ("old", "new"))
    else:
        columns, runs = COLUMNS, grouped(found)
        data = report_data(found, "t")
    data = json.loads(json.dumps(data))
    page, markdown = report_page(data, runs), report_markdown(data)
    body = re.findall(r"<tr[^>]*>(<td>.*?)</tr>", page)
    in_page = [re.findall(r"<td>(.*?)</td>", row) for row in body]
    in_markdown = [[cell.strip() for cell in line[1:-1].split("|")] for line in markdown.splitlines() if "|" in line]
    expected = numbers(data, columns)
    assert len(expected) == 2 and all(row in in_page and row in in_markdown for row in expected)
    data["groups"][0]["rows"][0]["imbalance_before"]["mean"] += 1  # the check can fail
    assert not all(row in in_page for row in numbers(data, columns))


def test_two_sets_side_by_side() -> None:
    faster = [record(p, s, [x / 2 for x in seconds], loss=1.5) for (p, s), seconds in SECONDS.items() if p != "local"]
    data = compare_data(records(), faster, ("old", "new"))
    (row,) = data["groups"][0]["rows"]
    assert (data["title"], row["planner"]) == ("new against old", "balanced")
    assert row["speed_ratio"] == {"mean": 2.0, "half": 0.0, "least": 2.0, "most": 2.0}
    assert (row["step_seconds_before"]["mean"], row["step_seconds_after"]["mean"]) == (2.75, 1.375)
    assert row["loss_difference"]["mean"] == pytest.approx(2.0)  # 1.5 against 0.5 in the second step
    with pytest.raises(DataError, match="in common"):
        compare_data(records(), [record("other", 0, [1.0])], ("old", "new"))


def test_runs_of_other_commands_are_reported_too() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "demo-cpu.jsonl"
    from knapformer.report.records import read_records

    (group,) = report_data(list(read_records(path).values()), "demo")["groups"]
    assert [row["planner"] for row in group["rows"]] == ["local", "balanced"]
    assert group["rows"][1]["speedup"]["mean"] > 1.2


def test_the_page_needs_nothing_else() -> None:
    found = records()
    page = report_page(report_data(found, "a <title>"), grouped(found))
    assert page.count("<svg") == 4 and "<script" not in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page) and "url(http" not in page and "@import" not in page
    assert "a &lt;title&gt;" in page and "w<1>" not in page
    assert "color-scheme: light dark" in page and "#000000" not in page


@needs_browser
def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    found = records()
    data = report_data(found, "t")
    (tmp_path / "report.html").write_text(report_page(data, grouped(found)))
    dom = open_in_browser(tmp_path / "report.html", tmp_path)
    assert dom.count("<figure ") == 4 and dom.count("</svg>") == 4
    cells = re.findall(r"<td>(.*?)</td>", dom)
    for row in numbers(data, COLUMNS):
        assert set(row) <= set(cells)
    assert width_in_browser(tmp_path / "report.html", tmp_path, 500) == 500
