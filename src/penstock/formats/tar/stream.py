"""Shards that cannot be mapped: standard input and pipes, read front to back, one sample in memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from penstock.errors import DataError
from penstock.formats.tar.compression import LIMITS, ArchiveLimits, Counted, compression, unpacked
from penstock.formats.tar.members import (
    BLOCK,
    END,
    GAP,
    MAX_PADDING,
    Entry,
    Extensions,
    Grouper,
    Halt,
    checksum_holds,
    overpadded,
    padded,
    step,
    trailing,
)
from penstock.formats.tar.reader import Fields

MAX_MEMBER = 4 << 30  # a field is held in memory here; a larger one is refused, not read


def samples(
    stream: BinaryIO, url: str, fields: Fields, limits: ArchiveLimits = LIMITS
) -> Iterator[tuple[dict[str, Any] | None, DataError | None]]:
    """Read the samples of an archive, compressed or not, as they come.

    Gives what reading the same bytes from a file gives, in the same order: the sample, or None and what is
    wrong with it.

    Args:
        stream: Something to read from; its ``read(n)`` may give fewer bytes, none only at the end.
        url: What to call it in samples and errors.
        fields: Which fields to keep.
        limits: How far it may unpack.

    Raises:
        OSError: The stream cannot be read.
        MissingExtra: It is compressed by zstd and there is no zstandard.
    """
    source = _Stream(stream, fields, limits)
    grouper: Grouper[bytes] = Grouper()
    for entry in _entries(source, grouper):
        yield _sample(entry, url, fields)


def _entries(source: _Stream, grouper: Grouper[bytes]) -> Iterator[Entry[bytes]]:
    extensions = Extensions()
    while True:
        item = step(source, extensions)
        if isinstance(item, Halt):
            if item.problem is None:
                yield from _ending(source, grouper, extensions)
                break
            yield from grouper.push(GAP, b"", item.problem if item.goes_on else source.problem or item.problem)
            extensions.forget()
            if not item.goes_on or not source.resync():
                break
        elif item is not None:
            name, value, problem = item
            if value is _TOO_LARGE:
                problem = problem or f"the member has more than {MAX_MEMBER} bytes, too many for a stream"
            yield from grouper.push(name, value, problem)
    yield from grouper.finish()


def _ending(source: _Stream, grouper: Grouper[bytes], extensions: Extensions) -> Iterator[Entry[bytes]]:
    """Read on behind the end marker: padding, else a loss."""
    end = source.offset - BLOCK
    orphaned = extensions.orphaned
    padding = source.only_zeros()
    if source.problem:
        yield from grouper.push(END, b"", source.problem)
    elif orphaned:
        yield from grouper.push(GAP, b"", f"an extension header has no member at offset {end}")
    if not padding:
        yield from grouper.push(END, b"", trailing(end))
    elif source.take(1):
        yield from grouper.push(END, b"", overpadded(end))


def _sample(entry: Entry[bytes], url: str, fields: Fields) -> tuple[dict[str, Any] | None, DataError | None]:
    key, kind, values, problem, _ = entry
    name = key.decode("utf-8", "surrogateescape")
    if problem is not None:
        return None, DataError(problem, url, name or None)
    sample: dict[str, Any] = {"__key__": name} if fields.wants("__key__") else {}
    if fields.wants("__url__"):
        sample["__url__"] = url
    sample |= {field: value for field, value in zip(kind, values, strict=True) if fields.wants(field)}
    return sample, None


_TOO_LARGE = b"too large"


class _Stream:
    """An archive that arrives in chunks of any size."""

    def __init__(self, stream: BinaryIO, fields: Fields, limits: ArchiveLimits) -> None:
        head = b""
        while len(head) < BLOCK and (more := stream.read(BLOCK - len(head))):
            head += more
        counted = Counted(head, stream)
        file = cast(BinaryIO, io.BufferedReader(counted, 1 << 18))
        packed: Callable[[], int] = lambda: counted.count  # noqa: E731
        self._chunks = unpacked(file, compression(head), packed, limits)
        self._rest = memoryview(b"")
        self._later = memoryview(b"")
        self._fields = fields
        self.problem: str | None = None
        self.offset = 0

    def _pieces(self, size: int) -> Iterator[memoryview]:
        """Give the next bytes as they lie in the chunks."""
        while size > 0 and self._fill():
            piece, self._rest = self._rest[:size], self._rest[size:]
            self.offset += len(piece)
            size -= len(piece)
            yield piece

    def _fill(self) -> bool:
        """Have some bytes at hand, unless the stream is at its end."""
        if not self._rest:
            self._rest, self._later = self._later, memoryview(b"")
        if not self._rest and self.problem is None:
            try:
                self._rest = memoryview(next(self._chunks, b""))
            except DataError as exc:
                self.problem = exc.problem
        return bool(self._rest)

    def take(self, size: int) -> bytes:
        """Give the next bytes; fewer where the archive ends."""
        return b"".join(self._pieces(size))

    def value(self, size: int, name: bytes) -> bytes | None:
        """Read the bytes of a member; those of a field nobody wants are dropped."""
        start = self.offset
        wanted = self._wanted(name) and size <= MAX_MEMBER
        body = self.take(size) if wanted else b""
        for _ in self._pieces(start + size - self.offset):
            pass
        if self.offset - start < size:
            return None
        self.take(padded(size) - size)
        return body if size <= MAX_MEMBER else _TOO_LARGE

    def _wanted(self, name: bytes) -> bool:
        _, dot, extension = name.rpartition(b"/")[2].partition(b".")
        return bool(dot) and self._fields.wants(extension.decode("utf-8", "surrogateescape").lower())

    def resync(self) -> bool:
        """Go on to the next good header."""
        self.take(-self.offset % BLOCK)
        while len(block := self.take(BLOCK)) == BLOCK:
            if checksum_holds(block):
                self._rest, self._later = memoryview(block), self._rest
                self.offset -= BLOCK
                return True
        return False

    def only_zeros(self) -> bool:
        """Read to the end and tell whether that was padding; stops at the first byte that is not."""
        return not any(bytes(piece).strip(b"\0") for piece in self._pieces(MAX_PADDING))
