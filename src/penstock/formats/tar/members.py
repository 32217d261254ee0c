"""The members of an archive as they are, for readers with rules of their own for what a sample is.

The table of a local file's members is kept in the user's cache, so that its headers are parsed only once.
"""

from __future__ import annotations

import io
import os
import stat
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, cast

import numpy as np

from penstock.blobs.content import copied, keep_freed_memory
from penstock.blobs.object_file import ObjectReader
from penstock.blobs.stamp import Stamp, cached_path, write_cached
from penstock.errors import DataError
from penstock.formats.tar.archive import BLOCK, compression_of
from penstock.formats.tar.grouper import Grouper, SampleEntry
from penstock.formats.tar.index import I64
from penstock.formats.tar.walker import ArchiveBuffer, ArchiveWalker, MemberSpan, archive_chunks

_CACHE_FAMILY = "members"
_MAGIC = b"PSTKMB01"
_RUN = 512  # members that are yielded together
_PIECE = 1 << 18  # bytes of a file that are read at once, or one member


class Ungrouped(Grouper[Any]):
    """Passes every member on as a sample of its own."""

    def push(self, name: bytes, value: Any, problem: str | None = None) -> list[SampleEntry[Any]]:
        return [(name, (), [value], problem, False)] if name or problem else []

    def push_run(self, names: list[bytes], values: Any, at: int) -> Any:
        return names[at:], (), values[at:]

    def finish(self) -> list[SampleEntry[Any]]:
        return []


class PlainFile:
    """The bytes of an open file, read by position: if the file is cut off meanwhile, reading mapped pages would crash.

    Args:
        file: The file.
        shard: What to call it in errors.
    """

    def __init__(self, file: io.BufferedReader, shard: str) -> None:
        keep_freed_memory()
        self._file, self._shard = file, shard
        self._size = os.fstat(file.fileno()).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: slice) -> bytes:
        start, stop = place.start, min(place.stop, self._size)
        found = os.pread(self._file.fileno(), stop - start, start)
        while len(found) < stop - start:  # one call reads at most 2 GB
            more = os.pread(self._file.fileno(), stop - start - len(found), start + len(found))
            if not more:
                problem = f"the file was cut to {os.fstat(self._file.fileno()).st_size:,} bytes while it was read"
                raise DataError(problem, self._shard)
            found += more
        return found

    def cut(self, places: list[slice], together: bool) -> Iterator[list[bytes]]:
        """Read many ranges in order, a part of them at a time; ``together``: most bytes between them are theirs."""
        at = 0
        while at < len(places):
            first = places[at].start
            stop = max(at + 1, bisect_right(places, first + _PIECE, at, key=attrgetter("stop")))
            part, at = places[at:stop], stop
            copy = copied(self._file.fileno(), first, part[-1].stop) if together else None
            if copy is not None:
                yield [copy[place.start - first : place.stop - first] for place in part]
            else:
                yield from ([self[place]] for place in part)


def archive_members(
    stream: Any, shard: str, renamed: Callable[[list[str]], list[str]] = list
) -> Iterator[tuple[list[str], list[bytes]] | DataError]:
    """Yield the members of an archive in order; an error in place of each damaged part.

    Args:
        stream: The archive at its beginning, also a compressed one: a file, or anything with a ``read``. Of a local
            file that is not compressed, only the members that are wanted are read.
        shard: What to call it in errors.
        renamed: Returns the names that members get, given their names; "" for one that is not wanted.

    Yields:
        The names of some members, and their data.

    Raises:
        OSError: The stream cannot be read.
    """
    content = _plain_file(stream, shard)
    runs: Iterator[Any] = _stream_runs(stream, shard) if content is None else _file_runs(content, stream)
    for run in runs:
        if isinstance(run, DataError):
            yield run
            continue
        names, places = renamed(run[0]), run[1]
        wanted = all(names)
        if not wanted:
            places = [place for name, place in zip(names, places, strict=True) if name]
            names = [name for name in names if name]
        if content is None:
            if names:
                yield names, places
            continue
        at = 0
        try:
            for values in content.cut(places, wanted):
                yield names[at : at + len(values)], values
                at += len(values)
        except DataError as exc:
            yield exc
            return


def _stream_runs(stream: Any, shard: str) -> Iterator[tuple[list[str], list[bytes]] | DataError]:
    """Yield the members of a stream, all of which are read."""
    whole = isinstance(stream, ObjectReader) and compression_of(stream.peek(BLOCK)) is None
    buffer = ArchiveBuffer(b"", stream.chunks() if whole else archive_chunks(stream))

    def value(name: bytes, span: MemberSpan) -> bytes:
        return bytes(buffer.data[span[1] - buffer.base : span[1] - buffer.base + span[2]])

    for found in ArchiveWalker[bytes](shard, buffer, value, grouper=Ungrouped()).runs():
        yield found if isinstance(found, DataError) else (found[0], found[2])


def _plain_file(stream: Any, shard: str) -> PlainFile | None:
    """Return the content of a local file that is at its beginning and not compressed; None for any other stream."""
    if not (isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO)):
        return None
    status = os.fstat(stream.fileno())
    if not stat.S_ISREG(status.st_mode) or not status.st_size or stream.tell():
        return None
    content = PlainFile(stream, shard)
    return content if compression_of(content[0:BLOCK]) is None else None


def _file_runs(content: PlainFile, file: io.BufferedReader) -> Iterator[tuple[list[str], list[slice]] | DataError]:
    """Yield where the members of a local file are, from the table that is kept of them, if there is one."""
    stamp = Stamp.of(os.fstat(file.fileno()))
    table = _cached_table(file.name, stamp)
    if table is not None:
        names, starts, stops = table
        for low in range(0, len(names), _RUN):
            run = slice(low, low + _RUN)
            yield names[run], list(map(slice, starts[run].tolist(), stops[run].tolist()))
        return
    found: list[str] = []
    slices: list[slice] = []
    damaged = False
    walker = ArchiveWalker[slice](
        str(file.name),
        ArchiveBuffer(cast(bytes, content)),  # which the walker only slices
        lambda _, span: slice(span[1], span[1] + span[2]),
        grouper=Ungrouped(),
    )
    try:
        for walked in walker.runs():
            if isinstance(walked, DataError):
                damaged = True
                yield walked
            else:
                found += walked[0]
                slices += walked[2]
                yield walked[0], walked[2]
    except DataError as exc:
        damaged = True
        yield exc
    if not damaged:
        _cache_table(file.name, stamp, found, slices)


def _cache_table(path: Any, stamp: Stamp, names: list[str], slices: list[slice]) -> None:
    if not isinstance(path, str):
        return
    numbers = [stamp.size, stamp.mtime_ns, stamp.inode, len(names)]
    numbers += [each.start for each in slices] + [each.stop for each in slices]
    text = "\0".join(names).encode("utf-8", "surrogateescape")
    body = _MAGIC + np.array(numbers, "<i8").tobytes() + text
    write_cached(_CACHE_FAMILY, os.path.abspath(path), body + zlib.crc32(body).to_bytes(4, "little"))


def _cached_table(path: Any, stamp: Stamp) -> tuple[list[str], I64, I64] | None:
    """Return names, starts and stops of the members of a file; None if they are not cached, or it has changed since."""
    try:
        data = cached_path(_CACHE_FAMILY, os.path.abspath(path)).read_bytes()
    except (OSError, RuntimeError, TypeError):
        return None
    if data[:8] != _MAGIC or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return None
    size, mtime_ns, inode, count = np.frombuffer(data, "<i8", 4, 8).tolist()
    if Stamp(size, mtime_ns, inode) != stamp:
        return None
    starts, stops = np.frombuffer(data, "<i8", 2 * count, 40).reshape(2, count)
    names = data[40 + 16 * count : -4].decode("utf-8", "surrogateescape").split("\0") if count else []
    return (names, starts, stops) if len(names) == count else None
