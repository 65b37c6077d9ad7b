"""What trackers are told of a step: the record's numbers, lists over ranks as mean and largest."""

from dataclasses import replace

import pytest

from knapformer.errors import BackendUnavailableError
from knapformer.train import StepReport
from knapformer.train.trackers import scalars, tensorboard

REPORT = StepReport(
    loss=1.5,
    seconds=2.0,
    busy_seconds=[1.0, 0.5],
    tokens=300,
    rank_tokens=[200, 100],
    modelled_imbalance=1.1,
    split_traffic=0.25,
    routed_fraction=0.5,
    plan_seconds=0.01,
    wait_seconds=0.0,
)


def test_numbers_are_those_of_the_record() -> None:
    found = scalars(REPORT)
    assert found["tokens_per_second"] == 150 and found["loss"] == 1.5
    assert (found["busy_seconds/mean"], found["busy_seconds/max"]) == (0.75, 1.0)
    assert (found["rank_tokens/mean"], found["rank_tokens/max"]) == (150.0, 200.0)
    assert found["measured_imbalance"] == pytest.approx(4 / 3)
    lists = {"busy_seconds", "rank_tokens"}
    assert {name.split("/")[0] for name in found} == REPORT.to_json().keys() | {"tokens_per_second"} | lists
    assert all(isinstance(value, float) for value in found.values())
    unmeasured = scalars(replace(REPORT, busy_seconds=[]))
    assert "measured_imbalance" not in unmeasured and "busy_seconds/mean" not in unmeasured


def test_tensorboard_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(BackendUnavailableError, match=r"knapformer\[tensorboard\]"):
        tensorboard(str(tmp_path))
