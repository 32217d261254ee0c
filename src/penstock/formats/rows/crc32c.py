"""CRC-32C (Castagnoli) of many byte strings at once, vectorized with numpy.

Without its initial and final inversion a CRC is linear: it is the XOR of the contributions of all bytes. Records are
cut into chunks of 256 bytes, a table holds the contribution of each byte by its position in the chunk, and the CRCs of
chunks are combined pairwise. A record costs a few nanoseconds per byte, in many small records as in one large record.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78  # reflected
_CHUNK_BYTES = 256
_BATCH_CHUNKS = 256  # chunks looked up at a time: the intermediate arrays stay in the processor's cache
_ALL_ONES = np.uint32(0xFFFFFFFF)
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of ``data``.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return int(crc32c_of([data])[0])


def crc32c_of(records: Sequence[bytes | memoryview]) -> U32:
    """Return the CRC-32C of each record."""
    lengths = np.array([len(record) for record in records], np.int64)
    chunk_counts = -(-lengths // _CHUNK_BYTES)
    ends = np.cumsum(chunk_counts)
    chunks = np.zeros((int(chunk_counts.sum()), _CHUNK_BYTES), np.uint8)
    flat = chunks.reshape(-1)
    for record, end, length in zip(records, (ends * _CHUNK_BYTES).tolist(), lengths.tolist(), strict=True):
        flat[end - length : end] = np.frombuffer(record, np.uint8)  # the leading zeros contribute nothing
    crcs = _combined(_chunk_crcs(chunks), chunk_counts)
    return crcs ^ _advanced_by_lengths(np.full(len(records), _ALL_ONES, np.uint32), lengths) ^ _ALL_ONES


def masked(crcs: U32) -> U32:
    """Return CRCs as TFRecord files store them: rotated and offset.

    A CRC over bytes that contain their own CRC would be of little use, hence the mask.
    """
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(_MASK_DELTA)


def _chunk_crcs(chunks: npt.NDArray[np.uint8]) -> U32:
    table, row_starts = _contributions(), np.arange(_CHUNK_BYTES) * 256
    out = np.empty(len(chunks), np.uint32)
    for first in range(0, len(chunks), _BATCH_CHUNKS):
        batch = chunks[first : first + _BATCH_CHUNKS]
        np.bitwise_xor.reduce(table.take(batch + row_starts), axis=1, out=out[first : first + len(batch)])
    return out


def _combined(crcs: U32, counts: npt.NDArray[np.int64]) -> U32:
    """Combine the chunk CRCs of each record pairwise: the left one is advanced by the bytes of the right one."""
    size = _CHUNK_BYTES
    while len(counts) and int(counts.max()) > 1:
        half = (counts + 1) // 2
        pairs = np.zeros((int(half.sum()), 2), np.uint32)
        # A record with an odd number of chunks gets a chunk of zeros at its front.
        record = np.repeat(np.arange(len(counts)), counts)
        inserted = np.cumsum(counts % 2)[record]
        pairs.reshape(-1)[np.arange(len(crcs)) + inserted] = crcs
        crcs = _advanced(pairs[:, 0], size) ^ pairs[:, 1]
        counts, size = half, size * 2
    out = np.zeros(len(counts), np.uint32)
    out[counts > 0] = crcs
    return out


def _advanced_by_lengths(crcs: U32, lengths: npt.NDArray[np.int64]) -> U32:
    """Return each CRC after as many zero bytes as its length."""
    for bit in range(int(lengths.max()).bit_length() if len(lengths) else 0):
        is_set = (lengths >> bit) & 1 == 1
        crcs = np.where(is_set, _advanced(crcs, 1 << bit), crcs)
    return crcs


def _advanced(crcs: U32, count: int) -> U32:
    """Return each CRC after ``count`` zero bytes, where ``count`` is a power of two."""
    tables = _advance_tables(count)
    out: U32 = (
        tables[0][crcs & 0xFF]
        ^ tables[1][(crcs >> np.uint32(8)) & 0xFF]
        ^ tables[2][(crcs >> np.uint32(16)) & 0xFF]
        ^ tables[3][crcs >> np.uint32(24)]
    )
    return out


@cache
def _byte_table() -> U32:
    """Return the contribution of the last byte, by its value."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> np.uint32(1))
    return table


@cache
def _contributions() -> U32:
    """Return the contribution of a byte, by its position in a chunk and its value, as a flat table."""
    byte_table = _byte_table()
    tables = np.empty((_CHUNK_BYTES, 256), np.uint32)
    tables[-1] = byte_table
    for position in range(_CHUNK_BYTES - 2, -1, -1):
        following = tables[position + 1]
        tables[position] = (following >> np.uint32(8)) ^ byte_table[following & 0xFF]
    return tables.reshape(-1)


@cache
def _advance_tables(count: int) -> tuple[U32, U32, U32, U32]:
    """Return the tables that advance a CRC by ``count`` zero bytes, one for each byte of the CRC."""
    if count == 1:
        byte_table = _byte_table()
        values = np.arange(256, dtype=np.uint32)
        return byte_table, values, values << np.uint32(8), values << np.uint32(16)
    half = count // 2
    first, second, third, fourth = (_advanced(table, half) for table in _advance_tables(half))
    return first, second, third, fourth
