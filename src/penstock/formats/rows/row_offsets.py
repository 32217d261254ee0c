"""Where rows begin in a file: every so many-th one, found in one pass and kept for the next run."""

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
_FAMILY = "rows"
_UNKNOWN = Stamp()


@dataclass(frozen=True, slots=True, eq=False)
class RowOffsets:
    """Where to begin in order to reach any row soon; eight bytes for every ``every`` rows, or sixteen.

    Attributes:
        every: How many rows lie from one mark to the next.
        rows: How many there are; a last one that is damaged counts.
        start: Where the rows 0, ``every``, twice ``every``, ... begin, in the (decompressed) file.
        end: Where the last row that can be read ends.
        line: The line each of those rows is on, from 1; empty where a file has no lines.
        bad: What is wrong with the last row, where the file ends in damage; else nothing.
        columns: The names in the header, where there is one.
        stamp: The file these marks were made of.
    """

    every: int
    rows: int
    start: I64
    end: int
    line: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    bad: str = ""
    columns: tuple[str, ...] = ()
    stamp: Stamp = _UNKNOWN

    @property
    def readable(self) -> int:
        """How many rows can be read."""
        return self.rows - bool(self.bad)

    def stretch(self, first: int, last: int) -> tuple[int, int]:
        """Where the bytes lie from mark ``first`` up to the one behind mark ``last``."""
        behind = int(self.start[last + 1]) if last + 1 < len(self.start) else self.end
        return int(self.start[first]), behind

    def to_bytes(self) -> bytes:
        """The file form: magic, a JSON header, the arrays, a checksum."""
        about = {
            "every": self.every,
            "rows": self.rows,
            "end": self.end,
            "bad": self.bad,
            "columns": self.columns,
            "stamp": [self.stamp.size, self.stamp.mtime_ns, self.stamp.inode],
            "marks": len(self.start),
            "lines": len(self.line),
        }
        head = json.dumps(about, separators=(",", ":")).encode()
        arrays = [array.astype("<i8").tobytes() for array in (self.start, self.line)]
        body = b"".join([_MAGIC, len(head).to_bytes(8, "little"), head, *arrays])
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> RowOffsets:
        """Read the file form back.

        Raises:
            DataError: it is something else, or damaged.
        """
        if data[:8] != _MAGIC or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise DataError("the marks are damaged, or of another version")
        length = int.from_bytes(data[8:16], "little")
        about: dict[str, Any] = json.loads(data[16 : 16 + length])
        many = about["marks"]
        start = np.frombuffer(data, "<i8", many, 16 + length).astype(np.int64)
        line = np.frombuffer(data, "<i8", about["lines"], 16 + length + 8 * many).astype(np.int64)
        columns, stamp = tuple(about["columns"]), Stamp(*about["stamp"])
        return cls(about["every"], about["rows"], start, about["end"], line, about["bad"], columns, stamp)


def read_cached_offsets(path: str, how: str, stamp: Stamp) -> RowOffsets | None:
    """The marks that were kept for a file read in this way, unless it has changed since."""
    try:
        marks = RowOffsets.from_bytes(cached_path(_FAMILY, _place(path, how)).read_bytes())
    except (OSError, RuntimeError, DataError, ValueError, KeyError, TypeError):
        return None
    return marks if marks.stamp == stamp else None


def write_cached_offsets(path: str, how: str, marks: RowOffsets, stamp: Stamp) -> RowOffsets:
    """Keep marks for the next run; a cache that cannot be written is no error."""
    marks = replace(marks, stamp=stamp)
    write_cached(_FAMILY, _place(path, how), marks.to_bytes())
    return marks


def _place(path: str, how: str) -> str:
    return f"{how}\0{os.path.abspath(path)}"
