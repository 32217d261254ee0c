"""Compression is recognised by content, and the error of an exceeded limit names it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from typing import BinaryIO, cast

import pytest
import zstandard

from penstock.blobs.compression import LIMITS, ArchiveLimits, CountingReader, decompressed, detect
from penstock.errors import DataError

DATA = bytes(range(256)) * 4000
PACKED = {
    "gz": gzip.compress(DATA),
    "bz2": bz2.compress(DATA),
    "xz": lzma.compress(DATA),
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress(DATA),
}


@pytest.mark.parametrize("kind", PACKED)
def test_each_compression_is_recognised_and_decompressed(kind: str) -> None:
    assert detect(PACKED[kind]) == kind
    chunks = decompressed(io.BytesIO(PACKED[kind]), kind, lambda: len(PACKED[kind]), LIMITS)
    assert b"".join(chunks) == DATA


@pytest.mark.parametrize("head", [b"", b"B", b"plain text", bytes(512)])
def test_anything_else_is_not_compressed(head: bytes) -> None:
    assert detect(head) is None


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_damaged_stream_is_a_data_error_and_not_a_silent_end(kind: str) -> None:
    packed = bytearray(PACKED[kind])
    packed[len(packed) // 2] ^= 0xFF
    with pytest.raises(DataError, match=f"the {kind} stream is damaged"):
        list(decompressed(io.BytesIO(packed), kind, lambda: len(packed), LIMITS))


def test_limits_hold_for_bytes_and_for_the_ratio_beyond_64_mib() -> None:
    limits = ArchiveLimits(max_bytes=1 << 30, max_ratio=100)
    assert limits.problem(1, 64 << 20) is None
    assert limits.problem(1 << 20, 100 << 20) is None
    assert "100 times its size" in (limits.problem(1 << 20, (100 << 20) + 1) or "")
    assert "more than 1073741824 bytes" in (limits.problem(1 << 30, (1 << 30) + 1) or "")


def test_bytes_put_back_are_read_first_and_counted() -> None:
    counted = CountingReader(b"abc", cast(BinaryIO, io.BytesIO(b"def")))
    assert counted.read(2) == b"ab"
    assert counted.readall() == b"cdef"
    assert counted.count == 6
