"""The cached copy of one object: a sparse file, followed by a flag byte and a CRC-32 for every chunk of 1 MiB.

The flag of a chunk is set after the chunk was flushed to disk, so a crash never leaves a flag without its data. When
all flags are set, they are cut off and the file gets its final name: it is then the object, and may be mapped. The
nanoseconds of its modification time are a checksum of all checksums. A process checks what it did not fetch itself at
the first use: chunks of an incomplete copy that it reads, or a complete copy as a whole.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby

from penstock.storage.cache_folder import (
    COMPLETE_SUFFIX,
    NEW_SUFFIX,
    PARTIAL_SUFFIX,
    URL_DIGITS,
    CacheFolder,
    CheckedChunks,
)
from penstock.storage.crc import crc32
from penstock.storage.protocol import Info, Storage, changed_error, redacted

CHUNK_BYTES = 1 << 20
CHUNKS_PER_REQUEST = 8  # large enough to make up for the latency, small enough for several processes to share the work
_MAGIC = b"penstock cache 2"
_PRESENT = b"\x01"
_COMPLETE_TIME_NS = 10**18  # of a complete copy's modification time, plus its checksum: writing to it changes both
_CHECKSUMS = 1 << 32  # how many checksums there are; 0 if the file system does not store nanoseconds
_USE_TIME_S = 10  # how stale the time of last use may be: eviction compares hours
_NO_FALLOCATE = (errno.EINVAL, errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP)
_flush = getattr(os, "fdatasync", os.fsync)
_log = logging.getLogger("penstock.storage")


@dataclass(frozen=True, slots=True)
class _Copy:
    """The open file of an object.

    Attributes:
        fd: Its descriptor.
        size: The size of the object.
        partial: Whether magic, flags and checksums follow the object's bytes; a complete copy has none of them.
    """

    fd: int
    size: int
    partial: bool

    @property
    def is_valid(self) -> bool:
        stat = os.fstat(self.fd)
        if not self.partial:
            return stat.st_size == self.size and 0 <= stat.st_mtime_ns - _COMPLETE_TIME_NS < _CHECKSUMS
        length = self.size + _trailer_bytes(self.size)
        return stat.st_size == length and os.pread(self.fd, len(_MAGIC), self.size) == _MAGIC

    def missing(self, first: int, last: int) -> list[int] | None:
        """Return the chunks that are not in the file; ``None`` if another process has just completed it."""
        if not self.partial:
            return []
        flags = os.pread(self.fd, last - first, self.size + len(_MAGIC) + first)
        if len(flags) < last - first:
            return None
        return [first + number for number, flag in enumerate(flags) if flag != _PRESENT[0]]

    def read(self, start: int, into: memoryview) -> bool:
        """Fill a buffer. Return False if the file is too short because something else has truncated it."""
        while into:
            read_size = os.preadv(self.fd, [into], start)
            if not read_size:
                return False
            start, into = start + read_size, into[read_size:]
        return True

    def checksums(self, first: int, last: int) -> array[int] | None:
        """Return the checksums of chunks as they were fetched; ``None`` if another process has completed the file."""
        start = self.size + len(_MAGIC) + chunk_count(self.size)
        data = os.pread(self.fd, 4 * (last - first), start + 4 * first)
        return array("I", data) if len(data) == 4 * (last - first) else None

    def compute_checksum(self, chunk: int) -> int:
        """Return the checksum of a chunk as it is now."""
        start = chunk * CHUNK_BYTES
        return crc32(os.pread(self.fd, min(CHUNK_BYTES, self.size - start), start))

    def damaged(self, chunks: Sequence[int]) -> list[int] | None:
        """Return which chunks changed since they were fetched; all of a complete copy count if any has changed.

        ``None``: another process has just completed the file.
        """
        if self.partial:
            wanted = self.checksums(0, chunk_count(self.size))
            if wanted is None:
                return None
            return [chunk for chunk in chunks if self.compute_checksum(chunk) != wanted[chunk]]
        every = range(chunk_count(self.size))
        checksum = os.fstat(self.fd).st_mtime_ns - _COMPLETE_TIME_NS
        fine = not checksum or crc32(array("I", map(self.compute_checksum, every)).tobytes()) == checksum
        return [] if fine else list(chunks)

    def allocate(self, start: int, nbytes: int) -> None:
        """Allocate blocks for a hole, on file systems that can do so without writing them."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.fd, start, nbytes)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self.fd, rest, start)
            start, rest = start + written, rest[written:]

    def mark_present(self, first: int, count: int) -> None:
        """Add the checksums of chunks, flush the file, and then set their flags."""
        flags = self.size + len(_MAGIC)
        checksums = array("I", map(self.compute_checksum, range(first, first + count)))
        self.write(flags + chunk_count(self.size) + 4 * first, checksums.tobytes())
        _flush(self.fd)
        self.write(flags + first, _PRESENT * count)

    def set_complete_time(self, checksums: array[int]) -> None:
        """Set the modification time that marks a complete copy with these checksums."""
        now = time.time_ns()
        for checksum in (crc32(checksums.tobytes()), 0):
            os.utime(self.fd, ns=(now, _COMPLETE_TIME_NS + checksum))
            if os.fstat(self.fd).st_mtime_ns == _COMPLETE_TIME_NS + checksum:
                return

    def update_use_time(self) -> None:
        """Set the access time to now. The modification time stays, because it identifies the content."""
        stat = os.fstat(self.fd)
        now = time.time_ns()
        if now - stat.st_atime_ns > _USE_TIME_S * 1_000_000_000:
            try:
                os.utime(self.fd, ns=(now, stat.st_mtime_ns))
            except OSError:
                return  # a read-only folder, from which nothing is evicted


@dataclass(frozen=True, slots=True)
class CachedObject:
    """An object of a storage, and its copy, complete or partial, in a cache folder.

    Attributes:
        folder: The cache folder.
        key: The name of the copy's files; other content of the same URL has another key.
        storage: Where missing chunks are fetched.
        url: The object's URL.
        info: The object's size and tag, both known.
        max_bytes: The limit of the folder; ``None``: see ``Cache.max_bytes``.
    """

    folder: CacheFolder
    key: str
    storage: Storage
    url: str
    info: Info
    max_bytes: int | None

    @property
    def size(self) -> int:
        assert self.info.size is not None
        return self.info.size

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are in the cache."""
        return os.path.exists(self.folder.path(self.key, COMPLETE_SUFFIX))

    def read(self, start: int, stop: int, into: memoryview) -> bool:
        """Fill a buffer with a range; missing chunks are fetched, and kept if there is space. Return False on failure.

        Raises:
            StorageError: A chunk cannot be fetched, or the object has changed.
        """
        while True:
            with self._with_chunks(start // CHUNK_BYTES, chunk_count(stop)) as copy:
                if copy is None:
                    break
                if copy.read(start, into):
                    return True
        return self._read_around(start, stop, into)

    def _read_around(self, start: int, stop: int, into: memoryview) -> bool:
        """Fill a buffer from the chunks that are in the cache and, without keeping them, from the storage."""
        with self.folder.using(self.key), self._opened(create=False) as copy:
            first, last = start // CHUNK_BYTES, chunk_count(stop)
            missing = range(first, last) if copy is None else copy.missing(first, last)
            present = sorted({*range(first, last)}.difference(missing or ()))
            damaged = [] if copy is None or missing is None else self._damaged(copy, present)
            if missing is None or damaged is None:
                return False
            for is_missing, chunks in groupby(range(first, last), {*missing, *damaged}.__contains__):
                numbers = list(chunks)
                low, high = max(start, numbers[0] * CHUNK_BYTES), min(stop, (numbers[-1] + 1) * CHUNK_BYTES)
                part = into[low - start : high - start]
                if is_missing:
                    self.storage.read(self.url, low, high, into=part, tag=self.info.tag)
                elif copy is None or not copy.read(low, part):
                    return False
        return True

    def fetch(self, start: int = 0, stop: int | None = None) -> bool:
        """Fetch the missing chunks of a range, or all of them. Return False if the cache has no space for them.

        Raises:
            StorageError: A chunk cannot be fetched, or the object has changed.
        """
        with self._with_chunks(start // CHUNK_BYTES, chunk_count(self.size if stop is None else stop)) as copy:
            return copy is not None

    def path(self) -> str | None:
        """Return the path of a complete copy, which then counts as in use; ``None`` if chunks are missing."""
        with self.folder.using(self.key):
            for _ in range(2):
                with self._opened(create=False) as copy:
                    every = range(chunk_count(self.size))
                    missing = copy.missing(0, len(every)) if copy is not None else None
                    damaged = self._damaged(copy, every) if copy is not None and missing == [] else None
                    if copy is not None and damaged:
                        self._discard(copy)
                        return None
                    if copy is not None and damaged == [] and (not copy.partial or self._complete(copy)):
                        self.folder.pin(self.key)
                        return self.folder.path(self.key, COMPLETE_SUFFIX)
                if missing or not self.folder.writable:
                    return None
                with self.folder.creating(self.key):
                    pass  # a process that was completing the file is done now
        return None

    @contextmanager
    def _with_chunks(self, first: int, last: int) -> Iterator[_Copy | None]:
        """Open the copy with all chunks from ``first`` up to ``last``; ``None`` if the cache has no space for them."""
        with self.folder.using(self.key):
            while True:
                with self._opened(create=True) as copy:
                    missing = copy.missing(first, last) if copy is not None else []
                    damaged = self._damaged(copy, range(first, last)) if copy is not None and missing == [] else []
                    if copy is None or (missing == [] and damaged == []):
                        yield copy
                        return
                    if (missing and not self._fetch_some(copy, missing)) or (damaged and not self._discard(copy)):
                        yield None
                        return

    def _damaged(self, copy: _Copy, chunks: Sequence[int]) -> list[int] | None:
        """Return which chunks are not as they were fetched, as ``_Copy.damaged``; chunks are read once in a process."""
        checked = self._checked(copy)
        if all(checked.flags[chunk] for chunk in chunks):
            return []
        with checked.lock:
            wanted = chunks if copy.partial else range(chunk_count(self.size))
            unchecked = [chunk for chunk in wanted if not checked.flags[chunk]]
            damaged = copy.damaged(unchecked) if unchecked else []
            if damaged is not None:
                for chunk in set(unchecked).difference(damaged):
                    checked.flags[chunk] = True
        return damaged

    def _checked(self, copy: _Copy) -> CheckedChunks:
        return self.folder.checked(self.key, os.fstat(copy.fd).st_ino, chunk_count(self.size))

    def _discard(self, copy: _Copy) -> bool:
        """Remove a damaged copy, so that the object is fetched anew. Return whether it could be removed."""
        if not self.folder.writable:
            return False
        _log.warning("%s: its copy in %s is damaged; fetching it again", redacted(self.url), self.folder.folder)
        with self.folder.creating(self.key):
            for suffix in (COMPLETE_SUFFIX, PARTIAL_SUFFIX):
                path = self.folder.path(self.key, suffix)
                try:
                    if os.path.samestat(os.lstat(path), os.fstat(copy.fd)):
                        os.unlink(path)
                except FileNotFoundError:
                    continue
                except OSError:
                    return False
        return True

    @contextmanager
    def _opened(self, create: bool) -> Iterator[_Copy | None]:
        copy = self._open() or (self._open_or_create() if create else None)
        try:
            if copy is not None:
                copy.update_use_time()
            yield copy
        finally:
            if copy is not None:
                os.close(copy.fd)

    def _open(self) -> _Copy | None:
        # Complete is tried again at the end: the file may have been completed and renamed between the first two.
        for suffix in (COMPLETE_SUFFIX, PARTIAL_SUFFIX, COMPLETE_SUFFIX):
            try:
                flags = os.O_RDWR if suffix == PARTIAL_SUFFIX and self.folder.writable else os.O_RDONLY
                fd = os.open(self.folder.path(self.key, suffix), flags | os.O_NOFOLLOW)
            except OSError:
                continue
            copy = _Copy(fd, self.size, suffix == PARTIAL_SUFFIX)
            if copy.is_valid:
                return copy
            os.close(copy.fd)
        return None

    def _open_or_create(self) -> _Copy | None:
        """Create an empty copy, unless another thread or process just has, and drop copies of the URL's old content."""
        if not self.folder.accepts:
            return None
        with self.folder.creating(self.key):
            if (copy := self._open()) is not None:
                return copy
            try:
                if not self.folder.reserve_space(self.key, 0, self.max_bytes, lambda: None):
                    return None
                copy = self._create()
            except OSError as error:
                self.folder.pause(error)
                return None
        self.folder.drop_all(self.key[:URL_DIGITS], except_key=self.key)
        return copy

    def _create(self) -> _Copy:
        path = self.folder.path(self.key, NEW_SUFFIX)
        # Of a process that was killed, a link that someone else put there, or a copy that is damaged.
        for old in (path, self.folder.path(self.key, COMPLETE_SUFFIX)):
            with suppress(FileNotFoundError):
                os.unlink(old)
        copy = _Copy(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), self.size, True)
        try:
            os.ftruncate(copy.fd, self.size + _trailer_bytes(self.size))
            copy.write(self.size, _MAGIC)
            os.rename(path, self.folder.path(self.key, PARTIAL_SUFFIX))
        except OSError:
            os.close(copy.fd)
            os.unlink(path)
            raise
        return copy

    def _fetch_some(self, copy: _Copy, missing: list[int]) -> bool:
        """Fetch some missing chunks, or wait while others are fetching them. Return False if the cache has no space."""
        if not self.folder.accepts:
            return False
        # Without ranges the object arrives as a whole: the lock of its first chunk stands for all of them.
        wanted, limit = (missing, CHUNKS_PER_REQUEST) if self.info.ranges else ([0], 1)
        claimed = self.folder.claim(self.key, wanted, limit)
        try:
            # Another process may have fetched them before they were claimed.
            if claimed and copy.missing(claimed[0], claimed[-1] + 1) == claimed:
                return self._store(copy, claimed if self.info.ranges else list(range(chunk_count(self.size))))
        finally:
            self.folder.release(self.key, claimed)
        if not claimed:
            self.folder.wait()
        return True

    def _store(self, copy: _Copy, chunks: list[int]) -> bool:
        """Fetch consecutive chunks, and write them to the copy. Return False if the cache has no space."""
        start, stop = chunks[0] * CHUNK_BYTES, min(self.size, (chunks[-1] + 1) * CHUNK_BYTES)
        if not self._reserve_space(copy, start, stop - start):
            return False
        for piece in self._fetch_range(start, stop) if self.info.ranges else self._fetch_whole():
            try:
                copy.write(start, piece)
            except OSError as error:
                self.folder.pause(error)
                return False
            start += len(piece)
        try:
            copy.mark_present(chunks[0], len(chunks))
            self._checked(copy).flags[chunks[0] : chunks[-1] + 1] = _PRESENT * len(chunks)
            if copy.missing(0, chunk_count(self.size)) == []:
                self._complete(copy)
        except OSError as error:
            self.folder.pause(error)
            return False
        return True

    def _reserve_space(self, copy: _Copy, start: int, nbytes: int) -> bool:
        """Allocate space before fetching: other processes see it, and a full disk costs no request."""
        try:
            return self.folder.reserve_space(self.key, nbytes, self.max_bytes, lambda: copy.allocate(start, nbytes))
        except OSError as error:
            self.folder.pause(error)
            return False

    def _fetch_range(self, start: int, stop: int) -> Iterable[bytes | bytearray]:
        data = bytearray(stop - start)
        self.storage.read(self.url, start, stop, into=memoryview(data), tag=self.info.tag)
        return [data]

    def _fetch_whole(self) -> Iterator[bytes]:
        """Yield the whole object from a server without ranges. Its tag can be checked only at the end."""
        size = 0
        for piece in self.storage.stream(self.url):
            size += len(piece)
            if size > self.size:
                break
            yield piece
        if size != self.size or self.storage.info(self.url).tag != self.info.tag:
            raise changed_error(self.url)

    def _complete(self, copy: _Copy) -> bool:
        """Cut off flags and checksums, and give the file its final name. Return whether the complete file exists."""
        partial, complete = self.folder.path(self.key, PARTIAL_SUFFIX), self.folder.path(self.key, COMPLETE_SUFFIX)
        if not self.folder.writable:
            return False
        with self.folder.creating(self.key):
            try:
                if not os.path.samestat(os.lstat(partial), os.fstat(copy.fd)):
                    return False
                checksums = copy.checksums(0, chunk_count(self.size))
                if checksums is None:  # the process that was completing it was killed: the next use starts anew
                    return False
                os.ftruncate(copy.fd, self.size)
                copy.set_complete_time(checksums)
                with self.folder.measuring():  # else a process that measures the folder could see neither name
                    os.rename(partial, complete)
            except FileNotFoundError:
                return os.path.exists(complete) and not os.path.islink(complete)
        return True


def _trailer_bytes(size: int) -> int:
    """Return how many bytes follow an object of this size in a partial copy."""
    return len(_MAGIC) + 5 * chunk_count(size)


def chunk_count(size: int) -> int:
    """Return how many chunks the first ``size`` bytes of an object touch."""
    return -(-size // CHUNK_BYTES)
