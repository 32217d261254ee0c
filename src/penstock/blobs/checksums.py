"""CRC-32 checksums of every MiB of a file, so that any part of it can be verified as it arrives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.storage.crc import crc32

U32 = npt.NDArray[np.uint32]

CELL = 1 << 20  # bytes of the file that one checksum covers


class CellChecksums:
    """Computes the CRC-32 of every ``CELL`` bytes of a file while the file is written."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._open, self._room = 0, CELL

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        rest = memoryview(data)
        while len(rest) >= self._room:
            self._done.append(crc32(rest[: self._room], self._open))
            rest = rest[self._room :]
            self._open, self._room = 0, CELL
        if len(rest):
            self._open = crc32(rest, self._open)
            self._room -= len(rest)

    def values(self) -> U32:
        """Return the checksums of all bytes added so far; the last cell may be shorter."""
        return np.array(self._done + [self._open] * (self._room < CELL), np.uint32)


def first_damaged(checksums: U32, data: memoryview, start: int, size: int) -> int | None:
    """Return the offset of the first cell that does not match its checksum; None if all match.

    Args:
        checksums: The checksums of the whole file.
        data: A range of the file; cells that it holds only in part are not verified.
        start: The offset of the range.
        size: The size of the file.
    """
    stop = start + len(data)
    for cell in range(-(-start // CELL), len(checksums)):
        low, high = cell * CELL, min((cell + 1) * CELL, size)
        if high > stop:
            break
        if crc32(data[low - start : high - start]) != int(checksums[cell]):
            return low
    return None
