"""`knapformer selfcheck`: whether balanced equals unbalanced here, with one's own model."""

import json
import sys
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from cyclopts import Parameter
from rich.console import Console

from knapformer.report.terminal import plain_table
from knapformer.tools.selfcheck.models import BUILT_IN, load_model
from knapformer.tools.selfcheck.selfcheck import selfcheck
from knapformer.train.launch import choose_device, run_on_ranks

_SHOWN = 10  # tensors that differ


def command(
    *,
    model: str | None = None,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    dtype: Literal["float64", "float32", "bfloat16"] | None = None,
    kernel: str | None = None,
    length: int = 257,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
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
    where = choose_device(device)
    ranks = ranks or (torch.cuda.device_count() if where.type == "cuda" else 2)
    names = (model,) if model else BUILT_IN
    if model:
        load_model(model)  # errors of the input are raised here, in one line, and not on every rank
    rank, found = run_on_ranks(_check, (names, dtype, kernel, length), ranks=ranks, device_type=where.type)
    passed = all(one["passed"] for one in found)  # the same on every rank
    if rank == 0 and as_json:
        print(json.dumps({"passed": passed, "checks": found}))
    elif rank == 0:
        for one in found:
            _print(one)
    if not passed:
        sys.exit(1)


def _check(
    device: torch.device, names: tuple[str, ...], dtype: str | None, kernel: str | None, length: int
) -> tuple[int, list[dict[str, Any]]]:
    """This rank, and what came of each model."""
    found = []
    for name in names:
        model = load_model(name)
        model = model.to(getattr(torch, dtype)) if dtype else model
        found.append({"subject": name, **selfcheck(model, device, length=length, kernel=kernel).to_json()})
    return dist.get_rank(), found


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
    shown = one["worst"] if one["passed"] else one["differs"][:_SHOWN]
    rows = [(row["plan"], row["tensor"], one["split"].get(row["plan"], "0"), f"{row['error']:.1e}") for row in shown]
    console.print(plain_table("", ("plan", "tensor", "sequences split", "relative error"), rows))
    if len(one["differs"]) > _SHOWN:
        console.print(f"and {len(one['differs']) - _SHOWN} more")
