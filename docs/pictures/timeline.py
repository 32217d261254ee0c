"""Draws the timeline of a run from the events that its observer received: one lane per worker, one bar per block.

``python docs/pictures/timeline.py`` runs a small pipeline for some seconds, kills one of its worker processes, and
writes ``timeline.svg`` beside this file.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.engines import Event

SAMPLES = 1300
SLOW_SAMPLES = 520  # the first ones, which take long to fetch
KILL_AFTER_S = 5.0

LEFT, WIDTH, RIGHT = 150, 790, 20  # widths of the names, of the time axis, and of the right margin
BAR, LANE, TOP, GAP = 9, 12, 30, 24  # heights of a bar, of a lane, and of the space above and below a group
COLOURS = ("#4a8fdc", "#d18a2c", "#4aa36c")  # by segment; readable on white and on black, like the grey
GREY, RED = "#7d858f", "#e0485a"


def fetch(sample: dict[str, Any]) -> dict[str, Any]:
    """Wait, as if for a network."""
    time.sleep(0.06 if sample["x"] < SLOW_SAMPLES else 0.004)
    return sample


def resize(sample: dict[str, Any]) -> dict[str, Any]:
    """Compute without holding the interpreter lock."""
    numbers = np.full(80_000, float(sample["x"]))
    return {**sample, "sum": float(np.sin(numbers).sum() + np.cos(numbers).sum())}


def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
    """Compute in pure Python."""
    return {**sample, "total": sum(number % 7 for number in range(70_000)), "pid": os.getpid()}


def record_events() -> list[Event]:
    """Run the pipeline, kill one of its processes, and return the events that its observer received."""
    events: list[Event] = []
    samples = ps.from_items([{"x": number} for number in range(SAMPLES)])
    ds = samples.map(fetch, workers=(1, 8)).map(resize, workers=2).map(tokenize, workers=2, on="processes")
    started_at, killed = time.monotonic(), False
    for sample in ds.on("local", observer=events.append):
        if not killed and time.monotonic() - started_at > KILL_AFTER_S:
            os.kill(sample["pid"], signal.SIGKILL)
            killed = True
    return events


@dataclass(slots=True)
class Group:
    """The events of one segment's pool.

    Attributes:
        name: The name of the segment.
        blocks: The blocks that its workers finished.
        sizes: Each change of the number of workers, as (seconds, workers).
        deaths: The workers that died.
        end: The duration of the run in seconds.
    """

    name: str
    blocks: list[Event]
    sizes: list[tuple[float, int]]
    deaths: list[Event]
    end: float

    def lifetimes(self) -> Iterator[tuple[int, float, float]]:
        """Yield the lane, the start and the end of every worker.

        Events contain only the number of workers. A new worker takes the lowest free lane; when the number drops, the
        workers that finish no more blocks are the ones that ended.
        """
        started_at: dict[int, float] = {}
        for at, size in self.sizes:
            while len(started_at) < size:
                started_at[min(set(range(size)) - started_at.keys())] = at
            by_next_block = sorted(started_at, key=lambda lane: self._next_block_after(lane, at))
            for lane in by_next_block[: len(started_at) - size]:
                yield lane, started_at.pop(lane), at
        for lane, at in started_at.items():
            yield lane, at, self.end

    def _next_block_after(self, lane: int, at: float) -> float:
        """Return when the worker finishes its next block; 0 if it finishes no more."""
        return min((block.seconds for block in self.blocks if block.worker == lane and block.seconds > at), default=0.0)


def group_by_segment(events: list[Event]) -> list[Group]:
    """Return the events by segment, in the order of the stream."""
    names = list(dict.fromkeys(event.segment for event in events if event.segment is not None))
    groups = []
    for name in names:
        own = [event for event in events if event.segment == name]
        sizes = [(max(0.0, event.seconds), event.items) for event in own if event.kind == "workers"]
        blocks = [event for event in own if event.kind == "block"]
        deaths = [event for event in own if event.kind == "death"]
        groups.append(Group(name, blocks, sizes, deaths, events[-1].seconds))
    return groups


class Picture:
    """An SVG that grows from top to bottom."""

    def __init__(self, seconds: float) -> None:
        self._per_s = WIDTH / seconds
        self._seconds = seconds
        self._shapes: list[str] = []
        self._y = 10

    def add(self, group: Group, workers: str, colour: str) -> None:
        """Draw a group: its name and workers, each change of their number, and the lanes."""
        lanes = max(size for _, size in group.sizes)
        top = self._y + TOP
        self._text(0, top + BAR, group.name.removeprefix("read -> "), colour, "bold 13px")
        self._text(0, top + BAR + 16, workers, GREY, "12px")
        for number, (at, size) in enumerate(group.sizes):
            self._text(self._x(at), top - 7, f"{size} workers" if not number else str(size), GREY, "12px")
            self._path(f"M{self._x(at):.1f} {top - 4}v{lanes * LANE + 2}", GREY, 1, 'stroke-dasharray="2 3"')
        for lane, start, stop in group.lifetimes():
            at = top + lane * LANE + BAR / 2
            self._path(f"M{self._x(start):.1f} {at}H{self._x(stop):.1f}", colour, BAR, 'opacity=".22"')
        self._path("".join(self._bar(block, top) for block in group.blocks), colour, BAR)
        for death in group.deaths:
            self._death(self._x(death.seconds), top + (death.worker or 0) * LANE + BAR / 2, top - 7)
        self._y = top + max(lanes * LANE, BAR + 16) + GAP - LANE

    def svg(self) -> str:
        """Return the picture, with a time axis below."""
        axis = self._y + 12
        self._path(f"M{LEFT} {axis}h{WIDTH}", GREY, 1)
        for second in range(int(self._seconds) + 1):
            self._path(f"M{self._x(second):.1f} {axis}v5", GREY, 1)
            self._text(self._x(second), axis + 19, f"{second} s", GREY, "12px", "middle")
        size = f"{LEFT + WIDTH + RIGHT} {axis + 28}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" role="img">'
        title = "<title>Timeline of a run: one lane per worker, one bar per block</title>"
        return "\n".join([head, title, *self._shapes, "</svg>\n"])

    def _x(self, seconds: float) -> float:
        return LEFT + seconds * self._per_s

    def _bar(self, block: Event, top: int) -> str:
        start, stop = self._x(max(0.0, block.seconds - block.took)), self._x(block.seconds)
        width = max(0.3, stop - start - 0.5)  # a gap between neighbours
        return f"M{start:.1f} {top + (block.worker or 0) * LANE + BAR / 2:g}h{width:.1f}"

    def _death(self, x: float, y: float, text_y: float) -> None:
        self._path(f"M{x - 5:.1f} {y - 5:g}l10 10m0 -10l-10 10", RED, 2.5)
        self._path(f"M{x:.1f} {y - 5:g}V{text_y - 4:g}h6", RED, 1)
        self._text(x + 9, text_y, "killed: a new worker starts and repeats the block", RED, "12px")

    def _path(self, d: str, colour: str, width: float, attributes: str = "") -> None:
        self._shapes.append(f'<path d="{d}" stroke="{colour}" stroke-width="{width:g}" fill="none" {attributes}/>')

    def _text(self, x: float, y: float, text: str, colour: str, font: str, anchor: str = "start") -> None:
        weight, size = font.split() if " " in font else ("normal", font)
        style = f'font-weight="{weight}" font-size="{size}" text-anchor="{anchor}"'
        self._shapes.append(f'<text x="{x:.1f}" y="{y:g}" fill="{colour}" {style}>{escape(text)}</text>')


def draw(events: list[Event]) -> str:
    """Return the timeline of a run as an SVG."""
    picture = Picture(events[-1].seconds)
    workers = ("threads, (1, 8)", "threads, 2", "processes, 2")
    for group, description, colour in zip(group_by_segment(events), workers, COLOURS, strict=True):
        picture.add(group, description, colour)
    return picture.svg()


if __name__ == "__main__":
    Path(__file__).with_name("timeline.svg").write_text(draw(record_events()))
