"""Samples as they are stored in an archive, so that they can be copied with their headers.

An archive is read front to back, from a file, a pipe or any storage, and yields the same samples and the same errors
as ``read_tar``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO, cast

from penstock.blobs.content import MappedFile
from penstock.blobs.file_range import FileRange
from penstock.blobs.remote_bytes import ChunkReader
from penstock.errors import DataError, StorageError
from penstock.formats.tar.archive import BLOCK, ZEROS, EncodedSamples, compression_of, member_header, padded
from penstock.formats.tar.walker import ArchiveBuffer, ArchiveWalker, MemberSpan, archive_chunks
from penstock.storage import STDIN, local_path, open_storage, redacted
from penstock.storage.protocol import scheme

ArchiveBytes = bytes | mmap.mmap

_PIPE_BYTES = 1 << 20  # the most that an unprivileged process may ask for


class RawSample:
    """One sample of an archive, as it is stored.

    Attributes:
        key: Its key.
        field_names: The names of its fields, in member order.
        shard: The archive, without credentials.
        spans: The positions of its members in the archive.
    """

    __slots__ = ("_base", "_data", "_exact", "field_names", "key", "shard", "spans")

    def __init__(
        self,
        key: str,
        field_names: tuple[str, ...],
        spans: list[MemberSpan],
        shard: str,
        data: ArchiveBytes,
        base: int,
        exact: bool,
    ) -> None:
        self.key, self.field_names, self.spans, self.shard = key, field_names, spans, shard
        self._data, self._base, self._exact = data, base, exact

    @property
    def nbytes(self) -> int:
        """The size of its members, headers and padding included."""
        return sum(padded(span[3] - span[0]) for span in self.spans)

    @property
    def extent(self) -> tuple[int, int] | None:
        """Its start and end in the archive, if it can be copied in one piece; None otherwise."""
        return _extent(self.spans) if self._exact else None

    @property
    def file(self) -> MappedFile | None:
        """The mapped file that its spans refer to, with the path ``shard``; None if the archive was streamed."""
        return self._data if isinstance(self._data, MappedFile) else None

    @property
    def exact(self) -> bool:
        """Whether its members can be copied with their stored headers."""
        return self._exact

    def members(self) -> memoryview:
        """Return the bytes from its first member to its last, headers included."""
        return memoryview(self._data)[self.spans[0][0] - self._base : self.spans[-1][3] - self._base]

    def value(self, field: str) -> bytes | None:
        """Return the bytes of a field; None if the sample does not have it."""
        if field not in self.field_names:
            return None
        _, body, size, _ = self.spans[self.field_names.index(field)]
        return bytes(self._data[body - self._base : body - self._base + size])

    def fields(self) -> dict[str, bytes]:
        """Return all fields and their bytes."""
        base = self._base
        values = (bytes(self._data[body - base : body - base + size]) for _, body, size, _ in self.spans)
        return dict(zip(self.field_names, values, strict=True))

    def sample(self) -> dict[str, str | bytes]:
        """Return the sample as ``read_tar`` yields it, undecoded."""
        return {"__key__": self.key, "__url__": self.shard, **self.fields()}

    def detached(self) -> RawSample:
        """Return a copy with bytes of its own, which does not keep the archive's buffer alive."""
        begin = self.spans[0][0]
        return RawSample(self.key, self.field_names, self.spans, self.shard, bytes(self.members()), begin, self._exact)

    def encode(self) -> EncodedSamples:
        """Return the sample for a writer, with its stored headers: a range of the mapped file or a view of a buffer."""
        if (extent := self.extent) is None:
            return self.reencode()
        return _encode_as_stored([self.key], self.field_names, self.spans, extent, self._data, self._base)

    def reencode(self, key: str | None = None, fields: Iterable[str] | None = None) -> EncodedSamples:
        """Return the sample for a writer, with new headers: under another key, or with some of its fields."""
        name = self.key if key is None else key
        stem = name.encode("utf-8", "surrogateescape")
        chosen = [number for number, field in enumerate(self.field_names) if fields is None or field in fields]
        view = memoryview(self._data)
        pieces: list[bytes | memoryview] = []
        starts: list[int] = []
        nbytes = 0
        for number in chosen:
            _, body, size, _ = self.spans[number]
            header = member_header(stem + b"." + self.field_names[number].encode("utf-8", "surrogateescape"), size)
            pieces += (header, view[body - self._base : body - self._base + size], ZEROS[: -size % BLOCK])
            starts.append(nbytes + len(header))
            nbytes += len(header) + padded(size)
        sizes = [self.spans[number][2] for number in chosen]
        return EncodedSamples(
            [name], tuple(self.field_names[number] for number in chosen), pieces, starts, sizes, nbytes
        )


class RawRun:
    """Consecutive samples of an archive with the same fields, as they are stored.

    Attributes:
        keys: The keys of the samples.
        field_names: The names of their fields, in member order.
        spans: The positions of all members in the archive, in order.
        shard: The archive, without credentials.
    """

    __slots__ = ("_base", "_data", "_exact", "field_names", "keys", "shard", "spans")

    def __init__(
        self,
        keys: list[str],
        field_names: tuple[str, ...],
        spans: list[MemberSpan],
        shard: str,
        data: ArchiveBytes,
        base: int,
        exact: bool,
    ) -> None:
        self.keys, self.field_names, self.spans, self.shard = keys, field_names, spans, shard
        self._data, self._base, self._exact = data, base, exact

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[RawSample]:
        """Yield the samples."""
        width = len(self.field_names)
        for number, key in enumerate(self.keys):
            spans = self.spans[number * width : (number + 1) * width]
            yield RawSample(key, self.field_names, spans, self.shard, self._data, self._base, self._exact)

    def slice(self, first: int, stop: int) -> RawRun:
        """Return the samples from ``first`` up to ``stop``."""
        width = len(self.field_names)
        spans = self.spans[first * width : stop * width]
        return RawRun(self.keys[first:stop], self.field_names, spans, self.shard, self._data, self._base, self._exact)

    def nbytes(self, count: int) -> int:
        """Return the bytes from the beginning of the first sample to the end of sample number ``count``."""
        return self.spans[count * len(self.field_names) - 1][3] - self.spans[0][0]

    def encode(self) -> Iterator[EncodedSamples]:
        """Yield the samples for a writer as :meth:`RawSample.encode` does, all at once if there are no gaps."""
        if self._exact and (extent := _extent(self.spans)) is not None:
            yield _encode_as_stored(self.keys, self.field_names, self.spans, extent, self._data, self._base)
        else:
            yield from (raw.encode() for raw in self)


def _extent(spans: list[MemberSpan]) -> tuple[int, int] | None:
    """Return the start and end of members, if there are no gaps between them and the last one is padded."""
    begin, end = spans[0][0], spans[-1][3]
    gapless = sum([span[3] - span[0] for span in spans]) == end - begin
    return (begin, end) if gapless and not (end - begin) % BLOCK else None


def _encode_as_stored(
    keys: list[str],
    field_names: tuple[str, ...],
    spans: list[MemberSpan],
    extent: tuple[int, int],
    data: ArchiveBytes,
    base: int,
) -> EncodedSamples:
    begin, end = extent
    piece = FileRange(data, data.fd, begin, end) if isinstance(data, MappedFile) else None
    starts, sizes = [span[1] - begin for span in spans], [span[2] for span in spans]
    pieces = [piece or memoryview(data)[begin - base : end - base]]
    return EncodedSamples(keys, field_names, pieces, starts, sizes, end - begin)


def open_raw(url: str, *, mapped: bool = False) -> RawReader:
    """Open an archive on any storage, compressed or not; ``-`` is standard input.

    Args:
        url: The archive.
        mapped: Map an uncompressed local file instead of reading it: faster if only headers are read and samples are
            copied by the system, slower if all data is read.

    Raises:
        StorageError: The archive cannot be opened.
    """
    if url == STDIN:
        _enlarge_pipe(sys.stdin.buffer)
        return RawReader.of_stream(url, cast(BinaryIO, sys.stdin.buffer))
    if scheme(url) != "file":
        return RawReader.of_stream(redacted(url), cast(BinaryIO, ChunkReader(open_storage(url).stream(url))))
    path = local_path(url)
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - the reader closes it
    except OSError as exc:
        raise StorageError(f"cannot read the shard: {exc.strerror or exc}", path) from exc
    status = os.fstat(file.fileno())
    regular = stat.S_ISREG(status.st_mode) and status.st_size > 0
    if mapped and regular and compression_of(os.pread(file.fileno(), BLOCK, 0)) is None:
        with file:
            return RawReader(path, ArchiveBuffer(MappedFile.of(file)))
    return RawReader.of_stream(path, cast(BinaryIO, file))


def _enlarge_pipe(file: BinaryIO) -> None:
    """Enlarge the buffer of a pipe, so that both ends wait less."""
    with suppress(OSError, AttributeError):  # not a pipe, not permitted, or not Linux
        fcntl.fcntl(file.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class RawReader:
    """Iterates over the samples of an archive; for a sample that cannot be read, it yields the error.

    Attributes:
        shard: The archive, without credentials.
    """

    def __init__(self, shard: str, buffer: ArchiveBuffer, stream: BinaryIO | None = None) -> None:
        self.shard = shard
        self._buffer, self._stream = buffer, stream

    @classmethod
    def of_stream(cls, shard: str, stream: BinaryIO) -> RawReader:
        """Return a reader of a stream; the reader closes the stream at the end unless it is standard input."""
        return cls(shard, ArchiveBuffer(b"", archive_chunks(stream)), stream)

    def close(self) -> None:
        """Stop reading; the samples yielded so far stay readable."""
        if self._stream is not None and self.shard != STDIN:
            self._stream.close()
        self._stream = None

    def __iter__(self) -> Iterator[RawSample | DataError]:
        """Yield the samples in order.

        Raises:
            OSError: The archive cannot be read.
            MissingExtra: It is compressed by zstd and zstandard is not installed.
        """
        for item in self.runs():
            if isinstance(item, RawRun):
                yield from item
            else:
                yield item

    def runs(self, apart: bool = False, skipped: Counter[str] | None = None) -> Iterator[RawRun | DataError]:
        """Yield the samples in order, in runs with the same fields.

        With ``apart``, a sample whose members lie apart is yielded in several parts with the same key.
        ``skipped`` counts the members that belong to no sample, by kind.

        Raises:
            OSError: The archive cannot be read.
            MissingExtra: It is compressed by zstd and zstandard is not installed.
        """
        buffer = self._buffer
        try:
            for run in ArchiveWalker[MemberSpan](self.shard, buffer, apart=apart, skipped=skipped).runs():
                if isinstance(run, DataError):
                    yield run
                else:
                    yield RawRun(*run, self.shard, buffer.data, buffer.base, buffer.exact)
        finally:
            self.close()
