"""Colours of plan pictures: split sequences in hues that colour-blind readers tell apart, whole ones in greys.

A sequence has one colour. Its attention is drawn in it, its token-wise work in a tint of it. There are more sequences
than hues, so hues repeat; neighbours differ.
"""

from dataclasses import dataclass

import numpy as np

from knapformer.report.drawing import HUES


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one picture."""

    background: str
    ink: str
    band: str
    greys: tuple[str, ...]
    bound: str


THEMES = {
    "light": Theme("#FFFFFF", "#222222", "#F3F3F3", ("#8C8C8C", "#A6A6A6", "#737373"), "#000000"),
    "dark": Theme("#15171A", "#E4E4E4", "#1F2226", ("#7C828A", "#636970", "#959BA3"), "#FFFFFF"),
}


def sequence_colours(split: np.ndarray, theme: Theme) -> np.ndarray:
    """(S, 3) colour of each sequence, 0 to 1."""
    hues, greys = (np.array([_rgb(c) for c in colours]) for colours in (HUES, theme.greys))
    colours = greys[np.arange(len(split)) % len(greys)]
    colours[split] = hues[np.arange(int(split.sum())) % len(hues)]
    return colours


def block_colours(colours: np.ndarray, seq: np.ndarray, is_attention: np.ndarray, theme: Theme) -> np.ndarray:
    """(N, 3) colour of each block: its sequence's, halfway to the background for token-wise work."""
    mine = colours[seq]
    return np.where(is_attention[:, None], mine, (mine + np.array(_rgb(theme.background))) / 2)


def _rgb(colour: str) -> tuple[float, float, float]:
    value = int(colour[1:], 16)
    return (value >> 16) / 255, (value >> 8 & 255) / 255, (value & 255) / 255
