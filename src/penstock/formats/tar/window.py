"""The part of an archive that is at hand while it is read front to back; where its bytes come from."""

from __future__ import annotations

import io
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from penstock.errors import DataError
from penstock.formats.tar.members import BLOCK, MAX_PADDING, checksum_holds, padded
from penstock.formats.tar.unpacking import LIMITS, Counted, compression, unpacked

Spot = tuple[int, int, int, int]
"""Where a member lies in its archive: its first record or header, its bytes, how many, and the end of their padding."""
Content = bytes | mmap.mmap

MAX_MEMBER = 4 << 30  # of a stream: a sample is held in memory there
_CHUNK = 1 << 20  # bytes of a stream asked for at once: as many as a pipe holds
_STRIDE = 32 << 20  # bytes of a mapped file that stay mapped behind the one who reads


class MappedFile(mmap.mmap):
    """A file mapped to be read, that stays open under ``fd`` as long as it is."""

    fd = -1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Window:
    """The part of an archive that is at hand: all of a mapped file, or what came of a stream and is still needed.

    Attributes:
        data: Its bytes.
        base: Where they begin in the archive.
        stop: How many they are.
        offset: Where reading stands, in the archive.
        begin: Where the records and the header of the next member begin.
        exact: Headers say all there is to say about their members.
        problem: Why there is no more, where the stream is damaged.
    """

    def __init__(self, data: Content, chunks: Iterator[bytes] | None, kept: Callable[[], int]) -> None:
        self.data, self.base, self.stop = data, 0, len(data)
        self.offset = self.begin = 0
        self.exact = True
        self.problem: str | None = None
        self._chunks, self._kept = chunks, kept
        self._mapped = 0
        self.free = self._first_free()

    def more(self, offset: int, size: int) -> bool:
        """Have ``size`` bytes from ``offset`` on at hand; False where there are not so many."""
        self.offset = offset
        if offset + size <= self.base + self.stop:
            return True
        if self._chunks is None:
            return False
        keep = min(self._kept(), offset, self.begin)
        parts = [self.data[keep - self.base :]]
        have = len(parts[0])
        while keep + have < offset + size:
            try:
                chunk = next(self._chunks, b"")
            except DataError as exc:
                self.problem, chunk = exc.problem, b""
            if not chunk:
                self._chunks = None
                break
            parts.append(chunk)
            have += len(chunk)
        self.data, self.base, self.stop = b"".join(parts), keep, have
        return offset + size <= keep + have

    def passed(self) -> None:
        """Note that what lies behind belongs to no member to come."""
        self.begin = self.offset

    def take(self, size: int) -> bytes:
        """Give the next bytes; fewer where the archive ends."""
        self.more(self.offset, size)
        at = self.offset - self.base
        found = bytes(self.data[at : at + size])
        self.offset += len(found)
        return found

    def value(self, size: int, name: bytes) -> Spot | None:
        """Step over the bytes of a member and give where it lies."""
        begin, body = self.begin, self.offset
        if self._chunks is not None and size > MAX_MEMBER:
            return self._dropped(size)
        if not self.more(body, size):
            self.offset = self.begin = self.base + self.stop
            return None
        self.more(body, padded(size))
        self.offset = self.begin = min(body + padded(size), self.base + self.stop)
        return begin, body, size, self.offset

    def _dropped(self, size: int) -> Spot | None:
        left = padded(size)
        while left > 0:
            self.begin = self.offset
            took = len(self.take(min(left, _CHUNK)))
            left -= took
            if not took:
                break
        self.begin = self.offset
        return None if left > padded(size) - size else (self.begin, -1, 0, self.begin)

    def resync(self) -> bool:
        """Go on to the next good header."""
        self.take(-self.offset % BLOCK)
        while True:
            self.begin = self.offset
            block = self.take(BLOCK)
            if len(block) < BLOCK:
                return False
            if checksum_holds(block):
                self.offset = self.begin
                return True

    def only_zeros(self) -> bool:
        """Read to the end and tell whether that was padding; stops at the first byte that is not."""
        left = MAX_PADDING
        while left > 0 and (found := self.take(min(left, _CHUNK))):
            self.begin = self.offset
            if found.strip(b"\0"):
                return False
            left -= len(found)
        return True

    def _first_free(self) -> int:
        return _STRIDE if isinstance(self.data, mmap.mmap) else sys.maxsize

    def let_go(self) -> int:
        """Unmap what lies behind, so that memory does not grow with the file; say where to do so next."""
        if isinstance(self.data, mmap.mmap):
            stop = self._kept() & -mmap.PAGESIZE
            if stop - self._mapped > _STRIDE:
                self.data.madvise(mmap.MADV_DONTNEED, self._mapped, stop - self._mapped - (_STRIDE // 2))
                self._mapped = stop - _STRIDE // 2
            self.free = self.offset + _STRIDE
        return self.free


class Pieces(io.RawIOBase):
    """Bytes that come in pieces, as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        """Give the next bytes, as many as are at hand; none at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        found, self._rest = self._rest[:size], self._rest[size:]
        return bytes(found)

    def close(self) -> None:
        """End the transfer."""
        if (end := getattr(self._pieces, "close", None)) is not None:
            end()
        super().close()


def chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Give the bytes of an archive in chunks, unpacked where it is compressed."""
    read = getattr(stream, "read1", stream.read)  # read() would wait for all of it
    head = b""
    while len(head) < BLOCK and (more := read(BLOCK - len(head))):
        head += more
    kind = compression(head)
    if kind is None:
        yield head
        while chunk := read(_CHUNK):
            yield chunk
        return
    counted = Counted(head, stream)
    file = cast(BinaryIO, io.BufferedReader(counted, 1 << 18))
    yield from unpacked(file, kind, lambda: counted.count, LIMITS)
