"""Archives walked front to back without an index: standard input, pipes, and files whose samples are copied.

A walker yields what the scan of the same bytes finds, sample for sample and loss for loss.
"""

from __future__ import annotations

import io
import logging
import mmap
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, BinaryIO, Generic, cast

from penstock.blobs.compression import LIMITS, ArchiveLimits, CountingReader, decompressed
from penstock.errors import DataError
from penstock.formats.tar.archive import (
    BLOCK,
    MAX_PADDING,
    RECORD,
    Extensions,
    Halt,
    ValueT,
    checksum_holds,
    compression_of,
    excess_padding,
    has_relevant_records,
    long_padding,
    orphaned_extension,
    padded,
    read_member,
    trailing_bytes,
)
from penstock.formats.tar.grouper import BAD_END, LOST_RANGE, Grouper, SampleEntry
from penstock.plan import Fields

MemberSpan = tuple[int, int, int, int]
"""Where a member is in its archive: the offset of its first header, the offset and size of its data, and the offset
after its padding."""
SampleRun = tuple[list[str], tuple[str, ...], list[ValueT]]
"""Consecutive samples with the same fields: their keys, their fields, and the values of all their members in order."""

log = logging.getLogger(__name__)
MAX_MEMBER = 4 << 30  # bytes, in a stream: its samples are held in memory
_MAX_LEADING = 64 << 20  # bytes of a stream without any header: it is not an archive, and may be endless
_CHUNK = 1 << 20  # bytes of a stream read at once: as many as a pipe holds
_STRIDE = 32 << 20  # bytes of a mapped file that stay mapped behind the reader
_PLAIN_TYPES = (0x30, 0)  # of ordinary members
_PAX_TYPE = 0x78  # of a header with records about the next member
_FIRST_HEADERS = 16  # headers read before the first samples are yielded; the number doubles, up to
_MAX_HEADERS = 512
_DROPPED = -1  # in place of the offset of a member's data: the data was not kept


class ArchiveBuffer:
    """The part of an archive that is in memory: all of a mapped file, or the part of a stream that is still needed.

    Args:
        data: A whole file; empty for a stream.
        chunks: The chunks of a stream; None for a file.

    Attributes:
        data: The bytes in memory.
        base: The offset in the archive at which ``data`` begins.
        size: The size of ``data``.
        offset: Where the next read begins, in the archive.
        begin: Where the extension headers or the header of the next member begin.
        exact: Whether each member can be copied with its headers alone, without records for all members.
        problem: Why the stream ends early, if it is damaged.
        streamed: Whether it is a stream.
        max_member: The size up to which members are kept.
        first_needed: Returns the offset from which on the archive must stay in memory.
        wanted: Returns whether the data of a member will be read, given the member's name.
    """

    def __init__(self, data: bytes | mmap.mmap, chunks: Iterator[bytes] | None = None) -> None:
        self.data, self.base, self.size = data, 0, len(data)
        self.offset = self.begin = 0
        self.exact = True
        self.problem: str | None = None
        self.streamed = chunks is not None
        self.max_member = MAX_MEMBER if self.streamed else sys.maxsize
        self.first_needed: Callable[[], int] = lambda: self.begin
        self.wanted: Callable[[bytes], bool] = lambda name: True
        self._chunks = chunks
        self._next, self._next_base = b"", 0  # the chunk that ``data`` ends in or before, and its offset
        self._released = 0
        self._release_at = _STRIDE if isinstance(data, mmap.mmap) else sys.maxsize

    def load(self, offset: int, size: int) -> bool:
        """Load ``size`` bytes from ``offset`` on into memory; False if the archive ends before that."""
        self.offset, stop = offset, offset + size
        keep = min(self.first_needed(), offset, self.begin) if stop > self.base + self.size else 0
        while stop > self.base + self.size:
            if not self._has_next(self.base + self.size):
                return False
            if keep >= self._next_base:
                self.data, self.base, self._next = self._next, self._next_base, b""
                self.size = len(self.data)
            else:
                self._join_next(keep, stop)
        return True

    def _has_next(self, end: int) -> bool:
        """Return whether the archive goes on after ``end``; reads a chunk unless part of the last one is left."""
        if not self._next and self._chunks is not None:
            try:
                self._next, self._next_base = next(self._chunks, b""), end
            except DataError as exc:
                self.problem = exc.problem
            self._chunks = self._chunks if self._next else None
        return bool(self._next)

    def _join_next(self, keep: int, stop: int) -> None:
        """Join the bytes from ``keep`` on with those up to ``stop``, instead of copying a whole chunk for a few bytes.

        As many bytes are added as are kept, if they are there: a sample with many members is not copied for each.
        """
        parts, end = [self.data[keep - self.base :]], self.base + self.size
        enough = max(stop, end + len(parts[0]))
        while end < stop and self._has_next(end):
            at = end - self._next_base
            parts.append(self._next[at : at + enough - end])
            end += len(parts[-1])
            if end == self._next_base + len(self._next):
                self._next = b""
        self.data, self.base, self.size = b"".join(parts), keep, end - keep

    def mark_consumed(self) -> None:
        """Note that the bytes before ``offset`` are no longer needed."""
        self.begin = self.offset

    def take(self, size: int) -> bytes:
        self.load(self.offset, size)
        at = self.offset - self.base
        found = bytes(self.data[at : at + size])
        self.offset += len(found)
        return found

    def drops(self, size: int, name: bytes) -> bool:
        """Return whether the data of a member is skipped without being kept: it is too large, or large and unwanted."""
        return size > self.max_member or (size > _CHUNK and self._chunks is not None and not self.wanted(name))

    def value(self, size: int, name: bytes) -> MemberSpan | None:
        begin, body = self.begin, self.offset
        if self.drops(size, name):
            return self._skip(size)
        if not self.load(body, size):
            self.offset = self.begin = self.base + self.size
            return None
        self.load(body, padded(size))
        self.offset = self.begin = min(body + padded(size), self.base + self.size)
        return begin, body, size, self.offset

    def _skip(self, size: int) -> MemberSpan | None:
        remaining = padded(size)
        while remaining > 0:
            self.begin = self.offset
            skipped = len(self.take(min(remaining, _CHUNK)))
            remaining -= skipped
            if not skipped:
                break
        self.begin = self.offset
        return None if remaining > padded(size) - size else (self.begin, _DROPPED, size, self.begin)

    def resync(self, limit: int = sys.maxsize) -> bool:
        """Go to the next header before the offset ``limit``; return whether there is one."""
        self.take(-self.offset % BLOCK)
        while self.offset < limit:
            self.begin = self.offset
            block = self.take(BLOCK)
            if len(block) < BLOCK:
                return False
            if checksum_holds(block):
                self.offset = self.begin
                return True
        return False

    def read_padding(self) -> int | None:
        """Read up to the most padding allowed and return its size; None if it is not all zeros."""
        remaining = MAX_PADDING
        while remaining > 0 and (found := self.take(min(remaining, _CHUNK))):
            self.begin = self.offset
            if found.strip(b"\0"):
                return None
            remaining -= len(found)
        return MAX_PADDING - remaining

    def release(self) -> None:
        """Give pages far behind the reader back to the system, so that memory does not grow with the file."""
        if self.offset <= self._release_at:
            return
        assert isinstance(self.data, mmap.mmap)
        stop = self.first_needed() & -mmap.PAGESIZE
        if stop - self._released > _STRIDE:
            self.data.madvise(mmap.MADV_DONTNEED, self._released, stop - self._released - (_STRIDE // 2))
            self._released = stop - _STRIDE // 2
        self._release_at = self.offset + _STRIDE


def archive_chunks(stream: BinaryIO, limits: ArchiveLimits = LIMITS) -> Iterator[bytes]:
    """Read an archive in chunks, decompressed if it is compressed.

    Raises:
        OSError: The stream cannot be read.
        DataError: The compressed stream is damaged or exceeds the limits.
        MissingExtra: The archive is compressed by zstd and zstandard is not installed.
    """
    read = getattr(stream, "read1", stream.read)  # read() would wait until all requested bytes have arrived
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


class ArchiveWalker(Generic[ValueT]):
    """Walks over the samples of an archive; a sample that cannot be read is an error in its place.

    Args:
        shard: What to call the archive in errors.
        buffer: The archive.
        value: Returns the value that stands for a member, given its name and span. By default the value is the span,
            and the bytes of a sample stay in the buffer until the sample has been yielded.
        apart: Yield parts of samples whose members lie apart, instead of errors.
        skipped: Counts the members that belong to no sample, by kind.
        grouper: Groups the members, by its own rules.
    """

    def __init__(
        self,
        shard: str,
        buffer: ArchiveBuffer,
        value: Callable[[bytes, MemberSpan], ValueT] | None = None,
        *,
        apart: bool = False,
        skipped: Counter[str] | None = None,
        grouper: Grouper[ValueT] | None = None,
    ) -> None:
        self.shard, self.buffer = shard, buffer
        self._value = value
        self._grouper = Grouper(apart, skipped) if grouper is None else grouper
        self._headers_ahead = _FIRST_HEADERS
        if value is None:
            buffer.first_needed = self._first_needed

    def _first_needed(self) -> int:
        first = cast("MemberSpan | None", self._grouper.first)
        return self.buffer.begin if first is None else first[0]

    def runs(self) -> Iterator[SampleRun[ValueT] | DataError]:
        """Yield the samples in order, in runs with the same fields.

        Raises:
            OSError: The archive cannot be read.
            MissingExtra: The archive is compressed by zstd and zstandard is not installed.
        """
        grouper, buffer, extensions = self._grouper, self.buffer, Extensions()
        while True:
            if not extensions.pending:
                yield from self._plain_members()
            item = read_member(buffer, extensions)
            if isinstance(item, Halt):
                if item.problem is None:
                    yield from self._runs_or_errors(self._end_losses(extensions))
                    break
                limit = _MAX_LEADING if buffer.begin == 0 and buffer.streamed else sys.maxsize
                buffer.mark_consumed()
                loss = item.problem if item.recoverable else buffer.problem or item.problem
                yield from self._runs_or_errors(self._lost(LOST_RANGE, loss))
                extensions.clear()
                if not item.recoverable or not buffer.resync(limit):
                    break
            elif item is not None:
                name, span, problem = item
                if span[2] > buffer.max_member:
                    problem = problem or f"the member has more than {buffer.max_member} bytes, too many for a stream"
                buffer.exact = buffer.exact and not extensions.pending  # records for all members are not copied
                yield from self._runs_or_errors(grouper.push(name, self._values([name], [span])[0], problem))
        yield from self._runs_or_errors(grouper.finish())

    def _values(self, names: list[bytes], spans: list[MemberSpan]) -> list[ValueT]:
        value = self._value
        return cast("list[ValueT]", spans) if value is None else list(map(value, names, spans))

    def _plain_members(self) -> Iterator[SampleRun[ValueT] | DataError]:
        """Walk over members with plain headers, up to the first that needs :func:`read_member`."""
        buffer = self.buffer
        while True:
            names, spans, needed = self._read_headers()
            yield from self._group(names, self._values(names, spans))
            buffer.release()
            if needed is None or not buffer.load(buffer.offset, needed):
                return

    def _read_headers(self) -> tuple[list[bytes], list[MemberSpan], int | None]:
        """Step over the members with plain headers that are in memory, and over PAX headers that only hold times.

        Returns:
            Their names, their spans, and how many bytes the next one needs; None if it needs :func:`read_member`.
        """
        buffer, adler32 = self.buffer, zlib.adler32
        data, base, stop, offset, most = buffer.data, buffer.base, buffer.size, buffer.offset, buffer.max_member
        names: list[bytes] = []
        spans: list[MemberSpan] = []
        begin = offset  # of the member's first header
        needed: int | None = BLOCK
        while (at := offset - base) + BLOCK <= stop and len(names) < self._headers_ahead:
            head = data[at : at + BLOCK]
            size = _parse_size(head[124:136])
            kind = head[156]
            if (
                not 0 <= size <= most
                or (kind not in _PLAIN_TYPES and (kind != _PAX_TYPE or size > BLOCK))
                or head[345]
                or adler32(head) & 0xFFFF != _expected_adler(head[148:156])
            ):
                needed = None
                break
            end = offset + BLOCK + ((size + 511) & -512)
            if kind == _PAX_TYPE:
                needed = end + BLOCK - begin  # the member's own header follows
                if end - base > stop:
                    break
                if has_relevant_records(data[at + BLOCK : at + BLOCK + size]):
                    needed = None
                    break
                offset = end
                continue
            cut = head.find(b"\0", 0, 100)
            name = head[:cut] if cut >= 0 else head[:100]
            if end - base > stop:
                needed = None if buffer.drops(size, name) else end - begin
                break
            names.append(name)
            spans.append((begin, offset + BLOCK, size, end))
            begin = offset = end
            needed = BLOCK
        buffer.offset = buffer.begin = begin
        self._headers_ahead = min(2 * self._headers_ahead, _MAX_HEADERS)
        return names, spans, needed

    def _group(self, names: list[bytes], values: list[ValueT]) -> Iterator[SampleRun[ValueT] | DataError]:
        at = 0
        while at < len(names):
            if (run := self._grouper.push_run(names, values, at)) is None:
                yield from self._runs_or_errors(self._grouper.push(names[at], values[at]))
                at += 1
                continue
            keys, field_names, run_values = run
            yield [key.decode("utf-8", "surrogateescape") for key in keys], field_names, run_values
            at += len(run_values)

    def _end_losses(self, extensions: Extensions) -> list[SampleEntry[ValueT]]:
        """Read what follows the end marker; anything but padding is a loss."""
        buffer, out = self.buffer, []
        end, orphaned = buffer.offset - BLOCK, extensions.orphaned
        padding = buffer.read_padding()
        if buffer.problem:
            out += self._lost(BAD_END, buffer.problem)
        elif orphaned:
            out += self._lost(LOST_RANGE, orphaned_extension(end))
        if padding is None:
            out += self._lost(BAD_END, trailing_bytes(end))
        elif buffer.take(1):
            out += self._lost(BAD_END, excess_padding(end))
        elif padding > RECORD:
            log.warning("%s: %s", self.shard, long_padding(padding))
        return out

    def _lost(self, kind: bytes, problem: str) -> list[SampleEntry[ValueT]]:
        return self._grouper.push(kind, cast(ValueT, None), problem)

    def _runs_or_errors(self, entries: list[SampleEntry[ValueT]]) -> Iterator[SampleRun[ValueT] | DataError]:
        for key, field_names, values, problem, _ in entries:
            name = key.decode("utf-8", "surrogateescape")
            yield ([name], field_names, values) if problem is None else DataError(problem, self.shard, name or None)


@lru_cache(1 << 12)
def _parse_size(field: bytes) -> int:
    """Return the size in a header; -1 if it is not in plain digits."""
    try:
        return int(field[:11], 8) if field[:11].isdigit() and field[11] <= 32 else -1
    except ValueError:
        return -1


@lru_cache(1 << 12)
def _expected_adler(field: bytes) -> int:
    """Return the low half of the Adler-32 of a header with this checksum: 1 + the sum of its bytes, modulo 65,521."""
    try:
        plain = field[:6].isdigit() and field[6] <= 32
        return (1 + int(field[:6], 8) + sum(field) - 256) % 65521 if plain else -1
    except ValueError:
        return -1


def iter_samples(
    stream: BinaryIO, url: str, fields: Fields, limits: ArchiveLimits = LIMITS
) -> Iterator[tuple[dict[str, Any] | None, DataError | None]]:
    """Yield the samples of an archive, compressed or not, as they arrive.

    Reading the same bytes from a file yields the same samples in the same order. Memory is bounded by the largest
    sample and a few chunks.

    Args:
        stream: The archive; its ``read(n)`` may return fewer bytes, none only at the end.
        url: What to call the archive in samples and errors.
        fields: The fields to read.
        limits: How large the archive may become when it is decompressed.

    Yields:
        A sample and None; or None and what is wrong with the sample.

    Raises:
        OSError: The stream cannot be read.
        MissingExtra: The archive is compressed by zstd and zstandard is not installed.
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


def _rows(run: SampleRun[bytes], url: str, fields: Fields) -> Iterator[dict[str, Any]]:
    keys, field_names, values = run
    chosen = [(place, field) for place, field in enumerate(field_names) if fields.wants(field)]
    with_key, with_url = fields.wants("__key__"), fields.wants("__url__")
    for number, key in enumerate(keys):
        sample: dict[str, Any] = {"__key__": key} if with_key else {}
        if with_url:
            sample["__url__"] = url
        for place, field in chosen:
            sample[field] = values[number * len(field_names) + place]
        yield sample
