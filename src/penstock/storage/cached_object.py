"""One object's copy on disk: a file with holes, and behind it a byte for every MiB that is here.

A byte is written after the cell it stands for was flushed, so it never promises too much, whatever crashes. When all
are written they are cut off and the file gets its final name: from then on it is the object, and may be mapped.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.storage.cache_folder import NEW, PART, WHOLE, CacheFolder
from penstock.storage.protocol import Info, Storage, changed

CELL = 1 << 20
RUN = 8  # cells fetched by one request: large enough for its latency, small enough to share the work
URL_DIGITS = 16  # of a key: they are the same for all contents of a URL
_MAGIC = b"penstock cache 1"
_HERE = b"\x01"
_STAMP_S = 10  # how old the time of last use may be: it decides between hours
_UNABLE = (errno.EINVAL, errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP)
_flush = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True, slots=True)
class _Copy:
    """The open file; without ``tail`` it is whole."""

    fd: int
    size: int
    tail: bool

    @property
    def is_valid(self) -> bool:
        length = self.size + (len(_MAGIC) + cells(self.size) if self.tail else 0)
        if os.fstat(self.fd).st_size != length:
            return False
        return not self.tail or os.pread(self.fd, len(_MAGIC), self.size) == _MAGIC

    def missing(self, first: int, last: int) -> list[int] | None:
        """The cells that are not here; ``None``: somebody has just completed the file."""
        if not self.tail:
            return []
        here = os.pread(self.fd, last - first, self.size + len(_MAGIC) + first)
        if len(here) < last - first:
            return None
        return [first + number for number, mark in enumerate(here) if mark != _HERE[0]]

    def read(self, start: int, into: memoryview) -> bool:
        """Fill a buffer; False where the file is too short, which only somebody else can have done."""
        while into:
            came = os.preadv(self.fd, [into], start)
            if not came:
                return False
            start, into = start + came, into[came:]
        return True

    def reserve(self, start: int, nbytes: int) -> None:
        """Fill a hole with blocks, where the disk can do so without writing them."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.fd, start, nbytes)
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            done = os.pwrite(self.fd, rest, start)
            start, rest = start + done, rest[done:]

    def mark(self, first: int, count: int) -> None:
        """Promise cells, once they are certain to be there."""
        _flush(self.fd)
        self.write(self.size + len(_MAGIC) + first, _HERE * count)

    def stamp(self) -> None:
        """Note that it is used now; the time of change stays, for it tells contents apart."""
        stat = os.fstat(self.fd)
        now = time.time_ns()
        if now - stat.st_atime_ns > _STAMP_S * 1_000_000_000:
            try:
                os.utime(self.fd, ns=(now, stat.st_mtime_ns))
            except OSError:
                return  # it may be read and not be written: then nobody removes it either


@dataclass(frozen=True, slots=True)
class CachedObject:
    """An object of a storage, and what the folder holds of it.

    Attributes:
        shelf: The folder.
        key: What its files are called; another content has another key.
        storage: Where the rest is fetched.
        url: Its name there.
        info: Its size and tag, both known.
        max_bytes: What the folder may hold.
    """

    shelf: CacheFolder
    key: str
    storage: Storage
    url: str
    info: Info
    max_bytes: int | None

    @property
    def size(self) -> int:
        assert self.info.size is not None
        return self.info.size

    def read(self, start: int, stop: int, into: memoryview) -> bool:
        """Fill a buffer with a range, fetching what is not here; False: there is no room for it.

        Raises:
            StorageError: it cannot be fetched, or the object has changed.
        """
        while True:
            with self._holding(start // CELL, cells(stop)) as copy:
                if copy is None:
                    return False
                if copy.read(start, into):
                    return True

    def fetch(self) -> bool:
        """Have all of it here; False: there is no room for it.

        Raises:
            StorageError: it cannot be fetched, or the object has changed.
        """
        with self._holding(0, cells(self.size)) as copy:
            return copy is not None

    def path(self) -> str | None:
        """Where the file is when all of it is here; it then counts as in use."""
        with self.shelf.using(self.key):
            for _ in range(2):
                with self._opened(make=False) as copy:
                    missing = copy.missing(0, cells(self.size)) if copy is not None else None
                    if copy is not None and missing == [] and (not copy.tail or self._complete(copy)):
                        self.shelf.lend(self.key)
                        return self.shelf.path(self.key, WHOLE)
                if missing or not self.shelf.writable:
                    return None
                with self.shelf.making(self.key):
                    pass  # whoever may be completing it has done so by now
        return None

    @contextmanager
    def _holding(self, first: int, last: int) -> Iterator[_Copy | None]:
        """Within it, cells are here; ``None``: they cannot be."""
        with self.shelf.using(self.key):
            while True:
                with self._opened(make=True) as copy:
                    missing = copy.missing(first, last) if copy is not None else []
                    if copy is None or missing == []:
                        yield copy
                        return
                    if missing is not None and not self._bring(copy, missing):
                        yield None
                        return

    @contextmanager
    def _opened(self, make: bool) -> Iterator[_Copy | None]:
        copy = self._open() or (self._made() if make else None)
        try:
            if copy is not None:
                copy.stamp()
            yield copy
        finally:
            if copy is not None:
                os.close(copy.fd)

    def _open(self) -> _Copy | None:
        for suffix in (WHOLE, PART, WHOLE):  # the last: it may have been completed between the first two
            try:
                flags = os.O_RDWR if suffix == PART and self.shelf.writable else os.O_RDONLY
                copy = _Copy(os.open(self.shelf.path(self.key, suffix), flags), self.size, suffix == PART)
            except OSError:
                continue
            if copy.is_valid:
                return copy
            os.close(copy.fd)
        return None

    def _made(self) -> _Copy | None:
        """Begin a copy, unless somebody just has; contents that the URL had before go."""
        if not self.shelf.keeps:
            return None
        with self.shelf.making(self.key):
            if (copy := self._open()) is not None:
                return copy
            try:
                copy = self._new()
            except OSError as error:
                self.shelf.stop(error)
                return None
        self.shelf.drop_all(self.key[:URL_DIGITS], but=self.key)
        return copy

    def _new(self) -> _Copy:
        path = self.shelf.path(self.key, NEW)
        copy = _Copy(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666), self.size, True)
        try:
            os.ftruncate(copy.fd, self.size + len(_MAGIC) + cells(self.size))
            copy.write(self.size, _MAGIC)
            os.rename(path, self.shelf.path(self.key, PART))
        except OSError:
            os.close(copy.fd)
            os.unlink(path)
            raise
        return copy

    def _bring(self, copy: _Copy, missing: list[int]) -> bool:
        """Fetch some of the missing cells, or wait for those who do; False: there is no room."""
        if not self.shelf.keeps:
            return False
        # Where no parts can be had, the first cell stands for all of them.
        mine = self.shelf.claim(self.key, missing, RUN) if self.info.ranges else self.shelf.claim(self.key, [0], 1)
        try:
            if mine and copy.missing(mine[0], mine[-1] + 1) == mine:  # nobody brought them before they were claimed
                return self._fetched(copy, mine if self.info.ranges else list(range(cells(self.size))))
        finally:
            self.shelf.release(self.key, mine)
        if not mine:
            self.shelf.wait()
        return True

    def _fetched(self, copy: _Copy, mine: list[int]) -> bool:
        start, stop = mine[0] * CELL, min(self.size, (mine[-1] + 1) * CELL)
        if not self._has_room(copy, start, stop - start):
            return False
        for piece in self._range(start, stop) if self.info.ranges else self._stream():
            try:
                copy.write(start, piece)
            except OSError as error:
                self.shelf.stop(error)
                return False
            start += len(piece)
        try:
            copy.mark(mine[0], len(mine))
            if copy.missing(0, cells(self.size)) == []:
                self._complete(copy)
        except OSError as error:
            self.shelf.stop(error)
            return False
        return True

    def _has_room(self, copy: _Copy, start: int, nbytes: int) -> bool:
        """Take room before anything is fetched: then others see it, and a full disk costs no fetch."""
        try:
            return self.shelf.take_room(nbytes, self.max_bytes, lambda: copy.reserve(start, nbytes))
        except OSError as error:
            self.shelf.stop(error)
            return False

    def _range(self, start: int, stop: int) -> Iterable[bytes | bytearray]:
        data = bytearray(stop - start)
        self.storage.read(self.url, start, stop, into=memoryview(data), tag=self.info.tag)
        return [data]

    def _stream(self) -> Iterator[bytes]:
        """All of it from a server that gives no parts; its content is known for certain only afterwards."""
        size = 0
        for piece in self.storage.stream(self.url):
            size += len(piece)
            if size > self.size:
                break
            yield piece
        if size != self.size or self.storage.info(self.url).tag != self.info.tag:
            raise changed(self.url)

    def _complete(self, copy: _Copy) -> bool:
        """Give the file its final name; whether it has it."""
        part, whole = self.shelf.path(self.key, PART), self.shelf.path(self.key, WHOLE)
        if not self.shelf.writable:
            return False
        with self.shelf.making(self.key):
            try:
                if not os.path.samestat(os.stat(part), os.fstat(copy.fd)):
                    return False
                os.ftruncate(copy.fd, self.size)
                os.rename(part, whole)
            except FileNotFoundError:
                return os.path.exists(whole)
        return True


def cells(size: int) -> int:
    """How many cells so many bytes touch."""
    return -(-size // CELL)
