"""Previews of a field: a summary, a short text, and a picture or a sound that a browser can show.

Nothing is decoded beyond ``VIEW_LIMITS``, nothing is unpickled, and no byte of the data reaches a browser as it is: a
picture is decoded and encoded again, and a sound becomes samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np

from penstock.codecs.arrays import Array, as_array
from penstock.codecs.audio import decode_audio
from penstock.codecs.gz import decompress
from penstock.codecs.images import load_image, open_image
from penstock.codecs.limits import Limits
from penstock.codecs.markup import size_text
from penstock.codecs.registry import codec_of, decoder
from penstock.errors import MissingExtra, message_of

VIEW_LIMITS = Limits(pixels=60_000_000, bytes=100_000_000)
MAX_TEXT = 4000  # characters of a preview
_MAX_PARSED_BYTES = 1_000_000  # of JSON and other documents
_MAX_SOUND_S = 60.0  # that are played
_WAVE_POINTS = 160  # of the drawing of a sound
_HEAT_SIDE = 64  # pixels of the drawing of an array
_HEX_BYTES = 256
_AUDIO_MAGICS = (b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3")


@dataclass(frozen=True, slots=True)
class Preview:
    """What a field holds.

    Attributes:
        kind: "image", "audio", "array", "text", "json", "number", "bytes" or "nothing".
        summary: Its type and size, in a few words.
        text: The value as text, shortened; empty if a picture shows more.
        shape: The width and height of an image.
        wave: The extent of a sound in equal parts of its time, from 0 to 1.
        problem: Why the field cannot be decoded.
        cut: Whether ``text`` is only the beginning.
    """

    kind: str
    summary: str
    text: str = ""
    shape: tuple[int, int] | None = None
    wave: tuple[float, ...] = ()
    problem: str | None = None
    cut: bool = False

    @property
    def drawable(self) -> bool:
        """Whether ``picture`` can draw the value."""
        return self.kind in ("image", "array") and self.problem is None


def preview(name: str, value: Any) -> Preview:
    """Return what a field holds; never raises, whatever the data is."""
    try:
        return _preview(name, value)
    except MissingExtra as exc:
        return _raw(value, str(exc))
    except Exception as exc:  # data may be made to break decoders, and users' objects may raise anything
        problem = str(exc) if isinstance(exc, ValueError) else message_of(exc)
        return _raw(value, problem or type(exc).__name__)


def picture(name: str, value: Any, side: int) -> tuple[str, bytes]:
    """Return an image, or the drawing of an array, of at most ``side`` pixels: its media type and its bytes.

    Raises:
        ValueError: The value is not an image, is damaged, or is beyond the limits.
    """
    from PIL import Image

    data = _file_bytes(value)
    if data is not None:
        name, data = _decompressed(name, data)
    if data is not None and _kind_of(name, data) == "image":
        opened = open_image(data, VIEW_LIMITS)
        opened.draft("RGB", (side, side))  # a JPEG is decoded at the smallest scale that is large enough
        load_image(opened)
        image: Image.Image = opened
    elif hasattr(value, "getexif") and isinstance(value, Image.Image):
        image = value
    else:
        array = as_array(value if data is None else _decoded(name, data))
        if array is None:
            raise ValueError("the value is neither an image nor an array")
        image = _drawn(array)
    return _encoded_picture(image, side)


def sound(name: str, value: Any) -> bytes:
    """Return the beginning of a sound as a WAV file.

    Raises:
        ValueError: The value is not a sound, is damaged, or is beyond the limits.
        MissingExtra: soundfile is not installed.
    """
    import soundfile

    decoded = _sound_of(name, value)
    samples, rate = decoded["array"], int(decoded["sampling_rate"])
    stream = BytesIO()
    part = samples[..., : int(rate * _MAX_SOUND_S)]
    soundfile.write(stream, np.clip(part.T, -1.0, 1.0), rate, format="WAV", subtype="PCM_16")
    return stream.getvalue()


def hex_dump(data: bytes) -> str:
    """Return the first bytes of a field as hexadecimal numbers and text."""
    lines = []
    for at in range(0, min(len(data), _HEX_BYTES), 16):
        row = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {text}")
    return "\n".join(lines)


def _preview(name: str, value: Any) -> Preview:
    if value is None:
        return Preview("nothing", "null", "null")
    data = _file_bytes(value)
    if data is not None:
        return _preview_file(name, data)
    if isinstance(value, str):
        return _text(value, f"text, {len(value):,} characters")
    if isinstance(value, bool | int | float | complex | np.generic):
        return Preview("number", type(value).__name__, str(value)[:MAX_TEXT])
    if _is_sound(value):
        return _preview_sound(value, "")
    if hasattr(value, "getexif") and hasattr(value, "size"):
        width, height = value.size
        return Preview("image", f"{width} x {height} {value.mode}", shape=(width, height))
    if (array := as_array(value)) is not None:
        return _preview_array(array)
    return _document(value, type(value).__name__)


def _preview_file(name: str, data: bytes) -> Preview:
    name, data = _decompressed(name, data)
    kind, size = _kind_of(name, data), size_text(len(data))
    if kind == "image":
        opened = open_image(data, VIEW_LIMITS)
        width, height = opened.size
        return Preview("image", f"{width} x {height} {opened.format}, {size}", shape=(width, height))
    if kind == "audio":
        return replace(_preview_sound(decode_audio(data, VIEW_LIMITS), size))
    if kind == "txt" or (kind is None and _is_text(data)):
        start = data[: MAX_TEXT * 4].decode("utf-8", "replace")
        shown = _text(start, f"text, {size}")
        return replace(shown, cut=shown.cut or len(data) > MAX_TEXT * 4)
    if kind is None:
        return Preview("bytes", f"bytes, {size}", hex_dump(data))
    if kind == "pickle":
        raise ValueError("pickle can run code and is not opened")
    if kind not in ("int", "npy", "npz", "ten") and len(data) > _MAX_PARSED_BYTES:
        start = data[: MAX_TEXT * 4].decode("utf-8", "replace")
        return replace(_text(start, f"{kind}, {size}"), cut=True)
    value = _decoded(name, data)
    if (array := as_array(value)) is not None:
        return _preview_array(array)
    return Preview("number", "int", str(value)) if kind == "int" else _document(value, f"{kind}, {size}")


def _raw(value: Any, problem: str) -> Preview:
    """Return the bytes of a value that cannot be decoded, with the reason."""
    data = _file_bytes(value)
    if data is None:
        return Preview("nothing", type(value).__name__, problem=problem)
    return Preview("bytes", f"bytes, {size_text(len(data))}", hex_dump(data), problem=problem)


def _kind_of(name: str, data: bytes) -> str | None:
    """Return the codec of a field by its name, or for names without one by its first bytes."""
    known = codec_of(name)
    if known is not None:
        return known
    if data[:4] == b"RIFF":
        return {b"WAVE": "audio", b"WEBP": "image"}.get(data[8:12])
    if data.startswith(_AUDIO_MAGICS):
        return "audio"
    return "image" if data[:3] == b"\xff\xd8\xff" or data[:8] == b"\x89PNG\r\n\x1a\n" else None


def _decompressed(name: str, data: bytes) -> tuple[str, bytes]:
    """Return the name and bytes of a field without gzip, within the limits."""
    if not name.lower().endswith(".gz"):
        return name, data
    return name[: -len(".gz")], decompress(data, VIEW_LIMITS)


def _decoded(name: str, data: bytes) -> Any:
    decode = decoder(name, limits=VIEW_LIMITS)
    return data if decode is None else decode(data)


def _file_bytes(value: Any) -> bytes | None:
    """Return the bytes of a file: as they are, or as tables store them, beside their path."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        value = value["bytes"]
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None


def _is_text(data: bytes) -> bool:
    start = data[:1024]
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as exc:
        if exc.start < len(start) - 4:
            return False
        text = start[: exc.start].decode("utf-8")
    return "\0" not in text


def _text(text: str, summary: str) -> Preview:
    return Preview("text", summary, text[:MAX_TEXT], cut=len(text) > MAX_TEXT)


def _document(value: Any, summary: str) -> Preview:
    text = json.dumps(_bounded(value), indent=1, ensure_ascii=False, default=_stand_in)
    return Preview("json", summary, text[:MAX_TEXT], cut=len(text) > MAX_TEXT)


def _bounded(value: Any, depth: int = 0) -> Any:
    """Return the beginning of a nested value: what a preview can show of it."""
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if depth > 20:
        return "..."
    if isinstance(value, Mapping):
        return {str(key)[:200]: _bounded(inner, depth + 1) for key, inner in list(value.items())[:200]}
    if isinstance(value, list | tuple):
        return [_bounded(inner, depth + 1) for inner in value[:200]]
    return value


def _stand_in(value: Any) -> Any:
    array = as_array(value)
    if array is not None:
        return f"array {array.shape} {array.dtype}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes, {size_text(len(value))}"
    return str(value)[:200]


def _is_sound(value: Any) -> bool:
    return isinstance(value, Mapping) and {"array", "sampling_rate"} <= value.keys()


def _sound_of(name: str, value: Any) -> Mapping[str, Any]:
    data = _file_bytes(value)
    if data is not None:
        name, data = _decompressed(name, data)
    if data is not None and _kind_of(name, data) == "audio":
        return decode_audio(data, VIEW_LIMITS)
    if not _is_sound(value):
        raise ValueError("the value is not a sound")
    return value  # type: ignore[no-any-return]


def _preview_sound(value: Mapping[str, Any], size: str) -> Preview:
    array = np.asarray(value["array"], np.float32)
    rate = int(value["sampling_rate"])
    frames = array.shape[-1] if array.ndim else 0
    channels = array.shape[0] if array.ndim > 1 else 1
    facts = [
        f"{frames / rate:.2f} s",
        f"{rate / 1000:g} kHz",
        "mono" if channels == 1 else f"{channels} channels",
        size,
    ]
    mono = np.abs(array if array.ndim < 2 else array.mean(axis=0))
    parts = np.array_split(mono, min(_WAVE_POINTS, max(1, frames)))
    peak = float(mono.max()) if frames else 0.0
    wave = tuple(float(part.max()) / peak if len(part) and peak > 0 else 0.0 for part in parts)
    return Preview("audio", ", ".join(filter(None, facts)), wave=wave)


def _preview_array(array: Array) -> Preview:
    shape = " x ".join(map(str, array.shape)) or "scalar"
    if _is_picture(array):
        height, width = _channels_last(array).shape[:2]
        return Preview("image", f"{shape} {array.dtype}", shape=(width, height))
    facts = ""
    if array.size and array.dtype.kind in "biuf":
        finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
        if finite.size:
            facts = f", {finite.min():.4g} to {finite.max():.4g}, mean {finite.mean(dtype=np.float64):.4g}"
    if array.ndim == 0 or not array.size or array.dtype.kind not in "biuf":
        return Preview("text", f"array {shape} {array.dtype}", str(array)[:MAX_TEXT])
    return Preview("array", f"array {shape} {array.dtype}{facts}", shape=_heat_shape(array))


def _is_picture(array: Array) -> bool:
    if array.dtype == np.uint8 and array.ndim == 2:
        return bool(min(array.shape) >= 8)
    if array.ndim != 3 or array.dtype not in (np.uint8, np.float32, np.float16, np.float64):
        return False
    height, width, channels = _channels_last(array).shape
    return bool(min(height, width) >= 8 and channels in (1, 3, 4))


def _channels_last(array: Array) -> Array:
    """Return an image with its channels as the last axis; torch has them first."""
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        return array.transpose(1, 2, 0)
    return array


def _heat_shape(array: Array) -> tuple[int, int]:
    height, width = _as_matrix(array).shape
    return width, height


def _as_matrix(array: Array) -> Array:
    """Return an array as rows and columns, for a drawing: the last axis is a row, the others are one after another."""
    rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)
    if rows.shape[0] == 1 and rows.shape[1] > _HEAT_SIDE:  # a long vector is folded
        width = min(_HEAT_SIDE, math.isqrt(rows.shape[1]))
        rows = rows[0, : rows.shape[1] // width * width].reshape(-1, width)
    steps = [max(1, -(-length // _HEAT_SIDE)) for length in rows.shape]
    return rows[:: steps[0], :: steps[1]]


def _drawn(array: Array) -> Any:
    """Return the drawing of an array: as an image, or from low (dark) to high (light)."""
    from PIL import Image

    if _is_picture(array):
        pixels = _channels_last(array)
        VIEW_LIMITS.check_pixels(pixels.shape[1], pixels.shape[0])
        pixels = pixels if pixels.dtype == np.uint8 else _to_bytes(pixels)
        return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels))
    heat = _to_bytes(_as_matrix(array)).astype(np.int32)
    colours = np.stack([40 + heat * 215 // 255, 44 + heat * 150 // 255, 92 + heat // 4], axis=-1)
    return Image.fromarray(np.clip(colours, 0, 255).astype(np.uint8))


def _to_bytes(array: Array) -> Array:
    values = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if array.dtype.kind == "f" and low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0  # pixels from 0 to 1
    return ((values - low) * (255.0 / (high - low or 1.0))).astype(np.uint8)


def _encoded_picture(image: Any, side: int) -> tuple[str, bytes]:
    from PIL import Image

    small = min(image.size) < side // 4 and max(image.size) < side
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = Image.fromarray(_to_bytes(np.asarray(image)))
    photo = image.mode in ("RGB", "YCbCr", "CMYK", "L") and not small
    image = image.convert("L" if image.mode == "L" else "RGB" if photo else "RGBA")
    image.thumbnail((side, side))
    stream = BytesIO()
    if photo:
        image.save(stream, "JPEG", quality=85)
        return "image/jpeg", stream.getvalue()
    image.save(stream, "PNG")
    return "image/png", stream.getvalue()
