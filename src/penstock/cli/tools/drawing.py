"""Values for people to look at: pictures in half blocks or a terminal's own way, sounds as a wave, texts made safe."""

from __future__ import annotations

import base64
import io
import os
import wave
from array import array
from itertools import pairwise
from typing import Any

PICTURES = frozenset(["jpg", "jpeg", "png", "ppm", "pgm", "pbm", "gif", "bmp", "webp", "tif", "tiff"])
SOUNDS = frozenset(["wav", "flac", "ogg", "mp3"])
_MOST_PIXELS = 100_000_000
_BARS = " ▁▂▃▄▅▆▇█"
_KITTY_CHUNK = 4096


def safe(text: str, most: int = 0) -> str:
    """A text on one line that cannot command a terminal; cut off where it is longer than ``most``."""
    cut = text if not most or len(text) <= most else text[: most - 1]
    out = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut)
    return out + "…" * (cut is not text)


def protocol() -> str:
    """How pictures are best drawn on this terminal: its own protocol where it is known to have one."""
    if os.environ.get("KITTY_WINDOW_ID") or "kitty" in os.environ.get("TERM", ""):
        return "kitty"
    return "iterm" if os.environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm") else "blocks"


def picture(data: bytes, how: str, width: int) -> str | None:
    """Draw a picture; None where it is none, or too large, or there is no Pillow."""
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > _MOST_PIXELS:
                return None
            image.draft("RGB", (width * 2, width * 2))
            small = image.convert("RGB")
        small.thumbnail((width, width) if how == "blocks" else (width * 8, width * 8))
    except Exception:  # a damaged picture is no reason not to show the rest
        return None
    return _blocks(small) if how == "blocks" else _inline(small, how)


def _blocks(image: Any) -> str:
    """Two pixels a character: the upper half in its colour, the lower one behind it."""
    pixels, (wide, high) = image.load(), image.size
    lines = []
    for y in range(0, high, 2):
        line = ""
        for x in range(wide):
            line += "\x1b[38;2;{};{};{}m".format(*pixels[x, y])
            line += "\x1b[48;2;{};{};{}m▀".format(*pixels[x, y + 1]) if y + 1 < high else "\x1b[49m▀"
        lines.append(line + "\x1b[0m\n")
    return "".join(lines)


def _inline(image: Any, how: str) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    text = base64.b64encode(out.getvalue()).decode()
    if how == "iterm":
        return f"\x1b]1337;File=inline=1;size={len(out.getvalue())}:{text}\a\n"
    pieces = [text[at : at + _KITTY_CHUNK] for at in range(0, len(text), _KITTY_CHUNK)]
    last = len(pieces) - 1
    heads = [f"{'f=100,a=T,' if not number else ''}m={int(number < last)}" for number in range(len(pieces))]
    return "".join(f"\x1b_G{head};{piece}\x1b\\" for head, piece in zip(heads, pieces, strict=True)) + "\n"


def sound(data: bytes, width: int) -> str | None:
    """Draw a sound as a line of bars, with its length; None where it cannot be read."""
    found = _pcm(data) or _decoded(data)
    if found is None or not len(found[0]):
        return None
    values, rate = found
    width = min(width, len(values))
    edges = [len(values) * place // width for place in range(width + 1)]
    peaks = [max(abs(value) for value in values[a : b : max(1, (b - a) // 200)]) for a, b in pairwise(edges)]
    top = max(peaks) or 1
    bars = "".join(_BARS[round(peak / top * (len(_BARS) - 1))] for peak in peaks)
    return f"{bars} {len(values) / rate:.2f} s, {rate:,} Hz"


def _pcm(data: bytes) -> tuple[Any, int] | None:
    try:
        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() != 2:
                return None
            values = array("h")
            values.frombytes(file.readframes(file.getnframes()))
            return values[:: file.getnchannels()], file.getframerate()
    except (wave.Error, EOFError, ValueError):
        return None


def _decoded(data: bytes) -> tuple[Any, int] | None:
    try:
        import soundfile

        values, rate = soundfile.read(io.BytesIO(data), always_2d=True)
    except Exception:  # not installed, or not for this file
        return None
    return values[:, 0].tolist(), rate
