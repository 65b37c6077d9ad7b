"""SQL that turns a manifest's rows into tokens, or into the number of what is wrong with them.

    (values) -> found: the row's problem -> frames, text tokens, tokens, samples -> problem, with sequences too long

Each level is a subquery; only roles and names of our own pass from one to the next, whatever the file's columns are
called. Units of durations are judged by the first rows; a row in another unit is a problem, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from knapformer.data.grid import frames_at_rate, token_grid
from knapformer.data.tables import BROKEN, ManifestTable, Run, quoted, reading
from knapformer.errors import SpecError
from knapformer.plan.sequences import MAX_LENGTH
from knapformer.tools.advise.columns import (
    MANY_TIMES,
    ROLES,
    Columns,
    find_columns,
    missing,
    number,
    problem_cases,
)
from knapformer.tools.advise.sql import Sql
from knapformer.tools.simulate.presets import ModelShape

BYTES_PER_TEXT_TOKEN = 4
"""Bytes of a caption per token, where only the caption is known: an estimate."""

_SAMPLE = 100_000  # rows that units are judged by


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """How samples become tokens.

    Attributes:
        columns: role -> column, where the name does not tell.
        max_pixels: most pixels of a frame; larger ones are scaled down [pixels].
        max_frames: most frames of a clip.
        sample_fps: rate clips are sampled at, and rate of clips whose own is not known [frame/s].
        duration_unit: "s" or "ms"; None to judge by the column's name and values.
        text_tokens: text tokens of every sample; None for the captions', or the model's where there are none.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    max_pixels: int | None = None
    max_frames: int | None = None
    sample_fps: float | None = None
    duration_unit: str | None = None
    text_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_pixels", 1), ("max_frames", 1), ("sample_fps", 1e-3), ("text_tokens", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value <= 1e9:
                raise SpecError(f"{name} is {value}; it must be from {least:g} to 1e9")
        if self.duration_unit not in (None, "s", "ms"):
            raise SpecError(f"duration_unit is {self.duration_unit!r}; it must be 's', 'ms', or left out")


@dataclass(frozen=True, slots=True)
class Query:
    """SQL of one file.

    Attributes:
        table, columns: the file, and which of its columns mean what.
        cases: (role, problem, condition) of its rows' problems, numbered from 1; the next number is "too long".
        shape: SQL of frames, tokens, text tokens and samples.
        notes: what was assumed, in words.
    """

    table: ManifestTable
    columns: Columns
    cases: list[tuple[str, str, str]]
    shape: str
    notes: list[str]

    @classmethod
    def of(cls, run: Run, table: ManifestTable, model: ModelShape, options: ScanOptions) -> "Query":
        notes: list[str] = []
        sampled = options.sample_fps is not None
        columns = find_columns(table.columns, options.columns, file=table.name, sampled=sampled)
        with reading(table.name):
            scale, mixed = _unit(run, table, columns, options, notes)
        cases = problem_cases(columns, mixed, sampled=sampled)
        if table.is_json:
            cases.insert(0, ("line", "type", "r_line IS NOT NULL"))
        text = _text(columns, model, options, notes, table.name)
        return cls(table, columns, cases, _shape(model, scale, text, options), notes)

    def sql(self, *, numbered: bool = False) -> str:
        """Rows as (problem, frames, tokens, text_tokens, samples); `numbered`, with their numbers and raw values."""
        names = self.columns.names
        raw = f", {self.table.row} AS row_number" if numbered else ""
        raw += "".join(f", CAST({quoted(n)} AS VARCHAR) AS r_{role}" for role, n in names.items() if numbered)
        raw += f", {BROKEN} AS r_line" if self.table.is_json else ""
        raw += f", strlen(CAST({quoted(names['caption'])} AS VARCHAR)) AS v_caption" if "caption" in names else ""
        problem = "".join(f" WHEN {condition} THEN {code}" for code, (_, _, condition) in enumerate(self.cases, 1))
        return f"""
            SELECT *, CASE WHEN tokens > {MAX_LENGTH} THEN {len(self.cases) + 1} ELSE found END AS problem
            FROM (SELECT *, {self.shape}
                  FROM (SELECT *, CASE {problem} ELSE 0 END AS found
                        FROM (SELECT {_values(self.columns)}{raw} FROM {self.table.relation})))
        """


def _values(columns: Columns) -> str:
    """SQL of each role's value, `v_...`, and of whether it is missing, `m_...`."""
    known = [role for role in ROLES if role != "caption"]
    return ", ".join(
        f"{number(columns, r)} AS v_{r}, {missing(columns, r)} AS m_{r}"
        if r in columns
        else f"CAST(NULL AS DOUBLE) AS v_{r}"
        for r in known
    )


def _unit(
    run: Run, table: ManifestTable, columns: Columns, options: ScanOptions, notes: list[str]
) -> tuple[float, str | None]:
    """Seconds in a unit of the durations, and the condition for a row that is in another unit."""
    if "duration" not in columns:
        return 1.0, None
    name = columns.names["duration"]
    ending = name.lower().replace("_", " ").split()[-1]
    if options.duration_unit or ending in ("ms", "milliseconds", "s", "sec", "seconds"):
        return (1e-3 if (options.duration_unit or ending).startswith("m") else 1.0), None
    usable = "v_duration > 0 AND isfinite(v_duration)"
    median, ratio = run(
        f"SELECT median(v_duration) FILTER ({usable}), median(v_duration * v_fps / v_frames) FILTER ({usable} AND "
        f"v_frames > 1 AND v_fps > 0) FROM (SELECT {_values(columns)} FROM {table.relation} LIMIT {_SAMPLE})"
    )
    if median[0] is np.ma.masked:
        return 1.0, None
    middle = float(median[0])
    if middle >= 1000 if ratio[0] is np.ma.masked else ratio[0] > 30:
        notes.append(
            f"{table.name}: column {name!r} is taken as milliseconds (median {middle:,.0f}); "
            "if it is in seconds, say --duration-unit s"
        )
        return 1e-3, f"v_duration < {middle / MANY_TIMES!r}"
    return 1.0, f"v_duration >= 1000 AND v_duration > {middle * MANY_TIMES!r}"


def _shape(model: ModelShape, scale: float, text: str, options: ScanOptions) -> str:
    """SQL of frames, tokens, text tokens and samples of a row; NULL where a problem was found."""
    media = model.media(max_pixels=options.max_pixels, max_frames=options.max_frames)
    grid = token_grid(Sql("v_width"), Sql("v_height"), Sql("frames"), media)
    visual = " * ".join(str(side) for side in grid)
    return ", ".join(
        f"CASE WHEN found = 0 THEN CAST({value} AS BIGINT) END AS {name}"
        for name, value in (
            ("frames", _frames(scale, options)),
            ("text_tokens", text if model.text == "joint" else "0"),
            ("tokens", f"{visual} + text_tokens"),
            ("samples", "coalesce(v_count, 1)"),
        )
    )


def _frames(scale: float, options: ScanOptions) -> str:
    """SQL of a row's frames at the asked rate, or at its own, within the limit."""
    duration = Sql("v_duration") * scale
    if options.sample_fps is None:
        at_rate = frames_at_rate(duration, Sql("v_fps"))
        count = f"CASE WHEN v_frames IS NULL AND v_duration IS NOT NULL THEN {at_rate} ELSE coalesce(v_frames, 1) END"
    else:
        length = Sql(f"coalesce({duration}, v_frames / v_fps)")
        is_clip = f"coalesce(v_frames, 2) > 1 AND {length} IS NOT NULL"
        count = f"CASE WHEN {is_clip} THEN {frames_at_rate(length, options.sample_fps)} ELSE coalesce(v_frames, 1) END"
    return count if options.max_frames is None else f"least({count}, {options.max_frames})"


def _text(columns: Columns, model: ModelShape, options: ScanOptions, notes: list[str], name: str) -> str:
    """SQL of a row's text tokens."""
    if options.text_tokens is not None:
        return str(options.text_tokens)
    if "text" in columns:
        tokens = "coalesce(round(v_text), 0)"
    elif "caption" in columns:
        tokens = f"ceil(coalesce(v_caption, 0) / {BYTES_PER_TEXT_TOKEN})"
        if model.text == "joint":
            notes.append(f"{name}: text tokens are estimated from the captions, one per {BYTES_PER_TEXT_TOKEN} bytes")
    else:
        if model.text == "joint":
            notes.append(f"{name}: has no captions; each sample is given the model's {model.text_length} text tokens")
        return str(model.text_length)
    return f"least({tokens}, {model.text_length})"
