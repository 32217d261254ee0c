"""There is one checksum for every MiB, however the bytes are split on their way."""

from __future__ import annotations

import random
import zlib

from penstock.blobs.checksums import CELL, CellChecksums


def test_every_mebibyte_has_its_checksum_however_the_bytes_are_split() -> None:
    data = random.Random(1).randbytes(3 * CELL + 12345)
    for step in (4 * CELL, CELL, CELL - 1, 100_003):
        checksums = CellChecksums()
        for at in range(0, len(data), step):
            checksums.update(data[at : at + step])
        assert checksums.values().tolist() == [zlib.crc32(data[at : at + CELL]) for at in range(0, len(data), CELL)]
    assert CellChecksums().values().tolist() == []
