"""A case as a picture: one bar a row, with a line from its slowest to its fastest round. Drawn by Pillow alone."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from cases import Case, Result
from report import Rounds, numbers

WIDTH, LINE, MARGIN = 1000, 26, 16
OWN, LIMIT, OTHER, INK, PAPER = "#1f77b4", "#9a9a9a", "#c9d6e2", "#222222", "#ffffff"


def draw(path: Path, name: str, case: Case, rows: dict[str, Rounds]) -> None:
    """Write the picture of a case; nothing where no row ran."""
    from PIL import Image, ImageDraw, ImageFont

    unit, bars = _bars(case, rows)
    if not bars:
        return
    font, large = ImageFont.load_default(14), ImageFont.load_default(17)
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + 2 * LINE + LINE * len(bars)), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, MARGIN), f"{name}: {unit}", INK, large)
    labels = int(max(pen.textlength(row, font) for row, _ in bars)) + 2 * MARGIN
    room = WIDTH - labels - 130  # 130: the figure behind the longest bar
    most = max(max(figures) for _, figures in bars)
    for number, (row, figures) in enumerate(bars):
        _bar(pen, font, (labels, MARGIN + 2 * LINE + LINE * number), row, [f / most * room for f in figures], figures)
    image.quantize(32).save(path, optimize=True)


def _bar(pen: Any, font: Any, at: tuple[int, int], row: str, lengths: list[float], figures: list[float]) -> None:
    left, top = at
    middle = top + LINE // 2 - 3
    colour = OWN if row.startswith("penstock") else LIMIT if row.startswith("limit") else OTHER
    pen.text((MARGIN, top), row, INK, font)
    pen.rectangle((left, top, left + median(lengths), top + LINE - 8), colour)
    pen.line((left + min(lengths), middle, left + max(lengths), middle), INK, 2)
    pen.text((left + max(lengths) + 8, top), _figure(median(figures)), INK, font)


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _bars(case: Case, rows: dict[str, Rounds]) -> tuple[str, list[tuple[str, list[float]]]]:
    """What is drawn: samples a second, more being better, where rows count samples; else seconds or MB."""
    good = {row: numbers(rounds) for row, rounds in rows.items() if numbers(rounds)}
    if case.peak:
        return "peak MB (less is better)", _values(good, lambda told: told["peak MB"])
    if all("samples" in told for rounds in good.values() for told in rounds):
        return "samples/s (more is better)", _values(good, lambda told: told["samples"] / told["seconds"])
    return "seconds (less is better)", _values(good, lambda told: told["seconds"])


def _values(rows: dict[str, list[Result]], value: Any) -> list[tuple[str, list[float]]]:
    return [(row, [value(told) for told in rounds]) for row, rounds in rows.items()]
