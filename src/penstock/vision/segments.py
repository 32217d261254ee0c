"""The structure of a JPEG file: its header, and the segments between restart markers, each decodable by itself.

A decoder starts again at a restart marker. Where every row of an image consists of the same number of segments, they
form a grid of tiles, and any rectangle of them, under a header with its height and width, is a JPEG of its own.

Files that Penstock stores in tiles say how long their segments are, so that nothing has to be searched: a header
segment APP9 holds ``b"Tiles\\0"``, then the length of each segment with its marker, as little-endian integers of two
bytes. Other programs ignore it. The list is compared with the markers, so a wrong one only costs a search.
"""

from __future__ import annotations

import math
from functools import lru_cache
from struct import Struct
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

_ORIENTATION_TAG = 0x0112
_FRAME_HEADER = Struct(">xBxxBHHB")  # marker, bits, height, width, components
_SUBSAMPLINGS = frozenset((luma, 0x11, 0x11) for luma in (0x11, 0x21, 0x12, 0x22, 0x41))  # 4:4:4 to 4:1:1
_MCU_SIZES: dict[tuple[int, ...], tuple[int, int]] = {
    sampling: (8 * (sampling[0] & 15), 8 * (sampling[0] >> 4)) for sampling in _SUBSAMPLINGS
}
_TABLE_NAME = b"Tiles\0"
_MAX_TABLE_BYTES = 65_000  # a header segment has at most 65,535


class Box(NamedTuple):
    """A rectangle of whole pixels."""

    top: int
    left: int
    bottom: int
    right: int


class JpegHeader(NamedTuple):
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
        table: The offset of the lengths of the segments, if the file has them; else 0.
        table_end: Where they end.
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
    table: int = 0
    table_end: int = 0

    @property
    def is_sequential(self) -> bool:
        """Whether rows are stored in order, by Huffman codes."""
        return self.marker in (0xC0, 0xC1)

    @property
    def is_common(self) -> bool:
        """Whether it has Huffman codes, 8 bits, and gray or chroma at the resolution of luma or below."""
        known = self.sampling in _SUBSAMPLINGS or len(self.sampling) == 1
        return self.marker <= 0xC2 and self.bits == 8 and self.height > 0 and self.width > 0 and known

    @property
    def mcu_size(self) -> tuple[int, int]:
        """The height and width in pixels of an MCU, the unit of a scan that holds all components."""
        known = _MCU_SIZES.get(self.sampling)
        if known is not None or len(self.sampling) == 1:
            return known or (8, 8)
        return 8 * max(factors & 15 for factors in self.sampling), 8 * max(factors >> 4 for factors in self.sampling)


def jpeg_header(data: bytes) -> JpegHeader | None:
    """Return what the header of a JPEG says; ``None`` if it has no frame header and no scan."""
    at, end, frame, restart_interval, orientation, table = 2, len(data) - 4, 0, 0, 0, (0, 0)
    while at < end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        after = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker == 0xDA:
            return _header(data, frame, at, after, restart_interval, orientation or 1, table) if frame else None
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = at
        elif marker == 0xDD:
            restart_interval = data[at + 4] << 8 | data[at + 5]
        elif marker == 0xE1 and not orientation and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = exif_orientation(data[at + 4 : after])
        elif marker == 0xE9 and data[at + 4 : at + 10] == _TABLE_NAME:
            table = at + 10, after
        elif marker == 0xD9:
            break
        at = after
    return None


def _header(
    data: bytes,
    frame: int,
    scan_header: int,
    scan: int,
    restart_interval: int,
    orientation: int,
    table: tuple[int, int],
) -> JpegHeader | None:
    marker, bits, height, width, components = _FRAME_HEADER.unpack_from(data, frame)
    sampling = tuple(data[frame + 11 : frame + 10 + 3 * components : 3])
    if not sampling or len(sampling) != components:
        return None
    scan = scan if data[scan_header + 4] == components else 0
    return JpegHeader(frame, scan, marker, bits, height, width, sampling, restart_interval, orientation, *table)


class Tiles(NamedTuple):
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
        frame, scan = self.header.frame + 5, self.header.scan
        low, high = box.top // self.height, -(-box.bottom // self.height)
        first, last = 0, self.columns
        if self.width < self.header.width:
            first, last = box.left // self.width, -(-box.right // self.width)
        view, offsets = memoryview(data), self.offsets
        size = (box.bottom - box.top).to_bytes(2, "big") + (box.right - box.left).to_bytes(2, "big")
        parts: list[Any] = [view[:frame], size, view[frame + 4 : scan]]
        if last - first == self.columns:  # the last band may have fewer segments, unless they form columns
            run = offsets[low * self.columns : high * self.columns + 1]
            lengths = run[1:] - run[:-1]
            parts.append(view[run[0] : run[-1]])
        else:
            starts = offsets[:-1].reshape(-1, self.columns)[low:high, first:last]
            stops = offsets[1:].reshape(-1, self.columns)[low:high, first:last]
            lengths = stops - starts
            parts += [view[begin:end] for begin, end in zip(starts[:, 0].tolist(), stops[:, -1].tolist(), strict=True)]
        out = bytearray().join(parts)
        markers = np.add.accumulate(lengths.ravel())
        markers += scan - 1
        np.frombuffer(out, np.uint8)[markers] = _expected_markers(len(markers))
        return out


def find_tiles(data: bytes, header: JpegHeader) -> Tiles | None:
    """Find the segments of a JPEG, by the lengths in its header or by its restart markers, in one pass over its data.

    Returns ``None`` if there are none, or if they are not in the expected order: the data are damaged or truncated.
    """
    interval = header.restart_interval
    if not (interval and header.scan and header.is_sequential and header.is_common):
        return None
    mcu_height, mcu_width = header.mcu_size
    rows, per_row = -(-header.height // mcu_height), -(-header.width // mcu_width)
    band_rows = interval // math.gcd(interval, per_row)
    count = -(-rows * per_row // interval)
    offsets = _listed_offsets(data, header, count)
    if offsets is None and (offsets := _searched_offsets(data, header, count)) is None:
        return None
    width = header.width if band_rows > 1 else min(header.width, interval * mcu_width)
    return Tiles(header, offsets, per_row * band_rows // interval, band_rows * mcu_height, width)


def _listed_offsets(data: bytes, header: JpegHeader, count: int) -> npt.NDArray[np.int64] | None:
    """Return where segments begin by the lengths in the header; ``None`` if it has none, or they are wrong."""
    if header.table_end - header.table != 2 * count:
        return None
    offsets = np.empty(count + 1, np.int64)
    offsets[0] = header.scan
    offsets[1:] = np.frombuffer(data, "<u2", count, header.table)
    np.add.accumulate(offsets, out=offsets)
    if offsets[-1] > len(data):
        return None
    codes, at = np.frombuffer(data, np.uint8), offsets[1:] - 2
    if codes[at].tobytes() != b"\xff" * count:
        return None
    at += 1
    return offsets if codes[at].tobytes() == _expected_markers(count).tobytes() else None


def _searched_offsets(data: bytes, header: JpegHeader, count: int) -> npt.NDArray[np.int64] | None:
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
    return offsets


def with_lengths(data: bytes) -> bytes:
    """Return a JPEG that says in its header how long its segments are; the same bytes if it has none, or too many."""
    header = jpeg_header(data)
    tiles = None if header is None or header.table else find_tiles(data, header)
    if header is None or tiles is None:
        return data
    lengths = np.diff(tiles.offsets)
    if 2 * len(lengths) > _MAX_TABLE_BYTES or lengths.max() > 0xFFFF:
        return data
    body = _TABLE_NAME + lengths.astype("<u2").tobytes()
    segment = b"\xff\xe9" + (len(body) + 2).to_bytes(2, "big") + body
    return b"".join((data[: header.frame], segment, data[header.frame :]))


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
