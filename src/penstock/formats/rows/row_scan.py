"""Where rows begin and end in files of lines: marks found in one pass, and rows looked for between marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.formats.rows.reader import Buffer, RowFile
from penstock.formats.rows.row_offsets import RowOffsets
from penstock.order import I64

U8 = npt.NDArray[np.uint8]
Ends = Callable[[U8, I64], I64]  # where rows end in bytes that begin with a row, given where lines do

EVERY = 64  # rows from one mark to the next: few enough to look through for one of them
_PIECE = 8 << 20
_NEWLINE, _QUOTE, _RETURN, _SPACE = b'\n"\r '


def breaks_of(data: U8) -> I64:
    """Where lines end."""
    return np.flatnonzero(data == _NEWLINE)


def line_ends(data: U8, breaks: I64) -> I64:
    """Where rows end that are lines."""
    return breaks


def csv_ends(data: U8, breaks: I64, delimiter: int) -> I64:
    """Where rows of CSV end: at newlines that stand in no quoted field."""
    if data.tobytes().find(_QUOTE) < 0:  # several times quicker than to compare every byte
        return breaks
    quotes = np.flatnonzero(data == _QUOTE)
    if _well_quoted(data, quotes, delimiter):
        outside: I64 = breaks[np.searchsorted(quotes, breaks) % 2 == 0]
        return outside
    return _ends_by_hand(data.tobytes(), delimiter)


def _well_quoted(data: U8, quotes: I64, delimiter: int) -> bool:
    """Whether every quote opens or closes a field or is one of a pair, so that counting them tells where one is."""
    opening, closing = quotes[0::2], quotes[1::2]
    before = data[opening[opening > 0] - 1]
    behind = data[closing[closing + 1 < len(data)] + 1]
    edge = np.zeros(256, bool)
    edge[[delimiter, _NEWLINE, _QUOTE]] = True
    if not edge[before].all():
        return False
    edge[_RETURN] = True
    return bool(edge[behind].all())


def _ends_by_hand(data: bytes, delimiter: int) -> I64:
    """The same where quotes stand in the middle of fields, and mean nothing there."""
    mark = re.escape(bytes([delimiter]))
    token = re.compile(rb'(?:\A|(?<=[\n%b]))"[^"]*(?:""[^"]*)*(?:"|\Z)|\n' % mark)
    return np.array([one.start() for one in token.finditer(data) if one[0] == b"\n"], np.int64)


def scan_lines(data: Buffer, first: int, ends: Ends, blanks: bool, problem: str | None, line: int = 1) -> RowOffsets:
    """Find every 64th row.

    Args:
        data: The file.
        first: Where its first row begins.
        ends: Where rows end.
        blanks: Whether empty lines are rows.
        problem: Why there is no more of the file: then a last line without its end is lost, and counts as damage.
        line: The line of the first row.
    """
    starts, lines = [], []
    rows, at, size, end = 0, first, _PIECE, first
    while at < len(data):
        piece = np.frombuffer(data, np.uint8, min(size, len(data) - at), at)
        breaks = breaks_of(piece)
        found = ends(piece, breaks)
        last = at + len(piece) == len(data)
        if last and problem is None and (not len(found) or found[-1] + 1 < len(piece)):
            found = np.append(found, len(piece))
        if not len(found):
            if last:
                break
            size *= 2
            continue
        begin, stop = _rows(piece, found, blanks)
        chosen = begin[-rows % EVERY :: EVERY]
        starts.append(at + chosen)
        lines.append(line + np.searchsorted(breaks, chosen))
        rows += len(begin)
        end = at + int(stop[-1]) + 1 if len(stop) else end
        ahead = int(found[-1]) + 1
        line += int(np.searchsorted(breaks, ahead))
        at, size = at + ahead, _PIECE
    none = np.zeros(0, np.int64)
    start = np.concatenate([none, *starts])
    end = min(end, len(data))
    return RowOffsets(EVERY, rows + bool(problem), start, end, np.concatenate([none, *lines]), problem or "")


def _rows(piece: U8, ends: I64, blanks: bool) -> tuple[I64, I64]:
    """Where rows begin and end, without those that are empty."""
    begin = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    begin, ends = (begin[:-1], ends[:-1]) if len(begin) and begin[-1] >= len(piece) else (begin, ends)
    if blanks or not len(begin):
        return begin, ends
    doubtful = np.flatnonzero((begin == ends) | (piece[begin] <= _SPACE))
    empty = [i for i in doubtful.tolist() if not piece[begin[i] : ends[i]].tobytes().strip()]
    keep = np.ones(len(begin), bool)
    keep[empty] = False
    return begin[keep], ends[keep]


@dataclass(frozen=True, slots=True)
class Spans:
    """Where rows lie in a file, in the order they were asked for; each with its newline, if it has one."""

    begin: I64
    end: I64

    def joined(self, data: Buffer) -> bytes:
        """Their bytes in one, neighbours cut out together."""
        breaks = np.flatnonzero(self.begin[1:] != self.end[:-1]) + 1
        runs = zip(self.begin[[0, *breaks]].tolist(), self.end[[*(breaks - 1), -1]].tolist(), strict=True)
        parts = [data[low:high] for low, high in runs]
        return b"".join(part if part.endswith(b"\n") else part + b"\n" for part in parts)

    def each(self, data: Buffer) -> list[bytes]:
        """The bytes of each."""
        return [data[low:high] for low, high in zip(self.begin.tolist(), self.end.tolist(), strict=True)]


def from_mark_to_mark(marks: RowOffsets, rows: I64) -> slice | None:
    """Where rows lie, if they are neighbours from one mark up to another, or to the end; then nobody need look."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    whole = first % marks.every == 0 and (last % marks.every == 0 or last == marks.readable)
    if not whole or last - first != len(rows) or not bool((np.diff(rows) == 1).all()):
        return None
    return slice(*marks.stretch(first // marks.every, (last - 1) // marks.every))


def find_rows(file: RowFile, rows: I64, ends: Ends, blanks: bool) -> Spans:
    """Find rows: the stretches from mark to mark that hold them are looked through."""
    marks = file.marks
    at = rows // marks.every
    wanted = np.unique(at)
    begin, end = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for run in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
        low, high = marks.stretch(int(run[0]), int(run[-1]))
        piece = np.frombuffer(file.data, np.uint8, high - low, low)
        found = ends(piece, breaks_of(piece))
        if not len(found) or found[-1] + 1 < len(piece):
            found = np.append(found, len(piece))
        starts, stops = _rows(piece, found, blanks)
        here = np.flatnonzero((at >= run[0]) & (at <= run[-1]))
        numbers = rows[here] - int(run[0]) * marks.every
        begin[here] = starts[numbers] + low
        end[here] = np.minimum(stops[numbers] + 1, len(piece)) + low
    return Spans(begin, end)


def line_of(file: RowFile, row: int, ends: Ends, blanks: bool) -> int:
    """The line on which a row begins, from 1."""
    mark = row // file.marks.every
    begin = int(find_rows(file, np.array([row]), ends, blanks).begin[0])
    low = int(file.marks.start[mark])
    return int(file.marks.line[mark]) + file.data[low:begin].count(b"\n")
