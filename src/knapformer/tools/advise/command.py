"""`knapformer advise`: is balancing worth it for one's own data set, what to set, what it will cost."""

import json
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from knapformer.errors import KnapFormerWarning, SpecError
from knapformer.report.terminal import plain_table
from knapformer.tools.advise.advice import AdviseOptions, advise
from knapformer.tools.advise.columns import parse_overrides
from knapformer.tools.advise.page import (
    OURS,
    headline,
    longest_sentence,
    memory_rows,
    memory_sentence,
    policy_rows,
    quantile_rows,
    summary,
    write_advice,
)
from knapformer.tools.advise.query import ScanOptions

_COLOURS = {"yes": "green", "no": "white", "depends": "yellow"}


def command(
    *sources: str,
    cluster: str = "h100x32",
    model: str | None = None,
    batch: int | None = None,
    column: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    max_pixels: int | None = None,
    max_frames: int | None = None,
    sample_fps: float | None = None,
    duration_unit: Literal["s", "ms"] | None = None,
    text_tokens: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    html: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Say whether balancing is worth it for a data set on a cluster, what to set, and what it will cost.

    Times, memory and chances are a model's figures: steps are drawn from the data's lengths and simulated.

    Parameters
    ----------
    sources
        Manifests (Parquet, CSV, JSON lines; files or folders of them), or one Open-Sora bucket config (.py, .json),
        trace file or workload name.
    cluster
        Cluster, e.g. h100x32, a100x64-nic100, h200x16-pcie.
    model
        Model whose tokens and work are meant. Default: a workload's own, else hunyuanvideo (images and clips).
    batch
        Samples a rank draws for a step. Default: as many of the longest as fit a rank, 1 to 64; a trace's own.
    column
        ROLE=NAME where a column's name does not tell; roles are width, height, frames, duration, fps, text (tokens),
        caption, count. May be repeated.
    max_pixels
        Scale larger frames down to this many pixels.
    max_frames
        Take at most this many frames of a clip.
    sample_fps
        Sample clips at this rate, and take it for clips whose rate is not known.
    duration_unit
        Unit of durations. Default: judged by the column's name and values.
    text_tokens
        Text tokens of every sample, e.g. where captions are padded. Default: the captions'.
    steps
        Steps to draw and simulate for each policy. Default: 20 to 100, fewer on larger clusters.
    seed
        Of the drawing.
    html
        Write a page with figures into this file.
    as_json
        Print one JSON object and nothing else.
    """
    if not sources:
        raise SpecError("nothing to advise on; give a manifest, a bucket config, a trace or a workload's name")
    scan = ScanOptions(
        columns=parse_overrides(column),
        max_pixels=max_pixels,
        max_frames=max_frames,
        sample_fps=sample_fps,
        duration_unit=duration_unit,
        text_tokens=text_tokens,
    )
    advice = advise(
        sources, AdviseOptions(model=model, cluster=cluster, batch=batch, num_steps=steps, seed=seed, scan=scan)
    )
    if html is not None:
        write_advice(advice, html)
    if as_json:
        print(json.dumps(advice))
    else:
        _print(advice)


def _print(advice: dict[str, Any]) -> None:
    console = Console(highlight=False)
    source, verdict = advice["source"], advice["verdict"]
    for problem in source["problems"]:
        warnings.warn(problem["message"], KnapFormerWarning, stacklevel=2)
    if source["bad_rows"]:
        told = f"{source['bad_rows']:,} of {source['rows']:,} rows cannot be used and are left out"
        warnings.warn(told, KnapFormerWarning, stacklevel=2)
    console.print(f"[bold]{escape(summary(advice))}[/]")
    console.print("[dim]Times, memory and chances are a model's figures, not measurements.[/]\n")
    text = escape("\n".join(verdict["reasons"]))
    console.print(Panel(text, title=f"[bold]{headline(advice)}[/]", border_style=_COLOURS[verdict["worth"]]))
    heads, lengths = quantile_rows(advice)
    console.print(plain_table("Length of samples [tokens]", heads, [lengths]))
    console.print(escape(longest_sentence(advice)) + "\n")
    console.print(plain_table("Time of all ranks, and throughput", *policy_rows(advice), ours=OURS))
    for policy in advice["policies"]:
        console.print(f"  [bold]{policy['name']}[/]: {escape(policy['text'])}")
    console.print()
    console.print(plain_table("Heaviest legal step", *memory_rows(advice), ours=OURS))
    console.print(escape(memory_sentence(advice)) + "\n")
    console.print("[bold]Three statements to add:[/]")
    print("\n".join(f"    {line}" for line in advice["lines"]))
    for note in source["notes"]:
        console.print(f"[dim]note: {escape(note)}[/]")
