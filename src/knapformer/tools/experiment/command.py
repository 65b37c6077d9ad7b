"""`knapformer experiment`: run a grid of workloads, models, planners and seeds, and report on it."""

import json
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from knapformer.files import write_text
from knapformer.report.pages import report_markdown, report_page
from knapformer.report.records import read_runs
from knapformer.report.tables import grouped, report_data
from knapformer.report.terminal import report_lines
from knapformer.tools.experiment.grid import Cell, EngineName, Experiment, read_grid
from knapformer.tools.experiment.loop import Engine, run_cells
from knapformer.tools.experiment.store import Store


def command(
    grid: str,
    *,
    engine: EngineName | None = None,
    out: Path | None = None,
    dry_run: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Run all cells of a grid and write a report. Started again, it goes on with the cells that are missing.

    The exit status is 1 if a cell failed; the others are run nevertheless.

    Parameters
    ----------
    grid
        flux-paper, tiny, or a .toml or .py file; see docs/experiment.md.
    engine
        simulate: on a virtual cluster. replay: each rank's share on this device. torchrun: train, on ranks started
        here, or on those of the launch that runs this command. slurm: submit a job that does, or write its script.
        Default: the grid's.
    out
        Folder for records and report. Default: runs/experiments/GRID-ENGINE.
    dry_run
        List the cells and the command that runs them; for slurm, print the batch script.
    as_json
        Print one JSON object and nothing else.
    """
    plan = read_grid(grid)
    name = engine or plan.engine
    folder = out or Path("runs/experiments") / f"{plan.name}-{name}"
    store = Store(folder, plan, "torchrun" if name == "slurm" else name)
    # What every rank is to run, wherever it is started.
    arguments = ["experiment", grid, "--engine", "torchrun", "--out", str(folder)]
    if dry_run:
        _list(store, name, arguments)
    elif name == "slurm":
        _submit(store, arguments)
    elif name == "torchrun":
        _torchrun(store, arguments, as_json)
    else:
        run_one = _engine(plan, name)
        with store.locked():
            cells = store.prepare()
            with _progress(store, cells, quiet=as_json) as on_step:
                run_cells(store, cells, run_one, on_step=on_step)
        _finish(store, as_json)


def write_reports(store: Store) -> dict[str, Any]:
    """Write report.html and report.md of what the run directory holds; returns the report."""
    store.tidy()
    runs = read_runs([store.folder])
    data = report_data(runs, f"{store.grid.name}, {store.engine}")
    write_text(store.folder / "report.html", report_page(data, grouped(runs)))
    write_text(store.folder / "report.md", report_markdown(data))
    return data


# ---- engines -------------------------------------------------------------------------------------------------------


def _engine(grid: Experiment, name: str) -> Engine:
    if name == "simulate":
        from knapformer.tools.experiment.modelled import SimulateEngine

        return SimulateEngine(grid)
    from knapformer.tools.experiment.measured import ReplayEngine

    return ReplayEngine(grid)


def _torchrun(store: Store, arguments: list[str], as_json: bool) -> None:
    """Join the launch that this process is a rank of, or start one on this machine."""
    from knapformer.tools.experiment.launch import check_ranks, current_launch, rank_environment, torchrun_command
    from knapformer.tools.experiment.trained import prepare_data

    if current_launch():
        from knapformer.train.launch import choose_device, run_on_ranks

        run_on_ranks(_train_on_rank, (store,), ranks=1, device_type=choose_device().type)
        return
    check_ranks(store.grid)
    with store.locked():
        prepare_data(store.grid, store.folder)
        missing = store.prepare()
    if missing:
        command = torchrun_command(store.grid, arguments)
        # To be ended like Ctrl-C does it: the ranks are ended, too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        output = subprocess.DEVNULL if as_json else None
        with subprocess.Popen(command, env=rank_environment(store.grid), stdout=output) as ranks:
            try:
                status = ranks.wait()
            except KeyboardInterrupt:
                ranks.terminate()  # torchrun ends its workers
                ranks.wait()
                raise SystemExit(130) from None
        if status:
            Console(stderr=True).print(f"[bold red]error:[/] torchrun ended with status {status}", highlight=False)
    _finish(store, as_json)


def _train_on_rank(device: Any, store: Store) -> None:
    """One rank of a launch. Collective."""
    import torch.distributed as dist

    from knapformer.tools.experiment.launch import current_launch
    from knapformer.tools.experiment.trained import train_cells

    first = dist.get_rank() == 0
    with _progress(store, list(store.grid.cells()), quiet=not first) as on_step:
        train_cells(device, store, current_launch(), on_step)
    if first:
        write_reports(store)


def _submit(store: Store, arguments: list[str]) -> None:
    """Write the batch script into the run's folder and submit it, or say what submits it."""
    from knapformer.tools.experiment.launch import slurm_script, submit

    console = Console(highlight=False, soft_wrap=True)
    script = write_text(store.folder / "slurm" / "job.sh", slurm_script(store.grid, store.folder, arguments))
    job = submit(script)
    if job is None:
        console.print(f"no sbatch on this machine; where there is one: sbatch {shlex.quote(str(script))}")
    else:
        console.print(f"submitted job {job}; records and report: {store.folder}")


# ---- what is shown -------------------------------------------------------------------------------------------------


def _list(store: Store, engine: str, arguments: list[str]) -> None:
    """What would run, and how."""
    from knapformer.tools.experiment.launch import check_ranks, slurm_script, torchrun_command

    if engine == "slurm":
        print(slurm_script(store.grid, store.folder, arguments), end="")
        return
    runs = store.read()
    for cell in store.grid.cells():
        state = "done" if store.done(runs.get(cell.name), cell) else "to run"
        how = f"  knapformer {shlex.join(_simulate(store.grid, cell))}" if engine == "simulate" else ""
        print(f"{state:8}{cell.name}{how}")
    if engine == "torchrun":
        print(shlex.join(torchrun_command(store.grid, arguments)))
        check_ranks(store.grid)


def _simulate(grid: Experiment, cell: Cell) -> Sequence[str]:
    """Arguments that simulate one cell by itself."""
    chosen = ["--topology", cell.topology] if cell.topology else ["--planner", cell.planner]
    model = ["--model", cell.model] if cell.model else []
    return ["simulate", cell.workload, "--cluster", str(grid.cluster), *chosen, *model, "--steps", str(grid.steps),
            "--seed", str(cell.seed)]  # fmt: skip


@contextmanager
def _progress(store: Store, cells: Sequence[Cell], *, quiet: bool) -> Iterator[Callable[[Cell, int], None]]:
    """A bar over the steps of the cells, with the time that is left; gives the function to call at each step."""
    steps, place = store.grid.steps, {cell: number for number, cell in enumerate(cells)}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=quiet, console=Console(stderr=True)) as bar:
        task = bar.add_task(store.grid.name, total=len(cells) * steps)
        yield lambda cell, step: bar.update(task, completed=place[cell] * steps + step, description=cell.name)


def _finish(store: Store, as_json: bool) -> None:
    """Write and print the report; exits with 1 if a cell failed or is missing."""
    data = write_reports(store)
    runs = store.read()
    missing = [cell.name for cell in store.grid.cells() if not store.done(runs.get(cell.name), cell)]
    if as_json:
        print(json.dumps(data))
    else:
        Console(highlight=False).print(*report_lines(data), sep="\n", soft_wrap=True)
        Console(highlight=False, soft_wrap=True).print(
            f"{len(runs)} cells, {len(missing)} of them not done; report {store.folder / 'report.html'}"
        )
    if missing:
        raise SystemExit(1)
