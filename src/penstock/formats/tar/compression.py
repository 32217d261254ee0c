"""The bytes of an archive at rest: mapped, a compressed one unpacked once, within limits."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import BinaryIO

from penstock.errors import DataError, StorageError
from penstock.formats.arriving import Arriving
from penstock.formats.tar.members import BLOCK
from penstock.formats.tar.unpacking import LIMITS, SUFFIXES, ArchiveLimits, Counted, compression, unpacked

Buffer = mmap.mmap | bytes

__all__ = [
    "LIMITS",
    "SUFFIXES",
    "ArchiveLimits",
    "Buffer",
    "Content",
    "Counted",
    "compression",
    "open_content",
    "unpacked",
]


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of an archive, unpacked and mapped.

    Attributes:
        bytes: The archive; what could be unpacked of it.
        problem: Why there is no more, where the compressed stream is damaged or refused.
    """

    bytes: Buffer | Arriving
    problem: str | None = None

    @property
    def buffer(self) -> Buffer:
        """The bytes, where they are all here."""
        assert not isinstance(self.bytes, Arriving)
        return self.bytes

    def grown_or_shrunk(self) -> bool:
        """Tell whether the mapped file has another size than when it was mapped (reading on could crash)."""
        return isinstance(self.bytes, mmap.mmap) and self.bytes.size() != len(self.bytes)


def open_content(path: str, shard: str, limits: ArchiveLimits = LIMITS) -> Content:
    """Map the archive at ``path``; a compressed one is unpacked to an unlinked temporary file first.

    Raises:
        StorageError: The file cannot be read, or there is no room to unpack it.
        MissingExtra: It is compressed by zstd and there is no zstandard.
    """
    try:
        with open(path, "rb") as file:
            kind = compression(file.read(BLOCK))
            if kind is None:
                return Content(_mapped(file))
            file.seek(0)
            return _unpacked(file, kind, limits, shard)
    except OSError as exc:
        if isinstance(exc, StorageError):
            raise
        raise StorageError(f"cannot read the shard: {exc.strerror or exc}", shard) from exc


def _mapped(file: BinaryIO) -> Buffer:
    size = os.fstat(file.fileno()).st_size
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""


def _unpacked(file: BinaryIO, kind: str, limits: ArchiveLimits, shard: str) -> Content:
    packed = os.fstat(file.fileno()).st_size
    problem = None
    with tempfile.TemporaryFile(prefix="penstock-") as spool:
        try:
            for chunk in unpacked(file, kind, lambda: packed, limits):
                _spill(spool, chunk, shard)
        except DataError as exc:
            problem = exc.problem
            if problem.startswith("refused"):
                spool.truncate(0)
        spool.flush()
        return Content(_mapped(spool), problem)


def _spill(spool: BinaryIO, chunk: bytes, shard: str) -> None:
    try:
        spool.write(chunk)
    except OSError as exc:
        raise StorageError(f"cannot unpack the shard to {tempfile.gettempdir()}: {exc.strerror or exc}", shard) from exc
