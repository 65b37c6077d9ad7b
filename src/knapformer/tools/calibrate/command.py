"""`knapformer calibrate`: measure a layer on this device, fit its costs, save a profile, draw the fits."""

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from knapformer.data.profile import FITS, PHASES, Profile
from knapformer.errors import SpecError
from knapformer.report import RecordWriter
from knapformer.report.terminal import plain_table
from knapformer.tools.calibrate.layers import make_layers
from knapformer.tools.calibrate.page import draw_fits, fit_rows, write_fits_page
from knapformer.tools.calibrate.run import Budget, calibrate
from knapformer.train import read_config
from knapformer.train.launch import choose_device


def command(
    *,
    device: Literal["cpu", "cuda"] | None = None,
    block: str = "mmdit",
    config: Path | None = None,
    width: int | None = None,
    heads: int | None = None,
    mlp_ratio: float = 4.0,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
    kernel: str | None = None,
    shortest: int = 64,
    longest: int | None = None,
    threads: int = 1,
    seconds: float = 100.0,
    name: str | None = None,
    out: Path = Path("runs/profile.json"),
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Measure what a layer costs on this device and fit a cost model to it.

    Writes the profile, and beside it a run record (.jsonl), a figure (.png) and a page (.html). Give the profile to
    knapformer plan --profile, to a training configuration, or to SequenceBalancer(cost=...).

    Parameters
    ----------
    device
        cpu or cuda. Default: cuda where there is one.
    block
        mmdit, dit, or the import path of your own module, package.module:Class; see docs/calibrate.md.
    config
        Training configuration (TOML) to take width, heads, mlp ratio, precision and kernel from.
    width
        Width of a token. Default: 192 on CPU, the demo's, and 3072 on CUDA.
    heads
        Attention heads. Default: 4 on CPU, 24 on CUDA.
    mlp_ratio
        Hidden width of the MLP over the width.
    dtype
        Of weights and activations. Default: float32 on CPU, bfloat16 on CUDA.
    kernel
        Attention kernel. Default: as in training.
    shortest
        Shortest sequence [tokens].
    longest
        Longest sequence [tokens]. Default: 4096 on CPU, 32768 on CUDA.
    threads
        CPU threads, as many as a rank has in training.
    seconds
        Time to measure for.
    name
        Of the profile. Default: the device's type.
    out
        Where the profile goes.
    as_json
        Print one JSON object and nothing else.
    """
    start = time.perf_counter()
    chosen = choose_device(device)
    if threads < 1 or not seconds > 0:
        raise SpecError(f"threads is {threads} and seconds {seconds}; give at least one thread and a positive time")
    big = chosen.type == "cuda"
    sizes: dict[str, Any] = {"d_model": width or (3072 if big else 192), "num_heads": heads or (24 if big else 4)}
    sizes["mlp_ratio"] = mlp_ratio
    if config is not None:
        settings = read_config(config)
        shape = settings.shape()
        sizes = {"d_model": shape.width, "num_heads": shape.num_heads, "mlp_ratio": shape.mlp_ratio}
        kernel = kernel or settings.balancer.kernel
        dtype = dtype or (None if settings.train.precision == "auto" else settings.train.precision)
    torch.set_num_threads(threads)
    precision = getattr(torch, dtype or ("bfloat16" if big else "float32"))
    layers = make_layers(block, **sizes, dtype=precision, device=chosen)
    console = Console(quiet=as_json)
    with Progress(console=console, disable=as_json) as progress:
        task = progress.add_task("measuring", total=1.0)
        profile = calibrate(
            layers,
            lengths=(shortest, longest or (32_768 if big else 4096)),
            kernel=kernel,
            budget=Budget(seconds=seconds),
            name=name or chosen.type,
            progress=lambda share: progress.update(task, completed=share),
        )
    profile.save(out)
    record = _write_record(profile, out.with_suffix(".jsonl"), {"block": block, **sizes, "seconds": seconds})
    picture = draw_fits(profile, out.with_suffix(".png"))
    page = write_fits_page(profile, out.with_suffix(".html"))
    result = {
        **_figures(profile),
        "profile": str(out),
        "record": str(record),
        "figure": str(picture),
        "page": str(page),
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        print(json.dumps(result))
        return
    title = f"{profile.name}: laws and their error on packs they were not fitted to"
    console.print(plain_table(title, *fit_rows(profile)))
    console.print(f"use {profile.recommended}; profile {out}, figure {picture}, page {page}")


def _figures(profile: Profile) -> dict[str, Any]:
    fits = {
        name: {"gamma": fit.gamma, "held_out_mean": fit.mean_error, "held_out_worst": fit.worst_error}
        for name, fit in profile.fits.items()
    }
    return {
        "name": profile.name,
        "device": dict(profile.device),
        "kernel": profile.kernel,
        "gamma": profile.gamma,
        "fits": fits,
        "recommended": profile.recommended,
        "additivity": profile.additivity,
    }


def _write_record(profile: Profile, path: Path, config: dict[str, Any]) -> Path:
    """What was measured, one line a pack."""
    path.unlink(missing_ok=True)
    with RecordWriter(path, profile.name, config, profile.device["name"]) as writer:
        for i, sample in enumerate(profile.samples):
            measured = {
                f"{what}_{phase}": timings[phase].seconds
                for what, timings in (("layer", sample.layer), ("attention", sample.attention))
                for phase in PHASES
            }
            modelled = {f"modelled_{name}": profile.seconds(sample.lengths, fit=name) for name in FITS}
            writer.step(
                i, lengths=list(sample.lengths), held_out=sample.held_out, runs=sample.runs, **measured, **modelled
            )
    return path
