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

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from knapformer.data.reading import Reader
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


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one phase: the median of the faster half of its runs, and a 95 % interval of that (bootstrap) [s].

    The faster half, because what disturbs a run on a shared machine only ever adds time.
    """

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured pack.

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


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOP of one layer in one phase, counted on the meta device: per token, per row and key, per sequence."""

    token: float
    per_qk_pair: float
    sequence: float = 0.0


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
    samples: tuple[Sample, ...] = field(default=(), repr=False)

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
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise CalibrationError(f"cannot write the profile {str(target)!r}: {error}") from error
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a profile from a file, or one that ships with the library by its name (`shipped_profiles`).

        Raises:
            CalibrationError: naming file, key and value.
        """
        file = Path(path)
        if not file.exists() and str(path) in shipped_profiles():
            file = SHIPPED / f"{path}.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CalibrationError(
                f"cannot read the profile {str(path)!r}: {error.strerror or error}; `knapformer calibrate` writes one, "
                f"and {', '.join(shipped_profiles()) or 'none'} ship with the library"
            ) from error
        except ValueError as error:
            raise CalibrationError(f"{file}: not JSON ({error})") from error
        return cls.from_json(data, str(file))

    @classmethod
    def from_json(cls, data: object, source: str = "profile") -> Self:
        """Read `to_json`'s data; `source` names it in errors."""
        top = Reader(data, source)
        if top.get("kind", str) != "profile" or top.get("schema", int) != SCHEMA:
            raise top.error("schema", data, f"a profile of schema {SCHEMA}; write it again with `knapformer calibrate`")
        shape, flops, fits = top.child("shape"), top.child("flops"), top.child("fits")
        recommended = top.get("recommended", str)
        if recommended not in FITS:
            raise top.error("recommended", recommended, f"one of {', '.join(FITS)}")
        return cls(
            name=top.get("name", str),
            device=top.get("device", dict),
            versions=top.get("versions", dict),
            kernel=top.get("kernel", str),
            shape=LayerShape(
                block=shape.get("block", str),
                **{name: shape.whole(name) for name in ("d_model", "num_heads", "head_dim", "num_layers")},
                mlp_ratio=shape.number("mlp_ratio"),
                dtype=shape.get("dtype", str),
            ),
            flops={phase: flops.child(phase).numbers(Flops) for phase in PHASES},
            fits={name: _fit(fits.child(name)) for name in FITS},
            recommended=recommended,
            additivity=top.number("additivity"),
            samples=tuple(_sample(sample) for sample in top.children("samples")),
        )


def shipped_profiles() -> list[str]:
    """Names of the profiles that ship with the library."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def _fit(data: Reader) -> Fit:
    phases, errors = data.child("phases"), data.child("phase_error")
    return Fit(
        phases={phase: _terms(phases.child(phase)) for phase in PHASES},
        phase_error={phase: errors.number(phase) for phase in PHASES},
        **{name: data.number(name) for name in ("gamma", "mean_error", "worst_error")},
    )


def _terms(data: Reader) -> Terms:
    lengths, row = data.column("lengths", whole=True), data.column("row")
    if len(lengths) != len(row) or sorted(set(lengths)) != list(lengths):
        raise data.error("lengths", lengths, f"{len(row)} rising lengths, one for each entry of 'row'")
    if sorted(row) != list(row):
        raise data.error("row", row, "times that do not fall with the length")
    prices = {name: data.number(name) for name in ("token", "per_qk_pair", "sequence", "step")}
    return Terms(**prices, lengths=tuple(int(length) for length in lengths), row=tuple(row))


def _sample(data: Reader) -> Sample:
    layer, attention = data.child("layer"), data.child("attention")
    return Sample(
        lengths=tuple(int(length) for length in data.column("lengths", whole=True)),
        held_out=data.get("held_out", bool),
        runs=data.whole("runs"),
        layer={phase: layer.child(phase).numbers(Timing) for phase in PHASES},
        attention={phase: attention.child(phase).numbers(Timing) for phase in PHASES},
    )
