"""Samples as they lie in an archive, found front to back, so that they can be copied without being taken apart.

Gives what reading the archive gives, sample for sample and loss for loss, from a file, a pipe or any storage.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import BinaryIO, cast

from penstock.errors import DataError, StorageError
from penstock.formats.tar.headers import member_header
from penstock.formats.tar.members import (
    BLOCK,
    END,
    GAP,
    ZEROS,
    Entry,
    Extensions,
    Grouper,
    Halt,
    overpadded,
    padded,
    step,
    trailing,
)
from penstock.formats.tar.parts import Parts
from penstock.formats.tar.ranges import FileRange
from penstock.formats.tar.unpacking import compression
from penstock.formats.tar.window import MAX_MEMBER, Content, MappedFile, Pieces, Spot, Window, chunks
from penstock.storage import STDIN, Storage, local_path, open_storage, shown
from penstock.storage.protocol import scheme

_PLAIN = (0x30, 0)  # kinds of ordinary members


class Raw:
    """One sample of an archive, as it lies there.

    Attributes:
        key: Its key.
        kind: Its fields, in the order of its members.
        shard: The archive, as it may be shown.
        spots: Where its members lie.
    """

    __slots__ = ("_base", "_data", "_exact", "key", "kind", "shard", "spots")

    def __init__(
        self, key: str, kind: tuple[str, ...], spots: list[Spot], shard: str, data: Content, base: int, exact: bool
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
        begin = end = self.spots[0][0]
        for spot in self.spots:
            if spot[0] != end:
                return None
            end = spot[3]
        return (begin, end) if self._exact and not (end - begin) % BLOCK else None

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

    def own(self) -> Raw:
        """The same with bytes of its own, so that it can be kept without all that lies around it."""
        begin, end = self.spots[0][0], self.spots[-1][3]
        data = bytes(self._data[begin - self._base : end - self._base])
        return Raw(self.key, self.kind, self.spots, self.shard, data, begin, self._exact)

    def parts(self) -> Parts:
        """The sample for a writer, headers and all as they are; views of what was read, not copies."""
        if (span := self.span) is None:
            return self.changed()
        begin, end = span
        view = memoryview(self._data)[begin - self._base : end - self._base]
        starts = [body - begin for _, body, _, _ in self.spots]
        return Parts(self.key, self.kind, [view], starts, [spot[2] for spot in self.spots], end - begin)

    def placed(self) -> Parts:
        """The sample for a writer, as :meth:`parts` gives it; left in its file, where it lies in one."""
        file = self._data
        if type(file) is not MappedFile or not self._exact:
            return self.parts()
        begin = end = self.spots[0][0]
        starts, sizes = [], []
        for first, body, size, behind in self.spots:  # as ``span`` does: here it is done for every sample of a copy
            if first != end:
                return self.parts()
            end = behind
            starts.append(body - begin)
            sizes.append(size)
        if (end - begin) % BLOCK:
            return self.parts()
        return Parts(self.key, self.kind, [FileRange(file, file.fd, begin, end)], starts, sizes, end - begin)

    def changed(self, key: str | None = None, fields: Iterable[str] | None = None) -> Parts:
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
        return Parts(name, tuple(self.kind[place] for place in chosen), pieces, starts, sizes, at)


def open_raw(url: str, storage: Storage | None = None, *, mapped: bool = False) -> RawReader:
    """Open an archive anywhere, compressed or not; ``-`` is standard input.

    ``mapped`` is for those who want to know where samples lie and not what they hold: files are mapped, of which only
    the headers are touched. To read all of them it takes more time than reading.

    Raises:
        StorageError: It cannot be opened.
    """
    if url == STDIN:
        _widen(sys.stdin.buffer)
        return RawReader(url, stream=cast(BinaryIO, sys.stdin.buffer))
    if scheme(url) != "file":
        return RawReader(shown(url), stream=cast(BinaryIO, Pieces(open_storage(url, storage).stream(url))))
    path = local_path(url)
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - the reader closes it
    except OSError as exc:
        raise StorageError(f"cannot read the shard: {exc.strerror or exc}", path) from exc
    status = os.fstat(file.fileno())
    regular = stat.S_ISREG(status.st_mode) and status.st_size > 0
    if mapped and regular and compression(os.pread(file.fileno(), BLOCK, 0)) is None:
        with file:
            content = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            content.fd = os.dup(file.fileno())
        return RawReader(path, mapped=content)
    return RawReader(path, stream=cast(BinaryIO, file))


def _widen(file: BinaryIO) -> None:
    """Let a pipe hold more, so that both ends wait less; what is no pipe, or may not, stays as it is."""
    with suppress(OSError):
        fcntl.fcntl(file.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


class RawReader:
    """Iterates over the samples of an archive; what cannot be read is an error in its place.

    Attributes:
        shard: The archive, as it may be shown.
    """

    def __init__(self, shard: str, *, stream: BinaryIO | None = None, mapped: mmap.mmap | None = None) -> None:
        self.shard = shard
        self._stream = stream
        self._grouper: Grouper[Spot] = Grouper()
        if mapped is not None:
            self._window = Window(mapped, None, self._kept)
        else:
            assert stream is not None
            self._window = Window(b"", chunks(stream), self._kept)

    def close(self) -> None:
        """Stop reading; what was given stays readable."""
        if self._stream is not None and self.shard != STDIN:
            self._stream.close()
        self._stream = None

    def _kept(self) -> int:
        """From where on the archive is still needed."""
        first = self._grouper.first
        return self._window.begin if first is None else first[0]

    def __iter__(self) -> Iterator[Raw | DataError]:
        """Give the samples in order.

        Raises:
            OSError: The archive cannot be read.
            MissingExtra: It is compressed by zstd and there is no zstandard.
        """
        try:
            yield from self._items()
        finally:
            self.close()

    def _items(self) -> Iterator[Raw | DataError]:
        grouper, window, extensions = self._grouper, self._window, Extensions()
        while True:
            if not extensions.pending:
                yield from self._ordinary()
            item = step(window, extensions)
            if isinstance(item, Halt):
                if item.problem is None:
                    yield from self._given(self._ending(extensions))
                    break
                window.passed()
                why = item.problem if item.goes_on else window.problem or item.problem
                yield from self._given(grouper.push(GAP, (0, 0, 0, 0), why))
                extensions.forget()
                if not item.goes_on or not window.resync():
                    break
            elif item is not None:
                name, spot, problem = item
                if spot[1] < 0:
                    problem = problem or f"the member has more than {MAX_MEMBER} bytes, too many for a stream"
                window.exact = window.exact and not extensions.pending  # records for all members are not copied
                yield from self._given(grouper.push(name, spot, problem))
        yield from self._given(grouper.finish())

    def _ordinary(self) -> Iterator[Raw | DataError]:
        """Go over members whose headers say nothing unusual; the first other one is left to :func:`step`."""
        window, push = self._window, self._grouper.push
        adler32, free = zlib.adler32, window.free
        while True:
            data, base, stop = window.data, window.base, window.stop
            offset = window.offset
            while (at := offset - base) + BLOCK <= stop:
                head = data[at : at + BLOCK]
                digits, own = head[124:135], head[148:156]
                if head[156] not in _PLAIN or head[345] or not digits.isdigit() or not own[:6].isdigit():
                    return
                try:
                    size, declared = int(digits, 8), int(own[:6], 8)
                except ValueError:
                    return
                if ((adler32(head) & 0xFFFF) - 1 - sum(own) + 256 - declared) % 65521 or head[135] > 32 or own[6] > 32:
                    return
                end = offset + BLOCK + ((size + 511) & -512)
                if end - base > stop:
                    break
                cut = head.find(b"\0", 0, 100)
                window.offset = window.begin = end
                for key, kind, spots, problem, _ in push(
                    head[:cut] if cut >= 0 else head[:100], (offset, offset + BLOCK, size, end)
                ):
                    name = key.decode("utf-8", "surrogateescape")
                    if problem is None:
                        yield Raw(name, kind, spots, self.shard, data, base, window.exact)
                    else:
                        yield DataError(problem, self.shard, name or None)
                    if end > free:
                        free = window.let_go()
                offset = end
            if not window.more(offset, BLOCK if at + BLOCK > stop else end - offset):
                return

    def _ending(self, extensions: Extensions) -> list[Entry[Spot]]:
        """Read on behind the end marker: padding, else a loss."""
        window, out = self._window, []
        end, orphaned = window.offset - BLOCK, extensions.orphaned
        padding = window.only_zeros()
        if window.problem:
            out += self._grouper.push(END, (0, 0, 0, 0), window.problem)
        elif orphaned:
            out += self._grouper.push(GAP, (0, 0, 0, 0), f"an extension header has no member at offset {end}")
        if not padding:
            out += self._grouper.push(END, (0, 0, 0, 0), trailing(end))
        elif window.take(1):
            out += self._grouper.push(END, (0, 0, 0, 0), overpadded(end))
        return out

    def _given(self, entries: list[Entry[Spot]]) -> Iterator[Raw | DataError]:
        window = self._window
        for key, kind, spots, problem, _ in entries:
            name = key.decode("utf-8", "surrogateescape")
            if problem is None:
                yield Raw(name, kind, spots, self.shard, window.data, window.base, window.exact)
            else:
                yield DataError(problem, self.shard, name or None)
