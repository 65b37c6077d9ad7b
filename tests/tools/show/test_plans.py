"""Pictures of a plan: every block is where the plan has it, and every format opens."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from knapformer.errors import DataError
from knapformer.plan import TICKS_PER_SECOND, Cluster, CostModel, Limits, Placement, Sequences, make_planner
from knapformer.tools.show.animation import animate_plan
from knapformer.tools.show.page import page_data, write_plan_page
from knapformer.tools.show.picture import draw_plan, rectangles
from knapformer.tools.show.style import THEMES, block_colours, sequence_colours
from knapformer.tools.show.view import PlanView
from tests.browser import needs_browser, open_in_browser, width_in_browser

COST = CostModel.from_shapes(64, 7, token_flops=1e9)
LENGTHS = [[400], [30, 20], [], [64], [5, 5, 5], [1]]


def view_of(planner="balanced", lengths=LENGTHS):
    cluster = Cluster(len(lengths), 4)
    placement = make_planner(planner)(Sequences.from_ranks(lengths), cluster, COST, Limits())
    return placement, PlanView.of(placement, cluster, COST, "a <title>")


def bars(view, base, rank):
    """Height of every bar; raises if its blocks do not lie end to end from 0."""
    tops = np.zeros(view.world_size)
    for r in range(view.world_size):
        mine = np.flatnonzero(rank == r)
        mine = mine[np.argsort(base[mine], kind="stable")]
        for i in mine:
            np.testing.assert_allclose(base[i], tops[r], atol=1e-9)
            tops[r] += view.blocks.height[i]
    return tops


def loads(placement):
    return COST.load(placement.tokens(), placement.area()) / TICKS_PER_SECOND * 1e3


@pytest.mark.parametrize("planner", ["balanced", "local"])
def test_bars_are_the_loads_before_and_after(planner):
    placement, view = view_of(planner)
    at_home = Placement.whole(placement.sequences, placement.sequences.home, world_size=6, num_heads=7, planner="local")
    blocks = view.blocks
    np.testing.assert_allclose(bars(view, blocks.base, blocks.rank), loads(placement), atol=1e-9)
    np.testing.assert_allclose(bars(view, blocks.home_base, blocks.home), loads(at_home), atol=1e-9)
    assert (planner == "balanced") == bool(view.split.any())


def test_the_check_of_bars_can_fail():
    _, view = view_of()
    wrong = view.blocks.base.copy()
    wrong[-1] += 0.1
    with pytest.raises(AssertionError):
        bars(view, wrong, view.blocks.rank)


def test_shards_of_a_sequence_cover_it():
    _, view = view_of()
    blocks = view.blocks
    for seq, length in enumerate(view.length):
        for kind, whole in ((False, length), (True, length * 7)):
            mine = (blocks.seq == seq) & (blocks.is_attention == kind)
            assert (blocks.stop - blocks.start)[mine].sum() == whole


def test_only_split_sequences_have_traffic():
    _, view = view_of()
    assert (view.traffic[view.split] > 0).all() and not view.traffic[~view.split].any()


def test_blocks_move_from_home_to_their_plan():
    _, view = view_of()
    b = view.blocks
    for progress, rank, base in ((0.0, b.home, b.home_base), (1.0, b.rank, b.base)):
        corners = rectangles(view, progress)
        np.testing.assert_allclose(corners[:, 0], np.stack([rank - 0.4, base], axis=1))
        np.testing.assert_allclose(corners[:, 2], np.stack([rank + 0.4, base + b.height], axis=1))


@pytest.mark.parametrize("theme", THEMES)
def test_split_sequences_have_hues_and_whole_ones_greys(theme):
    split = np.array([False, True, False, True, True])
    colours = sequence_colours(split, THEMES[theme])
    spread = colours.max(axis=1) - colours.min(axis=1)
    assert (spread[split] > 0.2).all() and (spread[~split] < 0.1).all()
    assert len(np.unique(colours[split], axis=0)) == 3
    light = block_colours(colours, np.array([1, 1]), np.array([True, False]), THEMES[theme])
    assert not np.allclose(light[0], light[1])


@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("deep/p.svg", b"<?xml"), ("p.pdf", b"%PDF")])
def test_pictures_open(tmp_path, name, start):
    path = draw_plan(view_of()[1], tmp_path / name, theme="dark")
    assert path.read_bytes().startswith(start)


def test_a_step_without_sequences_can_be_drawn(tmp_path):
    _, view = view_of(lengths=[[], []])
    assert draw_plan(view, tmp_path / "empty.png").is_file() and write_plan_page(view, tmp_path / "e.html").is_file()


def test_the_animation_returns_to_where_it_began(tmp_path, monkeypatch):
    av = pytest.importorskip("av")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("knapformer.tools.show.animation._HOLD", 2)
    monkeypatch.setattr("knapformer.tools.show.animation._MOVE", 3)
    view = view_of(lengths=[[40], [3]])[1]
    with image.open(animate_plan(view, tmp_path / "plan.gif")) as gif:
        assert gif.n_frames >= 6
        pictures = []
        for number in range(gif.n_frames):
            gif.seek(number)
            pictures.append(np.asarray(gif.convert("RGB")).astype(int)[60:])  # below the title
    assert np.abs(pictures[0] - pictures[-1]).mean() < 0.5 < np.abs(pictures[0] - pictures[len(pictures) // 2]).mean()
    with av.open(str(animate_plan(view, tmp_path / "plan.mp4"))) as video:
        assert sum(1 for _ in video.decode(video=0)) == 12


def test_unknown_endings_and_places_are_refused(tmp_path):
    view = view_of()[1]
    with pytest.raises(DataError, match=r"ends in \.gif or \.mp4"):
        animate_plan(view, tmp_path / "plan.webm")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        write_plan_page(view, tmp_path / "file" / "plan.html")


def test_the_page_holds_the_plan_and_asks_for_nothing(tmp_path):
    _, view = view_of()
    text = write_plan_page(view, tmp_path / "plan.html", theme="dark").read_text()
    embedded = re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(embedded) == page_data(view)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert 'data-theme="dark"' in text


def test_a_title_cannot_end_the_script(tmp_path):
    view = replace(view_of()[1], title="</script><b>")
    assert "</script><b>" not in write_plan_page(view, tmp_path / "plan.html").read_text()


@needs_browser
def test_the_page_draws_every_block_in_a_browser(tmp_path):
    _, view = view_of()
    page = write_plan_page(view, tmp_path / "plan.html")
    dom = open_in_browser(page, tmp_path)
    assert 'data-ready="yes"' in dom
    assert len(re.findall(r'<rect [^>]*class="block', dom)) == 2 * len(view.blocks)
    assert "a &lt;title&gt;" in dom


@needs_browser
def test_the_page_is_as_wide_as_its_window(tmp_path):
    _, view = view_of(lengths=[[40]] * 64)  # whose bars need more than 500 px
    assert width_in_browser(write_plan_page(view, tmp_path / "plan.html"), tmp_path, 500) == 500
