"""Archives walked front to back without an index: standard input, pipes, and files whose samples are copied.

A walker gives what the scan of the same bytes gives, sample for sample and loss for loss.
"""

from __future__ import annotations

import io
import mmap
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, BinaryIO, Generic, Protocol, TypeVar, cast

from penstock.blobs.compression import LIMITS, ArchiveLimits, CountingReader, decompressed
from penstock.errors import DataError
from penstock.formats.tar.archive import (
    BLOCK,
    MAX_PADDING,
    Extensions,
    Halt,
    checksum_holds,
    compression_of,
    overpadded,
    padded,
    step,
    trailing,
)
from penstock.formats.tar.grouper import END, GAP, Entry, Grouper

V = TypeVar("V")
MemberSpan = tuple[int, int, int, int]
"""Where a member lies in its archive: its first record or header, its bytes, how many, and the end of their padding."""
Run = tuple[list[str], tuple[str, ...], list[V]]
"""Neighbouring samples with the same fields: their keys, their fields, and the values of all their members in order."""

MAX_MEMBER = 4 << 30  # of a stream: a sample is held in memory there
_CHUNK = 1 << 20  # bytes of a stream read at once: as many as a pipe holds
_STRIDE = 32 << 20  # bytes of a mapped file that stay mapped behind the reader
_PLAIN = (0x30, 0)  # types of ordinary members
_FIRST = 16  # members looked at before the first sample is yielded; then twice as many, up to
_MOST = 512
_DROPPED = -1  # in the place of where a member's bytes lie: they were not kept


class ArchiveBuffer:
    """The part of an archive that is in memory: all of a mapped file, or what came of a stream and is still needed.

    Attributes:
        data: Its bytes.
        base: Where they begin in the archive.
        stop: How many they are.
        offset: Where reading stands, in the archive.
        begin: Where the records and the header of the next member begin.
        exact: Headers say all there is to say about their members.
        problem: Why there is no more, where the stream is damaged.
        max_member: The most bytes a member may have to be kept.
    """

    def __init__(self, data: bytes | mmap.mmap, chunks: Iterator[bytes] | None = None) -> None:
        """Begin with all of a file, or with nothing and the chunks of a stream."""
        self.data, self.base, self.stop = data, 0, len(data)
        self.offset = self.begin = 0
        self.exact = True
        self.problem: str | None = None
        self.max_member = sys.maxsize if chunks is None else MAX_MEMBER
        self.keeps: Callable[[], int] = lambda: self.begin  # from where on the archive is still needed
        self.wanted: Callable[[bytes], bool] = lambda name: True  # members whose bytes somebody will read
        self._chunks = chunks
        self._released = 0
        self._release_at = _STRIDE if isinstance(data, mmap.mmap) else sys.maxsize

    def more(self, offset: int, size: int) -> bool:
        """Have ``size`` bytes from ``offset`` on in memory; False where there are not so many."""
        self.offset = offset
        if offset + size <= self.base + self.stop:
            return True
        if self._chunks is None:
            return False
        keep = min(self.keeps(), offset, self.begin)
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
        """Return the next bytes; fewer where the archive ends."""
        self.more(self.offset, size)
        at = self.offset - self.base
        found = bytes(self.data[at : at + size])
        self.offset += len(found)
        return found

    def drops(self, size: int, name: bytes) -> bool:
        """Tell whether the bytes of a member are skipped: they are too many, or long and unwanted."""
        return size > self.max_member or (size > _CHUNK and self._chunks is not None and not self.wanted(name))

    def value(self, size: int, name: bytes) -> MemberSpan | None:
        """Step over the bytes of a member and return where it lies."""
        begin, body = self.begin, self.offset
        if self.drops(size, name):
            return self._skip(size)
        if not self.more(body, size):
            self.offset = self.begin = self.base + self.stop
            return None
        self.more(body, padded(size))
        self.offset = self.begin = min(body + padded(size), self.base + self.stop)
        return begin, body, size, self.offset

    def _skip(self, size: int) -> MemberSpan | None:
        left = padded(size)
        while left > 0:
            self.begin = self.offset
            took = len(self.take(min(left, _CHUNK)))
            left -= took
            if not took:
                break
        self.begin = self.offset
        return None if left > padded(size) - size else (self.begin, _DROPPED, size, self.begin)

    def resync(self) -> bool:
        """Go on to the next good header, if there is one."""
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

    def release(self) -> None:
        """Unmap what lies far behind, so that memory does not grow with the file."""
        if self.offset <= self._release_at:
            return
        assert isinstance(self.data, mmap.mmap)
        stop = self.keeps() & -mmap.PAGESIZE
        if stop - self._released > _STRIDE:
            self.data.madvise(mmap.MADV_DONTNEED, self._released, stop - self._released - (_STRIDE // 2))
            self._released = stop - _STRIDE // 2
        self._release_at = self.offset + _STRIDE


def archive_chunks(stream: BinaryIO, limits: ArchiveLimits = LIMITS) -> Iterator[bytes]:
    """Read an archive in chunks, decompressed where it is compressed."""
    read = getattr(stream, "read1", stream.read)  # read() would wait for all of it
    head = b""
    while len(head) < BLOCK and (more := read(BLOCK - len(head))):
        head += more
    kind = compression_of(head)
    if kind is None:
        yield head
        while chunk := read(_CHUNK):
            yield chunk
        return
    counted = CountingReader(head, stream)
    file = cast(BinaryIO, io.BufferedReader(counted, 1 << 18))
    yield from decompressed(file, kind, lambda: counted.count, limits)


class ArchiveWalker(Generic[V]):
    """Walks over the samples of an archive; what cannot be read is an error in its place.

    Args:
        shard: What to call the archive in errors.
        buffer: Its bytes.
        value: Makes what stands for a member, from its name and where it lies in the buffer. By default it is where
            it lies, and the bytes of a sample stay in the buffer until the sample was yielded.
    """

    def __init__(
        self, shard: str, buffer: ArchiveBuffer, value: Callable[[bytes, MemberSpan], V] | None = None
    ) -> None:
        self.shard, self.buffer = shard, buffer
        self._value = value
        self._grouper: Grouper[V] = Grouper()
        self._ahead = _FIRST
        if value is None:
            buffer.keeps = self._first_needed

    def _first_needed(self) -> int:
        first = cast("MemberSpan | None", self._grouper.first)
        return self.buffer.begin if first is None else first[0]

    def runs(self) -> Iterator[Run[V] | DataError]:
        """Yield the samples in order, as many at once as have the same fields.

        Raises:
            OSError: The archive cannot be read.
            MissingExtra: It is compressed by zstd and zstandard is not installed.
        """
        grouper, buffer, extensions = self._grouper, self.buffer, Extensions()
        while True:
            if not extensions.pending:
                yield from self._ordinary()
            item = step(buffer, extensions)
            if isinstance(item, Halt):
                if item.problem is None:
                    yield from self._checked(self._ending(extensions))
                    break
                buffer.passed()
                why = item.problem if item.goes_on else buffer.problem or item.problem
                yield from self._checked(self._lost(GAP, why))
                extensions.forget()
                if not item.goes_on or not buffer.resync():
                    break
            elif item is not None:
                name, span, problem = item
                if span[2] > buffer.max_member:
                    problem = problem or f"the member has more than {buffer.max_member} bytes, too many for a stream"
                buffer.exact = buffer.exact and not extensions.pending  # records for all members are not copied
                yield from self._checked(grouper.push(name, self._values([name], [span])[0], problem))
        yield from self._checked(grouper.finish())

    def _values(self, names: list[bytes], spans: list[MemberSpan]) -> list[V]:
        value = self._value
        return cast("list[V]", spans) if value is None else list(map(value, names, spans))

    def _ordinary(self) -> Iterator[Run[V] | DataError]:
        """Walk over members whose headers say nothing unusual; the first other one is left to :func:`step`."""
        buffer = self.buffer
        while True:
            names, spans, needed = self._headers()
            yield from self._grouped(names, self._values(names, spans))
            buffer.release()
            if needed is None or not buffer.more(buffer.offset, needed):
                return

    def _headers(self) -> tuple[list[bytes], list[MemberSpan], int | None]:
        """Step over the ordinary members in memory.

        Returns:
            Their names, where they lie, and how many bytes the next one needs; None where :func:`step` must look at it.
        """
        buffer, adler32 = self.buffer, zlib.adler32
        data, base, stop, offset, most = buffer.data, buffer.base, buffer.stop, buffer.offset, buffer.max_member
        names: list[bytes] = []
        spans: list[MemberSpan] = []
        needed: int | None = BLOCK
        while (at := offset - base) + BLOCK <= stop and len(names) < self._ahead:
            head = data[at : at + BLOCK]
            size = _size(head[124:136])
            if (
                not 0 <= size <= most
                or head[156] not in _PLAIN
                or head[345]
                or adler32(head) & 0xFFFF != _sum(head[148:156])
            ):
                needed = None
                break
            end = offset + BLOCK + ((size + 511) & -512)
            cut = head.find(b"\0", 0, 100)
            name = head[:cut] if cut >= 0 else head[:100]
            if end - base > stop:
                needed = None if buffer.drops(size, name) else end - offset
                break
            names.append(name)
            spans.append((offset, offset + BLOCK, size, end))
            offset = end
        buffer.offset = buffer.begin = offset
        self._ahead = min(2 * self._ahead, _MOST)
        return names, spans, needed

    def _grouped(self, names: list[bytes], values: list[V]) -> Iterator[Run[V] | DataError]:
        at = 0
        while at < len(names):
            if (run := self._grouper.run(names, values, at)) is None:
                yield from self._checked(self._grouper.push(names[at], values[at]))
                at += 1
                continue
            keys, kind, taken = run
            yield [key.decode("utf-8", "surrogateescape") for key in keys], kind, taken
            at += len(taken)

    def _ending(self, extensions: Extensions) -> list[Entry[V]]:
        """Read on behind the end marker: padding, else a loss."""
        buffer, out = self.buffer, []
        end, orphaned = buffer.offset - BLOCK, extensions.orphaned
        padding = buffer.only_zeros()
        if buffer.problem:
            out += self._lost(END, buffer.problem)
        elif orphaned:
            out += self._lost(GAP, f"an extension header has no member at offset {end}")
        if not padding:
            out += self._lost(END, trailing(end))
        elif buffer.take(1):
            out += self._lost(END, overpadded(end))
        return out

    def _lost(self, where: bytes, problem: str) -> list[Entry[V]]:
        return self._grouper.push(where, cast(V, None), problem)

    def _checked(self, entries: list[Entry[V]]) -> Iterator[Run[V] | DataError]:
        for key, kind, values, problem, _ in entries:
            name = key.decode("utf-8", "surrogateescape")
            yield ([name], kind, values) if problem is None else DataError(problem, self.shard, name or None)


@lru_cache(1 << 12)
def _size(field: bytes) -> int:
    """Read the size in a header where it is in plain digits; -1 where it is not."""
    try:
        return int(field[:11], 8) if field[:11].isdigit() and field[11] <= 32 else -1
    except ValueError:
        return -1


@lru_cache(1 << 12)
def _sum(field: bytes) -> int:
    """Compute the low half of the Adler-32 of a header with this checksum: 1 + the sum of its bytes, modulo 65,521."""
    try:
        plain = field[:6].isdigit() and field[6] <= 32
        return (1 + int(field[:6], 8) + sum(field) - 256) % 65521 if plain else -1
    except ValueError:
        return -1


class Fields(Protocol):
    """Which fields the reader of a sample wants."""

    def wants(self, name: str) -> bool:
        """Tell whether a field (or ``__key__``, ``__url__``) is wanted."""


def samples(
    stream: BinaryIO, url: str, fields: Fields, limits: ArchiveLimits = LIMITS
) -> Iterator[tuple[dict[str, Any] | None, DataError | None]]:
    """Read the samples of an archive, compressed or not, as they come, with one of them in memory.

    Yields what reading the same bytes from a file gives, in the same order: the sample, or None and what is wrong
    with it.

    Args:
        stream: Something to read from; its ``read(n)`` may return fewer bytes, none only at the end.
        url: What to call it in samples and errors.
        fields: Which fields to keep.
        limits: How large it may become when it is decompressed.

    Raises:
        OSError: The stream cannot be read.
        MissingExtra: It is compressed by zstd and zstandard is not installed.
    """
    buffer = ArchiveBuffer(b"", archive_chunks(stream, limits))

    def wanted(name: bytes) -> bool:
        _, dot, extension = name.rpartition(b"/")[2].partition(b".")
        return bool(dot) and fields.wants(extension.decode("utf-8", "surrogateescape").lower())

    def read(name: bytes, span: MemberSpan) -> bytes:
        _, body, size, _ = span
        if body == _DROPPED or not wanted(name):
            return b""
        return bytes(buffer.data[body - buffer.base : body - buffer.base + size])

    buffer.wanted = wanted
    for run in ArchiveWalker(url, buffer, read).runs():
        if isinstance(run, DataError):
            yield None, run
        else:
            yield from ((sample, None) for sample in _rows(run, url, fields))


def _rows(run: Run[bytes], url: str, fields: Fields) -> Iterator[dict[str, Any]]:
    keys, kind, values = run
    chosen = [(place, field) for place, field in enumerate(kind) if fields.wants(field)]
    with_key, with_url = fields.wants("__key__"), fields.wants("__url__")
    for number, key in enumerate(keys):
        sample: dict[str, Any] = {"__key__": key} if with_key else {}
        if with_url:
            sample["__url__"] = url
        for place, field in chosen:
            sample[field] = values[number * len(kind) + place]
        yield sample
