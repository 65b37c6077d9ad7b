"""From measured packs to a profile's laws: small least-squares problems with prices that cannot be negative.

All fits minimise the *relative* error, sum of (modelled / measured - 1)^2, so that a pack of 1 ms counts as much as one
of 1 s. There are four prices at most, so the best non-negative ones are found by solving for every subset of them.

    two_term   token, per_qk_pair                        of the layer's time
    terms      token, per_qk_pair, sequence, step        of the layer's time
    table      row(L): attention's own time per row, made monotone; then token, sequence, step of the rest

Each law is fitted to the packs that are not held out, for each phase on its own.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from knapformer.data.profile import FITS, PHASES, PLAIN, Fit, Floats, Flops, MeasuredPack, Terms
from knapformer.errors import CalibrationError
from knapformer.train.least_squares import non_negative

WORTH = 0.9
"""A law with more freedom is recommended only if its error is below this share of the simpler one's, and by 0.1 %."""


def fit_laws(samples: Sequence[MeasuredPack], num_heads: int, flops: dict[str, Flops]) -> tuple[dict[str, Fit], str]:
    """Fit all laws.

    Args:
        samples: measured packs, some of them held out.
        num_heads: of the layer.
        flops: of the layer by phase, for gamma.

    Returns:
        The laws by name, and the name of the one to use.

    Raises:
        CalibrationError: if the packs cannot tell the prices apart, or measured times make no sense.
    """
    fitted, held_out = [s for s in samples if not s.held_out], [s for s in samples if s.held_out]
    _check(fitted, held_out)
    prices = {name: {phase: _fit(name, fitted, phase, num_heads) for phase in PHASES} for name in FITS}
    longest = max(length for s in fitted for length in s.lengths)
    fits = {}
    for name, phases in prices.items():
        ratio = {p: relative_errors(held_out, {p: phases[p]}, num_heads) for p in PHASES}
        total = relative_errors(held_out, phases, num_heads)
        fits[name] = Fit(
            phases=phases,
            gamma=_gamma(phases, flops, longest),
            mean_error=float(total.mean()),
            worst_error=float(total.max()),
            phase_error={p: float(error.mean()) for p, error in ratio.items()},
        )
    recommended = FITS[0]
    for name in FITS[1:]:
        if fits[name].mean_error < WORTH * fits[recommended].mean_error - 1e-3:
            recommended = name
    return fits, recommended


def relative_errors(samples: Sequence[MeasuredPack], phases: dict[str, Terms], num_heads: int) -> Floats:
    """|modelled / measured - 1| of each sample, over the given phases together."""
    measured = np.array([sum(s.layer[p].seconds for p in phases) for s in samples])
    modelled = np.array([sum(_modelled(s, terms, num_heads) for terms in phases.values()) for s in samples])
    return np.abs(modelled / measured - 1)


def additivity(samples: Sequence[MeasuredPack], terms: dict[str, Terms]) -> float:
    """Mean over packs of several lengths of |pack / sum of its sequences measured alone - 1|.

    Sequences that were not measured alone make a pack unusable for this. The layer's constant is in each of them, and
    is taken off but once. Raises `CalibrationError` if no pack is usable.
    """

    def seconds(sample: MeasuredPack) -> float:
        return sum(sample.layer[p].seconds for p in PHASES)

    step = sum(terms[p].step for p in PHASES)
    alone = {s.lengths[0]: seconds(s) for s in samples if len(s.lengths) == 1}
    deviations = [
        abs(seconds(s) / (sum(alone[length] for length in s.lengths) - step * (len(s.lengths) - 1)) - 1)
        for s in samples
        if len(set(s.lengths)) > 1 and alone.keys() >= set(s.lengths)
    ]
    if not deviations:
        raise CalibrationError("no pack of several lengths, each of them also measured alone, to test additivity on")
    return float(np.mean(deviations))


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The rising sequence nearest to `values` in weighted squares: neighbours that fall are pooled to their mean."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, entries
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, u, m), (b, v, n) = pools[-2:]
            pools[-2:] = [((a * u + b * v) / (u + v), u + v, m + n)]
    return np.repeat([p[0] for p in pools], [p[2] for p in pools])


# -- the laws ---------------------------------------------------------------------------------------------------------


_PRICES = {
    "two_term": ("token", "per_qk_pair"),
    "terms": ("step", "sequence", "token", "per_qk_pair"),
    "table": ("step", "sequence", "token"),
}
"""What each law fits by least squares."""


def _fit(law: str, samples: Sequence[MeasuredPack], phase: str, num_heads: int) -> Terms:
    """The law's prices that come nearest to the layer's time, in relative error."""
    rows = _row_table(samples, phase, num_heads) if law == "table" else Terms(0.0)
    seconds = np.array([s.layer[phase].seconds for s in samples])
    attention = np.array([_modelled(s, rows, num_heads) for s in samples])
    amounts = [_amounts(s, num_heads) for s in samples]
    columns = np.array([[amount[name] for name in _PRICES[law]] for amount in amounts])
    prices = non_negative(columns / seconds[:, None], (seconds - attention) / seconds)
    return replace(rows, **dict(zip(_PRICES[law], prices.tolist(), strict=True)))


def _amounts(sample: MeasuredPack, num_heads: int) -> dict[str, float]:
    """How often a pack pays each price."""
    lengths = np.asarray(sample.lengths, dtype=np.float64)
    pairs = num_heads * float(lengths @ lengths)
    return {"step": 1.0, "sequence": len(lengths), "token": float(lengths.sum()), "per_qk_pair": pairs}


def _row_table(samples: Sequence[MeasuredPack], phase: str, num_heads: int) -> Terms:
    """Attention's own time per row by length, from packs of one length, made monotone."""
    equal = [s for s in samples if len(set(s.lengths)) == 1]
    lengths = sorted({s.lengths[0] for s in equal})
    # Errors are relative, so means and pools are formed of logarithms.
    logs, weights = np.zeros(len(lengths)), np.zeros(len(lengths))
    for i, length in enumerate(lengths):
        times = [s.attention[phase].seconds / (num_heads * sum(s.lengths)) for s in equal if s.lengths[0] == length]
        logs[i], weights[i] = np.mean(np.log(times)), len(times)
    row = np.exp(isotonic(logs, weights))
    return Terms(0.0, lengths=tuple(lengths), row=tuple(row.tolist()))


def _modelled(sample: MeasuredPack, terms: Terms, num_heads: int) -> float:
    lengths = np.asarray(sample.lengths, dtype=np.float64)
    rows = num_heads * lengths @ terms.row_seconds(lengths)
    return float(terms.token_seconds(lengths.sum(), len(lengths)) + rows)


def _gamma(phases: dict[str, Terms], flops: dict[str, Flops], longest: int) -> float:
    """Seconds per attention FLOP over seconds per token-wise FLOP, in a plain layer, at the longest length."""
    attention = sum(float(phases[p].row_seconds(longest)) / longest for p in PLAIN)
    token = sum(phases[p].token for p in PLAIN)
    attention_flop, token_flop = sum(flops[p].per_qk_pair for p in PLAIN), sum(flops[p].token for p in PLAIN)
    return attention / attention_flop * token_flop / token if token and attention_flop else 0.0


def _check(fitted: Sequence[MeasuredPack], held_out: Sequence[MeasuredPack]) -> None:
    """That there is enough, and that all times are positive."""
    lengths = {length for s in fitted for length in s.lengths}
    if len(fitted) < 4 or len(lengths) < 3 or not held_out:
        raise CalibrationError(
            f"{len(fitted)} packs of {len(lengths)} lengths to fit and {len(held_out)} held out; "
            "measure at least 4 of 3 and 1"
        )
    for sample in [*fitted, *held_out]:
        for phase in PHASES:
            for what, timing in (("layer", sample.layer[phase]), ("attention", sample.attention[phase])):
                if not 0 < timing.seconds < np.inf:
                    raise CalibrationError(
                        f"{what} of lengths {sample.lengths[:8]}, {phase}: {timing.seconds!r} s; times must be positive"
                    )
