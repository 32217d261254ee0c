"""The records of a ledger file: appended as a whole, never rewritten, readable up to the point where a crash cut them.

A file consists of ``MAGIC`` and records. A record consists of the length of its content, the CRC-32 of the content, and
the content. The first byte of the content is its type: the beginning or the end of a session (JSON), or steps (a table
of samples). A table is stored by column, as the minimum and the differences from it, in as few bytes as the largest
difference needs.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

import numpy as np

from penstock.engines import COLUMNS, ITEM
from penstock.errors import StorageError
from penstock.order import I64

MAGIC = b"penstock ledger 1\n"
BEGIN, END, STEPS = b"B", b"E", b"S"

_FRAME = struct.Struct("<II")  # length, CRC-32
_STEPS = struct.Struct("<cQII")  # STEPS, the first step, the number of steps, the number of samples
_NUMBER = struct.Struct("<q")
_PAIR = struct.Struct("<qq")

# The encodings of a column: zeros, one number, numbers at equal distances, or differences (2 + bytes per difference).
_ZEROS, _CONSTANT, _EVEN = 0, 1, 2
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_DIFFERENCES = {width + 2: dtype for width, dtype in _WIDTHS.items()}


def frame_record(content: bytes) -> bytes:
    """Return the bytes of a record in the file."""
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def iter_contents(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the end and the content of each record of a file, up to the first record that is torn or damaged."""
    end = len(MAGIC)
    if bytes(data[:end]) != MAGIC:
        return
    while end + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, end)
        content = data[end + _FRAME.size : end + _FRAME.size + length]
        if len(content) < length or not length or zlib.crc32(content) != crc:
            return
        end += _FRAME.size + length
        yield end, content


def encode_fields(record_type: bytes, fields: dict[str, Any]) -> bytes:
    """Return the content of a record of type ``BEGIN`` or ``END``."""
    return record_type + json.dumps(fields, separators=(",", ":")).encode()


def decode_fields(content: memoryview, kinds: Mapping[str, type | UnionType]) -> dict[str, Any]:
    """Return the fields that ``encode_fields`` encoded.

    Raises:
        ValueError: The content is not JSON, or a field is missing or has another type than in ``kinds``.
    """
    fields = json.loads(bytes(content[1:]))
    for name, kind in kinds.items():
        if not isinstance(fields, dict) or not isinstance(fields.get(name, ...), kind):
            raise ValueError(f"a record has no valid {name!r}")
    return fields  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class StepsRecord:
    """The samples of consecutive steps, or samples that belong to no step.

    Attributes:
        first: The number of the first step.
        count: The number of steps, which may be 0.
        content: The encoded record.
    """

    first: int
    count: int
    content: memoryview

    def table(self) -> I64:
        """Decode the table of samples (see ``engines.lineage``); its items are numbered from the first step.

        Raises:
            StorageError: The table is damaged, although its checksum is right.
        """
        try:
            return self._decode()
        except (KeyError, IndexError, ValueError, struct.error) as exc:
            raise StorageError(f"the ledger's steps {self.first} to {self.first + self.count - 1} are damaged") from exc

    def _decode(self) -> I64:
        _, _, count, samples = _STEPS.unpack_from(self.content)
        rows = np.zeros((COLUMNS, samples), np.int64)
        offset = _STEPS.size
        if count > 1:
            sizes, offset = _decode_column(self.content, offset, count)
            rows[ITEM] = np.repeat(np.arange(count), sizes)
        for column in range(ITEM + 1, COLUMNS):
            rows[column], offset = _decode_column(self.content, offset, samples)
        return rows


def encode_steps(first: int, count: int, rows: I64) -> bytes:
    """Return the content of a record of type ``STEPS``."""
    parts = [_STEPS.pack(STEPS, first, count, rows.shape[1])]
    if count > 1:
        sizes = np.bincount(rows[ITEM], minlength=count)
        parts += _encode_column(sizes, int(sizes.min()), int(sizes.max()))
    if not rows.shape[1]:
        parts += [bytes([_ZEROS])] * (COLUMNS - 1)
    else:
        lows, highs = rows.min(axis=1).tolist(), rows.max(axis=1).tolist()
        for column in range(ITEM + 1, COLUMNS):
            parts += _encode_column(rows[column], lows[column], highs[column])
    return b"".join(parts)


def decode_steps(content: memoryview) -> StepsRecord:
    """Return the record; its table is decoded on request."""
    _, first, count, _ = _STEPS.unpack_from(content)
    return StepsRecord(first, count, content)


def _encode_column(values: I64, low: int, high: int) -> list[bytes]:
    if low == high:
        return [bytes([_CONSTANT]), _NUMBER.pack(low)] if low else [bytes([_ZEROS])]
    first, distance = int(values[0]), int(values[1] - values[0])
    if int(values[-1]) - first == distance * (len(values) - 1) and (np.diff(values) == distance).all():
        return [bytes([_EVEN]), _PAIR.pack(first, distance)]
    width = next(width for width in _WIDTHS if high - low < 1 << (8 * width))
    return [bytes([width + 2]), _NUMBER.pack(low), (values - low).astype(_WIDTHS[width]).tobytes()]


def _decode_column(content: memoryview, offset: int, length: int) -> tuple[I64, int]:
    """Return a column and the offset after it."""
    encoding, offset = content[offset], offset + 1
    if encoding == _ZEROS:
        return np.zeros(length, np.int64), offset
    if encoding == _CONSTANT:
        return np.full(length, _NUMBER.unpack_from(content, offset)[0], np.int64), offset + _NUMBER.size
    if encoding == _EVEN:
        first, distance = _PAIR.unpack_from(content, offset)
        return first + distance * np.arange(length, dtype=np.int64), offset + _PAIR.size
    dtype = np.dtype(_DIFFERENCES[encoding])
    low, offset = _NUMBER.unpack_from(content, offset)[0], offset + _NUMBER.size
    return np.frombuffer(content, dtype, length, offset).astype(np.int64) + low, offset + length * dtype.itemsize
