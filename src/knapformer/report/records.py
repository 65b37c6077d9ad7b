"""Run records: what was run, where, with what, and what every step measured. One JSON object per line.

    {"schema": 1, "kind": "run", "name": ..., "environment": {...}, "command": [...], "config": {...}}
    {"schema": 1, "kind": "step", "name": ..., "step": 0, "loss": ..., "seconds": ...}
    ...
    {"schema": 1, "kind": "failure", "name": ..., "cause": ...}      where the run ended with an error

Lines are written as the run goes, so a killed run leaves a readable record. Several runs may share a file; `name` tells
their lines apart.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from knapformer.errors import DataError
from knapformer.files import read_bytes, write_bytes, write_text

SCHEMA = 1
_NEEDED = {"run": ("environment", "command", "config"), "step": (), "failure": ("cause",)}


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions, commit, machine and time of this run."""
    versions = {}
    for package in ("knapformer", "numpy", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "device": device,
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


class RecordWriter:
    """Appends a run's lines to a file. A context manager.

    Args:
        path: the JSONL file; folders are made, lines of earlier runs are kept.
        name: tells this run's lines apart.
        config: the configuration, as plain data.
        device: what it ran on, in words.
    """

    def __init__(self, path: str | os.PathLike[str], name: str, config: Mapping[str, Any], device: str = "cpu") -> None:
        self.path, self.name = Path(path), name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(self.path)
        self._file: TextIO = self.path.open("a", encoding="utf-8", newline="\n")
        program = Path(sys.argv[0])  # `python -m knapformer` is the command by another name
        by_module = program.parts[-2:] in (("knapformer", "__main__.py"), ("cli", "main.py"))
        command = ["knapformer" if by_module else program.name, *sys.argv[1:]]
        self._write("run", environment=environment(device), command=command, config=dict(config))

    def step(self, step: int, **values: Any) -> None:
        """One step's values."""
        self._write("step", step=step, **values)

    def failure(self, cause: str) -> None:
        """Why the run ended before its last step."""
        self._write("failure", cause=cause)

    def _write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"schema": SCHEMA, "kind": kind, "name": self.name, **values}) + "\n")
        self._file.flush()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, read back.

    Attributes:
        name: its name.
        header: environment, command and config.
        steps: one mapping per step, in order.
        failures: causes with which it ended; empty for a run that did not fail.
    """

    name: str
    header: Mapping[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def column(self, name: str) -> list[Any]:
        """One value of every step. Raises `DataError` if a step lacks it."""
        try:
            return [step[name] for step in self.steps]
        except KeyError:
            raise DataError(
                f"run {self.name!r}: a step has no value {name!r}; it has {sorted(self.steps[0])}"
            ) from None

    def lines(self) -> Iterator[dict[str, Any]]:
        """As they are written."""
        yield {"schema": SCHEMA, "kind": "run", "name": self.name, **self.header}
        yield from ({"schema": SCHEMA, "kind": "step", "name": self.name, **step} for step in self.steps)
        yield from ({"schema": SCHEMA, "kind": "failure", "name": self.name, "cause": c} for c in self.failures)


def read_records(path: str | os.PathLike[str]) -> dict[str, RunRecord]:
    """The runs of a file by name; a later run of the same name replaces an earlier one.

    Raises:
        DataError: naming the file if it cannot be read, and the line if it is no record of this schema. A cut last
            line is left out.
    """
    runs: dict[str, RunRecord] = {}
    try:
        lines = read_bytes(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a run record: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise DataError(
                f"{path}, line {number}: not JSON ({error}); a run record has one JSON object per line"
            ) from error
        if not isinstance(record, dict) or record.get("schema") != SCHEMA or record.get("kind") not in tuple(_NEEDED):
            raise DataError(f"{path}, line {number}: not a run record of schema {SCHEMA}")
        if missing := sorted({"name", *_NEEDED[record["kind"]]} - record.keys()):
            raise DataError(f"{path}, line {number}: a run record lacks {', '.join(missing)}")
        name = record["name"]
        if record["kind"] == "run":
            runs[name] = RunRecord(name, {k: record[k] for k in _NEEDED["run"]})
        elif name not in runs:
            raise DataError(f"{path}, line {number}: a {record['kind']} of run {name!r} before its header")
        elif record["kind"] == "failure":
            runs[name].failures.append(record["cause"])
        else:
            runs[name].steps.append({k: v for k, v in record.items() if k not in ("schema", "kind", "name")})
    return runs


def write_records(path: str | os.PathLike[str], runs: Iterable[RunRecord]) -> Path:
    """Write a file of these runs, whole; what the file had before is gone."""
    return write_text(path, "".join(json.dumps(line) + "\n" for run in runs for line in run.lines()))


def read_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """All runs of files and of experiments' folders. Raises `DataError` for what cannot be read."""
    found: list[RunRecord] = []
    for path in paths:
        found += read_records(path / "records.jsonl" if path.is_dir() else path).values()
    if not found:
        raise DataError("no runs to report on; give a record file or the folder of an experiment")
    return found


def _mend_last_line(path: Path) -> None:
    """End a file's last line, or drop it if a killed run left it half-written, so that new lines start at their own."""
    if not path.is_file() or (content := path.read_bytes()).endswith(b"\n") or not content:
        return
    last = content.rfind(b"\n") + 1
    try:
        json.loads(content[last:])
        mended = content + b"\n"
    except ValueError:
        mended = content[:last]
    write_bytes(path, mended)


def _commit() -> str | None:
    """Commit of the checkout this package runs from; None outside of one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    """Name of the processor; the platform's word for it where /proc does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
