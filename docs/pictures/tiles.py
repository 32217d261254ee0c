"""Draws which tiles of a photo a crop decodes, and what crops cost by the way photos are stored.

``python docs/pictures/tiles.py`` writes ``tiles.svg`` beside this file. The times are those of the table in the vision
guide, which ``benchmarks/stored_crops.py`` measures.
"""

from __future__ import annotations

from pathlib import Path

from penstock.vision.segments import Box

PHOTO, TILE, CROP = (375, 500), (16, 32), Box(96, 150, 262, 372)  # heights and widths
TIMES = {
    "whole photo, decoder alone": 1.06,
    "crop, as they are": 1.11,
    "crop, in tiles": 0.84,
    "crop, 256 px, in tiles": 0.36,
    "crop, 256 px, planes": 0.14,
}
GREY, BLUE, ORANGE = "#7d858f", "#4a8fdc", "#d18a2c"  # readable on white and on black
SCALE, BAR, GAP = 0.8, 18, 10


def grid() -> list[str]:
    """Return the photo with its tiles; those that the crop needs are filled."""
    out = []
    for top in range(0, PHOTO[0], TILE[0]):
        for left in range(0, PHOTO[1], TILE[1]):
            needed = top < CROP.bottom + 2 and top + TILE[0] > CROP.top - 2
            needed = needed and left < CROP.right + 4 and left + TILE[1] > CROP.left - 4
            out.append(_rect(left, top, min(TILE[1], PHOTO[1] - left), min(TILE[0], PHOTO[0] - top), needed))
    width, height = CROP.right - CROP.left, CROP.bottom - CROP.top
    crop = f'<rect x="{CROP.left * SCALE}" y="{CROP.top * SCALE}" width="{width * SCALE}" height="{height * SCALE}"'
    return [*out, f'{crop} fill="none" stroke="{ORANGE}" stroke-width="3"/>']


def _rect(left: int, top: int, width: int, height: int, filled: bool) -> str:
    place = f'x="{left * SCALE}" y="{top * SCALE}" width="{width * SCALE}" height="{height * SCALE}"'
    return f'<rect {place} fill="{BLUE if filled else "none"}" fill-opacity="0.6" stroke="{GREY}" stroke-width="0.5"/>'


def bars(left: float) -> list[str]:
    """Return one bar for each way, with its milliseconds."""
    out, longest = [], max(TIMES.values())
    for number, (name, milliseconds) in enumerate(TIMES.items()):
        y = 20 + number * (2 * BAR + GAP)
        out.append(f'<text x="{left}" y="{y}" fill="{GREY}">{name}</text>')
        width = 260 * milliseconds / longest
        out.append(f'<rect x="{left}" y="{y + 5}" width="{width:.0f}" height="{BAR - 4}" fill="{BLUE}"/>')
        out.append(f'<text x="{left + width + 6:.0f}" y="{y + 16}" fill="{GREY}">{milliseconds:.2f} ms</text>')
    return out


def draw() -> str:
    """Return the picture as an SVG."""
    height, width = PHOTO[0] * SCALE + 4, PHOTO[1] * SCALE + 380
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 {width:.0f} {height:.0f}"'
    style = 'font-family="sans-serif" font-size="13"'
    return "\n".join([f"{start} {style}>", *grid(), *bars(PHOTO[1] * SCALE + 30), "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_name("tiles.svg").write_text(draw())
