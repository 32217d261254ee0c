"""Draws two epochs of a loader, what their states mean, and how three ranks continue what two ranks began.

``python docs/pictures/epochs.py`` runs the loaders and writes ``epochs.svg`` beside this file.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import penstock as ps

SAMPLES, BATCH, EPOCHS = 12, 2, 2
FEW, MORE = 2, 3  # ranks before and after the restart

LEFT, CELL, BETWEEN, RIGHT = 118, 33, 44, 16  # widths of the names, of a sample, between epochs, and at the right
BAR, LANE = 22, 29  # heights of a batch and of a lane
COLOURS = ("#4a8fdc", "#d18a2c", "#4aa36c")  # by rank; readable on white and on black, like the grey
GREY, RED = "#7d858f", "#e0485a"

Batch = list[int]


def dataset() -> ps.Dataset:
    """Return a small dataset in a new order every epoch."""
    return ps.from_items([{"x": number} for number in range(SAMPLES)]).shuffle(seed=4)


def loader(rank: int, world: int) -> ps.Loader:
    """Return the loader of one rank."""
    return dataset().batched(BATCH).loader(rank, world, uneven="keep")


def take(batches: Any, count: int) -> list[Batch]:
    """Return the samples of the next batches."""
    return [batch["x"].tolist() for _, batch in zip(range(count), batches, strict=False)]


class Picture:
    """An SVG whose columns are the positions of the order, and whose lanes are ranks."""

    def __init__(self) -> None:
        self._shapes: list[str] = []
        self._orders = [[sample["x"] for sample in dataset().epoch(epoch)] for epoch in range(EPOCHS)]

    def x(self, epoch: int, position: float) -> float:
        """Return where a position begins."""
        return LEFT + epoch * (SAMPLES * CELL + BETWEEN) + position * CELL

    def order(self, y: int) -> None:
        """Draw the order of every epoch."""
        self.text(0, y + 15, "order", GREY, "bold")
        for epoch, order in enumerate(self._orders):
            self.text(self.x(epoch, SAMPLES / 2), y - 9, f"epoch {epoch}", GREY, "bold", "middle")
            for position, sample in enumerate(order):
                self._box(self.x(epoch, position), y, CELL, GREY, 0.16)
                self.text(self.x(epoch, position + 0.5), y + 15, str(sample), GREY, anchor="middle")

    def lane(self, y: int, name: str, rank: int, batches: list[tuple[int, Batch]]) -> None:
        """Draw the batches of a rank, each an epoch and its samples, below their positions in the order."""
        self.text(0, y + 15, name, COLOURS[rank], "bold")
        for epoch, batch in batches:
            at = [self._orders[epoch].index(sample) for sample in batch]
            for first in (position for position in at if position - 1 not in at):
                run = next(end for end in range(first, SAMPLES + 1) if end not in at) - first
                self._box(self.x(epoch, first), y, run * CELL, COLOURS[rank], 0.45)
            for sample, position in zip(batch, at, strict=True):
                self.text(self.x(epoch, position + 0.5), y + 15, str(sample), COLOURS[rank], "bold", "middle")

    def mark(self, x: float, top: int, bottom: int, lines: tuple[str, ...], anchor: str = "start") -> None:
        """Draw a moment as a line, with text below it."""
        self._shapes.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="{RED}" stroke-width="1.5" fill="none"/>')
        for number, line in enumerate(lines):
            self.text(x, bottom + 15 + 15 * number, line, RED, anchor=anchor)

    def text(self, x: float, y: float, text: str, colour: str, weight: str = "normal", anchor: str = "start") -> None:
        """Draw one line of text."""
        style = f'font-weight="{weight}" font-size="12.5px" text-anchor="{anchor}"'
        self._shapes.append(f'<text x="{x:.1f}" y="{y:g}" fill="{colour}" {style}>{escape(text)}</text>')

    def _box(self, x: float, y: int, width: float, colour: str, opacity: float) -> None:
        size = f'x="{x + 1.5:.1f}" y="{y}" width="{width - 3:.1f}" height="{BAR}" rx="4"'
        self._shapes.append(f'<rect {size} fill="{colour}" fill-opacity="{opacity:g}"/>')

    def svg(self, height: int) -> str:
        """Return the picture."""
        width = self.x(EPOCHS - 1, SAMPLES) + RIGHT
        size = f"{width:g} {height}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" role="img">'
        title = "<title>Two epochs of a loader: their end, a restart, and another number of ranks</title>"
        return "\n".join([head, title, *self._shapes, "</svg>\n"])


def draw() -> str:
    """Run the loaders and return the picture."""
    picture = Picture()
    picture.order(28)
    per_epoch = SAMPLES // BATCH // FEW
    straight = [loader(rank, FEW) for rank in range(FEW)]
    for rank, each in enumerate(straight):
        batches = [(epoch, batch) for epoch in range(EPOCHS) for batch in take(each, per_epoch)]
        picture.lane(66 + rank * LANE, f"rank {rank} of {FEW}", rank, batches)
    end = picture.x(1, 0) - BETWEEN / 2
    text = ("the last batch ends the epoch: loader.epoch == 1, state_dict() is the start of epoch 1",)
    picture.mark(end, 20, 130, text, "middle")

    begun = [loader(rank, FEW) for rank in range(FEW)]
    for rank, each in enumerate(begun):
        picture.lane(184 + rank * LANE, f"rank {rank} of {FEW}", rank, [(0, batch) for batch in take(each, 1)])
    states = [each.state_dict() for each in begun]
    resumed = [loader(rank, MORE) for rank in range(MORE)]
    for rank, each in enumerate(resumed):
        each.load_state_dict(states=states)
        batches = [(epoch, batch["x"].tolist()) for epoch in range(EPOCHS) for batch in each]
        picture.lane(184 + (FEW + rank) * LANE, f"rank {rank} of {MORE}", rank, batches)
    lines = ("three ranks load the states of two:", "they share the rest of epoch 0, then epoch 1")
    picture.mark(LEFT - 8, 184 + FEW * LANE - 4, 184 + (FEW + MORE) * LANE, lines)
    return picture.svg(184 + (FEW + MORE) * LANE + 40)


if __name__ == "__main__":
    Path(__file__).with_name("epochs.svg").write_text(draw())
