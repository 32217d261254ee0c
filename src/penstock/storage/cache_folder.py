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
from dataclasses import dataclass, field

from penstock.errors import StorageError
from penstock.storage.cache_policy import Stored, choose_evictions, spare_bytes, working_bytes
from penstock.storage.cache_uses import USES_SUFFIX, PlannedUses
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
_OVERHEAD_BYTES = 16 << 10  # of the blocks that a file system adds to an allocation, and of flags and checksums
URL_DIGITS = 16  # the first digits of a key, which are the same for all contents of a URL
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


@dataclass(frozen=True, slots=True)
class CheckedChunks:
    """Which chunks of a copy a process has fetched itself, or checked against their checksums.

    Attributes:
        inode: The file.
        flags: A byte for each chunk, set if the chunk was fetched or checked.
        lock: Held while chunks are checked, so that no chunk is checked twice.
    """

    inode: int
    flags: bytearray
    lock: threading.Lock = field(default_factory=threading.Lock)


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
        self._checked: dict[str, CheckedChunks] = {}
        self.plans = PlannedUses(folder)
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

    def checked(self, key: str, inode: int, chunks: int) -> CheckedChunks:
        """Return which of the chunks of a copy this process has checked."""
        with self._changed:
            known = self._checked.get(key)
            if known is None or known.inode != inode:
                known = self._checked[key] = CheckedChunks(inode, bytearray(chunks))
            return known

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
            self._checked.pop(key, None)
        return True

    def reserve_space(self, key: str, nbytes: int, max_bytes: int | None, allocate: Callable[[], None]) -> bool:
        """Call ``allocate`` to allocate bytes for an object, after evicting others if necessary.

        The lock file holds an upper bound of what all processes have allocated. The folder is measured only where the
        bound would exceed the limit, and then a little more than needed is evicted.

        Returns:
            Whether the bytes fit within the limit, and are worth keeping: what would have to be evicted for them is
            not used before them.
        """
        nbytes += _OVERHEAD_BYTES
        with self._space_lock, self._locked(_EVICT_LOCK):
            used = self._read_bound()
            limit = (used or 0) + _free_bytes(self.folder) if max_bytes is None else max_bytes
            if used is None or used + nbytes > limit:
                entries, used = self._measure()
                limit = used + _free_bytes(self.folder) if max_bytes is None else max_bytes
                if used + nbytes > limit:
                    used -= self._evict(key, entries, used + nbytes - limit, limit)
            fits = used + nbytes <= limit
            self._write_bound(used + nbytes * fits)
            if fits:
                allocate()
            return fits

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within the context, no process measures the folder or allocates bytes."""
        with self._space_lock, self._locked(_EVICT_LOCK):
            yield

    def has_space(self, nbytes: int, max_bytes: int | None) -> bool:
        """Return whether bytes can be added without evicting anything."""
        with self._space_lock, self._locked(_EVICT_LOCK):
            used = self._read_bound()
            if used is None or (max_bytes is not None and used + nbytes > max_bytes):
                _, used = self._measure()
                self._write_bound(used)
            return nbytes <= (_free_bytes(self.folder) if max_bytes is None else max_bytes - used)

    def _read_bound(self) -> int | None:
        data = os.pread(self._fd, 8, 0)
        return int.from_bytes(data, "little") if len(data) == 8 else None

    def _write_bound(self, used: int) -> None:
        with suppress(OSError):
            os.pwritev(self._fd, [used.to_bytes(8, "little")], 0)

    def _evict(self, key: str, entries: list[_CacheEntry], nbytes: int, limit: int) -> int:
        """Remove the objects that are used last until ``nbytes`` are free. Return how many bytes were freed."""
        next_uses = self.plans.next_uses()
        until = self.plans.use_after(use_key(key)) if next_uses else None
        stored = [Stored(one.key, one.nbytes, next_uses.get(use_key(one.key)), one.used_ns) for one in entries]
        busy = nbytes + sum(one.nbytes for one in stored if one.next_use == 0.0)
        freed = 0
        in_use = {key}
        while freed < nbytes:
            candidates = [one for one in stored if one.key not in in_use]
            chosen = choose_evictions(candidates, nbytes - freed, spare_bytes(limit), until)
            if freed + sum(one.nbytes for one in chosen) < nbytes and until is not None:
                chosen = choose_evictions(candidates, nbytes - freed, 0, until if busy > working_bytes(limit) else 0.0)
            if freed + sum(one.nbytes for one in chosen) < nbytes:
                break
            for one in chosen:
                in_use.add(one.key)
                freed += one.nbytes if self.drop(one.key) else 0
        return freed

    def _measure(self) -> tuple[list[_CacheEntry], int]:
        """Return the objects of all processes, and the bytes of everything that the cache has in the folder.

        Allocated blocks count, not file sizes: partial files have holes.
        """
        found: dict[str, _CacheEntry] = {}
        used = 0
        with os.scandir(self.folder) as files:
            for file in files:
                match = _match_file(file.name)
                if match or file.name.endswith(USES_SUFFIX):
                    with suppress(FileNotFoundError):
                        stat = file.stat(follow_symlinks=False)
                        used += stat.st_blocks * 512
                        if match:
                            entry = found.get(match[1], _CacheEntry(match[1], 0, 0))
                            used_ns = max(stat.st_atime_ns, stat.st_mtime_ns, entry.used_ns)
                            found[match[1]] = _CacheEntry(match[1], entry.nbytes + stat.st_blocks * 512, used_ns)
        return list(found.values()), used

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
            if os.path.samestat(os.lstat(os.path.join(self.folder, LOCK_FILE)), os.fstat(self._fd)):
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


def use_key(key: str) -> int:
    """Return the number by which plans name all contents of an object's URL."""
    return int(key[:URL_DIGITS], 16)


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
