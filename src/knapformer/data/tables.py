"""Tables of samples by DuckDB: Parquet, CSV or JSON lines, plain or gzipped, told apart by content.

Values of CSV and JSON arrive as text and are parsed later, so that one bad value costs one row. JSON lines are read as
lines for the same reason. Rows are numbered from 1 as a reader of the file would: rows of Parquet, data rows of a CSV
(neither its header nor empty lines count), lines of JSON lines.

The engine works within `MEMORY` and puts what does not fit into a temporary folder.
"""

import gzip
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knapformer.errors import BackendUnavailableError, DataError

MEMORY = "1GB"
BROKEN = "__broken"
"""Column of JSON relations: the line where it is no JSON object, else NULL."""

_NUMBERS = {
    *("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT"),
    *("UHUGEINT", "FLOAT", "DOUBLE", "DECIMAL"),
}

Run = Callable[[str], list[Any]]
"""Runs SQL and gives the result's columns as arrays."""


@dataclass(frozen=True, slots=True)
class ManifestTable:
    """A file as the engine sees it.

    Attributes:
        name: its path.
        relation: what stands in FROM.
        row: SQL for the number of a row.
        columns: its columns -> whether they are of a number type.
        is_json: whether it has a column `BROKEN`.
    """

    name: str
    relation: str
    row: str
    columns: Mapping[str, bool]
    is_json: bool = False


@contextmanager
def open_engine() -> Iterator[Run]:
    """An engine in memory. Raises `BackendUnavailableError` without DuckDB."""
    try:
        import duckdb
    except ImportError as error:
        raise BackendUnavailableError(
            "reading manifests needs duckdb; install it with: pip install 'knapformer[advise]'"
        ) from error
    with tempfile.TemporaryDirectory() as spill, duckdb.connect() as connection:
        connection.execute(f"SET memory_limit = '{MEMORY}'")
        connection.execute(f"SET temp_directory = {literal(spill)}")

        def run(sql: str) -> list[Any]:
            return list(connection.execute(sql).fetchnumpy().values())

        yield run


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns the engine's errors into errors of the file."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise DataError(f"{name}: cannot be read: {str(error).splitlines()[0]}") from error


def open_table(run: Run, path: Path) -> ManifestTable:
    """Tell the format by content, whatever the name says, and list the columns."""
    name = str(path)
    head, packed = _head(path)
    options = ", compression = 'gzip'" if packed else ""
    if not head.strip():
        raise DataError(f"{name}: the file is empty; a manifest needs columns of widths and heights, and rows")
    if head.startswith(b"PAR1"):
        relation, row = f"read_parquet({literal(name)}, file_row_number = true)", "file_row_number + 1"
    elif path.suffix.lower() in (".parquet", ".pq"):
        raise DataError(f"{name}: is named Parquet but does not begin with 'PAR1'; is it cut short or another format?")
    elif head.lstrip().startswith(b"{"):
        return _open_json(run, name, options)
    elif b"\0" in head:
        raise DataError(f"{name}: is none of Parquet, CSV and JSON lines, but some other binary format")
    else:
        parsing = f"all_varchar = true, header = true, null_padding = true, strict_mode = false{options}"
        relation, row = f"read_csv({literal(name)}, {parsing})", "row_number() OVER ()"
    with reading(name):
        names, types = run(f"DESCRIBE SELECT * FROM {relation}")[:2]
    columns = {str(c): str(t).split("(")[0] in _NUMBERS for c, t in zip(names, types, strict=True)}
    columns.pop("file_row_number", None)
    return ManifestTable(name, relation, row, columns)


def _open_json(run: Run, name: str, options: str) -> ManifestTable:
    parsing = "header = false, auto_detect = false, delim = '\x01', quote = '', escape = '', strict_mode = false"
    lines = (
        "(SELECT row_number() OVER () AS __line, __text, CASE WHEN json_valid(__text) "
        "THEN json_type(__text) = 'OBJECT' "
        f"ELSE false END AS __usable FROM read_csv({literal(name)}, columns = {{'__text': 'VARCHAR'}}, "
        f"{parsing}{options}))"
    )
    with reading(name):
        keys = run(f"SELECT DISTINCT unnest(json_keys(__text)) FROM {lines} WHERE __usable")[0]
    columns = {str(key): False for key in sorted(keys)}
    values = "".join(f", CASE WHEN __usable THEN __text ->> {_pointer(key)} END AS {quoted(key)}" for key in columns)
    broken = f"CASE WHEN NOT __usable THEN __text END AS {BROKEN}"
    relation = f"(SELECT __line, {broken}{values} FROM {lines} WHERE trim(coalesce(__text, '')) <> '')"
    return ManifestTable(name, relation, "__line", columns, is_json=True)


def read_columns(run: Run, table: ManifestTable) -> tuple[list[str], list[list[Any]]]:
    """Names and values of all columns; None for what is empty."""
    with reading(table.name):
        found = run(f"SELECT {', '.join(map(quoted, table.columns))} FROM {table.relation}")
    return list(table.columns), [column.tolist() for column in found]


def quoted(name: str) -> str:
    """A column name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string in SQL."""
    return "'" + text.replace("'", "''") + "'"


def _pointer(key: str) -> str:
    return literal("/" + key.replace("~", "~0").replace("/", "~1"))


def _head(path: Path) -> tuple[bytes, bool]:
    """The file's first bytes, unpacked, and whether it is gzipped."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            return file.read(4096), packed
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
