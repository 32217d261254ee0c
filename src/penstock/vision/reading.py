"""From the bytes of an image to pixels: RGB, upright, told by their content.

JPEG is decoded by libjpeg-turbo (simplejpeg), the same pixels as Pillow's; large ones that will shrink a lot at 1/2,
1/4 or 1/8 of their size, which libjpeg-turbo does while it decodes. Its faster and coarser ways (``fastdct``,
``fastupsample``) gained nothing that could be measured. Everything else is read by Pillow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from penstock.codecs.images import converted, load_image, open_image
from penstock.codecs.limits import Limits
from penstock.errors import MissingExtra
from penstock.vision.resampling import Pixels

if TYPE_CHECKING:
    from PIL import ImageFile

Truncated = Literal["error", "partial"]

# How much must be left to shrink after a decoder has done its part: then the result differs from one that looks at
# every pixel by a quarter of a level in the mean and by two or less in 999 of 1000.
_LEFT_TO_SHRINK = 2.5

_ORIENTATION = 0x0112
_HARMLESS = ("extraneous bytes before marker", "Unknown Adobe color transform code")
_LIMITS = Limits()


class Picture(Protocol):
    """An image whose size is known and whose pixels are not yet decoded."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, upright."""

    def pixels(self, shrinks: float) -> tuple[Pixels, int]:
        """Its pixels, and by which factor they were reduced already, knowing that it will shrink so many times."""


def read_image(data: bytes, *, limits: Limits = _LIMITS, truncated: Truncated = "error") -> Pixels:
    """Decode an image to uint8 RGB, height x width x 3, upright, fresh.

    Transparency is dropped, gray becomes RGB, 16 bits become 8, CMYK is converted; of several frames the first is
    taken.

    Args:
        data: The file: JPEG, PNG, WebP, or another kind that Pillow reads.
        limits: How many pixels it may have.
        truncated: Whether a JPEG that was cut short is an error, or what there is of it is taken: the rest is gray.

    Raises:
        OverLimit: it has too many pixels.
        ValueError: it is no image, or is damaged.
        MissingExtra: simplejpeg or Pillow is not installed.
    """
    return np.ascontiguousarray(open_picture(data, limits, truncated).pixels(1)[0])


def open_picture(data: bytes, limits: Limits, truncated: Truncated) -> Picture:
    """Read the header of an image.

    Raises:
        OverLimit: it has too many pixels.
        ValueError: it is no image, or its header is damaged.
        MissingExtra: simplejpeg or Pillow is not installed.
    """
    if not data:
        raise ValueError("no image: the field is empty (0 bytes)")
    if data[:3] == b"\xff\xd8\xff":
        try:
            height, width, colours, _ = simplejpeg().decode_jpeg_header(data, strict=False)
        except (ValueError, KeyError):
            colours = "unknown"  # rare kinds of JPEG, and damage: Pillow tells which
        if colours in ("YCbCr", "RGB", "Gray"):
            limits.check_pixels(width, height)
            return _Jpeg(data, height, width, orientation(_exif_of_jpeg(data)), truncated == "partial")
    image = open_image(data, limits)
    noted = image.info.get("exif")
    return _Other(image, orientation(noted) if isinstance(noted, bytes) and image.format != "TIFF" else 1)


@dataclass(frozen=True, slots=True)
class _Jpeg:
    data: bytes
    height: int
    width: int
    turned: int
    partial: bool

    @property
    def size(self) -> tuple[int, int]:
        return (self.height, self.width) if self.turned < 5 else (self.width, self.height)

    def pixels(self, shrinks: float) -> tuple[Pixels, int]:
        factor = next((factor for factor in (8, 4, 2) if shrinks >= factor * _LEFT_TO_SHRINK), 1)
        least = {"min_height": -(-self.height // factor), "min_width": -(-self.width // factor)} if factor > 1 else {}
        return upright(self._decoded(least), self.turned), factor

    def _decoded(self, least: dict[str, int]) -> Pixels:
        decode = simplejpeg().decode_jpeg
        try:
            pixels: Pixels = decode(self.data, strict=not self.partial, **least)
        except ValueError as exc:
            if not any(harmless in str(exc) for harmless in _HARMLESS):
                raise ValueError(f"damaged or truncated JPEG image: {exc}") from exc
            pixels = decode(self.data, strict=False, **least)
        return pixels


@dataclass(frozen=True, slots=True)
class _Other:
    image: ImageFile.ImageFile
    turned: int

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.image.size
        return (height, width) if self.turned < 5 else (width, height)

    def pixels(self, shrinks: float) -> tuple[Pixels, int]:
        load_image(self.image)
        if self.image.mode.startswith("I"):
            gray = _eight_bits(np.asarray(self.image))
            pixels = np.repeat(gray[:, :, None], 3, axis=2)
        else:
            pixels = np.array(converted(self.image, "RGB"))
        return upright(pixels, self.turned), 1


def _eight_bits(gray: Pixels) -> Pixels:
    """Gray of 16 bits, which Pillow may keep in 32, as 8."""
    if gray.size and not (gray.min() >= 0 and gray.max() <= 0xFFFF):
        raise ValueError(f"gray pixels of {gray.min()}..{gray.max()} are more than 16 bits")
    return np.rint(gray / np.float32(257)).astype(np.uint8)


def upright(pixels: Pixels, turned: int) -> Pixels:
    """Turn an image as its EXIF orientation (1 to 8) says; a view."""
    if turned in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    vertical, horizontal = turned in (3, 4, 7, 8), turned in (2, 3, 6, 7)
    if vertical:
        pixels = pixels[::-1]
    return pixels[:, ::-1] if horizontal else pixels


def _exif_of_jpeg(data: bytes) -> bytes | None:
    """The EXIF of a JPEG, which stands before its first frame if it stands anywhere."""
    at, end = 2, len(data) - 4
    while at < end and data[at] == 0xFF:
        kind = data[at + 1]
        if kind == 0xFF:  # bytes that only fill
            at += 1
            continue
        if 0xC0 <= kind <= 0xC3 or kind in (0xD9, 0xDA):
            return None
        after = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if kind == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            return data[at + 4 : after]
        at = after
    return None


def orientation(exif: bytes | None) -> int:
    """Which of the eight ways a camera was held, by its EXIF; 1 where it does not say, or says nonsense."""
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
        if number(entry, 2) == _ORIENTATION:
            turned = number(entry + 8, 2)
            return turned if 1 <= turned <= 8 else 1
    return 1


@cache
def simplejpeg() -> Any:
    """The decoder of JPEG.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import simplejpeg as found
    except ImportError as exc:
        raise MissingExtra("vision", "vision") from exc
    return found
