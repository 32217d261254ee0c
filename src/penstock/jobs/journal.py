"""The journal of a job: an append-only file with one line for each outcome of an input.

The line of an input is written before its outputs are published, and the input counts as done only if both the line and
the outputs exist. A run that is killed at any moment therefore leaves nothing that the next run mistakes for finished.
The last line of an input is the valid one; an incomplete last line of the file is dropped.

Objects on remote storage cannot be appended to, so that a remote journal is a sequence of objects, with a new one every
few seconds.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.blobs.draft import put_object, read_object
from penstock.errors import StateError
from penstock.jobs.inputs import Fingerprint
from penstock.jobs.job_rows import decode_rows
from penstock.jobs.output import JOB_FOLDER
from penstock.jobs.output_folder import Outputs
from penstock.jobs.task import Outcome
from penstock.storage import Storage, redacted

_VERSION = 1
_SYNC_INTERVAL_S = 2.0  # between two fsyncs, or two uploads of new lines
_FILE_NAME = "journal.jsonl"
_MAX_OBJECTS = 8  # a closed remote journal with more objects is joined into one


@dataclass(frozen=True, slots=True)
class InputRecord:
    """The latest entry of an input in the journal.

    Attributes:
        fingerprint: The content that was processed; None if it could not be accessed.
        outputs: The outputs that the input owns in the folder, whether it is done or not.
        done: Whether the input need not be processed again while its content and outputs stay the same.
        offset: Where its line starts in the journal.
        size: The length of that line.
    """

    fingerprint: Fingerprint | None
    outputs: Outputs
    done: bool
    offset: int
    size: int


class JobJournal:
    """The journal of one output folder, open for appending.

    With ``fresh``, only its list of outputs is read, as far as it is intact, and it must be ``reset`` afterwards.

    Attributes:
        records: The record of each input, by its key.
        owners: The key of the input that owns an output, by the name of the output.

    Raises:
        StateError: The journal is damaged, or belongs to another function.
        OSError: The journal cannot be read or written.
    """

    def __init__(self, fd: int, folder: str, function: str, fresh: bool = False) -> None:
        self._fd, self._folder, self._function = fd, redacted(folder), function
        self.records: dict[str, InputRecord] = {}
        self.owners: dict[str, str] = {}
        self._synced_at = time.monotonic()
        self._end = 0
        self._load(lenient=fresh)
        if not fresh:
            os.truncate(fd, self._end)
            if not self._end:
                self._write_header()

    def _load(self, lenient: bool) -> None:
        with open(self._fd, "rb", closefd=False) as lines:
            lines.seek(0)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                try:
                    self._load_entry(json.loads(line), len(line), lenient)
                except (ValueError, KeyError, TypeError, AttributeError) as exc:
                    if isinstance(exc, StateError):
                        raise
                    if not lenient:
                        raise StateError(
                            f"{self._folder}: the journal is damaged at byte {self._end} ({exc}); "
                            "pass fresh=True (--fresh) to start over"
                        ) from exc
                self._end += len(line)

    def _load_entry(self, entry: dict[str, Any], size: int, lenient: bool) -> None:
        if "key" in entry:
            self._index(entry, self._end, size)
        elif entry["v"] != _VERSION:
            raise ValueError("unknown version")
        elif entry["function"] != self._function and not lenient:
            raise StateError(
                f"{self._folder} holds the outputs of {entry['function']}, not of {self._function}; choose another "
                "folder, or pass fresh=True (--fresh) to start over"
            )

    def _index(self, entry: dict[str, Any], offset: int, size: int) -> None:
        """Update ``records`` and ``owners`` with an entry."""
        key = entry["key"]
        previous = self.records.get(key)
        for name, _ in previous.outputs if previous is not None else ():
            if self.owners.get(name) == key:
                del self.owners[name]
        outputs = tuple((str(name), int(nbytes)) for name, nbytes in entry["outputs"])
        fingerprint = None if entry["sign"] is None else tuple(entry["sign"])
        self.records[key] = InputRecord(fingerprint, outputs, bool(entry["done"]), offset, size)
        self.owners.update((name, key) for name, _ in outputs)

    def reset(self) -> None:
        """Remove all entries and start a new journal."""
        self.records.clear()
        self.owners.clear()
        self._end = 0
        os.truncate(self._fd, 0)
        self._write_header()

    def _write_header(self) -> None:
        self._append(json.dumps({"v": _VERSION, "function": self._function}))

    def add(self, outcome: Outcome, *, trial: bool = False) -> None:
        """Append the outcome of an input; with ``trial``, it owns its outputs but does not count as done.

        Raises:
            OSError: The line cannot be written.
        """
        entry = {
            "key": outcome.input.key,
            "done": outcome.error is None and not trial,
            "sign": outcome.fingerprint,
            "outputs": outcome.outputs,
            "tries": outcome.tries,
        }
        if outcome.error is not None:
            entry |= {"error": outcome.error, "trace": outcome.traceback}
        offset = self._end
        self._append(f'{json.dumps(entry)[:-1]}, "rows": {outcome.rows}}}')
        self._index(entry, offset, self._end - offset)

    def _append(self, line: str) -> None:
        data = memoryview(line.encode() + b"\n")
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._end + written)
        except OSError:
            with suppress(OSError):
                os.truncate(self._fd, self._end)  # drop the part that was written
            raise
        self._end += len(data)
        if time.monotonic() - self._synced_at > _SYNC_INTERVAL_S:
            self.sync()

    def sync(self) -> None:
        """Make sure that all lines survive a power failure or, on remote storage, the end of this process."""
        os.fsync(self._fd)
        self._synced_at = time.monotonic()

    def rows(self, key: str) -> list[dict[str, Any]]:
        """Return the rows of an input that is done."""
        record = self.records[key]
        return decode_rows(json.loads(os.pread(self._fd, record.size, record.offset))["rows"])

    def close(self) -> None:
        """Sync and close the file."""
        try:
            self.sync()
        finally:
            os.close(self._fd)


class LocalJournal(JobJournal):
    """A journal in a local output folder."""

    def __init__(self, folder: str, function: str, fresh: bool = False) -> None:
        job_folder = os.path.join(folder, JOB_FOLDER)
        os.makedirs(job_folder, exist_ok=True)
        fd = os.open(os.path.join(job_folder, _FILE_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            super().__init__(fd, folder, function, fresh)
        except BaseException:
            os.close(fd)
            raise


class RemoteJournal(JobJournal):
    """A journal on remote storage: a local temporary file whose new lines are uploaded as objects."""

    def __init__(self, url: str, storage: Storage, function: str, fresh: bool = False) -> None:
        self._url, self._storage = f"{url}/{JOB_FOLDER}/", storage
        self._objects = [info.url for info in storage.list(self._url) if info.url.endswith(_FILE_NAME)]
        with tempfile.TemporaryFile(prefix="penstock-job-", buffering=0) as file:
            fd = os.dup(file.fileno())
        try:
            self._uploaded = 0
            for object_url in self._objects:
                self._uploaded += os.write(fd, read_object(storage, object_url) or b"")
            super().__init__(fd, url, function, fresh)
        except BaseException:
            os.close(fd)
            raise

    def reset(self) -> None:
        self._delete(self._objects)
        self._objects, self._uploaded = [], 0
        super().reset()

    def _delete(self, objects: list[str]) -> None:
        for object_url in objects:
            self._storage.delete(object_url)

    def sync(self) -> None:
        self._synced_at = time.monotonic()
        if self._uploaded < self._end:
            self._upload(os.pread(self._fd, self._end - self._uploaded, self._uploaded))
            self._uploaded = self._end

    def _upload(self, data: bytes) -> None:
        last = int(self._objects[-1].rpartition("/")[2].partition("-")[0]) if self._objects else -1
        object_url = f"{self._url}{last + 1:08d}-{_FILE_NAME}"
        put_object(self._storage, object_url, data)
        self._objects.append(object_url)

    def close(self) -> None:
        """Upload the remaining lines; if there are many objects, join them into a new one, then delete them."""
        try:
            self.sync()
            if len(self._objects) > _MAX_OBJECTS:
                joined = list(self._objects)
                self._upload(os.pread(self._fd, self._end, 0))
                self._delete(joined)
        finally:
            os.close(self._fd)
