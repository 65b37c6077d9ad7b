"""What the advisor is pointed at: manifests, a bucket config, or a recorded or generated workload."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from knapformer.data import Trace, load_workload
from knapformer.errors import DataError, SpecError
from knapformer.tools.advise.buckets import Buckets, read_buckets
from knapformer.tools.advise.histogram import Histogram
from knapformer.tools.advise.query import ScanOptions
from knapformer.tools.advise.scan import Problem, scan_manifest
from knapformer.tools.simulate.presets import ModelShape, model_preset
from knapformer.tools.simulate.scenario import model_of

DEFAULT_MODEL = "hunyuanvideo"
"""Model where none is named: one that takes images and clips."""

_MANIFESTS = (".parquet", ".pq", ".csv", ".tsv", ".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Material:
    """Lengths to advise on.

    Attributes:
        kind: "manifest", "buckets" or "trace".
        name: what it was read from.
        model: shape of the model that is trained.
        histogram: its lengths.
        buckets: batch sizes in use, from a bucket config.
        trace: steps as they were recorded.
        rows, bad_rows, clips: of a manifest (see `Scan`).
        problems: what is wrong with bad rows.
        notes: what was assumed, in words.
        longest: the longest sample of a manifest.
    """

    kind: str
    name: str
    model: ModelShape
    histogram: Histogram
    buckets: Buckets | None = None
    trace: Trace | None = None
    rows: int = 0
    bad_rows: int = 0
    clips: int = 0
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    longest: Mapping[str, Any] = field(default_factory=dict)


def load_material(sources: Sequence[str], model: str | None, options: ScanOptions, *, ranks: int) -> Material:
    """Read what `sources` name: manifests (files, or folders of them), or one bucket config, workload or trace.

    Raises:
        DataError, SpecError: naming what cannot be read.
    """
    paths = [Path(source) for source in sources]
    first = paths[0]
    if len(paths) == 1 and first.is_file() and first.suffix == ".py":
        return _from_buckets(first, model)
    if len(paths) == 1 and first.is_file() and first.name.endswith((".json", ".json.gz")):
        return _from_trace(sources[0], model, ranks) if _is_trace(first) else _from_buckets(first, model)
    if len(paths) == 1 and not first.exists() and not first.name.endswith(_MANIFESTS) and first.parent == Path("."):
        return _from_trace(sources[0], model, ranks)
    files = [file for path in paths for file in _files(path)]
    shape = model_preset(model or DEFAULT_MODEL)
    scan = scan_manifest(files, shape, options)
    return Material(
        "manifest",
        ", ".join(sources) if len(sources) < 4 else f"{sources[0]} and {len(sources) - 1} more",
        shape,
        scan.histogram,
        rows=scan.rows,
        bad_rows=scan.bad_rows,
        clips=scan.clips,
        problems=scan.problems,
        notes=scan.notes,
        longest=scan.longest,
    )


def _files(path: Path) -> list[Path]:
    """A manifest, or those in a folder."""
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.name.removesuffix(".gz").endswith(_MANIFESTS) and p.is_file())
        if not found:
            raise DataError(f"folder {str(path)!r} holds no manifest ({', '.join('*' + m for m in _MANIFESTS)})")
        return found
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; give manifests, a bucket config, a trace or a workload's name")
    return [path]


def _is_trace(path: Path) -> bool:
    if path.name.endswith(".gz"):
        return True
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if head.lstrip().startswith(b"["):
        raise DataError(f"{path}: holds a JSON list; a manifest has one object a line (JSON lines)")
    return b'"seq_lens"' in head or b'"steps"' in head


def _from_buckets(path: Path, model: str | None) -> Material:
    shape = model_preset(model or DEFAULT_MODEL)
    histogram, buckets = read_buckets(path, shape)
    notes = (
        "a bucket config does not say what the data set holds; taken: each number of frames is equally frequent, and "
        "every sample large enough for all resolutions",
    )
    return Material("buckets", str(path), shape, histogram, buckets=buckets, notes=notes)


def _from_trace(source: str, model: str | None, ranks: int) -> Material:
    try:
        trace = load_workload(source, world_size=ranks)
    except SpecError:
        trace = load_workload(source)  # of another number of ranks: its lengths are drawn from
    length = np.concatenate([row for step in trace.steps for row in step.seq_lens])
    text = np.concatenate([row for step in trace.steps for row in step.text_lens])
    joint = trace.text == "joint"
    notes = ("lengths are tokens as recorded; the model changes their cost only",)
    if trace.world_size != ranks:
        notes += (f"recorded on {trace.world_size} ranks; steps of {ranks} ranks are drawn from its lengths",)
    shape = model_preset(model) if model else model_of(trace)
    histogram = Histogram.of(length, text if joint else np.zeros_like(text))
    return Material(
        "trace", trace.name, shape, histogram, trace=trace if trace.world_size == ranks else None, notes=notes
    )
