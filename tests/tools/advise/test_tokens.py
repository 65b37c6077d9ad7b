"""Loader, simulator and advisor count the same tokens: one rule, which the advisor turns into SQL."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from knapformer.data import Item, sample_grid
from knapformer.data import grid as rule
from knapformer.data.tables import open_engine, open_table
from knapformer.tools.advise import query
from knapformer.tools.advise.query import Query, ScanOptions
from knapformer.tools.advise.sql import Sql
from knapformer.tools.simulate.presets import ModelShape, model_preset

ROWS = 3000
LIMITS = [
    ScanOptions(text_tokens=0),
    ScanOptions(text_tokens=0, max_pixels=256 * 256, sample_fps=8),
    ScanOptions(text_tokens=0, max_pixels=1_000_003, max_frames=33, sample_fps=23.976),
    ScanOptions(text_tokens=0, max_pixels=1024, max_frames=2),
]


def random_items(seed: int) -> list[Item]:
    """Pictures, and clips of a known number of frames, of every size."""
    rng = np.random.default_rng(seed)
    sides = np.floor(np.exp(rng.uniform(0, np.log(4000), (ROWS, 2)))).astype(int).tolist()
    rates = rng.choice([8, 10, 23.976, 24, 25, 30000 / 1001, 30, 60], ROWS).tolist()
    frames = np.where(rng.random(ROWS) < 0.3, 1, rng.integers(2, 900, ROWS)).tolist()
    return [
        Item(
            id=id,
            path=Path("a"),
            kind="image" if count == 1 else "video",
            caption="",
            width=width,
            height=height,
            num_frames=count,
            duration=0.0 if count == 1 else count / rate,
            source="s",
        )
        for id, ((width, height), rate, count) in enumerate(zip(sides, rates, frames, strict=True))
    ]


def tokens_of_the_advisor(items: list[Item], model: ModelShape, options: ScanOptions, folder: Path) -> list[int]:
    rows = [f"{i.width},{i.height},{i.num_frames},{i.duration or ''}" for i in items]
    file = folder / "items.csv"
    file.write_text("\n".join(["width,height,num_frames,duration", *rows]))
    with open_engine() as run:
        found = Query.of(run, open_table(run, file), model, options)
        (tokens,) = run(f"SELECT tokens FROM ({found.sql(numbered=True)}) ORDER BY row_number")
    return tokens.tolist()


def tokens_of_the_loader(items: list[Item], model: ModelShape, options: ScanOptions) -> list[int]:
    media = replace(model.media(max_pixels=options.max_pixels, max_frames=options.max_frames), fps=options.sample_fps)
    return [sample_grid(item, media).num_tokens for item in items]


@pytest.mark.parametrize("options", LIMITS)
@pytest.mark.parametrize("name", ["flux1", "hunyuanvideo", "ltx-video", "mochi"])
def test_advisor_and_loader_agree_on_every_row(tmp_path: Path, name: str, options: ScanOptions) -> None:
    items, model = random_items(seed=len(name)), model_preset(name)
    if options.max_pixels and options.max_pixels < model.media().unit ** 2:
        options = replace(options, max_pixels=model.media().unit ** 2)
    assert tokens_of_the_advisor(items, model, options, tmp_path) == tokens_of_the_loader(items, model, options)


def test_temporal_patches_of_several_frames_agree(tmp_path: Path) -> None:
    items, model = random_items(seed=1), replace(model_preset("hunyuanvideo"), patch=(2, 2, 2))
    for options in LIMITS:
        options = replace(options, max_frames=options.max_frames and options.max_frames + 8)
        assert tokens_of_the_advisor(items, model, options, tmp_path) == tokens_of_the_loader(items, model, options)


def test_the_simulator_agrees_with_the_loader() -> None:
    for name in ("flux1", "hunyuanvideo", "ltx-video", "mochi"):
        model, items = model_preset(name), random_items(seed=2)
        counted = [model.visual_tokens(i.width, i.height, i.num_frames) for i in items]
        assert counted == tokens_of_the_loader(items, model, LIMITS[0])
    assert model_preset("flux1").visual_tokens(250, 250) == 256


def test_arrays_and_single_sizes_agree() -> None:
    items = random_items(seed=3)
    media = model_preset("hunyuanvideo").media(max_pixels=300 * 300, max_frames=40)
    columns = (np.array([getattr(i, name) for i in items], dtype=float) for name in ("width", "height", "num_frames"))
    assert np.stack(rule.token_grid(*columns, media), axis=1).tolist() == [list(sample_grid(i, media)) for i in items]


def test_the_comparison_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def floored(width, height, frames, options):  # as the advisor had it: whole patches only
        time = (1 + np.floor((frames - 1) / options.vae_temporal)) / options.temporal_patch
        return time, *(np.maximum(1, np.floor(side / options.unit)) for side in (height, width))

    items, model = random_items(seed=4), model_preset("hunyuanvideo")
    right = tokens_of_the_loader(items, model, LIMITS[0])
    monkeypatch.setattr(query, "token_grid", floored)
    wrong = tokens_of_the_advisor(items, model, LIMITS[0], tmp_path)
    assert np.mean(np.array(wrong) != right) > 0.5


@pytest.mark.parametrize("given", ["frames", "duration and rate"])
def test_frames_and_duration_with_rate_mean_the_same_clip(tmp_path: Path, given: str) -> None:
    """A clip of 240 frames at 24 a second, however a table says so, sampled and not."""
    model, item = model_preset("hunyuanvideo"), random_items(seed=0)[0]
    clip = replace(item, kind="video", width=640, height=360, num_frames=240, duration=10.0)
    row = "num_frames,fps\n640,360,240,24" if given == "frames" else "duration,fps\n640,360,10.0,24"
    file = tmp_path / "a.csv"
    file.write_text(f"width,height,{row}")
    for options in (ScanOptions(text_tokens=0), ScanOptions(text_tokens=0, sample_fps=7)):
        with open_engine() as run:
            found = Query.of(run, open_table(run, file), model, options)
            (tokens,) = run(f"SELECT tokens FROM ({found.sql()})")
        assert tokens.tolist() == tokens_of_the_loader([clip], model, options)


def test_sql_is_written_by_numpy() -> None:
    x = Sql("x")
    assert str(np.where((x > 2) & ~(x <= 1), np.floor(x / 16 + 0.5), 1)) == (
        "CASE WHEN ((x > 2) AND (NOT (x <= 1))) THEN floor(((x / 16) + '0.5'::DOUBLE)) ELSE 1 END"
    )
    with pytest.raises(TypeError):
        np.sin(x)
    with pytest.raises(TypeError):
        np.concatenate([x, x])
