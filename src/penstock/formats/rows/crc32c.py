"""CRC-32C (Castagnoli) of many byte strings at once, by numpy.

A CRC without its initial and final inversion is linear: the sum of what every byte adds by itself. Bytes are laid out
in rows of 256, what each adds stands in a table by its place in the row, and rows are joined two by two. So a record
costs a few nanoseconds a byte, and many small records no more than one large.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78  # reflected
_ROW = 256
_AT_ONCE = 256  # rows of one step: what is made of them stays in the processor's cache
_ONES = np.uint32(0xFFFFFFFF)
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes | memoryview) -> int:
    """Give the CRC-32C of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return int(crc32c_of([data])[0])


def crc32c_of(records: Sequence[bytes | memoryview]) -> U32:
    """Give the CRC-32C of each record."""
    lengths = np.array([len(record) for record in records], np.int64)
    many = -(-lengths // _ROW)
    ends = np.cumsum(many)
    rows = np.zeros((int(many.sum()), _ROW), np.uint8)
    flat = rows.reshape(-1)
    for record, end, length in zip(records, (ends * _ROW).tolist(), lengths.tolist(), strict=True):
        flat[end - length : end] = np.frombuffer(record, np.uint8)  # zeros before it add nothing
    sums = _joined(_row_sums(rows), many)
    return sums ^ _moved_by_bytes(np.full(len(records), _ONES, np.uint32), lengths) ^ _ONES


def masked(crcs: U32) -> U32:
    """CRCs as TFRecord files store them: turned and shifted, since a CRC of bytes that hold their CRC says little."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(_MASK_DELTA)


def _row_sums(rows: npt.NDArray[np.uint8]) -> U32:
    tables, places = _tables(), np.arange(_ROW) * 256
    out = np.empty(len(rows), np.uint32)
    for first in range(0, len(rows), _AT_ONCE):
        some = rows[first : first + _AT_ONCE]
        np.bitwise_xor.reduce(tables.take(some + places), axis=1, out=out[first : first + len(some)])
    return out


def _joined(sums: U32, many: npt.NDArray[np.int64]) -> U32:
    """Join the rows of each record, two by two from the end: the left one moves by the bytes of the right one."""
    level = _ROW
    while len(many) and int(many.max()) > 1:
        half = (many + 1) // 2
        pairs = np.zeros((int(half.sum()), 2), np.uint32)
        # Each record is filled up with a row of zeros at its front where its number of rows is odd.
        record = np.repeat(np.arange(len(many)), many)
        filled = np.cumsum(many % 2)[record]
        pairs.reshape(-1)[np.arange(len(sums)) + filled] = sums
        sums = _moved(pairs[:, 0], level) ^ pairs[:, 1]
        many, level = half, level * 2
    out = np.zeros(len(many), np.uint32)
    out[many > 0] = sums
    return out


def _moved_by_bytes(crcs: U32, lengths: npt.NDArray[np.int64]) -> U32:
    """Each CRC as it is when so many zero bytes have followed."""
    for bit in range(int(lengths.max()).bit_length() if len(lengths) else 0):
        chosen = (lengths >> bit) & 1 == 1
        crcs = np.where(chosen, _moved(crcs, 1 << bit), crcs)
    return crcs


def _moved(crcs: U32, count: int) -> U32:
    tables = _moving(count)
    out: U32 = (
        tables[0][crcs & 0xFF]
        ^ tables[1][(crcs >> np.uint32(8)) & 0xFF]
        ^ tables[2][(crcs >> np.uint32(16)) & 0xFF]
        ^ tables[3][crcs >> np.uint32(24)]
    )
    return out


@cache
def _bytewise() -> U32:
    """What one byte adds at the end of a row."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> np.uint32(1))
    return table


@cache
def _tables() -> U32:
    """What a byte adds, by its place in a row and its value."""
    step = _bytewise()
    tables = np.empty((_ROW, 256), np.uint32)
    tables[-1] = step
    for place in range(_ROW - 2, -1, -1):
        after = tables[place + 1]
        tables[place] = (after >> np.uint32(8)) ^ step[after & 0xFF]
    return tables.reshape(-1)


@cache
def _moving(count: int) -> tuple[U32, U32, U32, U32]:
    """Tables by which a CRC moves over ``count`` zero bytes (a power of two), one for each of its own bytes."""
    if count == 1:
        step = _bytewise()
        values = np.arange(256, dtype=np.uint32)
        return step, values, values << np.uint32(8), values << np.uint32(16)
    half = count // 2
    first, second, third, fourth = (_moved(table, half) for table in _moving(half))
    return first, second, third, fourth
