"""Profiles and samples whose true prices are known."""

from collections.abc import Callable

import numpy as np

from knapformer.data.profile import Flops, LayerShape, MeasuredPack, Profile, Terms, Timing
from knapformer.tools.calibrate.fitting import additivity, fit_laws

HEADS = 3
FLOPS = {"forward": Flops(1000.0, 10.0), "recompute": Flops(1000.0, 10.0), "backward": Flops(2000.0, 20.0)}
TRUE = {
    "forward": Terms(2e-5, 3e-9, 1e-4, 2e-3),
    "recompute": Terms(2.5e-5, 4e-9, 0.0, 3e-3),
    "backward": Terms(4e-5, 9e-9, 2e-4, 0.0),
}
PACKS = [(n,) for n in (64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096)]
PACKS += [(64,) * 7, (91,) * 5, (512, 512), (362,) * 3, (64, 1024, 256), (91, 724, 1448), (128, 128, 2048)]


def samples_of(row: Callable[[str, float], float] | None = None, noise: float = 0.0) -> list[MeasuredPack]:
    """Samples of `TRUE`, or with another time per row (phase, length); packs with a length halfway are held out."""
    rng = np.random.default_rng(0)

    def timing(seconds: float) -> Timing:
        seconds *= float(np.exp(noise * rng.standard_normal()))
        return Timing(seconds, seconds * 0.9, seconds * 1.1)

    samples = []
    for lengths in PACKS:
        layer, attention = {}, {}
        for phase, terms in TRUE.items():
            price = (lambda n, p=phase: row(p, n)) if row else (lambda n, t=terms: t.per_qk_pair * n)
            rows = sum(HEADS * n * price(n) for n in lengths)
            layer[phase] = timing(float(terms.token_seconds(sum(lengths), len(lengths))) + rows)
            attention[phase] = timing(rows)
        held_out = any(n in (91, 181, 362, 724, 1448, 2896) for n in lengths)
        samples.append(MeasuredPack(lengths, held_out, 5, layer, attention))
    return samples


def profile_of(samples: list[MeasuredPack] | None = None) -> Profile:
    """A whole profile, fitted to samples of `TRUE`."""
    samples = samples or samples_of()
    fits, recommended = fit_laws(samples, HEADS, FLOPS)
    return Profile(
        name="synthetic",
        device={"type": "cpu", "name": "paper", "threads": 1},
        versions={"torch": "0"},
        kernel="sdpa_loop",
        shape=LayerShape("dit", 48, HEADS, 16, 4.0, 1, "float32"),
        flops=FLOPS,
        fits=fits,
        recommended=recommended,
        additivity=additivity(samples, dict(fits["terms"].phases)),
        samples=tuple(samples),
    )
