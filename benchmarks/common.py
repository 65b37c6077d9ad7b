"""What the benchmarks share: where records go, numbers short enough to commit, and what a later run replaces.

Run one from the repository's root as a module: `python -m benchmarks.sampler`.
"""

import argparse
from pathlib import Path
from typing import Any

from knapformer.report import RecordWriter, read_records, write_records

RESULTS = Path(__file__).resolve().parent / "results"
DIGITS = 7


def make_parser(doc: str | None, record: str) -> argparse.ArgumentParser:
    """A parser with the option of the output, `results/RECORD` unless another is given; `doc` is the help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / record)
    return parser


class ShortRecord(RecordWriter):
    """A record whose numbers have seven significant digits."""

    def step(self, step: int, **values: Any) -> None:
        super().step(step, **rounded(values))


def rounded(value: Any) -> Any:
    """Plain data with its numbers at seven significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return value


def keep_newest(path: Path, *keys: str) -> None:
    """Drop from a file of records the steps that a later run measured again; `keys` are what makes two the same."""
    runs = list(read_records(path).values())
    newest = {tuple(step[key] for key in keys): run.name for run in runs for step in run.steps}
    for run in runs:
        run.steps[:] = [step for step in run.steps if newest[tuple(step[key] for key in keys)] == run.name]
    write_records(path, [run for run in runs if run.steps])
