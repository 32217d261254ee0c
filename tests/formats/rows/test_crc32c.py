"""CRC-32C against its definition and known values."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.formats.rows.crc32c import crc32c, crc32c_of, masked


def by_definition(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_values_are_computed(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def test_records_of_different_lengths_are_computed_together() -> None:
    rng = random.Random(5)
    records = [rng.randbytes(n) for n in (0, 1, 3, 255, 256, 257, 511, 512, 513, 1024, 3000, 0, 12_345)]
    assert crc32c_of(records).tolist() == [by_definition(record) for record in records]
    assert crc32c_of([]).tolist() == []


def test_the_mask_is_that_of_tfrecord() -> None:
    value = np.array([0xE3069283, 0, 0xFFFFFFFF], np.uint32)
    expected = [((x >> 15 | x << 17) + 0xA282EAD8) & 0xFFFFFFFF for x in value.tolist()]
    assert masked(value).tolist() == expected
