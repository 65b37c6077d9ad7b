"""A profile: what a transformer layer was measured to cost on a device, laws fitted to it, and how far to trust them.

For a pack of sequences of L tokens with H heads each, every phase of a layer is modelled as

    step + sequence * sequences + token * sum(L) + sum over sequences of  H * L * row(L)

    two_term   row(L) = per_qk_pair * L, no constants: the paper's law, with `gamma` the time of an attention FLOP
               over that of a token-wise one
    terms      row(L) = per_qk_pair * L
    table      row(L) interpolated in a table that never falls, for kernels whose speed depends on the length

Phases: `forward` keeps nothing for backward (as under activation checkpointing), `recompute` is the forward pass that
does, `backward` follows it. So a checkpointed layer costs all three, another one the last two.

`knapformer calibrate` writes profiles, planners read them (`cost_model`: whole ticks). Planners price rows by
`per_qk_pair * L` and so take the prices of `terms`, also where `table` predicts better.
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from knapformer import files
from knapformer.errors import CalibrationError
from knapformer.plan.cost import TICKS_PER_SECOND, CostModel

SCHEMA = 2
PHASES = ("forward", "recompute", "backward")
"""The passes of a checkpointed layer."""
PLAIN = ("recompute", "backward")
"""The passes of a layer that is not checkpointed."""
FITS = ("two_term", "terms", "table")

SHIPPED = Path(__file__).parent / "profiles"

Floats = NDArray[np.float64]


def _check(holder: object, *names: str, least: float = 0) -> None:
    for name in names:
        value = getattr(holder, name)
        if not least <= value < math.inf:
            raise CalibrationError(f"{name} is {value!r}; it must be a finite number of at least {least}")


def _check_keys(holder: object, wanted: Collection[str], *names: str) -> None:
    for name in names:
        if missing := set(wanted) - set(getattr(holder, name)):
            raise CalibrationError(f"{name} has no {', '.join(sorted(missing))}; it must have {', '.join(wanted)}")


def _rises(values: Sequence[float], *, strictly: bool = False) -> bool:
    steps = np.diff(values)
    return bool(np.isfinite(steps).all() and (steps > 0 if strictly else steps >= 0).all())


@dataclass(frozen=True, slots=True)
class Terms:
    """Prices of one phase of one layer.

    Attributes:
        token: of a token's token-wise work [s].
        per_qk_pair: of one attention row against one key [s]; 0 where a table says what rows cost.
        sequence: of having a sequence [s].
        step: of running the layer at all [s].
        lengths, row: table of the time of one attention row [s] in sequences of these lengths; empty for none.
    """

    token: float
    per_qk_pair: float = 0.0
    sequence: float = 0.0
    step: float = 0.0
    lengths: tuple[int, ...] = ()
    row: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "token", "per_qk_pair", "sequence", "step")
        if len(self.lengths) != len(self.row) or not _rises((0, *self.lengths), strictly=True):
            raise CalibrationError(f"lengths are {self.lengths}; expected {len(self.row)} rising ones, as 'row' has")
        if not _rises((0.0, *self.row)):
            raise CalibrationError(f"row is {self.row}; expected finite times that do not fall with the length")

    def row_seconds(self, length: ArrayLike) -> Floats:
        """Time of one attention row in sequences of `length` tokens [s]: linear between entries of the table.

        Outside of the table the time per row and key is that of its nearest entry.
        """
        length = np.asarray(length, dtype=np.float64)
        if not self.lengths:
            return self.per_qk_pair * length
        known = np.asarray(self.lengths, dtype=np.float64)
        inside = np.clip(length, known[0], known[-1])
        return np.interp(inside, known, self.row) * (length / inside)

    def token_seconds(self, tokens: ArrayLike, sequences: ArrayLike = 0) -> Floats:
        """Everything but attention, on ranks with `tokens` and shards of `sequences`, and the layer's constant [s]."""
        return self.step + self.token * np.asarray(tokens) + self.sequence * np.asarray(sequences, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Fit:
    """One law, fitted to every phase, and its error on packs that it was not fitted to.

    Attributes:
        phases: prices by phase.
        gamma: time of an attention FLOP over that of a token-wise one, over the passes of a plain layer.
        mean_error, worst_error: |modelled / measured - 1| of all three phases together, over the held-out packs.
        phase_error: mean error of each phase alone.
    """

    phases: Mapping[str, Terms]
    gamma: float
    mean_error: float
    worst_error: float
    phase_error: Mapping[str, float]

    def __post_init__(self) -> None:
        _check(self, "gamma", "mean_error", "worst_error")
        _check_keys(self, PHASES, "phases", "phase_error")


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one phase: the median of the faster half of its runs, and a 95 % interval of that (bootstrap) [s].

    The faster half, because what disturbs a run on a shared machine only ever adds time.
    """

    seconds: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check(self, "seconds", "low", "high")


@dataclass(frozen=True, slots=True)
class MeasuredPack:
    """Sequences that were run through a layer together, and how long that took.

    Attributes:
        lengths: of its sequences [tokens].
        held_out: whether it was kept from the fits.
        runs: how often it was run.
        layer: time of one layer by phase.
        attention: time of the attention in it by phase.
    """

    lengths: tuple[int, ...]
    held_out: bool
    runs: int
    layer: Mapping[str, Timing]
    attention: Mapping[str, Timing]

    def __post_init__(self) -> None:
        _check(self, "runs", least=1)
        _check_keys(self, PHASES, "layer", "attention")
        if min(self.lengths, default=1) < 1:
            raise CalibrationError(f"lengths are {self.lengths}; each must be at least 1")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What was measured.

    Attributes:
        block: "dit", "mmdit", or the import path of the user's module.
        d_model, num_heads, head_dim, mlp_ratio: of its layers.
        num_layers: layers measured together; all times are per layer.
        dtype: of weights and activations.
    """

    block: str
    d_model: int
    num_heads: int
    head_dim: int
    mlp_ratio: float
    num_layers: int
    dtype: str

    def __post_init__(self) -> None:
        _check(self, "d_model", "num_heads", "head_dim", "num_layers", least=1)
        _check(self, "mlp_ratio")


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOP of one layer in one phase, counted on the meta device: per token, per row and key, per sequence."""

    token: float
    per_qk_pair: float
    sequence: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "token", "per_qk_pair", "sequence")


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of one layer on one device.

    Attributes:
        name: how documents call it.
        device: "type" ("cpu", "cuda"), "name" and, on CPU, "threads".
        versions: of packages.
        kernel: attention kernel.
        shape: of the layer.
        flops: FLOP by phase.
        fits: the laws, by name of `FITS`.
        recommended: the law to predict with.
        additivity: how far a mixed pack is from the sum of its sequences measured alone, relative, all phases together,
            mean over packs.
        samples: what was measured.
    """

    name: str
    device: Mapping[str, Any]
    versions: Mapping[str, Any]
    kernel: str
    shape: LayerShape
    flops: Mapping[str, Flops]
    fits: Mapping[str, Fit]
    recommended: str
    additivity: float
    samples: tuple[MeasuredPack, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _check(self, "additivity")
        _check_keys(self, PHASES, "flops")
        _check_keys(self, FITS, "fits")
        if self.recommended not in FITS:
            raise CalibrationError(f"recommended is {self.recommended!r}; expected one of {', '.join(FITS)}")

    @property
    def gamma(self) -> float:
        """Time of an attention FLOP over that of a token-wise one, by the two-term law."""
        return self.fits["two_term"].gamma

    def terms(self, phase: str, fit: str | None = None) -> Terms:
        """Prices of a phase, by the recommended law or another one of `FITS`."""
        if phase not in PHASES or (fit or self.recommended) not in FITS:
            raise CalibrationError(f"no phase {phase!r} of fit {fit!r}; phases are {PHASES}, fits are {FITS}")
        return self.fits[fit or self.recommended].phases[phase]

    def seconds(self, lengths: ArrayLike, phase: str | Sequence[str] = PHASES, *, fit: str | None = None) -> float:
        """Predicted time of one layer for one rank that has these whole sequences [s], over one phase or several."""
        lengths = np.asarray(lengths, dtype=np.float64)
        rows = self.shape.num_heads * lengths
        phases = [phase] if isinstance(phase, str) else phase
        total = 0.0
        for terms in (self.terms(p, fit) for p in phases):
            total += float(terms.token_seconds(lengths.sum(), len(lengths)) + rows @ terms.row_seconds(lengths))
        return total

    def cost_model(self, phases: Sequence[str] = PLAIN, *, fit: str = "terms") -> CostModel:
        """Prices in whole ticks for planners: the mean over `phases`.

        The mean, because traffic crosses once in each pass and planners weigh it against the work of one pass.
        """
        prices = [self.terms(phase, fit) for phase in phases]
        ticks = TICKS_PER_SECOND / len(prices)
        return CostModel(
            num_heads=self.shape.num_heads,
            token=round(sum(p.token for p in prices) * ticks),
            per_qk_pair=round(sum(p.per_qk_pair for p in prices) * ticks),
            sequence=round(sum(p.sequence for p in prices) * ticks),
            head_dim=self.shape.head_dim,
        )

    # -- files ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        return {"schema": SCHEMA, "kind": "profile", **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the profile; its folder is made. Raises `CalibrationError` if it cannot be written."""
        return files.write_json(path, self.to_json(), indent=1, error=CalibrationError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a profile from a file, or one that ships with the library by its name (`shipped_profiles`).

        Raises:
            CalibrationError: naming file, key and value.
        """
        file = Path(path)
        if not file.exists() and str(path) in shipped_profiles():
            file = SHIPPED / f"{path}.json"
        if not file.is_file():
            raise CalibrationError(
                f"cannot read the profile {str(path)!r}: there is no such file; `knapformer calibrate` writes one, and "
                f"{', '.join(shipped_profiles()) or 'none'} ship with the library"
            )
        return cls.from_json(files.read_json(file, dict[str, Any], error=CalibrationError), str(file))

    @classmethod
    def from_json(cls, data: object, source: str = "profile") -> Self:
        """Read `to_json`'s data; `source` names it in errors."""
        head = files.convert(data, _Head, source, error=CalibrationError)
        if head != _Head(SCHEMA, "profile"):
            raise CalibrationError(
                f"{source}: is a {head.kind!r} of schema {head.schema}; expected a 'profile' of schema {SCHEMA}; "
                "write it again with `knapformer calibrate`"
            )
        profile = files.convert(data, cls, source, error=CalibrationError)
        if missing := _missing(asdict(profile), data):
            raise CalibrationError(f"{source}: {missing.removeprefix('.')} is missing; a profile has everything")
        return profile


@dataclass(frozen=True, slots=True)
class _Head:
    schema: int
    kind: str


def _missing(wanted: Any, given: Any, place: str = "") -> str:
    """Where the first value stands that is wanted and not given: fields with a default may not be left out of files."""
    if isinstance(wanted, (list, tuple)):
        wanted = dict(enumerate(wanted))
    for key, value in wanted.items() if isinstance(wanted, Mapping) else ():
        if isinstance(given, Mapping) and key not in given:
            return f"{place}.{key}"
        if found := _missing(value, given[key], f"{place}.{key}"):
            return found
    return ""


def shipped_profiles() -> list[str]:
    """Names of the profiles that ship with the library."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))
