"""Two runs compared, every figure by hand, and the picture of them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knapformer.errors import BackendUnavailableError, DataError
from knapformer.report import RunRecord, compare_runs, draw_comparison

BEFORE, AFTER = (213, 94, 0), (0, 114, 178)  # the colours of the two runs


def run(name: str, seconds: list[float], **columns: list[Any]) -> RunRecord:
    values = {
        "seconds": seconds,
        "loss": [1.0] * len(seconds),
        "tokens": [100] * len(seconds),
        "measured_imbalance": [1.0] * len(seconds),
        "modelled_imbalance": [1.0] * len(seconds),
        "busy_seconds": [[0.5, 0.25]] * len(seconds),
        **columns,
    }
    return RunRecord(name, {}, [{"step": i, **{k: v[i] for k, v in values.items()}} for i in range(len(seconds))])


def pair() -> tuple[RunRecord, RunRecord]:
    before = run(
        "unbalanced",
        [99.0, 4.0, 6.0, 5.0],  # the first step warms up
        loss=[2.0, 1.0, 0.5, 0.25],
        tokens=[7, 10, 20, 30],
        measured_imbalance=[9.0, 1.5, 2.0, 1.75],
        modelled_imbalance=[9.0, 1.6, 2.0, 1.8],
        busy_seconds=[[9.0, 9.0], [4.0, 1.0], [6.0, 1.0], [5.0, 1.0]],
    )
    after = run(
        "balanced",
        [0.5, 2.0, 2.0, 4.0],
        loss=[2.0, 1.0, 0.5005, 0.25],
        tokens=[7, 10, 20, 30],
        measured_imbalance=[9.0, 1.1, 1.0, 1.2],
        modelled_imbalance=[9.0, 1.0, 1.3, 1.0],
        busy_seconds=[[9.0, 9.0], [2.5, 2.5], [3.5, 3.5], [3.0, 3.0]],
    )
    return before, after


def test_figures_by_hand() -> None:
    got = compare_runs(*pair())
    assert got.step_seconds == {"unbalanced": 5.0, "balanced": 2.0}
    assert got.tokens_per_second == {"unbalanced": 20 / 5, "balanced": 20 / 2}
    assert got.measured_imbalance == {"unbalanced": pytest.approx(1.75), "balanced": pytest.approx(1.1)}
    assert got.modelled_imbalance == {"unbalanced": pytest.approx(1.8), "balanced": pytest.approx(1.1)}
    assert got.speedup == 2.0  # of 2, 3 and 1.25
    assert got.ideal_speedup == pytest.approx(1.8)
    assert got.largest_loss_difference == pytest.approx(0.001)
    assert got.steps == 4


def test_warm_up_steps_count_for_losses_only() -> None:
    before, after = pair()
    for warmup, step, speedup in ((0, 5.5, 2.5), (1, 5.0, 2.0), (2, 5.5, (3 + 1.25) / 2), (3, 5.0, 1.25)):
        got = compare_runs(before, after, warmup=warmup)
        assert got.step_seconds["unbalanced"] == step
        assert got.speedup == pytest.approx(speedup)
        assert got.largest_loss_difference == pytest.approx(0.001)
    after.steps[0]["loss"] = 2.5
    assert compare_runs(before, after).largest_loss_difference == pytest.approx(0.25)


def test_the_order_of_the_runs_matters() -> None:
    before, after = pair()
    assert compare_runs(after, before).speedup == 0.5
    assert compare_runs(after, before).ideal_speedup == pytest.approx(1.1)


def test_to_json() -> None:
    assert list(compare_runs(*pair()).to_json()) == [
        "step_seconds", "tokens_per_second", "measured_imbalance", "modelled_imbalance", "speedup", "ideal_speedup",
        "largest_loss_difference", "steps",
    ]  # fmt: skip


@pytest.mark.parametrize(("steps", "warmup"), [((3, 2), 1), ((1, 1), 1), ((0, 0), 0), ((2, 2), 2)])
def test_runs_that_cannot_be_compared(steps: tuple[int, int], warmup: int) -> None:
    before, after = run("unbalanced", [1.0] * steps[0]), run("balanced", [1.0] * steps[1])
    message = (
        f"runs 'unbalanced' and 'balanced' have {steps[0]} and {steps[1]} steps; "
        f"expected the same number, above the {warmup} warm-up steps"
    )
    with pytest.raises(DataError, match=message):
        compare_runs(before, after, warmup=warmup)


def test_a_run_without_a_value() -> None:
    before, after = pair()
    del after.steps[2]["tokens"]
    with pytest.raises(DataError, match="run 'balanced': a step has no value 'tokens'"):
        compare_runs(before, after)


def test_two_runs_of_one_name() -> None:
    """Two training runs on disk may well have one name: refuse, or tell them apart; never compare one with itself."""
    before, after = pair()
    try:
        got = compare_runs(RunRecord("train", {}, before.steps), RunRecord("train", {}, after.steps))
    except DataError:
        return
    assert got.speedup == 2.0


def pixels(path: Path) -> np.ndarray:
    """(height, width, 3) uint8."""
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG")
    return (imread(path)[..., :3] * 255).round().astype(np.uint8)


def share_of(image: np.ndarray, colour: tuple[int, int, int]) -> float:
    return float((np.abs(image.astype(int) - colour).max(axis=-1) < 8).mean())


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = draw_comparison(*pair(), tmp_path / "new" / "folder" / "picture.png")
    assert path == tmp_path / "new" / "folder" / "picture.png"
    image = pixels(path)
    assert image.shape[0] > 300 and image.shape[1] > 900
    left, middle, right = np.array_split(image, 3, axis=1)
    for part in (left, middle, right):  # both runs in each of the three
        assert share_of(part, BEFORE) > 2e-4 and share_of(part, AFTER) > 2e-4
    assert share_of(right, BEFORE) > 0.02  # bars, not lines
    assert 0.5 < share_of(image, (255, 255, 255)) < 0.99


def test_a_picture_without_the_second_run_is_noticed(tmp_path: Path) -> None:
    before, after = pair()
    invisible = run("balanced", [float("nan")] * 4, loss=[float("nan")] * 4, busy_seconds=[[0.0, 0.0]] * 4)
    full = pixels(draw_comparison(before, after, tmp_path / "full.png"))
    bare = pixels(draw_comparison(before, invisible, tmp_path / "bare.png"))
    assert share_of(bare, AFTER) < share_of(full, AFTER) / 2
    assert share_of(np.full((300, 900, 3), 255), AFTER) == 0


def test_bars_are_means_without_warm_up(tmp_path: Path) -> None:
    """The right part is as if the warm-up step, with other busy times, did not exist."""
    before, after = pair()
    one = pixels(draw_comparison(before, after, tmp_path / "one.png"))
    for record in (before, after):
        record.steps[0]["busy_seconds"] = [0.001, 70.0]
    same = pixels(draw_comparison(before, after, tmp_path / "same.png"))
    other = pixels(draw_comparison(before, after, tmp_path / "other.png", warmup=0))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendUnavailableError, match="drawing needs matplotlib; install it with: pip install"):
        draw_comparison(*pair(), tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()
