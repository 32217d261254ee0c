"""Decoding of images to upright RGB pixels. The file format is recognised by the content.

libjpeg-turbo (simplejpeg) decodes JPEG to the same pixels as Pillow. Large images that will shrink a lot are decoded at
1/2, 1/4 or 1/8 of their size, which libjpeg-turbo does on the fly. Of a JPEG with restart markers only the segments
that cover the needed part are decoded; of others, the rows below it are not: most of the work is unpacking rows in
order. The faster but less exact modes of libjpeg-turbo (``fastdct``, ``fastupsample``) made no measurable difference.
Pillow reads all other formats, except for planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from penstock.codecs.images import converted, load_image, open_image
from penstock.codecs.limits import Limits
from penstock.errors import import_extra
from penstock.vision.planes import PLANES_MAGIC, PlanesImage
from penstock.vision.resampling import Decoded, Pixels
from penstock.vision.segments import Box, JpegHeader, exif_orientation, find_tiles, jpeg_header

if TYPE_CHECKING:
    from PIL import ImageFile

Truncated = Literal["error", "partial"]

# How many times an image must still shrink after the decoder has reduced it. With this value the result differs from
# one that is filtered from all pixels by 1/4 of a level on average, and by at most two levels in 999 of 1000 pixels.
_MIN_REMAINING_SHRINK = 2.5

_HARMLESS_WARNINGS = ("extraneous bytes before marker", "Unknown Adobe color transform code")
# Chroma is stored at a lower resolution: the colours of a pixel depend on the pixels around it. Where there are only
# two columns of chroma, the decoder does not interpolate between them.
_MARGIN_ROWS, _MARGIN_COLUMNS = 2, 4
_END_WARNING = "extraneous bytes before marker 0xd9"  # the only one to expect when rows are left undecoded
_LIMITS = Limits()

# What makes an image upright, by its EXIF orientation; flips come last.
_TRANSPOSED, _FLIPPED_VERTICALLY, _FLIPPED_HORIZONTALLY = (5, 6, 7, 8), (3, 4, 7, 8), (2, 3, 6, 7)


class EncodedImage(Protocol):
    """An image whose header was read, and whose pixels are not decoded yet."""

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the upright image."""

    def decode(self, shrink_factor: float, needed: Box | None = None) -> Decoded:
        """Return the pixels of the image, or of a part that covers what is needed.

        Args:
            shrink_factor: How many times the caller will shrink the image.
            needed: The part that the caller will use, in pixels of the full size; ``None``: all of the image.
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
    return np.ascontiguousarray(open_encoded(data, limits, truncated).decode(1).pixels)


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
    if data.startswith(PLANES_MAGIC):
        planes = PlanesImage.of(data)
        limits.check_pixels(*reversed(planes.size))
        return planes
    image = open_image(data, limits)
    exif = image.info.get("exif")
    return _PillowImage(image, exif_orientation(exif) if isinstance(exif, bytes) and image.format != "TIFF" else 1)


def _jpeg(data: bytes, partial: bool) -> _Jpeg | None:
    """Return a JPEG that simplejpeg can decode; ``None`` for rare kinds and damage, which are left to Pillow."""
    header = jpeg_header(data)
    if header is not None and header.is_common:
        return _Jpeg(data, header.height, header.width, header.orientation, partial, header)
    try:
        height, width, colorspace, _ = simplejpeg().decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):
        return None
    if colorspace not in ("YCbCr", "RGB", "Gray"):
        return None
    return _Jpeg(data, height, width, 1 if header is None else header.orientation, partial)


@dataclass(slots=True)
class _Jpeg:
    data: bytes
    height: int
    width: int
    orientation: int
    partial: bool
    header: JpegHeader | None = None  # None: of a rare kind, which is decoded whole

    @property
    def size(self) -> tuple[int, int]:
        return (self.height, self.width) if self.orientation < 5 else (self.width, self.height)

    def decode(self, shrink_factor: float, needed: Box | None = None) -> Decoded:
        factor = 1
        while factor < 8 and shrink_factor >= 2 * factor * _MIN_REMAINING_SHRINK:
            factor *= 2
        height, width = -(-self.height // factor), -(-self.width // factor)
        decoded = None
        if needed is not None and self.header is not None and self.header.is_sequential:
            box = needed if factor == 1 else _reduced(needed, factor)
            top, left, bottom, right = (
                box if self.orientation == 1 else _as_stored(box, self.orientation, height, width)
            )
            top, left = max(0, top - _MARGIN_ROWS), max(0, left - _MARGIN_COLUMNS)
            box = Box(top, left, min(height, bottom + _MARGIN_ROWS), min(width, right + _MARGIN_COLUMNS))
            decode = self._decode_tiles if self.header.restart_interval else self._decode_top
            decoded = decode(box, factor, self.header)
        part, pixels = decoded or (Box(0, 0, height, width), self._decode_all(factor))
        if self.orientation == 1:
            return Decoded(pixels, factor, part.top, part.left)
        top, left, _, _ = _as_upright(part, self.orientation, height, width)
        return Decoded(upright(pixels, self.orientation), factor, top, left)

    def _decode_tiles(self, box: Box, factor: int, header: JpegHeader) -> tuple[Box, Pixels] | None:
        """Decode the segments that cover a box; ``None`` if they are damaged, or nearly all are needed.

        Boxes are in reduced pixels, as they are stored.
        """
        tiles = find_tiles(self.data, header)
        if tiles is None:
            return None
        if factor > 1:
            top, left, bottom, right = (side * factor for side in box)
            box = Box(top, left, min(bottom, self.height), min(right, self.width))
        part = tiles.covering(box)
        height, width = part.bottom - part.top, part.right - part.left
        if not self._worthwhile(height * width):
            return None
        options = _size_options(height, width, factor)
        try:
            pixels = simplejpeg().decode_jpeg(tiles.joined(self.data, part), strict=not self.partial, **options)
        except ValueError:
            return None
        return part if factor == 1 else _reduced(part, factor), pixels

    def _decode_top(self, box: Box, factor: int, header: JpegHeader) -> tuple[Box, Pixels] | None:
        """Decode the rows above the end of a box only, by changing the height in the header.

        Returns ``None`` if the decoder reports anything but the bytes that are left over, or if nearly all rows are
        needed. A truncated image is still noticed, because the decoder looks for its end.
        """
        rows = box.bottom * factor
        if not self._worthwhile(rows * self.width):
            return None
        at = header.frame + 5
        data = b"".join((self.data[:at], rows.to_bytes(2, "big"), memoryview(self.data)[at + 2 :]))
        part = Box(0, 0, box.bottom, -(-self.width // factor))
        pixels = np.empty((part.bottom, part.right, 3), np.uint8)
        options = _size_options(rows, self.width, factor)
        try:
            simplejpeg().decode_jpeg(data, buffer=pixels, strict=not self.partial, **options)
        except ValueError as exc:
            if not str(exc).endswith(_END_WARNING):
                return None
        return part, pixels

    def _worthwhile(self, area: int) -> bool:
        """Return whether decoding only this many pixels pays for the copy of the data."""
        return area <= self.height * self.width * 15 / 16

    def _decode_all(self, factor: int) -> Pixels:
        options = _size_options(self.height, self.width, factor)
        decode = simplejpeg().decode_jpeg
        try:
            pixels: Pixels = decode(self.data, strict=not self.partial, **options)
        except ValueError as exc:
            if not any(harmless in str(exc) for harmless in _HARMLESS_WARNINGS):
                raise ValueError(f"damaged or truncated JPEG image: {exc}") from exc
            pixels = decode(self.data, strict=False, **options)
        return pixels


@dataclass(frozen=True, slots=True)
class _PillowImage:
    image: ImageFile.ImageFile
    orientation: int

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.image.size
        return (height, width) if self.orientation < 5 else (width, height)

    def decode(self, shrink_factor: float, needed: Box | None = None) -> Decoded:
        load_image(self.image)
        if self.image.mode.startswith("I"):
            gray = _to_eight_bits(np.asarray(self.image))
            pixels = np.repeat(gray[:, :, None], 3, axis=2)
        else:
            pixels = np.array(converted(self.image, "RGB"))
        return Decoded(upright(pixels, self.orientation))


def _to_eight_bits(gray: Pixels) -> Pixels:
    """Convert 16-bit gray, which Pillow may hold in 32 bits."""
    if gray.size and not (gray.min() >= 0 and gray.max() <= 0xFFFF):
        raise ValueError(f"gray pixels from {gray.min()} to {gray.max()} do not fit in 16 bits")
    return np.rint(gray / np.float32(257)).astype(np.uint8)


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return a view of an image that is rotated and flipped as its EXIF orientation (1 to 8) says."""
    if orientation in _TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in _FLIPPED_VERTICALLY:
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in _FLIPPED_HORIZONTALLY else pixels


def _reduced(box: Box, factor: int) -> Box:
    """Return the reduced pixels that cover a box of the full size."""
    return Box(box.top // factor, box.left // factor, -(-box.bottom // factor), -(-box.right // factor))


def _as_upright(box: Box, orientation: int, height: int, width: int) -> Box:
    """Return where a box of a stored image of this height and width is in the upright image."""
    top, left, bottom, right = box
    if orientation in _TRANSPOSED:
        top, left, bottom, right, height, width = left, top, right, bottom, width, height
    if orientation in _FLIPPED_VERTICALLY:
        top, bottom = height - bottom, height - top
    if orientation in _FLIPPED_HORIZONTALLY:
        left, right = width - right, width - left
    return Box(top, left, bottom, right)


def _as_stored(box: Box, orientation: int, height: int, width: int) -> Box:
    """Return where a box of the upright image is in the stored image, which has this height and width."""
    if orientation in _TRANSPOSED:
        height, width = width, height
    inverse = {6: 8, 8: 6}.get(orientation, orientation)  # all other rotations and flips undo themselves
    return _as_upright(box, inverse, height, width)


def _size_options(height: int, width: int, factor: int) -> dict[str, int]:
    """Return the options that make simplejpeg reduce an image of this height and width."""
    return {"min_height": -(-height // factor), "min_width": -(-width // factor)} if factor > 1 else {}


@cache
def simplejpeg() -> Any:
    """Import simplejpeg, the JPEG codec.

    Raises:
        MissingExtra: simplejpeg is not installed.
    """
    return import_extra("simplejpeg", "vision", "vision")
