"""Decoding of images to upright RGB pixels. The file format is recognised by the content.

libjpeg-turbo (simplejpeg) decodes JPEG to the same pixels as Pillow. Large images that will shrink a lot are decoded at
1/2, 1/4 or 1/8 of their size, which libjpeg-turbo does on the fly. Rows below the last one that is needed are not
decoded: most of the work is unpacking rows in order. The faster but less exact modes of libjpeg-turbo (``fastdct``,
``fastupsample``) made no measurable difference. Pillow reads all other formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from penstock.codecs.images import converted, load_image, open_image
from penstock.codecs.limits import Limits
from penstock.errors import MissingExtra
from penstock.vision.resampling import Pixels

if TYPE_CHECKING:
    from PIL import ImageFile

Truncated = Literal["error", "partial"]

# How many times an image must still shrink after the decoder has reduced it. With this value the result differs from
# one that is filtered from all pixels by 1/4 of a level on average, and by at most two levels in 999 of 1000 pixels.
_MIN_REMAINING_SHRINK = 2.5

_ORIENTATION_TAG = 0x0112
_HARMLESS_WARNINGS = ("extraneous bytes before marker", "Unknown Adobe color transform code")
_ROWS_AFTER = 2  # chroma is stored at a lower resolution: the colours of a row depend on the rows below it
_END_WARNING = "extraneous bytes before marker 0xd9"  # the only one to expect when rows are left undecoded
_FRAME_HEADER = Struct(">xBxxBHHB")  # of a JPEG: marker, bits, height, width, components
_SUBSAMPLINGS = (0x11, 0x21, 0x12, 0x22, 0x41)  # 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1
_LIMITS = Limits()


class Box(NamedTuple):
    """A rectangle of whole pixels."""

    top: int
    left: int
    bottom: int
    right: int


class EncodedImage(Protocol):
    """An image whose header was read, and whose pixels are not decoded yet."""

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the upright image."""

    def decode(self, shrink_factor: float, needed: Box | None = None) -> tuple[Pixels, int]:
        """Return the pixels, and by which factor they are reduced already.

        Args:
            shrink_factor: How many times the caller will shrink the image.
            needed: The part that the caller will use, in pixels of the full size; all others may have any value.
                ``None``: all of the image.
        """


def read_image(data: bytes, *, limits: Limits = _LIMITS, truncated: Truncated = "error") -> Pixels:
    """Decode an image to a new, upright uint8 RGB array of height x width x 3.

    Transparency is dropped, gray becomes RGB, 16 bits become 8, CMYK is converted, and of several frames the first one
    is decoded.

    Args:
        data: The file: JPEG, PNG, WebP, or another format that Pillow reads.
        limits: How many pixels the image may have.
        truncated: Whether a truncated JPEG is an error (``"error"``), or the missing part becomes gray (``"partial"``).

    Raises:
        OverLimit: The image has too many pixels.
        ValueError: ``data`` is not an image, or is damaged.
        MissingExtra: simplejpeg or Pillow is not installed.
    """
    return np.ascontiguousarray(open_encoded(data, limits, truncated).decode(1)[0])


def open_encoded(data: bytes, limits: Limits, truncated: Truncated) -> EncodedImage:
    """Read the header of an image.

    Raises:
        OverLimit: The image has too many pixels.
        ValueError: ``data`` is not an image, or its header is damaged.
        MissingExtra: simplejpeg or Pillow is not installed.
    """
    if not data:
        raise ValueError("not an image: the field is empty (0 bytes)")
    if data[:3] == b"\xff\xd8\xff" and (jpeg := _jpeg(data, truncated == "partial")) is not None:
        limits.check_pixels(jpeg.width, jpeg.height)
        return jpeg
    image = open_image(data, limits)
    exif = image.info.get("exif")
    return _PillowImage(image, exif_orientation(exif) if isinstance(exif, bytes) and image.format != "TIFF" else 1)


def _jpeg(data: bytes, partial: bool) -> _Jpeg | None:
    """Return a JPEG that simplejpeg can decode; ``None`` for rare kinds and damage, which are left to Pillow."""
    frame, exif = _find_frame(data)
    if 0 < frame < len(data) - 18:
        marker, bits, height, width, components = _FRAME_HEADER.unpack_from(data, frame)
        supported = components == 1 or (
            components == 3 and data[frame + 11] in _SUBSAMPLINGS and data[frame + 14] == data[frame + 17] == 0x11
        )
        if bits == 8 and height and width and supported:
            return _Jpeg(data, height, width, exif_orientation(exif), partial, 0 if marker > 0xC1 else frame)
    try:
        height, width, colorspace, _ = simplejpeg().decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):
        return None
    if colorspace not in ("YCbCr", "RGB", "Gray"):
        return None
    return _Jpeg(data, height, width, exif_orientation(exif), partial)


@dataclass(slots=True)
class _Jpeg:
    data: bytes
    height: int
    width: int
    orientation: int
    partial: bool
    frame: int = 0  # offset of the frame header, or 0 if rows are not stored in order: the image is then decoded whole

    @property
    def size(self) -> tuple[int, int]:
        return (self.height, self.width) if self.orientation < 5 else (self.width, self.height)

    def decode(self, shrink_factor: float, needed: Box | None = None) -> tuple[Pixels, int]:
        factor = next((factor for factor in (8, 4, 2) if shrink_factor >= factor * _MIN_REMAINING_SHRINK), 1)
        rows = self.height if needed is None or not self.frame else self._rows_needed(needed, factor)
        # Leaving out less than 1/16 of the rows does not pay for the copy of the data.
        pixels = self._decode_top(rows, factor) if rows <= self.height - self.height // 16 else None
        if pixels is None:
            pixels = self._decode_all(self._size_options(self.height, factor))
        return upright(pixels, self.orientation), factor

    def _rows_needed(self, needed: Box, factor: int) -> int:
        """Return how many rows, in the order in which they are stored, must be decoded."""
        first, last = (needed.left, needed.right) if self.orientation >= 5 else (needed.top, needed.bottom)
        if self.orientation in (3, 4, 6, 7):
            last = self.height - first
        return (-(-last // factor) + _ROWS_AFTER) * factor

    def _size_options(self, height: int, factor: int) -> dict[str, int]:
        """Return the options that make simplejpeg reduce an image of this height."""
        return {"min_height": -(-height // factor), "min_width": -(-self.width // factor)} if factor > 1 else {}

    def _decode_top(self, rows: int, factor: int) -> Pixels | None:
        """Decode the first rows only, by changing the height in the header; the others have any value.

        Returns ``None`` if the decoder reports anything but the bytes that are left over, or if this cannot work. A
        truncated image is still noticed, because the decoder looks for its end.
        """
        at = self.frame + 5
        if self.data.find(b"\xff\xdd", self.frame, self.frame + 1024) > 0:  # restart markers would hide the end
            return None
        data = b"".join((self.data[:at], rows.to_bytes(2, "big"), memoryview(self.data)[at + 2 :]))
        pixels = np.empty((-(-self.height // factor), -(-self.width // factor), 3), np.uint8)
        try:
            simplejpeg().decode_jpeg(data, buffer=pixels, strict=not self.partial, **self._size_options(rows, factor))
        except ValueError as exc:
            if not str(exc).endswith(_END_WARNING):
                return None
        return pixels

    def _decode_all(self, size_options: dict[str, int]) -> Pixels:
        decode = simplejpeg().decode_jpeg
        try:
            pixels: Pixels = decode(self.data, strict=not self.partial, **size_options)
        except ValueError as exc:
            if not any(harmless in str(exc) for harmless in _HARMLESS_WARNINGS):
                raise ValueError(f"damaged or truncated JPEG image: {exc}") from exc
            pixels = decode(self.data, strict=False, **size_options)
        return pixels


@dataclass(frozen=True, slots=True)
class _PillowImage:
    image: ImageFile.ImageFile
    orientation: int

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.image.size
        return (height, width) if self.orientation < 5 else (width, height)

    def decode(self, shrink_factor: float, needed: Box | None = None) -> tuple[Pixels, int]:
        load_image(self.image)
        if self.image.mode.startswith("I"):
            gray = _to_eight_bits(np.asarray(self.image))
            pixels = np.repeat(gray[:, :, None], 3, axis=2)
        else:
            pixels = np.array(converted(self.image, "RGB"))
        return upright(pixels, self.orientation), 1


def _to_eight_bits(gray: Pixels) -> Pixels:
    """Convert 16-bit gray, which Pillow may hold in 32 bits."""
    if gray.size and not (gray.min() >= 0 and gray.max() <= 0xFFFF):
        raise ValueError(f"gray pixels from {gray.min()} to {gray.max()} do not fit in 16 bits")
    return np.rint(gray / np.float32(257)).astype(np.uint8)


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return a view of an image that is rotated and flipped as its EXIF orientation (1 to 8) says."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    vertical, horizontal = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    if vertical:
        pixels = pixels[::-1]
    return pixels[:, ::-1] if horizontal else pixels


def _find_frame(data: bytes) -> tuple[int, bytes | None]:
    """Return the offset of a JPEG's frame header (0: none found), and the EXIF data that precede it."""
    at, end, exif = 2, len(data) - 4, None
    while at < end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if 0xC0 <= marker <= 0xC2:
            return at, exif
        if marker in (0xC3, 0xD9, 0xDA):
            break
        after = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if exif is None and marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            exif = data[at + 4 : after]
        at = after
    return 0, exif


def exif_orientation(exif: bytes | None) -> int:
    """Return the orientation (1 to 8) that EXIF data give; 1, which is upright, if it is missing or not valid."""
    if exif is None:
        return 1
    exif = exif.removeprefix(b"Exif\0\0")
    order: Literal["little", "big"] = "little" if exif[:2] == b"II" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(exif[at : at + size], order)

    first = number(4, 4)
    for entry in range(first + 2, first + 2 + 12 * number(first, 2), 12):
        if entry + 12 > len(exif):
            break
        if number(entry, 2) == _ORIENTATION_TAG:
            orientation = number(entry + 8, 2)
            return orientation if 1 <= orientation <= 8 else 1
    return 1


@cache
def simplejpeg() -> Any:
    """Import simplejpeg, the JPEG codec.

    Raises:
        MissingExtra: simplejpeg is not installed.
    """
    try:
        import simplejpeg as module
    except ImportError as exc:
        raise MissingExtra("vision", "vision") from exc
    return module
