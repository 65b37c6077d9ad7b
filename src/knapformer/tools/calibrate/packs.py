"""Which packs are measured: alone, several of a length, and mixed; some are kept from the fits.

    fitted      lengths lo, ..., hi in equal ratios, alone and several of a kind; mixed packs
    held out    the lengths halfway between them, alone and several of a kind; other mixed packs

Several of a kind tell the constant of a sequence from that of a pack, and mixed packs are what training sees.
"""

from dataclasses import dataclass

import numpy as np

from knapformer.errors import CalibrationError


@dataclass(frozen=True, slots=True)
class Pack:
    """Lengths of the sequences of a pack [tokens], and whether it is kept from the fits."""

    lengths: tuple[int, ...]
    held_out: bool


def choose_packs(lo: int, hi: int, *, points: int = 7, mixed: int = 8, seed: int = 0) -> list[Pack]:
    """Packs of lengths from `lo` to `hi` [tokens].

    Args:
        lo, hi: shortest and longest sequence.
        points: lengths to fit, `lo` and `hi` among them.
        mixed: mixed packs, half of them held out.
        seed: of the mixed packs.

    Raises:
        CalibrationError: for lengths that span no range.
    """
    if not (lo >= 1 and 2 * lo <= hi and points >= 3):
        raise CalibrationError(
            f"cannot calibrate on lengths {lo} to {hi} at {points} points; the longest must be at least twice the "
            "shortest, with 3 points or more"
        )
    grid = np.unique(np.rint(np.geomspace(lo, hi, 2 * points - 1)).astype(int)).tolist()
    packs = []
    for i, length in enumerate(grid):
        held_out = i % 2 == 1
        packs.append(Pack((length,), held_out))
        if (many := hi // (4 * length)) > 1:
            packs.append(Pack((length,) * min(many, 8), held_out))
    rng = np.random.default_rng(seed)
    for i in range(mixed):
        held_out = i % 2 == 1
        choice = [length for j, length in enumerate(grid) if 2 * length <= hi and (held_out or j % 2 == 0)]
        lengths: list[int] = []
        while sum(lengths) < hi // 2:
            lengths.append(int(rng.choice(choice)))
        packs.append(Pack(tuple(lengths), held_out))
    return packs
