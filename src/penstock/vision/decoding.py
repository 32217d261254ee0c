"""From the bytes of an image to pixels: RGB, upright, told by their content.

JPEG is decoded by libjpeg-turbo (simplejpeg), the same pixels as Pillow's; large ones that will shrink a lot at 1/2,
1/4 or 1/8 of their size, which libjpeg-turbo does while it decodes; and no further down than to the last row that is
wanted, since most of the work is unpacking rows one after the other. Its faster and coarser ways (``fastdct``,
``fastupsample``) gained nothing that could be measured. Everything else is read by Pillow.
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

# How much must be left to shrink after a decoder has done its part: then the result differs from one that looks at
# every pixel by a quarter of a level in the mean and by two or less in 999 of 1000.
_LEFT_TO_SHRINK = 2.5

_ORIENTATION = 0x0112
_HARMLESS = ("extraneous bytes before marker", "Unknown Adobe color transform code")
_ROWS_AFTER = 2  # colours are stored coarser than brightness: a row's are made of the next one's too
_END = "extraneous bytes before marker 0xd9"  # all that is wrong: the image goes on behind the rows that were asked for
_FRAME = Struct(">xBxxBHHB")  # of a JPEG: kind, bits, height, width, components
_SAMPLINGS = (0x11, 0x21, 0x12, 0x22, 0x41)  # 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1
_LIMITS = Limits()


class Box(NamedTuple):
    """A part of an image, in whole pixels."""

    top: int
    left: int
    bottom: int
    right: int


class Picture(Protocol):
    """An image whose size is known and whose pixels are not yet decoded."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, upright."""

    def pixels(self, shrinks: float, wanted: Box | None = None) -> tuple[Pixels, int]:
        """Its pixels, and by which factor they were reduced already, knowing that it will shrink so many times.

        Where only the part ``wanted`` will be looked at, the others may be anything.
        """


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
    if data[:3] == b"\xff\xd8\xff" and (jpeg := _jpeg(data, truncated == "partial")) is not None:
        limits.check_pixels(jpeg.width, jpeg.height)
        return jpeg
    image = open_image(data, limits)
    noted = image.info.get("exif")
    return _Other(image, orientation(noted) if isinstance(noted, bytes) and image.format != "TIFF" else 1)


def _jpeg(data: bytes, partial: bool) -> _Jpeg | None:
    """A JPEG that simplejpeg decodes; ``None`` for rare kinds and damage, of which Pillow knows more."""
    frame, exif = _front(data)
    if 0 < frame < len(data) - 18:
        kind, bits, height, width, components = _FRAME.unpack_from(data, frame)
        sampled = components == 1 or (
            components == 3 and data[frame + 11] in _SAMPLINGS and data[frame + 14] == data[frame + 17] == 0x11
        )
        if bits == 8 and height and width and sampled:
            return _Jpeg(data, height, width, orientation(exif), partial, 0 if kind > 0xC1 else frame)
    try:
        height, width, colours, _ = simplejpeg().decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):
        return None
    return _Jpeg(data, height, width, orientation(exif), partial) if colours in ("YCbCr", "RGB", "Gray") else None


@dataclass(slots=True)
class _Jpeg:
    data: bytes
    height: int
    width: int
    turned: int
    partial: bool
    frame: int = 0  # where its frame begins, if rows follow one another: then it can be decoded in part

    @property
    def size(self) -> tuple[int, int]:
        return (self.height, self.width) if self.turned < 5 else (self.width, self.height)

    def pixels(self, shrinks: float, wanted: Box | None = None) -> tuple[Pixels, int]:
        factor = next((factor for factor in (8, 4, 2) if shrinks >= factor * _LEFT_TO_SHRINK), 1)
        upto = self.height if wanted is None or not self.frame else self._upto(wanted, factor)
        # Less than a sixteenth is not worth the copy that it takes.
        pixels = self._upper(upto, factor) if upto <= self.height - self.height // 16 else None
        if pixels is None:
            pixels = self._decoded(self._least(self.height, factor))
        return upright(pixels, self.turned), factor

    def _upto(self, wanted: Box, factor: int) -> int:
        """How many rows, as they are stored, have to be decoded."""
        first, last = (wanted.left, wanted.right) if self.turned >= 5 else (wanted.top, wanted.bottom)
        if self.turned in (3, 4, 6, 7):
            last = self.height - first
        return (-(-last // factor) + _ROWS_AFTER) * factor

    def _least(self, height: int, factor: int) -> dict[str, int]:
        """What makes simplejpeg reduce an image of this height."""
        return {"min_height": -(-height // factor), "min_width": -(-self.width // factor)} if factor > 1 else {}

    def _upper(self, upto: int, factor: int) -> Pixels | None:
        """An image whose first rows are decoded, as if its header said that there are no others.

        ``None`` where more is wrong with it than the bytes that are left over, or where it cannot be told. An image
        that was cut short is found out nonetheless: the decoder looks for its end.
        """
        at = self.frame + 5
        if self.data.find(b"\xff\xdd", self.frame, self.frame + 1024) > 0:  # marks between rows would hide its end
            return None
        data = b"".join((self.data[:at], upto.to_bytes(2, "big"), memoryview(self.data)[at + 2 :]))
        pixels = np.empty((-(-self.height // factor), -(-self.width // factor), 3), np.uint8)
        try:
            simplejpeg().decode_jpeg(data, buffer=pixels, strict=not self.partial, **self._least(upto, factor))
        except ValueError as exc:
            if not str(exc).endswith(_END):
                return None
        return pixels

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

    def pixels(self, shrinks: float, wanted: Box | None = None) -> tuple[Pixels, int]:
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


def _front(data: bytes) -> tuple[int, bytes | None]:
    """Where the frame of a JPEG begins (0: nowhere), and its EXIF, which stands before it if it stands anywhere."""
    at, end, exif = 2, len(data) - 4, None
    while at < end and data[at] == 0xFF:
        kind = data[at + 1]
        if kind == 0xFF:  # bytes that only fill
            at += 1
            continue
        if 0xC0 <= kind <= 0xC2:
            return at, exif
        if kind in (0xC3, 0xD9, 0xDA):
            break
        after = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if exif is None and kind == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            exif = data[at + 4 : after]
        at = after
    return 0, exif


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
