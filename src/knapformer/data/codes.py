"""Data codes, the KnapFormer paper's one-line description of a joint training mix, and traces made from them.

`g8b4i256f1s0,g4b1i512f85s1` reads: 8 ranks (g) load 4 samples each (b) at 256x256 pixels (i) of 1 frame (f), and 4
ranks load one 512x512 clip of 85 frames. `s1` marks smooth video, whose frames the VAE also compresses in time; with
`s0` every frame counts in full (images, key frames). A sample then has

    visual tokens = floor( floor(i / 16)**2 * latent_frames * aspect ),   latent_frames = f        for s0
                                                                          max(1, floor(f / 3.4)) for s1

where `aspect`, drawn once per rank and step, stands for the spread of aspect ratios in a resolution bucket, and 3.4
is a VAE that turns 17 frames into 5. That is the paper's rule (`DataCode.paper_tokens`), which traces made from codes
keep; real pictures and clips follow `knapformer.data.grid.token_grid`. Text length is uniform.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knapformer.data.draws import fractions
from knapformer.data.trace import Trace, TraceStep
from knapformer.errors import SpecError

_FIELDS = (("g", "ranks"), ("b", "batch"), ("i", "resolution"), ("f", "frames"), ("s", "the video flag"))
_NUMBER = re.compile(r"[0-9]{1,9}")
_EXAMPLE = "expected terms like 'g8b4i256f1s0' (ranks, batch, resolution, frames, video flag) joined by ','"


@dataclass(frozen=True, slots=True)
class DataCode:
    """One term of a data-code string.

    Attributes:
        ranks: ranks that load this kind of data.
        batch: samples each of them loads per step.
        resolution: side of the (nominally square) picture [pixels].
        frames: frames of a sample before the VAE.
        video: whether the VAE compresses the frames in time.
    """

    ranks: int
    batch: int
    resolution: int
    frames: int
    video: bool

    def __post_init__(self) -> None:
        for name in ("ranks", "batch", "resolution", "frames"):
            if getattr(self, name) < 1:
                raise SpecError(f"data code '{self}': {name} is {getattr(self, name)}; it must be at least 1")

    def paper_tokens(self, *, vae_spatial: float = 16, vae_temporal: float = 3.4) -> int:
        """Visual tokens of one square sample by the paper's rule, before the aspect ratio is applied [tokens]."""
        side = int(self.resolution / vae_spatial)
        if side < 1:
            raise SpecError(
                f"data code '{self}': {self.resolution} pixels give no token at one token per {vae_spatial} pixels; "
                f"use a resolution of at least {vae_spatial}"
            )
        # The small addend keeps quotients such as 33 / 2.2, which computes to just below 15, at the whole number.
        latent_frames = max(1, int(self.frames / vae_temporal + 1e-9)) if self.video else self.frames
        return side * side * latent_frames

    def __str__(self) -> str:
        return f"g{self.ranks}b{self.batch}i{self.resolution}f{self.frames}s{int(self.video)}"


def parse_data_codes(text: str) -> tuple[DataCode, ...]:
    """Read a data-code string. Raises `SpecError` that names the column (from 1) of what it cannot read."""
    codes: list[DataCode] = []
    at = 0
    while True:
        start = at
        values: list[int] = []
        for letter, meaning in _FIELDS:
            number = _NUMBER.match(text, at + 1) if text.startswith(letter, at) else None
            if number is None:
                raise _unreadable(text, at, f"{letter!r} and the number for {meaning}")
            values.append(int(number[0]))
            if values[-1] > 1 if letter == "s" else values[-1] < 1:
                allowed = "0 (images, key frames) or 1 (video)" if letter == "s" else "at least 1"
                raise SpecError(
                    f"data code {text!r}: {letter + number[0]!r} at column {at + 1}: {meaning} must be {allowed}"
                )
            at = number.end()
        if at < len(text) and text[at] != ",":
            raise _unreadable(text, at, f"',' or the end after {text[start:at]!r}")
        codes.append(DataCode(*values[:4], video=bool(values[4])))
        if at == len(text):
            return tuple(codes)
        at += 1


def _unreadable(text: str, at: int, wanted: str) -> SpecError:
    bad = text[at:].split(",", 1)[0]
    what = repr(bad) if bad else "','" if at < len(text) else "the end"
    return SpecError(f"data code {text!r}: cannot read {what} at column {at + 1}, where {wanted} should be; {_EXAMPLE}")


def generate_trace(
    codes: str | Sequence[DataCode],
    *,
    world_size: int | None = None,
    num_steps: int = 20,
    seed: int = 0,
    vae_spatial: float = 16,
    vae_temporal: float = 3.4,
    max_text: int = 392,
    aspect: tuple[float, float] = (0.96, 1.04),
) -> Trace:
    """Draw the lengths that ranks training on `codes` would see; joint text and visual tokens, as in FLUX.

    Each rank and step depends on `(seed, step, rank)` alone: a longer trace or a larger world begins with the shorter
    or smaller one.

    Args:
        codes: a data-code string, or what `parse_data_codes` made of it. Ranks take the terms in order.
        world_size: a multiple of the ranks the codes name (the mix is repeated); by default that number.
        num_steps: steps to draw.
        seed: any integer.
        vae_spatial: pixels per token along one side.
        vae_temporal: frames per latent frame of `s1` codes.
        max_text: longest text; lengths are uniform in 0..max_text [tokens].
        aspect: range of the factor on the visual tokens.

    Raises:
        SpecError: on a bad code, a world size that is no multiple, or a setting out of range.
    """
    terms = parse_data_codes(codes) if isinstance(codes, str) else tuple(codes)
    if not terms:
        raise SpecError(f"no data code given; {_EXAMPLE}")
    text = ",".join(map(str, terms))
    named = sum(code.ranks for code in terms)
    world_size = named if world_size is None else world_size
    if world_size < 1 or world_size % named:
        raise SpecError(
            f"data codes {text!r} name {named} ranks, so the world size must be a multiple of {named}, got "
            f"{world_size}; choose {max(1, round(world_size / named)) * named} or change the codes"
        )
    if num_steps < 1:
        raise SpecError(f"num_steps is {num_steps}; a trace has at least 1 step")
    low, high = aspect
    if not 0 < low <= high:
        raise SpecError(f"aspect is {aspect}; it must be a range (low, high) with 0 < low <= high")
    if max_text < 0:
        raise SpecError(f"max_text is {max_text}; it must be 0 or more")

    copies = world_size // named
    square = [code.paper_tokens(vae_spatial=vae_spatial, vae_temporal=vae_temporal) for code in terms]
    ranks = [code.ranks for code in terms]
    tokens = np.tile(np.repeat(square, ranks), copies)  # (world_size,)
    counts = np.tile(np.repeat([code.batch for code in terms], ranks), copies)
    cuts = np.cumsum(counts)[:-1]
    steps: list[TraceStep] = []
    for step in range(num_steps):
        factor = low + (high - low) * fractions(world_size, seed=seed, stream="data code aspect", index=step)
        visual = np.maximum(1, np.floor(tokens * factor)).astype(np.int64)
        drawn = fractions(int(counts.sum()), seed=seed, stream="data code text", index=step)
        text_lens = np.floor(drawn * (max_text + 1)).astype(np.int64)
        seq_lens = np.repeat(visual, counts) + text_lens
        steps.append(TraceStep(tuple(np.split(seq_lens, cuts)), tuple(np.split(text_lens, cuts))))
    meta = {"kind": "generated", "data_codes": text, "seed": seed, "text": "joint"}
    return Trace(text, world_size, tuple(steps), meta | {"d_model": 3072, "heads": 24, "ranks_per_node": 8})
