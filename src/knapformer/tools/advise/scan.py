"""A manifest of any size to a histogram of lengths: one pass in the engine, and no rows in Python.

    file -> values of each role -> problem of the row, or its tokens -> group by (problem, tokens, text) -> counts

Rows that cannot be used are counted by cause, the first few are named by file, row and column, and all others are used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knapformer.data.tables import Run, open_engine, open_table, reading
from knapformer.errors import DataError
from knapformer.tools.advise.columns import PROBLEMS, allowed, listed
from knapformer.tools.advise.histogram import LENGTH_BITS, TEXT_BITS, Histogram, rounded
from knapformer.tools.advise.query import Query, ScanOptions
from knapformer.tools.simulate.presets import ModelShape

_SHOWN = 3  # rows named per cause and file


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows of a file that cannot be used, of one cause.

    Attributes:
        file, column, cause: where and what.
        count: how many rows.
        rows: the first few, as (number, value).
    """

    file: str
    column: str
    cause: str
    count: int
    rows: tuple[tuple[int, str], ...]

    def message(self) -> str:
        shown = ", ".join(f"{row:,} ({value})" for row, value in self.rows)
        more = f" and {self.count - len(self.rows):,} more" if self.count > len(self.rows) else ""
        return f"{self.file}, column {self.column!r}: {self.cause} in row {shown}{more}"


@dataclass(frozen=True, slots=True)
class Scan:
    """What manifests hold.

    Attributes:
        histogram: lengths of the rows that can be used.
        rows, bad_rows: rows read; those of them that cannot be used.
        clips: samples of more than one frame.
        problems: what is wrong with bad rows, the most frequent first.
        notes: what was assumed, in words.
        longest: the longest sample: file, row, width, height, frames.
    """

    histogram: Histogram
    rows: int
    bad_rows: int
    clips: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    longest: Mapping[str, Any]


def scan_manifest(files: Sequence[Path], model: ModelShape, options: ScanOptions) -> Scan:
    """Read manifests into one histogram.

    Raises:
        DataError: for a file that cannot be read or lacks a column, or if no row of all files can be used.
        BackendUnavailableError: without DuckDB.
    """
    names = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    with open_engine() as run:
        tables = [open_table(run, file) for file in files]
        for role, name in options.columns.items():
            if not any(name in table.columns for table in tables):
                raise DataError(f"{names}: no column {name!r}, given for {role}; there is {listed(tables[0].columns)}")
        queries = [Query.of(run, table, model, options) for table in tables]
        run(_PARTS)
        for index, query in enumerate(queries):
            with reading(query.table.name):
                run(f"INSERT INTO parts SELECT {index}, * FROM ({_GROUPED} FROM ({query.sql()}) GROUP BY ALL)")
        total, bad = run("SELECT sum(n)::BIGINT, coalesce(sum(n) FILTER (problem > 0), 0)::BIGINT FROM parts")
        if total[0] is np.ma.masked:
            raise DataError(f"{names}: there are no rows; an empty manifest cannot be advised on")
        problems = sorted((p for i, q in enumerate(queries) for p in _problems(run, q, i)), key=lambda p: -p.count)
        length, text, count, longest, tokens, clips = run(_MERGED)
        if not len(length):
            told = "".join(f"\n  {problem.message()}" for problem in problems[:10])
            raise DataError(f"{names}: none of the {int(total[0]):,} rows can be used:{told}")
        text = np.minimum(text, length)  # rounding may have passed it
        histogram = Histogram(length, text, count, round(float(tokens.sum())), int(longest.max()))
        return Scan(
            histogram,
            rows=int(total[0]),
            bad_rows=int(bad[0]),
            clips=int(clips.sum()),
            problems=tuple(problems),
            notes=tuple(dict.fromkeys(note for query in queries for note in query.notes)),
            longest=_longest(run, queries, histogram.longest),
        )


_PARTS = """
    CREATE TABLE parts (file INT, problem INT, length BIGINT, text BIGINT, samples HUGEINT, n BIGINT, longest BIGINT,
                        tokens HUGEINT, clips HUGEINT)
"""
_GROUPED = f"""
    SELECT problem, {rounded("tokens", LENGTH_BITS)}, {rounded("text_tokens", TEXT_BITS)}, sum(samples), count(*),
           max(tokens), sum(CAST(tokens AS HUGEINT) * samples), sum(samples) FILTER (frames > 1)
"""
_MERGED = """
    SELECT length, text, sum(samples)::BIGINT, max(longest), sum(tokens)::DOUBLE, coalesce(sum(clips), 0)::BIGINT
    FROM parts WHERE problem = 0 AND samples > 0 GROUP BY length, text ORDER BY length, text
"""


def _problems(run: Run, query: Query, index: int) -> list[Problem]:
    """What is wrong with the bad rows of a file, which is part `index`."""
    codes, counts = run(f"SELECT problem, sum(n)::BIGINT FROM parts WHERE file = {index} AND problem > 0 GROUP BY 1")
    if not len(codes):
        return []
    cases = [*query.cases, ("width", "long", "")]
    value = "".join(f" WHEN {code} THEN r_{cases[code - 1][0]}" for code in codes)
    code, number, value = run(
        f"SELECT problem, row_number, CASE problem {value} END FROM ({query.sql(numbered=True)}) WHERE problem > 0 "
        f"QUALIFY row_number() OVER (PARTITION BY problem ORDER BY row_number) <= {_SHOWN} ORDER BY row_number"
    )
    found: list[Problem] = []
    for bad, count in zip(codes, counts, strict=True):
        role, kind, _ = cases[bad - 1]
        here = np.flatnonzero(code == bad)
        rows = tuple((int(number[i]), _shown(value[i])) for i in here)
        cause = "not a JSON object" if role == "line" else f"{PROBLEMS[kind]}; allowed is {allowed(role)}"
        found.append(Problem(query.table.name, query.columns.names.get(role, role), cause, int(count), rows))
    return found


def _shown(value: Any) -> str:
    if value is None or value is np.ma.masked or not str(value).strip():
        return "no value"
    return repr(str(value)) if len(str(value)) <= 40 else repr(str(value)[:37]) + "..."


def _longest(run: Run, queries: Sequence[Query], tokens: int) -> dict[str, Any]:
    """Where the longest sample is, and what it is."""
    (index,) = run(f"SELECT file FROM parts WHERE longest = {tokens} LIMIT 1")
    query = queries[int(index[0])]
    found = run(
        f"SELECT row_number, v_width, v_height, frames FROM ({query.sql(numbered=True)}) "
        f"WHERE tokens = {tokens} LIMIT 1"
    )
    row, width, height, frames = (int(column[0]) for column in found)
    return {"file": query.table.name, "row": row, "width": width, "height": height, "frames": frames}
