"""Samples as they lie in an archive, found front to back, so that they can be copied without being taken apart.

Gives what reading the archive gives, sample for sample and loss for loss, from a file, a pipe or any storage.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO, cast

from penstock.blobs.file_range import FileRange
from penstock.errors import DataError, StorageError
from penstock.formats.tar.archive import BLOCK, ZEROS, EncodedSamples, compression_of, member_header, padded
from penstock.formats.tar.walker import ArchiveBuffer, ArchiveWalker, MemberSpan, archive_chunks
from penstock.storage import STDIN, Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme

Content = bytes | mmap.mmap


class MappedFile(mmap.mmap):
    """A file mapped to be read, that stays open under ``fd`` as long as it is."""

    fd = -1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class RawSample:
    """One sample of an archive, as it lies there.

    Attributes:
        key: Its key.
        kind: Its fields, in the order of its members.
        shard: The archive, as it may be shown.
        spots: Where its members lie.
    """

    __slots__ = ("_base", "_data", "_exact", "key", "kind", "shard", "spots")

    def __init__(
        self,
        key: str,
        kind: tuple[str, ...],
        spots: list[MemberSpan],
        shard: str,
        data: Content,
        base: int,
        exact: bool,
    ) -> None:
        self.key, self.kind, self.spots, self.shard = key, kind, spots, shard
        self._data, self._base, self._exact = data, base, exact

    @property
    def nbytes(self) -> int:
        """Bytes that its members take."""
        return sum(padded(spot[3] - spot[0]) for spot in self.spots)

    @property
    def span(self) -> tuple[int, int] | None:
        """From where to where it lies in its archive, if it can be copied from there in one piece."""
        return _span(self.spots) if self._exact else None

    @property
    def file(self) -> MappedFile | None:
        """The file it lies in, called ``shard``, if it was mapped: its spots are places there."""
        return self._data if isinstance(self._data, MappedFile) else None

    def value(self, field: str) -> bytes | None:
        """The bytes of a field; None where it has no such field."""
        if field not in self.kind:
            return None
        _, body, size, _ = self.spots[self.kind.index(field)]
        return bytes(self._data[body - self._base : body - self._base + size])

    def fields(self) -> dict[str, bytes]:
        """All fields and their bytes."""
        base = self._base
        values = (bytes(self._data[body - base : body - base + size]) for _, body, size, _ in self.spots)
        return dict(zip(self.kind, values, strict=True))

    def sample(self) -> dict[str, str | bytes]:
        """The sample as readers give it, undecoded."""
        return {"__key__": self.key, "__url__": self.shard, **self.fields()}

    def own(self) -> RawSample:
        """The same with bytes of its own, so that it can be kept without all that lies around it."""
        begin, end = self.spots[0][0], self.spots[-1][3]
        data = bytes(self._data[begin - self._base : end - self._base])
        return RawSample(self.key, self.kind, self.spots, self.shard, data, begin, self._exact)

    def parts(self) -> EncodedSamples:
        """The sample for a writer, headers and all as they are: left in its file if that was mapped, else a view."""
        if (span := self.span) is None:
            return self.changed()
        return _copied([self.key], self.kind, self.spots, span, self._data, self._base)

    def changed(self, key: str | None = None, fields: Iterable[str] | None = None) -> EncodedSamples:
        """The sample for a writer under another key, or with some of its fields; headers are made anew."""
        name = self.key if key is None else key
        stem = name.encode("utf-8", "surrogateescape")
        chosen = [place for place, field in enumerate(self.kind) if fields is None or field in fields]
        view = memoryview(self._data)
        pieces: list[bytes | memoryview] = []
        starts: list[int] = []
        at = 0
        for place in chosen:
            _, body, size, _ = self.spots[place]
            head = member_header(stem + b"." + self.kind[place].encode("utf-8", "surrogateescape"), size)
            pieces += (head, view[body - self._base : body - self._base + size], ZEROS[: -size % BLOCK])
            starts.append(at + len(head))
            at += len(head) + padded(size)
        sizes = [self.spots[place][2] for place in chosen]
        return EncodedSamples([name], tuple(self.kind[place] for place in chosen), pieces, starts, sizes, at)


class RawRun:
    """Samples of an archive that have the same fields, as they lie there.

    Attributes:
        keys: Their keys.
        kind: Their fields, in the order of their members.
        spots: Where the members of all of them lie.
        shard: The archive, as it may be shown.
    """

    __slots__ = ("_base", "_data", "_exact", "keys", "kind", "shard", "spots")

    def __init__(
        self,
        keys: list[str],
        kind: tuple[str, ...],
        spots: list[MemberSpan],
        shard: str,
        data: Content,
        base: int,
        exact: bool,
    ) -> None:
        self.keys, self.kind, self.spots, self.shard = keys, kind, spots, shard
        self._data, self._base, self._exact = data, base, exact

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[RawSample]:
        """Give the samples one by one."""
        fields, at = len(self.kind), 0
        for key in self.keys:
            yield RawSample(
                key, self.kind, self.spots[at : at + fields], self.shard, self._data, self._base, self._exact
            )
            at += fields

    def cut(self, first: int, stop: int) -> RawRun:
        """Some of its samples."""
        fields = len(self.kind)
        spots = self.spots[first * fields : stop * fields]
        return RawRun(self.keys[first:stop], self.kind, spots, self.shard, self._data, self._base, self._exact)

    def nbytes(self, count: int) -> int:
        """Bytes from the beginning of the first sample to the end of the last of so many."""
        return self.spots[count * len(self.kind) - 1][3] - self.spots[0][0]

    def parts(self) -> Iterator[EncodedSamples]:
        """The samples for a writer as :meth:`Raw.parts` gives one, all at once if they lie one behind the other."""
        if self._exact and (span := _span(self.spots)) is not None:
            yield _copied(self.keys, self.kind, self.spots, span, self._data, self._base)
        else:
            yield from (raw.parts() for raw in self)


def _span(spots: list[MemberSpan]) -> tuple[int, int] | None:
    """From where to where members lie, if there is nothing between them and they are padded."""
    begin, end = spots[0][0], spots[-1][3]
    gapless = sum([spot[3] - spot[0] for spot in spots]) == end - begin
    return (begin, end) if gapless and not (end - begin) % BLOCK else None


def _copied(
    keys: list[str], kind: tuple[str, ...], spots: list[MemberSpan], span: tuple[int, int], data: Content, base: int
) -> EncodedSamples:
    begin, end = span
    piece = FileRange(data, data.fd, begin, end) if isinstance(data, MappedFile) else None
    starts, sizes = [spot[1] - begin for spot in spots], [spot[2] for spot in spots]
    pieces = [piece or memoryview(data)[begin - base : end - base]]
    return EncodedSamples(keys, kind, pieces, starts, sizes, end - begin)


def open_raw(url: str, storage: Storage | None = None, *, mapped: bool = False) -> RawReader:
    """Open an archive anywhere, compressed or not; ``-`` is standard input.

    ``mapped`` is for those who want to know where samples lie and not what they hold: files are mapped, of which only
    the headers are touched. To read all of them it takes more time than reading.

    Raises:
        StorageError: It cannot be opened.
    """
    if url == STDIN:
        _widen(sys.stdin.buffer)
        return RawReader.of_stream(url, cast(BinaryIO, sys.stdin.buffer))
    if scheme(url) != "file":
        return RawReader.of_stream(redacted(url), cast(BinaryIO, _ChunkStream(open_storage(url, storage).stream(url))))
    path = local_path(url)
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - the reader closes it
    except OSError as exc:
        raise StorageError(f"cannot read the shard: {exc.strerror or exc}", path) from exc
    status = os.fstat(file.fileno())
    regular = stat.S_ISREG(status.st_mode) and status.st_size > 0
    if mapped and regular and compression_of(os.pread(file.fileno(), BLOCK, 0)) is None:
        with file:
            content = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            content.fd = os.dup(file.fileno())
        return RawReader(path, ArchiveBuffer(content))
    return RawReader.of_stream(path, cast(BinaryIO, file))


def _widen(file: BinaryIO) -> None:
    """Let a pipe hold more, so that both ends wait less; what is no pipe, or may not, stays as it is."""
    with suppress(OSError):
        fcntl.fcntl(file.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


class _ChunkStream(io.RawIOBase):
    """Bytes that come in chunks, as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, as many as are at hand; none at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        found, self._rest = self._rest[:size], self._rest[size:]
        return bytes(found)

    def close(self) -> None:
        """End the transfer."""
        if (end := getattr(self._chunks, "close", None)) is not None:
            end()
        super().close()


class RawReader:
    """Iterates over the samples of an archive; what cannot be read is an error in its place.

    Attributes:
        shard: The archive, as it may be shown.
    """

    def __init__(self, shard: str, buffer: ArchiveBuffer, stream: BinaryIO | None = None) -> None:
        self.shard = shard
        self._buffer, self._stream = buffer, stream

    @classmethod
    def of_stream(cls, shard: str, stream: BinaryIO) -> RawReader:
        """Read from a stream, which is closed at the end unless it is standard input."""
        return cls(shard, ArchiveBuffer(b"", archive_chunks(stream)), stream)

    def close(self) -> None:
        """Stop reading; what was yielded stays readable."""
        if self._stream is not None and self.shard != STDIN:
            self._stream.close()
        self._stream = None

    def __iter__(self) -> Iterator[RawSample | DataError]:
        """Yield the samples in order.

        Raises:
            OSError: The archive cannot be read.
            MissingExtra: It is compressed by zstd and zstandard is not installed.
        """
        for item in self.stretches():
            if isinstance(item, RawRun):
                yield from item
            else:
                yield item

    def stretches(self) -> Iterator[RawRun | DataError]:
        """Yield the samples in order, as many at once as have the same fields.

        Raises:
            OSError: The archive cannot be read.
            MissingExtra: It is compressed by zstd and zstandard is not installed.
        """
        buffer = self._buffer
        try:
            for run in ArchiveWalker[MemberSpan](self.shard, buffer).runs():
                if isinstance(run, DataError):
                    yield run
                else:
                    yield RawRun(*run, self.shard, buffer.data, buffer.base, buffer.exact)
        finally:
            self.close()
