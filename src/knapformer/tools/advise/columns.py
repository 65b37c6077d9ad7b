"""Columns of a dataset manifest: which one means what, and how its values become numbers in SQL.

A *role* is what the advisor needs to know of a sample. Columns are found by common names (`ROLES`), whatever their case
and punctuation, or named by the user. A clip's frames are given, or are duration times rate; a row with neither is an
image. In text columns as in floating-point ones, NaN stands for a missing value. A value that is not usable makes its
row a *problem*: a role and what is wrong with it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knapformer.data.entry import LIMITS
from knapformer.data.tables import quoted
from knapformer.errors import DataError, SpecError

ROLES: dict[str, list[str]] = {
    role: names.split()
    for role, names in {
        "width": "width w image_width img_width video_width frame_width original_width orig_width",
        "height": "height h image_height img_height video_height frame_height original_height orig_height",
        "frames": "num_frames frames n_frames nframes nb_frames frame_count video_frames frame",
        "duration": "duration duration_s duration_sec duration_seconds seconds clip_duration clip_seconds "
        "video_duration segment_seconds duration_ms duration_milliseconds",
        "fps": "fps frame_rate framerate video_fps avg_frame_rate r_frame_rate",
        "text": "caption_tokens text_tokens num_text_tokens num_caption_tokens caption_token_count text_len "
        "caption_length text_length caption_len prompt_tokens caption_clip_tokens",
        "caption": "caption text prompt captions description",
        "count": "count repeats num_repeats",
    }.items()
}
"""Role -> names it is recognised by, best first."""

_LIMITS = {**LIMITS, "frames": LIMITS["num_frames"], "text": 1e6, "count": 1e12}
"""Largest value of each role that is believed."""

_WHOLE = ("width", "height", "frames", "count")
_REQUIRED = ("width", "height")
_MAY_BE_ZERO = ("text", "count")

MANY_TIMES = 200
"""A duration this many times another unit's is taken for the other unit (seconds, milliseconds: 1000)."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Column of each role that a file has, and whether the engine knows it as a number.

    Attributes:
        names: role -> column name.
        numeric: roles whose column has a number type; others are text to be parsed.
    """

    names: Mapping[str, str]
    numeric: frozenset[str] = frozenset()

    def __contains__(self, role: str) -> bool:
        return role in self.names


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """`["frames=n", ...]` as role -> column. Raises `SpecError` for an unknown role."""
    found: dict[str, str] = {}
    for text in texts:
        role, equals, name = text.partition("=")
        if role not in ROLES or not equals or not name or role in found:
            raise SpecError(
                f"column {text!r} cannot be read; give ROLE=NAME, each role once, with ROLE one of {', '.join(ROLES)}"
            )
        found[role] = name
    return found


def find_columns(
    available: Mapping[str, bool], overrides: Mapping[str, str], *, file: str, sampled: bool = False
) -> Columns:
    """Which column has which role.

    Args:
        available: the file's columns -> whether they are of a number type.
        overrides: role -> column, from the user; other files may lack it.
        file: name of the file, for messages.
        sampled: whether the user gave the rate at which clips are sampled.

    Raises:
        DataError: if a column that is needed is not there.
    """
    plain = {_plain(name): name for name in reversed(list(available))}  # the first of two like names
    names: dict[str, str] = {}
    for role, known in ROLES.items():
        if overrides.get(role) in available:
            names[role] = overrides[role]
        elif found := next((plain[name] for name in known if name in plain), None):
            names[role] = found
    if "text" in names:
        names.pop("caption", None)
    if missing := [role for role in _REQUIRED if role not in names]:
        raise DataError(
            f"{file}: no column for {' and '.join(missing)}; it has {listed(available)}. "
            f"Name it, e.g. --column {missing[0]}=NAME"
        )
    if "duration" in names and "frames" not in names and "fps" not in names and not sampled:
        raise DataError(
            f"{file}: column {names['duration']!r} gives durations, but there is neither a column of frame rates nor "
            "one of frame counts; give the rate clips are sampled at, --sample-fps, or name a column, --column fps=NAME"
        )
    return Columns(names, frozenset(role for role, name in names.items() if available[name]))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def listed(names: Mapping[str, bool]) -> str:
    """Names of columns for a message."""
    shown = [repr(name) for name in names][:20]
    return f"columns {', '.join(shown)}{', ...' if len(names) > 20 else ''}" if shown else "no columns"


def _value(columns: Columns, role: str) -> str:
    """SQL for what stands in a role's column: a number where the engine has one, else text without outer spaces."""
    column = quoted(columns.names[role])
    return f"CAST({column} AS DOUBLE)" if role in columns.numeric else f"trim(CAST({column} AS VARCHAR))"


def number(columns: Columns, role: str) -> str:
    """SQL for a role's value as a number; NULL where it is missing, NaN or other text. Rates may be fractions."""
    value = _value(columns, role)
    if role not in columns.numeric:
        parsed = f"TRY_CAST({value} AS DOUBLE)"
        if role == "fps":  # '30000/1001', as media tools print it
            top, bottom = (f"TRY_CAST(split_part({value}, '/', {n}) AS DOUBLE)" for n in (1, 2))
            parsed = f"CASE WHEN contains({value}, '/') THEN {top} / nullif({bottom}, 0) ELSE {parsed} END"
        value = parsed
    return f"nullif({value}, CAST('NaN' AS DOUBLE))"


def missing(columns: Columns, role: str) -> str:
    """SQL for whether a role has no value: empty, or NaN, which tables of floating-point columns use for it."""
    value = _value(columns, role)
    if role in columns.numeric:
        return f"({value} IS NULL OR isnan({value}))"
    return f"lower(coalesce({value}, '')) IN ('', 'nan', 'null', 'none')"


PROBLEMS = {
    "missing": "is missing",
    "type": "is not a number",
    "infinite": "is not finite",
    "range": "is out of range",
    "whole": "is not a whole number",
    "unit": "is of another unit (seconds, milliseconds) than the rest",
    "rate": "is no frame rate, which this clip needs",
    "long": "makes a sequence of over 2^31 tokens",
}


def problem_cases(columns: Columns, unit: str | None, *, sampled: bool) -> list[tuple[str, str, str]]:
    """(role, problem, SQL condition) in the order they are tried; the first that holds is the row's problem.

    Args:
        columns: the file's columns.
        unit: SQL condition for a duration in another unit than its column's; None not to look.
        sampled: whether the user gave the rate at which clips are sampled.
    """
    cases: list[tuple[str, str, str]] = []
    for role in (r for r in ROLES if r in columns and r != "caption"):
        value, absent = f"v_{role}", f"m_{role}"
        if role in (*_REQUIRED, "count"):
            cases.append((role, "missing", absent))
        cases.append((role, "type", f"{value} IS NULL AND NOT {absent}"))
        cases.append((role, "infinite", f"isinf({value})"))
        least = f"{value} < 0" if role in _MAY_BE_ZERO else f"{value} <= 0"
        cases.append((role, "range", f"{least} OR {value} > {_LIMITS[role]:.0f}"))
        if role in _WHOLE:
            cases.append((role, "whole", f"{value} <> floor({value})"))
    return cases + _clip_cases(columns, unit, sampled=sampled)


def _clip_cases(columns: Columns, unit: str | None, *, sampled: bool) -> list[tuple[str, str, str]]:
    """Problems of rows that are clips but do not say how many frames they have."""
    cases: list[tuple[str, str, str]] = []
    if unit and "duration" in columns:
        cases.append(("duration", "unit", f"v_frames IS NULL AND {unit}"))
    if "fps" in columns:
        timed = "v_frames IS NULL AND v_duration IS NOT NULL"
        needs_rate = "v_frames > 1" if sampled else timed
        cases.append(("fps", "rate", f"v_fps IS NULL AND {needs_rate}"))
        if length := next((role for role in ("duration", "frames") if role in columns), None):
            cases.append((length, "missing", "v_frames IS NULL AND v_duration IS NULL AND v_fps IS NOT NULL"))
    return cases


def allowed(role: str) -> str:
    """What values a role takes, in words."""
    least = "0" if role in _MAY_BE_ZERO else "1" if role in _WHOLE else "above 0"
    return f"{'a whole number ' if role in _WHOLE else ''}{least} to {_LIMITS[role]:,.0f}"
