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
from functools import lru_cache
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
_FIRST = 16  # members looked at before the first sample is given; then more and more, up to
_AHEAD = 512


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

    def own(self) -> Raw:
        """The same with bytes of its own, so that it can be kept without all that lies around it."""
        begin, end = self.spots[0][0], self.spots[-1][3]
        data = bytes(self._data[begin - self._base : end - self._base])
        return Raw(self.key, self.kind, self.spots, self.shard, data, begin, self._exact)

    def parts(self) -> Parts:
        """The sample for a writer, headers and all as they are: left in its file if that was mapped, else a view."""
        if (span := self.span) is None:
            return self.changed()
        return _copied([self.key], self.kind, self.spots, span, self._data, self._base)

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
        return Parts([name], tuple(self.kind[place] for place in chosen), pieces, starts, sizes, at)


class Stretch:
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
        spots: list[Spot],
        shard: str,
        data: Content,
        base: int,
        exact: bool,
    ) -> None:
        self.keys, self.kind, self.spots, self.shard = keys, kind, spots, shard
        self._data, self._base, self._exact = data, base, exact

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Raw]:
        """Give the samples one by one."""
        fields, at = len(self.kind), 0
        for key in self.keys:
            yield Raw(key, self.kind, self.spots[at : at + fields], self.shard, self._data, self._base, self._exact)
            at += fields

    def cut(self, first: int, stop: int) -> Stretch:
        """Some of its samples."""
        fields = len(self.kind)
        spots = self.spots[first * fields : stop * fields]
        return Stretch(self.keys[first:stop], self.kind, spots, self.shard, self._data, self._base, self._exact)

    def nbytes(self, count: int) -> int:
        """Bytes from the beginning of the first sample to the end of the last of so many."""
        return self.spots[count * len(self.kind) - 1][3] - self.spots[0][0]

    def parts(self) -> Iterator[Parts]:
        """The samples for a writer as :meth:`Raw.parts` gives one, all at once if they lie one behind the other."""
        if self._exact and (span := _span(self.spots)) is not None:
            yield _copied(self.keys, self.kind, self.spots, span, self._data, self._base)
        else:
            yield from (raw.parts() for raw in self)


def _span(spots: list[Spot]) -> tuple[int, int] | None:
    """From where to where members lie, if there is nothing between them and they are padded."""
    begin, end = spots[0][0], spots[-1][3]
    gapless = sum([spot[3] - spot[0] for spot in spots]) == end - begin
    return (begin, end) if gapless and not (end - begin) % BLOCK else None


def _copied(
    keys: list[str], kind: tuple[str, ...], spots: list[Spot], span: tuple[int, int], data: Content, base: int
) -> Parts:
    begin, end = span
    piece = FileRange(data, data.fd, begin, end) if isinstance(data, MappedFile) else None
    starts, sizes = [spot[1] - begin for spot in spots], [spot[2] for spot in spots]
    pieces = [piece or memoryview(data)[begin - base : end - base]]
    return Parts(keys, kind, pieces, starts, sizes, end - begin)


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
        self._ahead = _FIRST
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
        for item in self.stretches():
            if isinstance(item, Stretch):
                yield from item
            else:
                yield item

    def stretches(self) -> Iterator[Stretch | DataError]:
        """Give the samples in order, as many at once as there are alike.

        Raises:
            OSError: The archive cannot be read.
            MissingExtra: It is compressed by zstd and there is no zstandard.
        """
        try:
            yield from self._items()
        finally:
            self.close()

    def _items(self) -> Iterator[Stretch | DataError]:
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

    def _ordinary(self) -> Iterator[Stretch | DataError]:
        """Go over members whose headers say nothing unusual; the first other one is left to :func:`step`."""
        window = self._window
        while True:
            names, spots, needed = self._headers()
            yield from self._grouped(names, spots)
            if window.offset > window.free:
                window.let_go()
            if needed is None or not window.more(window.offset, needed):
                return

    def _headers(self) -> tuple[list[bytes], list[Spot], int | None]:
        """Step over ordinary members at hand: their names, where they lie, and how many bytes the next one needs."""
        window, adler32 = self._window, zlib.adler32
        data, base, stop, offset = window.data, window.base, window.stop, window.offset
        names: list[bytes] = []
        spots: list[Spot] = []
        needed: int | None = BLOCK
        while (at := offset - base) + BLOCK <= stop and len(names) < self._ahead:
            head = data[at : at + BLOCK]
            size = _size(head[124:136])
            if size < 0 or head[156] not in _PLAIN or head[345] or adler32(head) & 0xFFFF != _sum(head[148:156]):
                needed = None
                break
            end = offset + BLOCK + ((size + 511) & -512)
            if end - base > stop:
                needed = end - offset
                break
            cut = head.find(b"\0", 0, 100)
            names.append(head[:cut] if cut >= 0 else head[:100])
            spots.append((offset, offset + BLOCK, size, end))
            offset = end
        window.offset = window.begin = offset
        self._ahead = min(2 * self._ahead, _AHEAD)
        return names, spots, needed

    def _grouped(self, names: list[bytes], spots: list[Spot]) -> Iterator[Stretch | DataError]:
        window, at = self._window, 0
        while at < len(names):
            if (run := self._grouper.run(names, spots, at)) is None:
                yield from self._given(self._grouper.push(names[at], spots[at]))
                at += 1
                continue
            keys, kind, taken = run
            decoded = [key.decode("utf-8", "surrogateescape") for key in keys]
            yield Stretch(decoded, kind, taken, self.shard, window.data, window.base, window.exact)
            at += len(taken)

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

    def _given(self, entries: list[Entry[Spot]]) -> Iterator[Stretch | DataError]:
        window = self._window
        for key, kind, spots, problem, _ in entries:
            name = key.decode("utf-8", "surrogateescape")
            if problem is None:
                yield Stretch([name], kind, spots, self.shard, window.data, window.base, window.exact)
            else:
                yield DataError(problem, self.shard, name or None)


@lru_cache(1 << 12)
def _size(field: bytes) -> int:
    """The size that a header says in plain digits; -1 where it says it otherwise."""
    try:
        return int(field[:11], 8) if field[:11].isdigit() and field[11] <= 32 else -1
    except ValueError:
        return -1


@lru_cache(1 << 12)
def _sum(field: bytes) -> int:
    """The low half of the Adler-32 of a header with this checksum: one plus the sum of its bytes, modulo 65,521."""
    try:
        plain = field[:6].isdigit() and field[6] <= 32
        return (1 + int(field[:6], 8) + sum(field) - 256) % 65521 if plain else -1
    except ValueError:
        return -1
