"""The journal of a run: JSON lines on disk or in objects, each durable before the step that depends on it.

The first line is a header with the version of the format. A last line that is incomplete is dropped: its writer was
killed. Objects on remote storage cannot be appended to, so that a remote journal is a local temporary file whose new
lines are uploaded as further objects.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from penstock.blobs.draft import put_object, read_object
from penstock.errors import StateError
from penstock.storage import Storage, redacted

JOURNAL = "journal.jsonl"  # in the work folder; remote objects have a number before it
_VERSION = 2
_SYNC_INTERVAL_S = 2.0  # between two fsyncs, or two uploads of new lines, unless a caller asks for one
_MAX_OBJECTS = 64  # of a remote journal; more are joined into one
_OBJECT = re.compile(rf"\d{{8}}-{re.escape(JOURNAL)}")


class Journal:
    """The journal in a work folder, open for reading and appending. Thread-safe only if calls do not overlap.

    Args:
        work: The work folder; on a disk, it exists.
        storage: The storage of a remote folder; None on a disk.

    Raises:
        StorageError: The objects of a remote journal cannot be read.
        OSError: The file cannot be opened, or is a link.
    """

    def __init__(self, work: str, storage: Storage | None) -> None:
        self._work, self._storage = work.rstrip("/"), storage
        self._objects: list[str] = []  # of a remote journal
        self._end = self._synced = 0
        self._synced_at = time.monotonic()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        if storage is None:
            self._fd = os.open(os.path.join(work, JOURNAL), flags, 0o644)
            return
        with tempfile.TemporaryFile(buffering=0) as file:
            self._fd = os.dup(file.fileno())
        try:
            listed = (info.url for info in storage.list(f"{self._work}/"))
            self._objects = [url for url in listed if _OBJECT.fullmatch(url.removeprefix(f"{self._work}/"))]
            for url in self._objects:
                os.write(self._fd, read_object(storage, url) or b"")
        except BaseException:
            os.close(self._fd)
            raise

    def load(self, lenient: bool = False) -> Iterator[tuple[dict[str, Any], int, int]]:
        """Yield the lines with their offsets and sizes, the header first; afterwards lines can be appended.

        With ``lenient``, lines that cannot be read are left out.

        Raises:
            StateError: A line is damaged, or the journal has the format of another version.
        """
        self._end = 0
        with open(self._fd, "rb", closefd=False) as lines:
            lines.seek(0)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(line)
                    if not isinstance(entry, dict):
                        raise ValueError("not an object")
                    if not self._end and entry.get("v") != _VERSION:
                        raise ValueError(f"it has the format {entry.get('v')!r} of another version of Penstock")
                    yield entry, self._end, len(line)
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
                    if not lenient:
                        raise self.damaged(exc) from exc
                self._end += len(line)
        os.truncate(self._fd, self._end)
        self._synced = self._end

    def damaged(self, problem: object) -> StateError:
        """Return the error for a line that cannot be used."""
        folder = redacted(self._work.rpartition("/")[0] or "/")
        return StateError(f"{folder}: the journal cannot be read at byte {self._end} ({problem})")

    def start(self, header: dict[str, Any]) -> None:
        """Remove all lines and write a new header.

        Raises:
            OSError: The journal cannot be written.
        """
        self._join()
        os.truncate(self._fd, 0)
        self._end = self._synced = 0
        self.append(json.dumps({"v": _VERSION, **header}))
        if self._objects:  # replaced in one step
            self._put(self._objects[0], 0)
        else:
            self.sync()

    def append(self, line: str, *, sync: bool = False) -> tuple[int, int]:
        """Append a line and return its offset and size; it is durable with ``sync``, else after a few seconds.

        Raises:
            OSError: The line cannot be written; no part of it is kept.
        """
        data, offset = memoryview(line.encode() + b"\n"), self._end
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], offset + written)
        except OSError:
            with suppress(OSError):
                os.truncate(self._fd, offset)
            raise
        self._end += len(data)
        if sync or time.monotonic() - self._synced_at > _SYNC_INTERVAL_S:
            self.sync()
        return offset, len(data)

    def read(self, offset: int, size: int) -> dict[str, Any]:
        """Return a line again."""
        line: dict[str, Any] = json.loads(os.pread(self._fd, size, offset))
        return line

    def sync(self) -> None:
        """Make sure that all lines survive a power failure or, on remote storage, the end of this process.

        Raises:
            OSError: The lines cannot be written.
            StorageError: The lines cannot be uploaded.
        """
        self._synced_at = time.monotonic()
        if self._storage is None:
            os.fsync(self._fd)
        elif self._synced < self._end:
            self._put_next(self._synced)
            if len(self._objects) > _MAX_OBJECTS:
                self._join()

    def _put(self, url: str, first: int) -> None:
        """Upload the lines from byte ``first`` on."""
        assert self._storage is not None
        put_object(self._storage, url, os.pread(self._fd, self._end - first, first))
        self._synced = self._end

    def _put_next(self, first: int) -> None:
        last = int(self._objects[-1].rpartition("/")[2].partition("-")[0]) if self._objects else -1
        url = f"{self._work}/{last + 1:08d}-{JOURNAL}"
        self._put(url, first)
        self._objects.append(url)

    def _join(self) -> None:
        """Join the objects into one; a kill in between leaves lines twice, never a later line without an earlier."""
        if self._storage is None or len(self._objects) < 2:
            return
        self._put_next(0)
        while len(self._objects) > 1:
            self._storage.delete(self._objects[-2])
            del self._objects[-2]

    def remove(self) -> None:
        """Delete the journal, of which nothing is needed any more, in one step.

        Raises:
            StorageError: An object cannot be deleted.
        """
        self._join()
        if self._storage is None:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._work, JOURNAL))
        elif self._objects:
            self._storage.delete(self._objects.pop())

    def close(self) -> None:
        """Close the journal; lines that are not durable yet may be lost. An empty file is removed."""
        if self._storage is None and not os.fstat(self._fd).st_size:
            self.remove()
        fd, self._fd = self._fd, -1  # a thread that was left behind must not write to another file
        os.close(fd)
