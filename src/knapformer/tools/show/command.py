"""`knapformer show`: a plan as a picture, an interactive page, an animation, or a timeline."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from knapformer.data import Trace, cluster_and_cost
from knapformer.errors import DataError, PlanError, SpecError
from knapformer.files import read_json, write_json
from knapformer.plan import Cluster, CostModel, Limits, Placement, make_planner
from knapformer.tools.show.animation import animate_plan
from knapformer.tools.show.page import write_plan_page
from knapformer.tools.show.picture import draw_plan
from knapformer.tools.show.view import PlanView
from knapformer.tools.simulate.chrome import write_chrome_trace
from knapformer.tools.simulate.presets import cluster_preset, named_workload
from knapformer.tools.simulate.scenario import Scenario, model_of

ENDINGS = (".png", ".svg", ".pdf", ".html", ".gif", ".mp4", ".perfetto.json", ".json")
"""What a name may end in: pictures, page, animations, timeline of a simulated step, and the placement itself."""


def command(
    source: str,
    *,
    output: Annotated[list[Path], Parameter(name=("--output", "-o"))],
    step: int = 0,
    planner: str | None = None,
    topology: str | None = None,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    gamma: float = 1.25,
    seed: int = 0,
    cluster: str | None = None,
    theme: Literal["light", "dark"] | None = None,
) -> None:
    """Draw one step of a workload, before balancing and as planned.

    The ending of each output says what it becomes: .png, .svg or .pdf a picture, .html an interactive page, .gif or
    .mp4 an animation of the routing, .perfetto.json a simulated timeline for ui.perfetto.dev, .json the placement.

    Parameters
    ----------
    source
        A placement written by this command (.json), or a workload: preset, data codes, or trace file.
    output
        File to write; may be given several times.
    step
        Which step of the workload.
    planner
        balanced, bags or local. Default: bags if a topology is given, else balanced.
    topology
        Bag spec for planner bags, e.g. g4n8.
    ranks
        World size. Default: the workload's.
    ranks_per_node
        Ranks that share fast links. Default: the workload's, else all.
    gamma
        Time of an attention FLOP over that of a token-wise FLOP.
    seed
        For generated lengths.
    cluster
        For timelines: the cluster to simulate, e.g. h100x32-nic200. Default: H100 with the step's nodes.
    theme
        light or dark. Default: light; a page follows the reader's browser.
    """
    for path in output:
        if not path.name.endswith(ENDINGS):
            raise SpecError(f"cannot tell what {path.name!r} should become; a name ends in {', '.join(ENDINGS)}")
    placement = _read_placement(source)
    if placement is None:
        trace = named_workload(source, world_size=ranks, num_steps=None, seed=seed)
        if not 0 <= step < trace.num_steps:
            raise SpecError(f"step {step}: {trace.name!r} has steps 0 to {trace.num_steps - 1}")
        nodes, cost = cluster_and_cost(trace, gamma, ranks_per_node)
        plan = make_planner(planner or ("bags" if topology else "balanced"), topology)
        placement = plan(trace.sequences(step), nodes, cost, Limits())
        title = f"{trace.name}, step {step}, {trace.world_size} ranks"
    else:
        nodes, cost = Cluster(placement.world_size, ranks_per_node), _cost_of(placement, gamma)
        trace, title = None, f"{Path(source).name}, {placement.world_size} ranks"
    view = PlanView.of(placement, nodes, cost, title)
    for path in output:
        _write(path, view, placement, trace, cluster, theme)
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"wrote {path}")


def _write(
    path: Path, view: PlanView, placement: Placement, trace: Trace | None, cluster: str | None, theme: str | None
) -> None:
    if path.name.endswith(".perfetto.json"):
        write_chrome_trace(_scenario(view, placement, trace, cluster).time(placement, record=True), path)
    elif path.suffix == ".json":
        write_json(path, placement.to_json())
    elif path.suffix == ".html":
        write_plan_page(view, path, theme=theme)
    elif path.suffix in (".gif", ".mp4"):
        animate_plan(view, path, theme=theme or "light")
    else:
        draw_plan(view, path, theme=theme or "light")


def _scenario(view: PlanView, placement: Placement, trace: Trace | None, cluster: str | None) -> Scenario:
    """What a timeline is simulated on."""
    preset = cluster_preset(cluster or f"h100x{placement.world_size}-node{len(view.nodes[0])}")
    if preset.world_size != placement.world_size:
        raise SpecError(f"cluster {cluster!r} has {preset.world_size} ranks, the step {placement.world_size}")
    return Scenario.of("flux1" if trace is None else model_of(trace), preset)


def _read_placement(source: str) -> Placement | None:
    """The placement in a file that is one; None for anything else, which is a workload."""
    path = Path(source)
    if path.suffix != ".json" or not path.is_file():
        return None
    data = read_json(path, object)
    if not isinstance(data, dict) or data.get("kind") != "placement":
        return None
    try:
        return Placement.from_json(data)
    except PlanError as error:
        raise DataError(f"{source}: {error}") from error


def _cost_of(placement: Placement, gamma: float) -> CostModel:
    """Prices for a placement without a workload: heads of width 128."""
    return CostModel.from_shapes(128 * placement.num_heads, placement.num_heads, gamma=gamma)
