"""The members of an archive as they are, for readers with rules of their own for what a sample is.

The table of a local file's members is kept in the user's cache, so that its headers are parsed only once.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.blobs.object_file import ObjectReader
from penstock.blobs.stamp import Stamp, cached_path, write_cached
from penstock.errors import DataError
from penstock.formats.tar.archive import BLOCK, compression_of
from penstock.formats.tar.grouper import Grouper, SampleEntry
from penstock.formats.tar.index import I64
from penstock.formats.tar.walker import ArchiveBuffer, ArchiveWalker, MemberSpan, archive_chunks

MemberRun = tuple[list[str], list[slice]]
"""The names of some members, and where their data is in the archive."""

_CACHE_FAMILY = "members"
_MAGIC = b"PSTKMB01"
_RUN = 512  # members that are yielded together


class Ungrouped(Grouper[Any]):
    """Passes every member on as a sample of its own."""

    def push(self, name: bytes, value: Any, problem: str | None = None) -> list[SampleEntry[Any]]:
        return [(name, (), [value], problem, False)] if name or problem else []

    def push_run(self, names: list[bytes], values: Any, at: int) -> Any:
        return names[at:], (), values[at:]

    def finish(self) -> list[SampleEntry[Any]]:
        return []


def archive_members(
    stream: Any, shard: str
) -> Iterator[tuple[list[str], list[Any], Callable[[Any], bytes]] | DataError]:
    """Yield the members of an archive in order; an error in place of each damaged part.

    A local file that is not compressed is mapped: only the members that are read are copied.

    Args:
        stream: The archive at its beginning, also a compressed one: a file, or anything with a ``read``.
        shard: What to call it in errors.

    Yields:
        The names of some members, what stands for the data of each, and the function that reads that.

    Raises:
        OSError: The stream cannot be read.
    """
    mapped = _mapped_file(stream)
    if mapped is not None:
        for run in file_members(mapped, stream):
            yield run if isinstance(run, DataError) else (*run, mapped.__getitem__)
        return
    whole = isinstance(stream, ObjectReader) and compression_of(stream.peek(BLOCK)) is None
    buffer = ArchiveBuffer(b"", stream.chunks() if whole else archive_chunks(stream))

    def copied(name: bytes, span: MemberSpan) -> bytes:
        return bytes(buffer.data[span[1] - buffer.base : span[1] - buffer.base + span[2]])

    for found in ArchiveWalker[Any](shard, buffer, copied, grouper=Ungrouped()).runs():
        yield found if isinstance(found, DataError) else (found[0], found[2], bytes)


def _mapped_file(stream: Any) -> mmap.mmap | None:
    """Map a local file that is read from its beginning and is not compressed; None for any other stream."""
    if not (isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO)):
        return None
    status = os.fstat(stream.fileno())
    if not stat.S_ISREG(status.st_mode) or not status.st_size or stream.tell():
        return None
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return mapped if compression_of(mapped[:BLOCK]) is None else None


def file_members(content: mmap.mmap, file: io.BufferedReader) -> Iterator[MemberRun | DataError]:
    """Yield the members of a local archive in order; an error in place of each damaged part.

    Args:
        content: The archive, mapped.
        file: The file that was mapped.
    """
    stamp, buffer = Stamp.of(os.fstat(file.fileno())), ArchiveBuffer(content)
    table = _cached_table(file.name, stamp)
    if table is not None:
        names, starts, stops = table
        for low in range(0, len(names), _RUN):
            run = slice(low, low + _RUN)
            yield names[run], list(map(slice, starts[run].tolist(), stops[run].tolist()))
            buffer.begin = buffer.offset = int(stops[run][-1])
            buffer.release()
        return
    found: list[str] = []
    slices: list[slice] = []
    damaged = False
    walker = ArchiveWalker[slice](
        str(file.name), buffer, lambda _, span: slice(span[1], span[1] + span[2]), grouper=Ungrouped()
    )
    for walked in walker.runs():
        if isinstance(walked, DataError):
            damaged = True
            yield walked
        else:
            found += walked[0]
            slices += walked[2]
            yield walked[0], walked[2]
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
