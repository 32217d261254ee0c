"""Checksums of every MiB, whatever pieces the bytes come in."""

from __future__ import annotations

import random
import zlib

from penstock.blobs.checksums import CELL, CellChecksums


def test_a_grid_is_the_checksum_of_every_mebibyte_however_the_bytes_come() -> None:
    chance = random.Random(1)
    data = chance.randbytes(3 * CELL + 12345)
    for step in (4 * CELL, CELL, CELL - 1, 100_003):
        grid = CellChecksums()
        for at in range(0, len(data), step):
            grid.update(data[at : at + step])
        assert grid.values().tolist() == [zlib.crc32(data[at : at + CELL]) for at in range(0, len(data), CELL)]
    assert CellChecksums().values().tolist() == []
