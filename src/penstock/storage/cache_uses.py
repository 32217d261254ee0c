"""Planned uses of a cache by the runs of all processes: each publishes its plan as a file in the folder.

A plan is locked by the process that published it; the plan of a process that has ended is removed by the next one that
looks. Progress is written into the file as the run proceeds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex

import numpy as np

from penstock.storage.cache_policy import NEVER, Uses

USES_SUFFIX = ".penstock-uses"
_MAGIC = b"penstock uses 1\n"
_HEADER = struct.Struct("<16sdddQ")  # magic, progress, positions per second, end of the run, number of objects
_ENDED_S = 120.0  # how long a plan counts after its run has ended: the next epoch may begin soon


class PublishedUses:
    """The plan of one run of this process, which other processes see. Thread-safe."""

    def __init__(self, folder: str, uses: Uses) -> None:
        """Write the plan.

        Raises:
            OSError: The folder cannot be written.
        """
        self.uses = uses
        self._begun = time.monotonic()
        self._progress, self._rate, self._ended = 0.0, 0.0, 0.0
        self._lock = threading.Lock()
        self.path = os.path.join(folder, f"{os.getpid()}-{token_hex(4)}{USES_SUFFIX}")
        fd = self._create()
        try:
            positions = (column.astype("<f8").tobytes() for column in (uses.first, uses.last, uses.following))
            columns = b"".join([uses.keys.astype("<u8").tobytes(), *positions])
            os.ftruncate(fd, _HEADER.size + len(columns))
            os.pwrite(fd, columns, _HEADER.size)
            os.pwrite(fd, self._header(), 0)  # last: until then no process reads the plan
            self._map = mmap.mmap(fd, _HEADER.size)
        except OSError:
            _remove(self.path, fd, os.getpid())
            raise
        weakref.finalize(self, _remove, self.path, fd, os.getpid())

    def _create(self) -> int:
        """Create the file and lock it; a process that looks in between takes it for one without an owner."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            fcntl.flock(fd, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(fd)):
                    return fd
            os.close(fd)

    def advance(self, done: int) -> None:
        """Record that the run has reached a position."""
        with self._lock:
            self._progress = float(done)
            self._rate = self._progress / max(time.monotonic() - self._begun, 1e-3)
            self._map[:] = self._header()

    @property
    def progress(self) -> float:
        """The position that the run has reached."""
        return self._progress

    def end(self) -> None:
        """Record that the run has ended."""
        with self._lock:
            self._ended = time.time()
            self._map[:] = self._header()

    def _header(self) -> bytes:
        return _HEADER.pack(_MAGIC, self._progress, self._rate, self._ended, len(self.uses.keys))


def _remove(path: str, fd: int, pid: int) -> None:
    if pid == os.getpid():  # not in a forked child
        with suppress(OSError):
            os.unlink(path)
    os.close(fd)


@dataclass(slots=True)
class PlannedUses:
    """The plans of all live processes, as one process sees them."""

    folder: str
    _known: dict[str, Uses] = field(default_factory=dict)

    def next_uses(self) -> dict[int, float]:
        """Return the seconds until the next use of every object that a plan names."""
        soonest: dict[int, float] = {}
        for uses, progress, rate in self._read():
            distances = (uses.upcoming(progress) / rate).tolist()
            if not soonest:
                soonest = dict(zip(uses.keys.tolist(), distances, strict=True))
                continue
            for key, distance in zip(uses.keys.tolist(), distances, strict=True):
                soonest[key] = min(distance, soonest.get(key, NEVER))
        return soonest

    def use_after(self, key: int) -> float | None:
        """Return the seconds until the use after the one for which an object is read; None: no plan names it.

        If several plans use the object, the second of their next uses counts, whichever plan it belongs to.
        """
        coming: list[float] = []
        for uses, progress, rate in self._read():
            if (row := uses.row(key)) is not None:
                coming += [float(uses.upcoming(progress)[row]) / rate, float(uses.after_next(progress)[row]) / rate]
        return sorted(coming)[1] if coming else None

    def _read(self) -> list[tuple[Uses, float, float]]:
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(USES_SUFFIX)]
        except OSError:
            names = []
        found = []
        for name in names:
            with suppress(OSError, ValueError, struct.error):
                if (one := self._read_one(name)) is not None:
                    found.append(one)
        self._known = {name: uses for name, uses in self._known.items() if name in names}
        rates = [rate for _, _, rate in found if rate]
        usual = sum(rates) / len(rates) if rates else 1.0  # of a run that has just begun
        return [(uses, progress, rate or usual) for uses, progress, rate in found]

    def _read_one(self, name: str) -> tuple[Uses, float, float] | None:
        path = os.path.join(self.folder, name)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # possible only if its process has ended
                os.unlink(path)
                return None
            magic, progress, rate, ended, count = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
            if magic != _MAGIC or (ended and time.time() - ended > _ENDED_S):
                return None
            if name not in self._known:
                data = os.pread(fd, os.fstat(fd).st_size, _HEADER.size)
                self._known[name] = Uses(
                    np.frombuffer(data, "<u8", count),
                    *(np.frombuffer(data, "<f8", count, 8 * count * column) for column in (1, 2, 3)),
                )
            return self._known[name], progress, rate
        finally:
            os.close(fd)
