"""A cache folder that processes share: which objects are in use, which chunks are being fetched, and how much fits.

Processes coordinate by record locks on one file in the folder, the lock file. The kernel drops the locks of a process
that dies, and a forked child has none of its parent's. Each object has a region of byte offsets in the lock file:

- the first byte is locked, shared, by every user of the object;
- the second byte is locked, exclusively, while the object's file is created or completed;
- each further byte is locked, exclusively, while its chunk is fetched.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from penstock.errors import StorageError
from penstock.storage.protocol import per_process

LOCK_FILE = "penstock-cache"
COMPLETE_SUFFIX, PARTIAL_SUFFIX, NEW_SUFFIX = ".penstock", ".penstock-part", ".penstock-new"
_FILE_NAME = re.compile(rf"([0-9a-f]{{32}})(?:{COMPLETE_SUFFIX}|{PARTIAL_SUFFIX}|{NEW_SUFFIX})", re.ASCII)
_MAPPED = re.compile(rf"/([0-9a-f]{{32}}){COMPLETE_SUFFIX}$", re.ASCII | re.MULTILINE)

_REGION_BYTES = 1 << 22  # of the lock file for one object: enough chunks for 4 TiB
_USE_LOCK, _CREATE_LOCK, _CHUNK_LOCKS = 0, 1, 2  # offsets in a region
_EVICT_LOCK = 1 << 62  # after all regions: held while objects are evicted
_POLL_S = 0.01  # between attempts to take a lock of another process: short compared with fetching a chunk
_MAX_PINNED = 32  # paths that count as in use after they were returned: as many shards as a reader keeps open
_PAUSE_S = 60.0  # before the next attempt to write to a full disk
_LOCKED_ERRNOS = (errno.EACCES, errno.EAGAIN)

_log = logging.getLogger("penstock.storage")
# File descriptors by folder, also those opened before a fork. Each is opened once and never closed: closing any
# descriptor of a file drops all locks that the process has on it.
_open_lock_files: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    """The space that one object takes in the folder, and when it was last used."""

    key: str
    nbytes: int
    used_ns: int


def cache_folder(folder: str) -> CacheFolder:
    """Return this process's ``CacheFolder`` for a path; the folder is created on first use.

    Raises:
        StorageError: The folder cannot be written, and has no cache that can be read.
    """
    return per_process(("cache", folder), lambda: CacheFolder(folder))


class CacheFolder:
    """The locks and the free space of one folder. Thread-safe.

    Attributes:
        folder: The path of the folder.
        writable: Whether objects can be added.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._changed = threading.Condition()
        self._users: dict[str, int] = {}  # how often this process uses each object
        self._pinned: OrderedDict[str, None] = OrderedDict()  # least recently pinned first
        self._exclusive: set[int] = set()  # offsets that this process has locked exclusively
        self._space_lock = threading.Lock()
        self._added_bytes = self._check_bytes = 0
        self._paused_until = float("-inf")
        self._warned = False
        self._fd, self.writable = _open_lock_file(folder)

    def path(self, key: str, suffix: str) -> str:
        """Return the path of a file of an object."""
        return os.path.join(self.folder, key + suffix)

    @property
    def accepts(self) -> bool:
        """Whether objects can be added now."""
        return self.writable and time.monotonic() >= self._paused_until

    def pause(self, error: OSError) -> None:
        """Add nothing for a minute, because writing failed with ``error``. Logs a warning the first time."""
        with self._changed:
            self._paused_until = time.monotonic() + _PAUSE_S
            warned, self._warned = self._warned, True
        if not warned:
            _log.warning(
                "the cache in %s cannot be written: %s; continuing without adding to it", self.folder, error.strerror
            )

    @contextmanager
    def using(self, key: str) -> Iterator[None]:
        """Prevent the removal of an object within the context, by any process."""
        with self._changed:
            self._acquire_use(key)
        try:
            yield
        finally:
            with self._changed:
                self._release_use(key)

    def pin(self, key: str) -> None:
        """Prevent the removal of an object while its file may be open: it is mapped, or was pinned recently."""
        with self._changed:
            if key not in self._pinned:
                self._acquire_use(key)
            self._pinned[key] = None
            self._pinned.move_to_end(key)
            if len(self._pinned) > _MAX_PINNED:
                mapped = _mapped_keys()
                for old in [old for old in list(self._pinned)[:-_MAX_PINNED] if old not in mapped]:
                    del self._pinned[old]
                    self._release_use(old)

    def claim(self, key: str, chunks: Iterable[int], limit: int) -> list[int]:
        """Lock and return up to ``limit`` consecutive chunks that are not being fetched. ``release`` unlocks them."""
        claimed: list[int] = []
        with self._changed:
            for chunk in chunks:
                if len(claimed) == limit or (claimed and chunk != claimed[-1] + 1):
                    break
                if self._lock_exclusive(_chunk_offset(key, chunk)):
                    claimed.append(chunk)
                elif claimed:
                    break
        return claimed

    def release(self, key: str, chunks: Iterable[int]) -> None:
        """Unlock chunks, and wake the threads that wait for them."""
        with self._changed:
            for chunk in chunks:
                self._unlock_exclusive(_chunk_offset(key, chunk))
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until a chunk is released, or for a moment: releases by other processes do not wake this one."""
        with self._changed:
            self._changed.wait(_POLL_S)

    @contextmanager
    def creating(self, key: str) -> Iterator[None]:
        """Within the context, no other thread or process creates or completes the object's file."""
        with self._locked(_region(key) + _CREATE_LOCK):
            yield

    def drop_all(self, prefix: str, except_key: str | None = None) -> None:
        """Remove all objects whose keys start with ``prefix``, except one and those in use."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return
        for key in {match[1] for name in names if (match := _match_file(name, prefix))} - {except_key}:
            self.drop(key)

    def drop(self, key: str) -> bool:
        """Remove an object unless it is in use. Return whether it is gone."""
        with self._changed:
            if not self.writable or key in self._users or not self._lock(fcntl.LOCK_EX, _region(key), _REGION_BYTES):
                return False
            try:
                for suffix in (COMPLETE_SUFFIX, PARTIAL_SUFFIX, NEW_SUFFIX):
                    with suppress(FileNotFoundError):
                        os.unlink(self.path(key, suffix))
            except OSError:
                return False
            finally:
                self._unlock(_region(key), _REGION_BYTES)
        return True

    def reserve_space(self, nbytes: int, max_bytes: int | None, allocate: Callable[[], None]) -> bool:
        """Call ``allocate`` to allocate bytes, after evicting the least recently used objects if need be.

        The folder is measured whenever this process has added 1/1024 of the limit, and is kept 1/16 below the limit:
        even 64 processes, none of which knows what the others have added since, stay within it.

        Returns:
            Whether the bytes fit within the limit.
        """
        with self._space_lock:
            self._added_bytes += nbytes
            if self._added_bytes < self._check_bytes:
                allocate()
                return True
            with self._locked(_EVICT_LOCK):
                entries = self._entries()
                used = sum(entry.nbytes for entry in entries)
                limit = max_bytes if max_bytes is not None else used + _free_bytes(self.folder)
                if used + nbytes > limit - limit // 16:
                    used -= self._evict(entries, used + nbytes - (limit - limit // 8))
                fits = used + nbytes <= limit
                self._added_bytes, self._check_bytes = 0, limit // 1024 if fits else 0
                if fits:
                    allocate()
            return fits

    def _evict(self, entries: list[_CacheEntry], nbytes: int) -> int:
        """Remove the least recently used objects until ``nbytes`` are free. Return how many bytes were freed."""
        freed = 0
        for entry in sorted(entries, key=lambda entry: entry.used_ns):
            if freed >= nbytes:
                break
            if self.drop(entry.key):
                freed += entry.nbytes
        return freed

    def _entries(self) -> list[_CacheEntry]:
        """Return the objects of all processes. Allocated blocks count, not file sizes: partial files have holes."""
        found: dict[str, _CacheEntry] = {}
        with os.scandir(self.folder) as files:
            for file in files:
                if match := _match_file(file.name):
                    key = match[1]
                    with suppress(FileNotFoundError):
                        stat, entry = file.stat(follow_symlinks=False), found.get(key, _CacheEntry(key, 0, 0))
                        used_ns = max(stat.st_atime_ns, stat.st_mtime_ns, entry.used_ns)
                        found[key] = _CacheEntry(key, entry.nbytes + stat.st_blocks * 512, used_ns)
        return list(found.values())

    def _acquire_use(self, key: str) -> None:
        self._check_lock_file()
        while key not in self._users and not self._lock(fcntl.LOCK_SH, _region(key) + _USE_LOCK):
            self._changed.wait(_POLL_S)
        self._users[key] = self._users.get(key, 0) + 1

    def _release_use(self, key: str) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._unlock(_region(key) + _USE_LOCK)

    @contextmanager
    def _locked(self, offset: int) -> Iterator[None]:
        with self._changed:
            while not self._lock_exclusive(offset):
                self._changed.wait(_POLL_S)
        try:
            yield
        finally:
            with self._changed:
                self._unlock_exclusive(offset)
                self._changed.notify_all()

    def _lock_exclusive(self, offset: int) -> bool:
        # Record locks exclude other processes only; the set excludes other threads of this one.
        if offset in self._exclusive or not self._lock(fcntl.LOCK_EX, offset):
            return False
        self._exclusive.add(offset)
        return True

    def _unlock_exclusive(self, offset: int) -> None:
        self._exclusive.discard(offset)
        self._unlock(offset)

    def _lock(self, kind: int, offset: int, size: int = 1) -> bool:
        # Never blocks: the kernel would report a deadlock for two processes with several threads each.
        try:
            fcntl.lockf(self._fd, kind | fcntl.LOCK_NB, size, offset)
        except OSError as error:
            if error.errno in _LOCKED_ERRNOS:
                return False
            raise StorageError(f"the cache cannot be locked: {error.strerror}", self.folder) from error
        return True

    def _unlock(self, offset: int, size: int = 1) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, size, offset)

    def _check_lock_file(self) -> None:
        """Take the locks again on a new lock file if the folder was emptied."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(os.path.join(self.folder, LOCK_FILE)), os.fstat(self._fd)):
                return
        del _open_lock_files[self.folder]  # not closed: another thread may be about to use it
        self._fd, self.writable = _open_lock_file(self.folder)
        for key in self._users:
            self._lock(fcntl.LOCK_SH, _region(key) + _USE_LOCK)
        for offset in self._exclusive:
            self._lock(fcntl.LOCK_EX, offset)


def _open_lock_file(folder: str) -> tuple[int, bool]:
    """Open the lock file, creating it and the folder. Return its descriptor, and whether the folder is writable."""
    if folder not in _open_lock_files:
        path = os.path.join(folder, LOCK_FILE)
        try:
            os.makedirs(folder, exist_ok=True)
            _open_lock_files[folder] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            try:
                _open_lock_files[folder] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                raise StorageError(f"the cache folder cannot be used: {error.strerror}", folder) from error
    fd = _open_lock_files[folder]
    opened_for_writing = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return fd, opened_for_writing and os.access(
        folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
    )


def _region(key: str) -> int:
    """Return where an object's region of the lock file begins; objects that share a region only wait for each other."""
    return int(key[:5] + key[16:21], 16) * _REGION_BYTES


def _chunk_offset(key: str, chunk: int) -> int:
    return _region(key) + _CHUNK_LOCKS + chunk % (_REGION_BYTES - _CHUNK_LOCKS)


def _match_file(name: str, prefix: str = "") -> re.Match[str] | None:
    """Match the name of a file that the cache created; other files in the folder are left alone."""
    return _FILE_NAME.fullmatch(name) if name.startswith(prefix) else None


def _mapped_keys() -> set[str]:
    """Return the objects whose files this process has mapped, on systems that report it."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            return set(_MAPPED.findall(file.read()))
    except OSError:
        return set()


def _free_bytes(folder: str) -> int:
    """Return how much may be added to a disk: its free space, less 1/20 of the disk, which is left to others."""
    disk = os.statvfs(folder)
    return (disk.f_bavail - disk.f_blocks // 20) * disk.f_frsize
