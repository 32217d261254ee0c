"""The records of a ledger's file: appended whole, never rewritten, readable up to where a crash cut them off.

A file is ``MAGIC`` and then records: the length of the content, its CRC-32, and the content. The first byte of the
content says what it is: the beginning or the end of a session (JSON), or steps (a table of samples). A table is stored
column by column, as the smallest number and the differences to it in as few bytes as the largest one needs.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines import COLUMNS, ITEM
from penstock.order import I64

MAGIC = b"penstock ledger 1\n"
BEGIN, END, STEPS = b"B", b"E", b"S"

_FRAME = struct.Struct("<II")  # length, CRC-32
_STEPS = struct.Struct("<cQII")  # STEPS, the first step, how many steps, how many samples
_NUMBER = struct.Struct("<q")
_PAIR = struct.Struct("<qq")

# How a column is written: all zeros, one number, equal distances, or differences of so many bytes.
_ZEROS, _ONE, _EVEN = 0, 1, 2
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_DIFFERENCES = {width + 2: kind for width, kind in _WIDTHS.items()}


def frame_record(content: bytes) -> bytes:
    """A record as it stands in the file."""
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def contents(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The whole records of a file, each with where it ends; a torn one and what follows it is left out."""
    at = len(MAGIC)
    if bytes(data[:at]) != MAGIC:
        return
    while at + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, at)
        content = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(content) < length or not length or zlib.crc32(content) != crc:
            return
        at += _FRAME.size + length
        yield at, content


def words(kind: bytes, facts: dict[str, Any]) -> bytes:
    """The content of a record in words."""
    return kind + json.dumps(facts, separators=(",", ":")).encode()


def read_words(content: memoryview) -> dict[str, Any]:
    """What ``words`` wrote."""
    facts: dict[str, Any] = json.loads(bytes(content[1:]))
    return facts


@dataclass(frozen=True, slots=True)
class Steps:
    """Some steps in a row; none, where samples are noted that belong to no step."""

    first: int
    many: int
    content: memoryview

    def table(self) -> I64:
        """The samples (see ``engines.tracing``); their items are counted from the first step."""
        _, _, many, samples = _STEPS.unpack_from(self.content)
        rows = np.zeros((COLUMNS, samples), np.int64)
        at = _STEPS.size
        if many > 1:
            sizes, at = _column(self.content, at, many)
            rows[ITEM] = np.repeat(np.arange(many), sizes)
        for column in range(ITEM + 1, COLUMNS):
            rows[column], at = _column(self.content, at, samples)
        return rows


def steps(first: int, many: int, rows: I64) -> bytes:
    """The content of a record of steps."""
    parts = [_STEPS.pack(STEPS, first, many, rows.shape[1])]
    if many > 1:
        sizes = np.bincount(rows[ITEM], minlength=many)
        parts += _coded(sizes, int(sizes.min()), int(sizes.max()))
    if not rows.shape[1]:
        parts += [bytes([_ZEROS])] * (COLUMNS - 1)
    else:
        lows, highs = rows.min(axis=1).tolist(), rows.max(axis=1).tolist()
        for column in range(ITEM + 1, COLUMNS):
            parts += _coded(rows[column], lows[column], highs[column])
    return b"".join(parts)


def read_steps(content: memoryview) -> Steps:
    """Steps whose table is read when it is asked for."""
    _, first, many, _ = _STEPS.unpack_from(content)
    return Steps(first, many, content)


def _coded(values: I64, low: int, high: int) -> list[bytes]:
    if low == high:
        return [bytes([_ONE]), _NUMBER.pack(low)] if low else [bytes([_ZEROS])]
    first, distance = int(values[0]), int(values[1] - values[0])
    if int(values[-1]) - first == distance * (len(values) - 1) and (np.diff(values) == distance).all():
        return [bytes([_EVEN]), _PAIR.pack(first, distance)]
    width = next(width for width in _WIDTHS if high - low < 1 << (8 * width))
    return [bytes([width + 2]), _NUMBER.pack(low), (values - low).astype(_WIDTHS[width]).tobytes()]


def _column(content: memoryview, at: int, many: int) -> tuple[I64, int]:
    code, at = content[at], at + 1
    if code == _ZEROS:
        return np.zeros(many, np.int64), at
    if code == _ONE:
        return np.full(many, _NUMBER.unpack_from(content, at)[0], np.int64), at + _NUMBER.size
    if code == _EVEN:
        first, distance = _PAIR.unpack_from(content, at)
        return first + distance * np.arange(many, dtype=np.int64), at + _PAIR.size
    kind = np.dtype(_DIFFERENCES[code])
    low, at = _NUMBER.unpack_from(content, at)[0], at + _NUMBER.size
    return np.frombuffer(content, kind, many, at).astype(np.int64) + low, at + many * kind.itemsize
