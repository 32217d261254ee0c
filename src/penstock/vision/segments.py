"""The structure of a JPEG file: its header, and the segments between restart markers, each decodable by itself.

A decoder starts anew at a restart marker. Where every row of an image consists of the same number of segments, they
form a grid of tiles, and any rectangle of them, under a header with its height and width, is a JPEG of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

_ORIENTATION_TAG = 0x0112
_FRAME_HEADER = Struct(">xBxxBHHB")  # marker, bits, height, width, components
_SUBSAMPLINGS = (0x11, 0x21, 0x12, 0x22, 0x41)  # 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1


class Box(NamedTuple):
    """A rectangle of whole pixels."""

    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What the header of a JPEG says, up to its first scan.

    Attributes:
        frame: The offset of the frame header.
        scan: The offset of the first scan's data; 0 if the scan does not hold all components.
        marker: The kind of the frame, such as 0xC0 for baseline.
        bits: The bits of a sample.
        height: The height in pixels, as stored.
        width: The width in pixels, as stored.
        sampling: The sampling factors of each component: horizontal in the upper four bits, vertical in the lower.
        restart_interval: The MCUs between two restart markers; 0: there are none.
        orientation: The EXIF orientation, from 1 to 8.
    """

    frame: int
    scan: int
    marker: int
    bits: int
    height: int
    width: int
    sampling: tuple[int, ...]
    restart_interval: int
    orientation: int

    @property
    def is_sequential(self) -> bool:
        """Whether rows are stored in order, by Huffman codes."""
        return self.marker in (0xC0, 0xC1)

    @property
    def is_common(self) -> bool:
        """Whether it has Huffman codes, 8 bits, and gray or chroma at the resolution of luma or below."""
        luma, *chroma = self.sampling
        known = not chroma or (luma in _SUBSAMPLINGS and chroma == [0x11, 0x11])
        return self.marker <= 0xC2 and self.bits == 8 and self.height > 0 and self.width > 0 and known

    @property
    def mcu_size(self) -> tuple[int, int]:
        """The height and width in pixels of an MCU, the unit of a scan that holds all components."""
        if len(self.sampling) == 1:
            return 8, 8
        return 8 * max(factors & 15 for factors in self.sampling), 8 * max(factors >> 4 for factors in self.sampling)


def jpeg_header(data: bytes) -> JpegHeader | None:
    """Return what the header of a JPEG says; ``None`` if it has no frame header and no scan."""
    at, end, frame, restart_interval, orientation = 2, len(data) - 4, 0, 0, 0
    while at < end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = at
        elif marker == 0xD9:
            break
        after = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker == 0xDA:
            return _header(data, frame, at, after, restart_interval, orientation or 1) if frame else None
        if marker == 0xDD:
            restart_interval = data[at + 4] << 8 | data[at + 5]
        elif marker == 0xE1 and not orientation and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = exif_orientation(data[at + 4 : after])
        at = after
    return None


def _header(
    data: bytes, frame: int, scan_header: int, scan: int, restart_interval: int, orientation: int
) -> JpegHeader | None:
    marker, bits, height, width, components = _FRAME_HEADER.unpack_from(data, frame)
    sampling = tuple(data[frame + 11 : frame + 10 + 3 * components : 3])
    if not sampling or len(sampling) != components:
        return None
    whole = data[scan_header + 4] == components
    return JpegHeader(frame, scan if whole else 0, marker, bits, height, width, sampling, restart_interval, orientation)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where the segments of a JPEG lie: bands of rows, each cut into columns.

    Attributes:
        header: What the header says.
        offsets: Where each segment begins, and where one after the last would begin: a marker of two bytes is
            before each of these.
        columns: The segments of a band.
        height: The height of a band in pixels; the last one may be lower.
        width: The width of a column in pixels, or that of the image where segments do not form columns.
    """

    header: JpegHeader
    offsets: npt.NDArray[np.int64]
    columns: int
    height: int
    width: int

    def covering(self, box: Box) -> Box:
        """Return the smallest rectangle of segments that covers a box, in pixels."""
        header, height, width = self.header, self.height, self.width
        return Box(
            box.top // height * height,
            box.left // width * width,
            min(header.height, -(-box.bottom // height) * height),
            min(header.width, -(-box.right // width) * width),
        )

    def joined(self, data: bytes, box: Box) -> bytearray:
        """Return the JPEG of a box that consists of whole segments."""
        first, last = 0, self.columns
        if self.width < self.header.width:
            first, last = box.left // self.width, -(-box.right // self.width)
        bands = np.arange(box.top // self.height, -(-box.bottom // self.height))
        segments = (bands[:, None] * self.columns + np.arange(first, last)).ravel()
        # The last band may have fewer segments, unless they form columns.
        segments = segments[: len(self.offsets) - 1 - int(segments[0])]
        starts, stops = self.offsets[segments], self.offsets[segments + 1]
        per_band = last - first
        begins, ends = starts[::per_band].tolist(), stops[per_band - 1 :: per_band].tolist()
        if len(ends) < len(begins):
            ends.append(int(stops[-1]))
        at = self.header.frame + 5
        size = (box.bottom - box.top).to_bytes(2, "big") + (box.right - box.left).to_bytes(2, "big")
        view = memoryview(data)
        parts: list[Any] = [view[:at], size, view[at + 4 : self.header.scan]]
        parts += [view[begin:end] for begin, end in zip(begins, ends, strict=True)]
        out = bytearray().join(parts)
        markers = (stops - starts).cumsum()
        markers += self.header.scan - 1
        codes = np.frombuffer(out, np.uint8)
        codes[markers] = _expected_markers(len(markers))
        return out


def find_tiles(data: bytes, header: JpegHeader) -> Tiles | None:
    """Find the segments of a JPEG by its restart markers, in one pass over its data.

    Returns ``None`` if there are none, or if they are not the ones to expect: the data are damaged or truncated.
    """
    if not (header.restart_interval and header.scan and header.is_sequential and header.is_common):
        return None
    mcu_height, mcu_width = header.mcu_size
    rows, per_row = -(-header.height // mcu_height), -(-header.width // mcu_width)
    interval = header.restart_interval
    band_rows = interval // math.gcd(interval, per_row)
    count = -(-rows * per_row // interval)
    codes = np.frombuffer(data, np.uint8, offset=header.scan)
    found = codes[:-1] == 0xFF
    found &= codes[1:] >= 0xD0  # in the data of a segment, a zero follows 0xFF
    at = found.nonzero()[0]
    markers, expected = codes[at + 1], _expected_markers(count)
    if markers[:count].tobytes() != expected.tobytes():
        at = at[markers != 0xFF]  # fill bytes, which may precede a marker
        if codes[at[:count] + 1].tobytes() != expected.tobytes():
            return None
    offsets = np.empty(count + 1, np.int64)
    offsets[0] = header.scan
    offsets[1:] = at[:count] + (header.scan + 2)
    width = header.width if band_rows > 1 else min(header.width, interval * mcu_width)
    return Tiles(header, offsets, per_row * band_rows // interval, band_rows * mcu_height, width)


@lru_cache(64)
def _expected_markers(count: int) -> npt.NDArray[np.uint8]:
    """Return the markers after each of this many segments."""
    markers = (0xD0 + np.arange(count) % 8).astype(np.uint8)
    markers[-1] = 0xD9
    return markers


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
