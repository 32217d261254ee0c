"""Records in a folder, by number: added by many processes at once, and read by all of them.

Every process that adds records has a pair of files of its own, which it locks: the records, one after another, and
their index, an entry of fixed size for each. An entry is written after its record, so a process that is killed leaves
at most bytes that no entry names; the next process that takes over the files removes them. A record that does not have
the checksum in its entry counts as absent.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.order import I64
from penstock.storage.crc import crc32
from penstock.storage.protocol import per_process

log = logging.getLogger("penstock")

_ENTRY = np.dtype([("number", "<u8"), ("offset", "<u8"), ("nbytes", "<u4"), ("crc", "<u4")])
_RECORDS, _INDEX = ".records", ".index"
_REFRESH_PAUSE = 20  # times the duration of a look for records of other processes passes before the next one
_MAX_RECORD_BYTES = (1 << 32) - 1
_MAX_BUFFERS = 512  # of one call
_MIN_COMPACTION = 4096  # entries that are kept in a dict before they are sorted in

Bytes = NDArray[np.uint8]


class Entries(NamedTuple):
    """Where records are stored, as parallel arrays; a file of -1 marks a record that does not exist."""

    file: I64
    offset: I64
    nbytes: I64
    crc: I64

    def take(self, sel: Any) -> Entries:
        """Return the selected entries."""
        return Entries(self.file[sel], self.offset[sel], self.nbytes[sel], self.crc[sel])


def record_store(folder: str) -> RecordStore:
    """Return the store of a folder that this process shares."""
    return per_process(("records", folder), lambda: RecordStore(folder))


class RecordStore:
    """The records of one folder. Its methods may be called from several threads."""

    def __init__(self, folder: str) -> None:
        """Open the folder, which is created when the first record is added."""
        self.folder = folder
        self._lock = threading.RLock()
        self._names: list[str] = []  # of the files, without suffix
        self._known: dict[str, int] = {}  # how many entries of each file were read
        self._numbers = np.zeros(0, np.uint64)  # ascending
        self._entries = Entries(*(np.zeros(0, np.int64) for _ in range(4)))
        self._recent: dict[int, tuple[int, int, int, int]] = {}  # entries that are not in the arrays yet
        self._readable: dict[int, int] = {}  # descriptors by file
        self._damaged: set[tuple[int, int]] = set()  # (file, offset)
        self._looked = 0.0  # the latest ``since`` that a look for records of other processes answered
        self._refresh_from = 0.0
        self._writer: _RecordFiles | None = None
        self._writable = True

    def find(self, numbers: NDArray[np.uint64], since: float = 0) -> Entries:
        """Return the entry of each record; what other processes added after the time ``since`` may be missing."""
        with self._lock:
            found = self._lookup(numbers)
            if (found.file < 0).any() and (self._looked < since or self._refresh_from <= time.monotonic()):
                self._looked = max(since, self._looked)
                self._refresh()
                found = self._lookup(numbers)
        return found

    def _lookup(self, numbers: NDArray[np.uint64]) -> Entries:
        entries = Entries(*(np.full(len(numbers), -1, np.int64) for _ in range(4)))
        if len(self._numbers):
            at = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
            entries = self._entries.take(at)
            for column in entries:
                column[self._numbers[at] != numbers] = -1
        if self._recent:
            for row in np.flatnonzero(entries.file < 0).tolist():
                if (recent := self._recent.get(int(numbers[row]))) is not None:
                    for column, value in zip(entries, recent, strict=True):
                        column[row] = value
        return entries

    def read(self, file: int, offset: int, nbytes: int, crc: int) -> Bytes | None:
        """Return a record, in memory of its own; None if it is damaged or gone, and then also for ``find``.

        Raises:
            LookupError: The entry stands for a record that does not exist.
        """
        if file < 0:
            raise LookupError("there is no such record: find() has marked it with a file of -1")
        data = np.empty(nbytes, np.uint8)
        try:
            fd = self._descriptor(file)
            whole = os.preadv(fd, [data.data], offset) == nbytes
        except OSError:
            whole = False
        if whole and crc32(data.data) == crc:
            return data
        self._forget(file, offset)
        return None

    def _forget(self, file: int, offset: int) -> None:
        with self._lock:
            self._damaged.add((file, offset))
            self._recent = {n: entry for n, entry in self._recent.items() if entry[:2] != (file, offset)}
            kept = ~((self._entries.file == file) & (self._entries.offset == offset))
            self._numbers, self._entries = self._numbers[kept], self._entries.take(kept)

    def add(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Append records, except those that exist. A folder that cannot be written is one warning."""
        with self._lock:
            if not self._writable:
                return
            numbers = np.array([number for number, _ in records], np.uint64)
            absent = self._lookup(numbers).file < 0
            wanted = zip(records, absent.tolist(), strict=True)
            new = [record for record, add in wanted if add and len(record[1]) <= _MAX_RECORD_BYTES]
            if not new:
                return
            try:
                if self._writer is None:
                    self._writer = _RecordFiles(self.folder)
                added = self._writer.append(new)
            except OSError as error:
                self._writable = False
                problem = error.strerror or error
                log.warning("cannot write to %s: %s; no more results are added to the cache", self.folder, problem)
                return
            name = self._writer.name
            if self._known.get(name, 0) * _ENTRY.itemsize + added.nbytes == self._writer.index_end:
                self._merge(name, added)

    def _refresh(self) -> None:
        """Read the entries that other processes have added."""
        begun = time.monotonic()
        try:
            names = sorted(name.removesuffix(_INDEX) for name in os.listdir(self.folder) if name.endswith(_INDEX))
        except OSError:
            names = []
        for name in names:
            with suppress(OSError), open(os.path.join(self.folder, name + _INDEX), "rb") as file:
                file.seek(self._known.get(name, 0) * _ENTRY.itemsize)
                data = file.read()
                whole = len(data) // _ENTRY.itemsize * _ENTRY.itemsize
                if whole:
                    self._merge(name, np.frombuffer(data[:whole], _ENTRY))
        now = time.monotonic()
        self._refresh_from = now + _REFRESH_PAUSE * (now - begun)

    def _merge(self, name: str, added: NDArray[Any]) -> None:
        if name not in self._names:
            self._names.append(name)
        file = self._names.index(name)
        self._known[name] = self._known.get(name, 0) + len(added)
        for number, offset, nbytes, crc in added.tolist():
            if (file, offset) not in self._damaged:
                self._recent[number] = file, offset, nbytes, crc
        if len(self._recent) > max(_MIN_COMPACTION, len(self._numbers) // 4):
            self._compact()

    def _compact(self) -> None:
        """Sort the recent entries into the arrays; doing so rarely keeps the cost of an entry constant."""
        recent = np.array(list(self._recent), np.uint64)
        kept = ~np.isin(self._numbers, recent)
        numbers = np.concatenate([self._numbers[kept], recent])
        columns = np.array(list(self._recent.values()), np.int64).T
        pairs = zip(self._entries.take(kept), columns, strict=True)
        order = np.argsort(numbers)
        self._numbers = numbers[order]
        self._entries = Entries(*(np.concatenate(pair)[order] for pair in pairs))
        self._recent = {}

    def _descriptor(self, file: int) -> int:
        with self._lock:
            if file not in self._readable:
                path = os.path.join(self.folder, self._names[file] + _RECORDS)
                self._readable[file] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._readable[file])
            return self._readable[file]


class _RecordFiles:
    """The pair of files that this process adds records to; locked until the process ends."""

    def __init__(self, folder: str) -> None:
        """Take over the files of a process that has ended, or create new ones.

        Raises:
            OSError: The folder cannot be written.
        """
        os.makedirs(folder, exist_ok=True)
        for number in range(1 << 16):
            self.name = f"{number:04d}"
            self._records = self._open(os.path.join(folder, self.name + _RECORDS))
            try:
                fcntl.flock(self._records, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(self._records)
        weakref.finalize(self, os.close, self._records)
        self._index = self._open(os.path.join(folder, self.name + _INDEX))
        weakref.finalize(self, os.close, self._index)
        entries = np.frombuffer(self._whole_index(), _ENTRY)
        self.index_end = entries.nbytes
        self._end = int((entries["offset"] + entries["nbytes"]).max()) if len(entries) else 0
        os.ftruncate(self._index, self.index_end)
        os.ftruncate(self._records, self._end)

    @staticmethod
    def _open(path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def _whole_index(self) -> bytes:
        data = os.pread(self._index, os.fstat(self._index).st_size, 0)
        return data[: len(data) // _ENTRY.itemsize * _ENTRY.itemsize]

    def append(self, records: Sequence[tuple[int, bytes]]) -> NDArray[Any]:
        """Append records, then their entries, which are returned.

        Raises:
            OSError: They cannot be written; nothing is left of them.
        """
        entries = np.zeros(len(records), _ENTRY)
        end = self._end
        for row, (number, data) in enumerate(records):
            entries[row] = number, end, len(data), crc32(data)
            end += len(data)
        try:
            _write(self._records, [data for _, data in records], self._end)
            _write(self._index, [entries.tobytes()], self.index_end)
        except OSError:
            os.ftruncate(self._index, self.index_end)
            os.ftruncate(self._records, self._end)
            raise
        self._end, self.index_end = end, self.index_end + entries.nbytes
        return entries


def _write(fd: int, buffers: Sequence[bytes], offset: int) -> None:
    for first in range(0, len(buffers), _MAX_BUFFERS):
        part = buffers[first : first + _MAX_BUFFERS]
        done, size = os.pwritev(fd, part, offset), sum(map(len, part))
        rest = memoryview(b"".join(part))[done:] if done < size else memoryview(b"")
        while rest:
            written = os.pwrite(fd, rest, offset + done)
            done, rest = done + written, rest[written:]
        offset += size
