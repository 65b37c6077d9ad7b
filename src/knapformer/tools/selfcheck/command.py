"""`knapformer selfcheck`: whether balanced equals unbalanced here, with one's own model."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from knapformer.tools.selfcheck.selfcheck import selfcheck
from knapformer.tools.selfcheck.subjects import BUILT_IN, load_subject
from knapformer.train.launch import run_on_ranks

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_SHOWN = 10  # tensors that differ


def command(
    *,
    model: str | None = None,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    dtype: Literal["float64", "float32", "bfloat16"] | None = None,
    kernel: str | None = None,
    length: int = 257,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Compare balanced with unbalanced: outputs and gradients, on this machine, kernel and process group.

    Exit status 0: all agree; 1: something differs.

    Parameters
    ----------
    model
        package.module:factory or file.py:factory of a module that takes a PackedBatch, or the folder of a diffusers
        model. Default: two tiny models of this library.
    ranks
        Ranks to start when not under torchrun. Default: 2 on CPU, all devices on CUDA.
    device
        cpu or cuda. Default: cuda where there is one.
    dtype
        Of weights; a model of your own casts its inputs itself. Default: as the model is made.
    kernel
        Attention kernel by name. Default: as in training.
    length
        Tokens of the longest sequence, about.
    as_json
        Print one JSON object and nothing else.
    """
    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = ranks or (torch.cuda.device_count() if device_type == "cuda" else 2)
    sys.path.insert(0, os.getcwd())  # where users keep the module they name
    names = (model,) if model else BUILT_IN
    for name in names if model else ():
        load_subject(name)  # errors of the input are raised here, in one line, and not on every rank
    with tempfile.TemporaryDirectory(prefix="knapformer-") as folder:
        run_on_ranks(_check, (names, dtype, kernel, length, folder), ranks=ranks, device_type=device_type)
        written = sorted(Path(folder).iterdir())
        found = json.loads(written[0].read_text()) if written else []
        is_first = bool(written) and written[0].name == "0"
    passed = all(one["passed"] for one in found)
    if is_first and as_json:
        print(json.dumps({"passed": passed, "checks": found}))
    elif is_first:
        for one in found:
            _print(one)
    if not passed:
        sys.exit(1)


def _check(
    device: torch.device, names: tuple[str, ...], dtype: str | None, kernel: str | None, length: int, folder: str
) -> None:
    found = []
    for name in names:
        model = load_subject(name)
        model = model.to(DTYPES[dtype]) if dtype else model
        found.append({"subject": name, **selfcheck(model, device, length=length, kernel=kernel).to_json()})
    # Reports are the same on every rank. Under torchrun each process has a folder, else all share one.
    Path(folder, str(dist.get_rank())).write_text(json.dumps(found))


def _print(one: dict[str, Any]) -> None:
    console = Console()
    verdict = "[bold green]pass[/]" if one["passed"] else "[bold red]differs[/]"
    console.print(
        f"{verdict}  {one['subject']} ({one['model']}, {one['dtype']}), {one['ranks']} ranks, {one['backend']} on "
        f"{one['device']}, kernel {one['kernel']}; largest relative error allowed {one['tolerance']:g}"
    )
    if not one["deterministic"]:
        console.print(
            "the model gives other values each time for the same inputs; turn off dropout and other randomness, or "
            "draw it by sample id before routing"
        )
    table = Table()
    for column in ("plan", "sequences split", "tensor", "relative error"):
        table.add_column(column, justify="right" if column == "relative error" else "left")
    for row in one["worst"] if one["passed"] else one["differs"][:_SHOWN]:
        table.add_row(row["plan"], one["split"].get(row["plan"], "0"), row["tensor"], f"{row['error']:.1e}")
    console.print(table)
    if len(one["differs"]) > _SHOWN:
        console.print(f"and {len(one['differs']) - _SHOWN} more")
