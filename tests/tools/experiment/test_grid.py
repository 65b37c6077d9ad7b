"""Grids: what they hold, in which order, and what is wrong with those that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from knapformer.errors import SpecError
from knapformer.tools.experiment.grid import Experiment, grid_names, read_grid

SMALL = """
name = "small"
workloads = ["a", "b"]
planners = ["local", "g2n1", "balanced"]
seeds = [3, 1]
ranks_per_node = 2
"""


def test_planners_of_the_same_batches_run_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text(SMALL)
    grid = read_grid(str(tmp_path / "g.toml"))
    cells = list(grid.cells())
    assert [(c.workload, c.seed, c.planner) for c in cells[:4]] == [
        ("a", 3, "local"),
        ("a", 3, "g2n1"),
        ("a", 3, "balanced"),
        ("a", 1, "local"),
    ]
    assert len({cell.name for cell in cells}) == len(cells) == 12
    assert (cells[1].planner_name, cells[1].topology, cells[0].topology) == ("bags", "g2n1", None)
    assert grid.folder == str(tmp_path)


def test_a_python_file_defines_a_grid(tmp_path: Path) -> None:
    code = "from knapformer.tools.experiment.grid import Experiment\nsizes = [2 * n for n in (1, 2)]\n"
    code += (
        "GRID = Experiment(name='py', workloads=('x',), planners=tuple(f'g{n}n2' for n in sizes), cluster='h100x8')\n"
    )
    (tmp_path / "g.py").write_text(code)
    assert [cell.planner for cell in read_grid(str(tmp_path / "g.py")).cells()] == ["g2n2", "g4n2"]
    (tmp_path / "g.py").write_text("GRID = {}")
    with pytest.raises(SpecError, match=r"GRID must be a knapformer\.tools\.experiment\.grid\.Experiment"):
        read_grid(str(tmp_path / "g.py"))


def test_the_papers_grid_is_whole() -> None:
    assert grid_names() == ("flux-paper", "tiny")
    grid = read_grid("flux-paper")
    assert grid.workloads == ("flux-lowres", "flux-mixed", "flux-joint")
    assert {"local", "g1n32", "g2n16", "g4n8", "g8n4", "balanced"} < set(grid.planners)
    assert sum("+" in planner for planner in grid.planners) >= 2
    assert (len(grid.seeds), grid.num_ranks, grid.num_nodes, grid.ranks_in_node) == (5, 32, 4, 8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["a", "b"]', "[]", "workloads are []"),
        ('["a", "b"]', '["a", "a"]', "each once"),
        ("seeds = [3, 1]", "seed = 3", "unknown keys seed"),
        ('"g2n1"', '"g2n"', "bag spec 'g2n'"),
        ('"g2n1"', '"best"', "unknown planner 'best'"),
        ("ranks_per_node = 2", "", "say on how many ranks"),
        ("ranks_per_node = 2", "ranks_per_node = 0", "both start at 1"),
        ("ranks_per_node = 2", 'ranks_per_node = 2\nengine = "pbs"', "Invalid enum value 'pbs'"),
        ("ranks_per_node = 2", "ranks_per_node = 2\nsteps = 1\nwarmup = 1", "some must be left"),
        ("ranks_per_node = 2", 'cluster = "h1000"', "cannot read 'h1000'"),
    ],
)
def test_a_wrong_grid_is_told_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "g.toml").write_text(SMALL.replace(old, new))
    with pytest.raises(SpecError) as error:
        read_grid(str(tmp_path / "g.toml"))
    assert message in str(error.value)


def test_a_grid_that_is_not_there() -> None:
    with pytest.raises(SpecError, match=r"no grid 'flux'.*one of flux-paper, tiny"):
        read_grid("flux")


def test_grids_can_be_changed() -> None:
    assert replace(read_grid("tiny"), seeds=(7,)).seeds == (7,)
    assert isinstance(read_grid("tiny"), Experiment)
