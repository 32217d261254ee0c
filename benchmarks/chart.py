"""Draws a case as a bar chart: one bar per row, with a line from its slowest to its fastest round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from cases import Case, Result
from report import Rounds, format_number, successful

WIDTH, LINE, MARGIN = 1000, 26, 16
PENSTOCK, LIMIT, PEER, TEXT, BACKGROUND = "#1f77b4", "#9a9a9a", "#c9d6e2", "#222222", "#ffffff"


def draw(path: Path, name: str, case: Case, rows: dict[str, Rounds]) -> None:
    """Write the chart of a case to ``path``, or nothing if no row ran."""
    from PIL import Image, ImageDraw, ImageFont

    unit, bars = _bars(case, rows)
    if not bars:
        return
    font, large = ImageFont.load_default(14), ImageFont.load_default(17)
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + 2 * LINE + LINE * len(bars)), BACKGROUND)
    canvas = ImageDraw.Draw(image)
    canvas.text((MARGIN, MARGIN), f"{name}: {unit}", TEXT, large)
    left = int(max(canvas.textlength(row, font) for row, _ in bars)) + 2 * MARGIN
    full_length = WIDTH - left - 130  # 130: the number after the longest bar
    largest = max(max(values) for _, values in bars)
    for number, (row, values) in enumerate(bars):
        top = MARGIN + 2 * LINE + LINE * number
        _draw_bar(canvas, font, (left, top), row, [value / largest * full_length for value in values], values)
    image.quantize(32).save(path, optimize=True)


def _draw_bar(
    canvas: Any, font: Any, corner: tuple[int, int], row: str, lengths: list[float], values: list[float]
) -> None:
    left, top = corner
    middle = top + LINE // 2 - 3
    color = PENSTOCK if row.startswith("penstock") else LIMIT if row.startswith("limit") else PEER
    canvas.text((MARGIN, top), row, TEXT, font)
    canvas.rectangle((left, top, left + median(lengths), top + LINE - 8), color)
    canvas.line((left + min(lengths), middle, left + max(lengths), middle), TEXT, 2)
    canvas.text((left + max(lengths) + 8, top), format_number(median(values)), TEXT, font)


def _bars(case: Case, rows: dict[str, Rounds]) -> tuple[str, list[tuple[str, list[float]]]]:
    """Return the unit and the values of each row: samples per second if all rows count samples, else seconds or MB."""
    measured = {row: successful(rounds) for row, rounds in rows.items() if successful(rounds)}
    if case.measures_memory:
        return "peak MB (less is better)", _values(measured, lambda result: result["peak MB"])
    if all("samples" in result for results in measured.values() for result in results):
        return "samples/s (more is better)", _values(measured, lambda result: result["samples"] / result["seconds"])
    return "seconds (less is better)", _values(measured, lambda result: result["seconds"])


def _values(rows: dict[str, list[Result]], value: Callable[[Result], float]) -> list[tuple[str, list[float]]]:
    return [(row, [value(result) for result in results]) for row, results in rows.items()]
