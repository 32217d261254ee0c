"""The folder of a cache, as one process sees it: who uses what in it, who fetches what, and how much fits.

Processes agree by record locks on one file of the folder, the marker: the kernel drops those of a process that dies,
and a forked child has none of its parent's. Every object owns a stretch of that file. Its first byte is held, together
with others, by whoever uses the object; the second, alone, by whoever makes or completes its file; each further one,
alone, by whoever fetches that cell.
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
from penstock.storage.protocol import own

MARKER = "penstock-cache"
WHOLE, PART, NEW = ".penstock", ".penstock-part", ".penstock-new"
_OWN = re.compile(rf"([0-9a-f]{{32}})(?:{WHOLE}|{PART}|{NEW})", re.ASCII)
_MAPPED = re.compile(rf"/([0-9a-f]{{32}}){WHOLE}$", re.ASCII | re.MULTILINE)

_STRETCH = 1 << 22  # bytes of the marker for one object: cells for 4 TiB
_USED, _MADE, _CELLS = 0, 1, 2  # places in a stretch
_SWEEPING = 1 << 62  # behind all stretches: held by whoever removes what was not used for longest
_POLL_S = 0.01  # between two looks at what another process holds: short beside the time a cell takes
_LENT = 32  # paths that count as in use after they were given away: as many shards as a reader keeps open
_PAUSE_S = 60.0  # before a disk that was full is tried again
_TAKEN = (errno.EACCES, errno.EAGAIN)

_log = logging.getLogger("penstock.storage")
_markers: dict[str, int] = {}  # open files, also those of a parent: a second one, closed, would end all locks on it


@dataclass(frozen=True, slots=True)
class _Item:
    """What the folder holds of one object."""

    key: str
    nbytes: int
    used_ns: int


def cache_folder(folder: str) -> CacheFolder:
    """Give this process's view of a folder; the folder is made when it is first asked for.

    Raises:
        StorageError: it cannot be written, and there is no cache in it to be read.
    """
    return own(("cache", folder), lambda: CacheFolder(folder))


class CacheFolder:
    """One folder: locks between threads and processes, and room. Safe to use from any thread.

    Attributes:
        folder: Where it is.
        writable: Whether anything can be added.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._changed = threading.Condition()
        self._users: dict[str, int] = {}  # how often each object is in use here
        self._lent: OrderedDict[str, None] = OrderedDict()
        self._alone: set[int] = set()  # bytes of the marker this process holds alone
        self._room = threading.Lock()
        self._added = self._step = 0
        self._resumes = float("-inf")
        self._warned = False
        self._fd, self.writable = _open_marker(folder)

    def path(self, key: str, suffix: str) -> str:
        """Where a file of an object is."""
        return os.path.join(self.folder, key + suffix)

    @property
    def keeps(self) -> bool:
        """Whether something may be added now."""
        return self.writable and time.monotonic() >= self._resumes

    def stop(self, error: OSError) -> None:
        """Add nothing for a while, because ``error`` came of it; said once."""
        with self._changed:
            self._resumes = time.monotonic() + _PAUSE_S
            warned, self._warned = self._warned, True
        if not warned:
            _log.warning("the cache in %s keeps nothing more: %s; going on without", self.folder, error.strerror)

    @contextmanager
    def using(self, key: str) -> Iterator[None]:
        """Within it, nobody removes the object."""
        with self._changed:
            self._hold(key)
        try:
            yield
        finally:
            with self._changed:
                self._let_go(key)

    def lend(self, key: str) -> None:
        """Keep an object from being removed while its file may be open: it is mapped, or one of the last given away."""
        with self._changed:
            if key not in self._lent:
                self._hold(key)
            self._lent[key] = None
            self._lent.move_to_end(key)
            if len(self._lent) > _LENT:
                mapped = _mapped()
                for old in [old for old in list(self._lent)[:-_LENT] if old not in mapped]:
                    del self._lent[old]
                    self._let_go(old)

    def claim(self, key: str, cells: Iterable[int], most: int) -> list[int]:
        """Choose neighbouring cells that nobody fetches, up to ``most``: they are the caller's until released."""
        mine: list[int] = []
        with self._changed:
            for cell in cells:
                if len(mine) == most or (mine and cell != mine[-1] + 1):
                    break
                if self._take(_cell(key, cell)):
                    mine.append(cell)
                elif mine:
                    break
        return mine

    def release(self, key: str, cells: Iterable[int]) -> None:
        """Let others look at cells, and fetch those that are still missing."""
        with self._changed:
            for cell in cells:
                self._give(_cell(key, cell))
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait a little for others to bring what they fetch."""
        with self._changed:
            self._changed.wait(_POLL_S)

    @contextmanager
    def making(self, key: str) -> Iterator[None]:
        """Within it, nobody else on the machine makes or completes the object's file."""
        with self._only(_place(key) + _MADE):
            yield

    def drop_all(self, start: str, but: str | None = None) -> None:
        """Remove all objects whose keys begin so, but one and those in use."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return
        for key in {match[1] for name in names if (match := _own(name, start))} - {but}:
            self.drop(key)

    def drop(self, key: str) -> bool:
        """Remove an object unless somebody uses it; whether it is gone."""
        with self._changed:
            if not self.writable or key in self._users or not self._lock(fcntl.LOCK_EX, _place(key), _STRETCH):
                return False
            try:
                for suffix in (WHOLE, PART, NEW):
                    with suppress(FileNotFoundError):
                        os.unlink(self.path(key, suffix))
            except OSError:
                return False
            finally:
                self._unlock(_place(key), _STRETCH)
        return True

    def take_room(self, nbytes: int, max_bytes: int | None, take: Callable[[], None]) -> bool:
        """Take so many bytes of the disk by calling ``take``, after removing what was not used for longest if need be.

        The folder is looked at after every 1024th part of what it may hold, and kept a 16th below: then even 64
        processes, which do not know what the others have taken since, stay within.

        Returns:
            Whether there was room, as far as the cache is concerned.
        """
        with self._room:
            self._added += nbytes
            if self._added < self._step:
                take()
                return True
            with self._only(_SWEEPING):
                items = self._items()
                used = sum(item.nbytes for item in items)
                limit = max_bytes if max_bytes is not None else used + _free(self.folder)
                if used + nbytes > limit - limit // 16:
                    used -= self._sweep(items, used + nbytes - (limit - limit // 8))
                fits = used + nbytes <= limit
                self._added, self._step = 0, limit // 1024 if fits else 0
                if fits:
                    take()
            return fits

    def _sweep(self, items: list[_Item], needed: int) -> int:
        freed = 0
        for item in sorted(items, key=lambda item: item.used_ns):
            if freed >= needed:
                break
            if self.drop(item.key):
                freed += item.nbytes
        return freed

    def _items(self) -> list[_Item]:
        """What the folder holds, whoever added it; blocks count, not sizes: unfinished files have holes."""
        found: dict[str, _Item] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if match := _own(entry.name):
                    with suppress(FileNotFoundError):
                        stat, old = entry.stat(follow_symlinks=False), found.get(match[1], _Item(match[1], 0, 0))
                        used_ns = max(stat.st_atime_ns, stat.st_mtime_ns, old.used_ns)
                        found[match[1]] = _Item(match[1], old.nbytes + stat.st_blocks * 512, used_ns)
        return list(found.values())

    def _hold(self, key: str) -> None:
        self._look_at_marker()
        while key not in self._users and not self._lock(fcntl.LOCK_SH, _place(key) + _USED):
            self._changed.wait(_POLL_S)
        self._users[key] = self._users.get(key, 0) + 1

    def _let_go(self, key: str) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._unlock(_place(key) + _USED)

    @contextmanager
    def _only(self, place: int) -> Iterator[None]:
        with self._changed:
            while not self._take(place):
                self._changed.wait(_POLL_S)
        try:
            yield
        finally:
            with self._changed:
                self._give(place)
                self._changed.notify_all()

    def _take(self, place: int) -> bool:
        # The kernel tells processes apart, not threads: those of this one are told apart by the set.
        if place in self._alone or not self._lock(fcntl.LOCK_EX, place):
            return False
        self._alone.add(place)
        return True

    def _give(self, place: int) -> None:
        self._alone.discard(place)
        self._unlock(place)

    def _lock(self, kind: int, place: int, size: int = 1) -> bool:
        # Never waiting in the kernel: it would take two processes with several threads each for a deadlock.
        try:
            fcntl.lockf(self._fd, kind | fcntl.LOCK_NB, size, place)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise StorageError(f"the cache cannot be locked: {error.strerror}", self.folder) from error
        return True

    def _unlock(self, place: int, size: int = 1) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, size, place)

    def _look_at_marker(self) -> None:
        """Move the locks to a new marker where somebody has emptied the folder."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(os.path.join(self.folder, MARKER)), os.fstat(self._fd)):
                return
        del _markers[self.folder]  # not closed: another thread may be about to use it
        self._fd, self.writable = _open_marker(self.folder)
        for key in self._users:
            self._lock(fcntl.LOCK_SH, _place(key) + _USED)
        for place in self._alone:
            self._lock(fcntl.LOCK_EX, place)


def _open_marker(folder: str) -> tuple[int, bool]:
    """Open the file that says whose folder this is, making both; and whether they can be written."""
    if folder not in _markers:
        path = os.path.join(folder, MARKER)
        try:
            os.makedirs(folder, exist_ok=True)
            _markers[folder] = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            try:
                _markers[folder] = os.open(path, os.O_RDONLY)
            except OSError:
                raise StorageError(f"the cache cannot be kept there: {error.strerror}", folder) from error
    fd = _markers[folder]
    is_open = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return fd, is_open and os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _place(key: str) -> int:
    """Where an object's stretch of the marker begins; two that share one only wait for each other."""
    return int(key[:5] + key[16:21], 16) * _STRETCH


def _cell(key: str, cell: int) -> int:
    return _place(key) + _CELLS + cell % (_STRETCH - _CELLS)


def _own(name: str, start: str = "") -> re.Match[str] | None:
    """Tell a file of the cache from all others, which are left alone."""
    return _OWN.fullmatch(name) if name.startswith(start) else None


def _mapped() -> set[str]:
    """The objects whose files this process has mapped, where the system tells."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            return set(_MAPPED.findall(file.read()))
    except OSError:
        return set()


def _free(folder: str) -> int:
    """What may be added to a disk: all but a 20th of it, which others may need."""
    disk = os.statvfs(folder)
    return (disk.f_bavail - disk.f_blocks // 20) * disk.f_frsize
