"""The index of a file of rows as a value: the offset of every n-th row, and its copy in the user's cache."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.blobs.stamp import Stamp, cached_path, write_cached
from penstock.errors import DataError
from penstock.order import I64

_MAGIC = b"PSTKRW01"
_CACHE_FAMILY = "rows"
_NO_STAMP = Stamp()


@dataclass(frozen=True, slots=True, eq=False)
class RowOffsets:
    """The offsets of every ``interval``-th row of a file, from which any row is found with a short search.

    They take 8 bytes for every ``interval`` rows, or 16 in a file with lines.

    Attributes:
        interval: How many rows there are from one offset to the next.
        row_count: How many rows the file has; a damaged last row counts.
        starts: The offsets of rows 0, ``interval``, 2 * ``interval``, ... in the (decompressed) file.
        end: The offset of the end of the last readable row.
        lines: The line numbers, from 1, of the rows at ``starts``; empty if the file has no lines.
        problem: What is wrong with the last row, if the file ends in damaged data; else empty.
        columns: The column names in the header, if there is one.
        stamp: The stamp of the file when it was scanned.
    """

    interval: int
    row_count: int
    starts: I64
    end: int
    lines: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    problem: str = ""
    columns: tuple[str, ...] = ()
    stamp: Stamp = _NO_STAMP

    @property
    def readable_rows(self) -> int:
        """How many rows can be read: all but a damaged last row."""
        return self.row_count - bool(self.problem)

    def byte_range(self, first: int, last: int) -> tuple[int, int]:
        """Return the offsets from ``starts[first]`` to the one after ``starts[last]``."""
        end = int(self.starts[last + 1]) if last + 1 < len(self.starts) else self.end
        return int(self.starts[first]), end

    def to_bytes(self) -> bytes:
        """Return the content of a cache file: magic, a JSON header, the arrays, a checksum."""
        about = {
            "every": self.interval,
            "rows": self.row_count,
            "end": self.end,
            "bad": self.problem,
            "columns": self.columns,
            "stamp": [self.stamp.size, self.stamp.mtime_ns, self.stamp.inode],
            "marks": len(self.starts),
            "lines": len(self.lines),
        }
        header = json.dumps(about, separators=(",", ":")).encode()
        arrays = [array.astype("<i8").tobytes() for array in (self.starts, self.lines)]
        body = b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *arrays])
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> RowOffsets:
        """Parse the content of a cache file.

        Raises:
            DataError: The data is damaged, or has another format.
        """
        if data[:8] != _MAGIC or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise DataError("the cached row offsets are damaged, or have another version")
        length = int.from_bytes(data[8:16], "little")
        about: dict[str, Any] = json.loads(data[16 : 16 + length])
        count = about["marks"]
        starts = np.frombuffer(data, "<i8", count, 16 + length).astype(np.int64)
        lines = np.frombuffer(data, "<i8", about["lines"], 16 + length + 8 * count).astype(np.int64)
        columns, stamp = tuple(about["columns"]), Stamp(*about["stamp"])
        return cls(about["every"], about["rows"], starts, about["end"], lines, about["bad"], columns, stamp)


def read_cached_offsets(path: str, scan_key: str, stamp: Stamp) -> RowOffsets | None:
    """Return the cached offsets of a file, ``None`` if there are none or the file has changed since.

    Args:
        path: The file.
        scan_key: What the offsets depend on besides the file, as in ``RowFormat.scan_key``.
        stamp: The stamp of the file now.
    """
    try:
        offsets = RowOffsets.from_bytes(cached_path(_CACHE_FAMILY, _cache_key(path, scan_key)).read_bytes())
    except (OSError, RuntimeError, DataError, ValueError, KeyError, TypeError):
        return None
    return offsets if offsets.stamp == stamp else None


def write_cached_offsets(path: str, scan_key: str, offsets: RowOffsets, stamp: Stamp) -> RowOffsets:
    """Cache the offsets of a file for later runs and return them with ``stamp``.

    A cache that cannot be written is not an error.
    """
    offsets = replace(offsets, stamp=stamp)
    write_cached(_CACHE_FAMILY, _cache_key(path, scan_key), offsets.to_bytes())
    return offsets


def _cache_key(path: str, scan_key: str) -> str:
    return f"{scan_key}\0{os.path.abspath(path)}"
