"""Scan files of lines for rows: all offsets of a file in one pass, or the rows between two offsets."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.formats.rows.reader import FileBytes, RowFile
from penstock.formats.rows.row_offsets import RowOffsets
from penstock.order import I64

U8 = npt.NDArray[np.uint8]
FindEnds = Callable[[U8, I64], I64]  # (bytes that begin with a row, positions of newlines) -> positions where rows end

ROWS_PER_OFFSET = 64  # few enough to search all of them for one row
_CHUNK_BYTES = 8 << 20
_NEWLINE, _QUOTE, _RETURN, _SPACE = b'\n"\r '


def find_newlines(data: U8) -> I64:
    """Return the positions of newlines."""
    return np.flatnonzero(data == _NEWLINE)


def find_line_ends(data: U8, newlines: I64) -> I64:
    """Return where rows end that are lines: at every newline."""
    return newlines


def find_csv_ends(data: U8, newlines: I64, delimiter: int) -> I64:
    """Return where rows of CSV end: at newlines outside quoted fields."""
    if data.tobytes().find(_QUOTE) < 0:  # several times faster than comparing every byte in numpy
        return newlines
    quotes = np.flatnonzero(data == _QUOTE)
    if _quotes_are_regular(data, quotes, delimiter):
        outside: I64 = newlines[np.searchsorted(quotes, newlines) % 2 == 0]
        return outside
    return _csv_ends_by_regex(data.tobytes(), delimiter)


def _quotes_are_regular(data: U8, quotes: I64, delimiter: int) -> bool:
    """Return whether every quote opens or closes a field or is one of a pair.

    If so, a position is inside a quoted field exactly if an odd number of quotes precede it.
    """
    opening, closing = quotes[0::2], quotes[1::2]
    before = data[opening[opening > 0] - 1]
    after = data[closing[closing + 1 < len(data)] + 1]
    is_boundary = np.zeros(256, bool)
    is_boundary[[delimiter, _NEWLINE, _QUOTE]] = True
    if not is_boundary[before].all():
        return False
    is_boundary[_RETURN] = True
    return bool(is_boundary[after].all())


def _csv_ends_by_regex(data: bytes, delimiter: int) -> I64:
    """Return where rows of CSV end if quotes also occur inside fields, where they have no meaning."""
    separator = re.escape(bytes([delimiter]))
    token = re.compile(rb'(?:\A|(?<=[\n%b]))"[^"]*(?:""[^"]*)*(?:"|\Z)|\n' % separator)
    return np.array([match.start() for match in token.finditer(data) if match[0] == b"\n"], np.int64)


def scan_lines(
    data: FileBytes, first: int, find_ends: FindEnds, blank: bytes | None, problem: str | None, line: int = 1
) -> RowOffsets:
    """Find the offset of every 64th row.

    Args:
        data: The file.
        first: The offset of the first row.
        find_ends: Finds where rows end.
        blank: The characters of blank lines, which are not rows; None: all lines are rows.
        problem: Why the file ends here, if it is damaged: a last line without a newline is then lost and counts as
            one damaged row.
        line: The line number of the first row.
    """
    starts, lines = [], []
    rows, at, size, end = 0, first, _CHUNK_BYTES, first
    while at < len(data):
        chunk = np.frombuffer(data, np.uint8, min(size, len(data) - at), at)
        newlines = find_newlines(chunk)
        ends = find_ends(chunk, newlines)
        is_last = at + len(chunk) == len(data)
        if is_last and problem is None and (not len(ends) or ends[-1] + 1 < len(chunk)):
            ends = np.append(ends, len(chunk))
        if not len(ends):
            if is_last:
                break
            size *= 2
            continue
        row_starts, row_ends = _rows_between(chunk, ends, blank)
        indexed = row_starts[-rows % ROWS_PER_OFFSET :: ROWS_PER_OFFSET]
        starts.append(at + indexed)
        lines.append(line + np.searchsorted(newlines, indexed))
        rows += len(row_starts)
        end = at + int(row_ends[-1]) + 1 if len(row_ends) else end
        consumed = int(ends[-1]) + 1
        line += int(np.searchsorted(newlines, consumed))
        at, size = at + consumed, _CHUNK_BYTES
    empty = np.zeros(0, np.int64)
    end = min(end, len(data))
    return RowOffsets(
        ROWS_PER_OFFSET,
        rows + bool(problem),
        np.concatenate([empty, *starts]),
        end,
        np.concatenate([empty, *lines]),
        problem or "",
    )


def _rows_between(chunk: U8, ends: I64, blank: bytes | None) -> tuple[I64, I64]:
    """Return where the rows of a chunk begin and end; without lines of ``blank`` characters."""
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    starts, ends = (starts[:-1], ends[:-1]) if len(starts) and starts[-1] >= len(chunk) else (starts, ends)
    if blank is None or not len(starts):
        return starts, ends
    candidates = np.flatnonzero((starts == ends) | (chunk[starts] <= _SPACE))
    dropped = [i for i in candidates.tolist() if not chunk[starts[i] : ends[i]].tobytes().strip(blank)]
    keep = np.ones(len(starts), bool)
    keep[dropped] = False
    return starts[keep], ends[keep]


@dataclass(frozen=True, slots=True)
class RowSpans:
    """The byte ranges of rows in a file, in the order in which they were requested; newlines are included."""

    starts: I64
    ends: I64

    def joined(self, data: FileBytes) -> bytes:
        """Return the bytes of all rows in one; adjacent rows are copied together."""
        breaks = np.flatnonzero(self.starts[1:] != self.ends[:-1]) + 1
        runs = zip(self.starts[[0, *breaks]].tolist(), self.ends[[*(breaks - 1), -1]].tolist(), strict=True)
        parts = [data[low:high] for low, high in runs]
        return b"".join(part if part.endswith(b"\n") else part + b"\n" for part in parts)

    def separate(self, data: FileBytes) -> list[bytes]:
        """Return the bytes of each row."""
        return [data[low:high] for low, high in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]


def aligned_range(offsets: RowOffsets, rows: I64) -> slice | None:
    """Return the byte range of rows if known offsets delimit it, else ``None``.

    That is the case for consecutive rows from one offset to another, or to the end; they need no search.
    """
    first, last = int(rows[0]), int(rows[-1]) + 1
    interval = offsets.interval
    is_aligned = first % interval == 0 and (last % interval == 0 or last == offsets.readable_rows)
    if not is_aligned or last - first != len(rows) or not bool((np.diff(rows) == 1).all()):
        return None
    return slice(*offsets.byte_range(first // interval, (last - 1) // interval))


def find_rows(file: RowFile, rows: I64, find_ends: FindEnds, blank: bytes | None) -> RowSpans:
    """Return the byte ranges of rows, by a search of the parts between known offsets that hold them."""
    offsets = file.offsets
    entries = rows // offsets.interval
    wanted = np.unique(entries)
    starts, ends = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for run in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
        low, high = offsets.byte_range(int(run[0]), int(run[-1]))
        chunk = np.frombuffer(file.data, np.uint8, high - low, low)
        chunk_ends = find_ends(chunk, find_newlines(chunk))
        if not len(chunk_ends) or chunk_ends[-1] + 1 < len(chunk):
            chunk_ends = np.append(chunk_ends, len(chunk))
        row_starts, row_ends = _rows_between(chunk, chunk_ends, blank)
        in_run = np.flatnonzero((entries >= run[0]) & (entries <= run[-1]))
        numbers = rows[in_run] - int(run[0]) * offsets.interval
        starts[in_run] = row_starts[numbers] + low
        ends[in_run] = np.minimum(row_ends[numbers] + 1, len(chunk)) + low
    return RowSpans(starts, ends)


def line_number(file: RowFile, row: int, find_ends: FindEnds, blank: bytes | None) -> int:
    """Return the line on which a row begins, from 1."""
    entry = row // file.offsets.interval
    start = int(find_rows(file, np.array([row]), find_ends, blank).starts[0])
    low = int(file.offsets.starts[entry])
    return int(file.offsets.lines[entry]) + file.data[low:start].count(b"\n")
