"""Draw fields in a terminal: images as half blocks or by the terminal's protocol, audio as waveforms, escaped text."""

from __future__ import annotations

import base64
import io
import os
import wave
from array import array
from itertools import pairwise
from typing import Any

_MAX_PIXELS = 100_000_000
_BARS = " ▁▂▃▄▅▆▇█"
_KITTY_CHUNK = 4096  # the most characters of base64 that the protocol allows in one escape sequence


def escape(text: str, max_length: int = 0) -> str:
    """Escape a text so that it fits on one line and cannot control the terminal; 0 as ``max_length`` means no limit."""
    cut = text if not max_length or len(text) <= max_length else text[: max_length - 1]
    out = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut)
    return out + "…" * (cut is not text)


def image_protocol() -> str:
    """Return how to draw images on this terminal: ``kitty`` or ``iterm`` if it has that protocol, else ``blocks``."""
    if os.environ.get("KITTY_WINDOW_ID") or "kitty" in os.environ.get("TERM", ""):
        return "kitty"
    return "iterm" if os.environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm") else "blocks"


def draw_image(data: bytes, protocol: str, width: int) -> str | None:
    """Draw an image; return None if it cannot be decoded, is too large, or Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None
            image.draft("RGB", (width * 2, width * 2))
            small = image.convert("RGB")
        small.thumbnail((width, width) if protocol == "blocks" else (width * 8, width * 8))
    except Exception:  # a damaged image must not hide the other fields
        return None
    return _draw_blocks(small) if protocol == "blocks" else _draw_inline(small, protocol)


def _draw_blocks(image: Any) -> str:
    """Draw two pixels per character: the upper one as the foreground of a half block, the lower one as background."""
    pixels, (width, height) = image.load(), image.size
    lines = []
    for y in range(0, height, 2):
        line = ""
        for x in range(width):
            line += "\x1b[38;2;{};{};{}m".format(*pixels[x, y])
            line += "\x1b[48;2;{};{};{}m▀".format(*pixels[x, y + 1]) if y + 1 < height else "\x1b[49m▀"
        lines.append(line + "\x1b[0m\n")
    return "".join(lines)


def _draw_inline(image: Any, protocol: str) -> str:
    png = io.BytesIO()
    image.save(png, "PNG")
    text = base64.b64encode(png.getvalue()).decode()
    if protocol == "iterm":
        return f"\x1b]1337;File=inline=1;size={len(png.getvalue())}:{text}\a\n"
    chunks = [text[start : start + _KITTY_CHUNK] for start in range(0, len(text), _KITTY_CHUNK)]
    last = len(chunks) - 1
    controls = [f"{'f=100,a=T,' if not number else ''}m={int(number < last)}" for number in range(len(chunks))]
    return "".join(f"\x1b_G{control};{chunk}\x1b\\" for control, chunk in zip(controls, chunks, strict=True)) + "\n"


def draw_waveform(data: bytes, width: int) -> str | None:
    """Draw audio as a line of bars, followed by its duration; return None if it cannot be decoded."""
    decoded = _decode_pcm(data) or _decode_audio(data)
    if decoded is None or not len(decoded[0]):
        return None
    values, rate = decoded
    width = min(width, len(values))
    edges = [len(values) * column // width for column in range(width + 1)]
    # At most about 200 values per bar: enough for a peak, and quick for long recordings.
    peaks = [max(abs(value) for value in values[a : b : max(1, (b - a) // 200)]) for a, b in pairwise(edges)]
    top = max(peaks) or 1
    bars = "".join(_BARS[round(peak / top * (len(_BARS) - 1))] for peak in peaks)
    return f"{bars} {len(values) / rate:.2f} s, {rate:,} Hz"


def _decode_pcm(data: bytes) -> tuple[Any, int] | None:
    """Return the first channel of a 16-bit WAV file and its sampling rate, without any extra."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() != 2:
                return None
            values = array("h")
            values.frombytes(file.readframes(file.getnframes()))
            return values[:: file.getnchannels()], file.getframerate()
    except (wave.Error, EOFError, ValueError):
        return None


def _decode_audio(data: bytes) -> tuple[Any, int] | None:
    try:
        import soundfile

        values, rate = soundfile.read(io.BytesIO(data), always_2d=True)
    except Exception:  # soundfile is not installed, or cannot decode this file
        return None
    return values[:, 0].tolist(), rate
