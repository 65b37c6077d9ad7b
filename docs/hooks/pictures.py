"""Draws the pictures of docs/concepts: `python docs/hooks/pictures.py`. A test compares them with what is committed.

Bars show real plans of small examples, made by the library; the timeline and the route are drawings of an order.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from knapformer.plan import Cluster, CostModel, Placement, Sequences, make_planner

FOLDER = Path(__file__).parents[1] / "concepts"
HUES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BB5588")
GREYS = ("#8C8C8C", "#A6A6A6", "#737373", "#B8B8B8")
INK = "#333333"
LENGTHS = [[900], [64, 80], [256, 120], [49, 200]]
COST = CostModel.from_shapes(d_model=64, num_heads=4, gamma=8.0)
"""Prices at which attention is about half of the example's work, as it is at real widths and lengths."""


@dataclass
class Drawing:
    """An SVG picture: shapes are added, `text` is the file."""

    width: int
    height: int
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, colour: str, label: str = "") -> None:
        """A filled box, with a label in it where that fits."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.shapes.append(f'<rect {place} fill="{colour}" stroke="#FFFFFF"/>')
        if label and width > 7 * len(label):
            self.words(x + width / 2, y + height / 2 + 4, label, colour="#FFFFFF", anchor="middle")

    def words(self, x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start") -> None:
        """A line of text; `anchor` is start, middle or end."""
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False) -> None:
        """A thin line."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.shapes.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{INK}"{dash}/>')

    @property
    def text(self) -> str:
        """The file."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" font-family="sans-serif" font-size="12">',
            f'<rect width="{self.width}" height="{self.height}" fill="#FFFFFF"/>',
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def colour_of(placement: Placement, seq: int) -> str:
    """Hues for split sequences, greys for whole ones."""
    palette = HUES if placement.split[seq] else GREYS
    return palette[seq % len(palette)]


def rows(
    drawing: Drawing, left: float, width: float, heading: str, placement: Placement, amounts: np.ndarray, table: str
) -> None:
    """A bar for each rank, a block for each shard of one table, on one scale; the mean as a dashed line."""
    shards = getattr(placement, table)
    totals = np.bincount(shards.rank, weights=amounts, minlength=placement.world_size)
    scale = width / totals.max()
    drawing.words(left, 20, heading)
    for rank in range(placement.world_size):
        x, y = left, 32 + 34 * rank
        for shard in np.flatnonzero(shards.rank == rank):
            seq, wide = int(shards.seq[shard]), amounts[shard] * scale
            drawing.box(x, y, wide, 26, colour_of(placement, seq), f"{seq}")
            x += wide
    mean = left + totals.mean() * scale
    drawing.line(mean, 28, mean, 30 + 34 * placement.world_size, dashed=True)


def plan_picture(placement: Placement) -> Drawing:
    """Tokens and attention of every rank side by side."""
    ranks = placement.world_size
    drawing = Drawing(760, 54 + 34 * ranks)
    for rank in range(ranks):
        drawing.words(8, 50 + 34 * rank, f"rank {rank}")
    tokens = placement.token_shards.count.astype(float)
    lengths = placement.sequences.length[placement.attention_shards.seq]
    area = placement.attention_shards.count.astype(float) * lengths
    rows(drawing, 70, 320, "tokens", placement, tokens, "token_shards")
    rows(drawing, 420, 320, "attention (rows x keys)", placement, area, "attention_shards")
    return drawing


def planned(
    planner: str, lengths: Sequence[Sequence[int]], topology: str | None = None, per_node: int | None = None
) -> Placement:
    """A real plan of an example."""
    sequences = Sequences.from_ranks(lengths)
    return make_planner(planner, topology)(sequences, Cluster(len(lengths), per_node), COST)


def nodes_picture() -> Drawing:
    """Two nodes of four ranks: who shares a sequence shares a node."""
    lengths = [[700], [64, 80], [256, 120], [49, 200], [90, 60, 30], [640], [128], [300]]
    drawing = plan_picture(planned("balanced", lengths, per_node=4))
    drawing.line(4, 165, 756, 165)
    drawing.words(8, 20, "node 0")
    drawing.words(8, 320, "node 1")
    return drawing


def overlap_picture() -> Drawing:
    """The order of one layer's attention on one rank."""
    drawing = Drawing(760, 120)
    drawing.words(8, 49, "compute")
    drawing.words(8, 89, "links")
    whole, split, token, link = GREYS[2], HUES[0], GREYS[1], HUES[3]
    for x, width, colour, label in (
        (80, 90, token, "q, k, v"),
        (170, 180, whole, "whole sequences"),
        (350, 120, split, "split ones"),
        (470, 130, whole, "other whole ones"),
        (600, 140, token, "out, MLP"),
    ):
        drawing.box(x, 32, width, 26, colour, label)
    drawing.box(172, 72, 150, 26, link, "q, k, v of split ones")
    drawing.box(472, 72, 110, 26, link, "their outputs")
    return drawing


def loss_picture() -> Drawing:
    """Tokens and their weights travel once; gradients add up."""
    drawing = Drawing(760, 130)
    steps = (
        ("loader", "samples of any size"),
        ("weights", "one sum over ranks"),
        ("route", "tokens and weights"),
        ("model", "on the layout"),
        ("loss", "weighted sum here"),
    )
    for place, (name, what) in enumerate(steps):
        x = 10 + 150 * place
        drawing.box(x, 30, 120, 34, HUES[0] if name in ("weights", "loss") else GREYS[2], name)
        drawing.words(x + 60, 84, what, anchor="middle")
        if place:
            drawing.line(x - 30, 47, x - 2, 47)
    drawing.words(
        380, 116, "sum over ranks of the losses = loss of the batch, whoever holds which token", anchor="middle"
    )
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "before.svg": lambda: plan_picture(planned("local", LENGTHS)),
    "balanced.svg": lambda: plan_picture(planned("balanced", LENGTHS)),
    "bags.svg": lambda: plan_picture(planned("bags", LENGTHS, "g2n1+g1n2")),
    "nodes.svg": nodes_picture,
    "overlap.svg": overlap_picture,
    "loss.svg": loss_picture,
}
"""Each picture's file and what draws it."""


def main() -> int:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
