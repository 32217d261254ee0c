"""What became of every input: lines that are added to a file and never changed.

A line is written before the outputs it speaks of get their names, and an input counts as done when its line and its
outputs are there; so a run that is killed at any moment leaves nothing that the next one takes for what it is not. The
last line of an input holds; a last line that is cut off is dropped.

Elsewhere than on a disk nothing can be added to a file: there the journal is a row of objects, one every few seconds.
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
from penstock.jobs.inputs import Sign
from penstock.jobs.job_rows import from_json
from penstock.jobs.output import HIDDEN
from penstock.jobs.output_folder import Outputs
from penstock.jobs.task import Done
from penstock.storage import Storage, redacted

_VERSION = 1
_EVERY_S = 2.0  # how often what is new is sent elsewhere, or made to survive a power cut
_FILE = "journal.jsonl"
_PIECES = 8  # that a journal elsewhere may be left in


@dataclass(frozen=True, slots=True)
class Record:
    """What the journal says of an input.

    Attributes:
        sign: The content that was worked on.
        outputs: What it owns in the folder, done or not.
        done: It need not be done again while neither changes.
        at: Where its line begins.
        size: How long that is.
    """

    sign: Sign | None
    outputs: Outputs
    done: bool
    at: int
    size: int


class Journal:
    """The journal of one folder of outputs, open for more.

    With ``fresh`` it is read for what outputs there are, however damaged it is, and then ``reset``.

    Raises:
        StateError: it cannot be understood, or is that of another function.
        OSError: it cannot be read or written.
    """

    def __init__(self, fd: int, where: str, function: str, fresh: bool = False) -> None:
        self._fd, self._where, self._function = fd, redacted(where), function
        self.records: dict[str, Record] = {}
        self.owners: dict[str, str] = {}  # whose an output is
        self._synced = time.monotonic()
        self._end = 0
        self._load(fresh)
        if not fresh:
            os.truncate(fd, self._end)
            if not self._end:
                self._begin()

    def _load(self, lenient: bool) -> None:
        with open(self._fd, "rb", closefd=False) as lines:
            lines.seek(0)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                try:
                    self._understand(json.loads(line), len(line), lenient)
                except (ValueError, KeyError, TypeError, AttributeError) as exc:
                    if isinstance(exc, StateError):
                        raise
                    if not lenient:
                        raise StateError(
                            f"{self._where}: the journal cannot be understood (byte {self._end}: {exc}); "
                            "pass fresh=True to start over"
                        ) from exc
                self._end += len(line)

    def _understand(self, said: dict[str, Any], size: int, lenient: bool) -> None:
        if "key" in said:
            self._note(said, self._end, size)
        elif said["v"] != _VERSION:
            raise ValueError("another version")
        elif said["function"] != self._function and not lenient:
            raise StateError(
                f"{self._where} holds the outputs of {said['function']}, and this is {self._function}; choose another "
                "folder, or pass fresh=True to start over"
            )

    def _note(self, said: dict[str, Any], at: int, size: int) -> None:
        key = said["key"]
        before = self.records.get(key)
        for name, _ in before.outputs if before is not None else ():
            if self.owners.get(name) == key:
                del self.owners[name]
        outputs = tuple((str(name), int(nbytes)) for name, nbytes in said["outputs"])
        sign = None if said["sign"] is None else tuple(said["sign"])
        self.records[key] = Record(sign, outputs, bool(said["done"]), at, size)
        self.owners.update((name, key) for name, _ in outputs)

    def reset(self) -> None:
        """Begin anew."""
        self.records.clear()
        self.owners.clear()
        self._end = 0
        os.truncate(self._fd, 0)
        self._begin()

    def _begin(self) -> None:
        self._append(json.dumps({"v": _VERSION, "function": self._function}))

    def add(self, done: Done, *, trial: bool = False) -> None:
        """Add what became of an input; of a trial, that it is not done, though its outputs are there.

        Raises:
            OSError: it cannot be written.
        """
        said = {
            "key": done.input.key,
            "done": done.error is None and not trial,
            "sign": done.sign,
            "outputs": done.outputs,
            "tries": done.tries,
        }
        if done.error is not None:
            said |= {"error": done.error, "trace": done.trace}
        at = self._end
        self._append(f'{json.dumps(said)[:-1]}, "rows": {done.rows}}}')
        self._note(said, at, self._end - at)

    def _append(self, line: str) -> None:
        data = memoryview(line.encode() + b"\n")
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._end + written)
        except OSError:
            with suppress(OSError):
                os.truncate(self._fd, self._end)  # half a line
            raise
        self._end += len(data)
        if time.monotonic() - self._synced > _EVERY_S:
            self.sync()

    def sync(self) -> None:
        """Have what was added survive the end of this machine too."""
        os.fsync(self._fd)
        self._synced = time.monotonic()

    def rows(self, key: str) -> list[dict[str, Any]]:
        """The rows of an input that is done."""
        record = self.records[key]
        return from_json(json.loads(os.pread(self._fd, record.size, record.at))["rows"])

    def close(self) -> None:
        """End; the journal stays."""
        try:
            self.sync()
        finally:
            os.close(self._fd)


class DiskJournal(Journal):
    """A journal beside the outputs."""

    def __init__(self, folder: str, function: str, fresh: bool = False) -> None:
        hidden = os.path.join(folder, HIDDEN)
        os.makedirs(hidden, exist_ok=True)
        fd = os.open(os.path.join(hidden, _FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            super().__init__(fd, folder, function, fresh)
        except BaseException:
            os.close(fd)
            raise


class FarJournal(Journal):
    """A journal elsewhere: kept in a temporary file, and sent piece by piece."""

    def __init__(self, url: str, storage: Storage, function: str, fresh: bool = False) -> None:
        self._url, self._storage = f"{url}/{HIDDEN}/", storage
        self._pieces = [one.url for one in storage.list(self._url) if one.url.endswith(_FILE)]
        with tempfile.TemporaryFile(prefix="penstock-job-", buffering=0) as file:
            fd = os.dup(file.fileno())
        try:
            self._sent = 0
            for piece in self._pieces:
                self._sent += os.write(fd, read_object(storage, piece) or b"")
            super().__init__(fd, url, function, fresh)
        except BaseException:
            os.close(fd)
            raise

    def reset(self) -> None:
        """Begin anew."""
        self._forget(self._pieces)
        self._pieces, self._sent = [], 0
        super().reset()

    def _forget(self, pieces: list[str]) -> None:
        for piece in pieces:
            self._storage.delete(piece)

    def sync(self) -> None:
        """Send what is new."""
        self._synced = time.monotonic()
        if self._sent < self._end:
            self._put(os.pread(self._fd, self._end - self._sent, self._sent))
            self._sent = self._end

    def _put(self, data: bytes) -> None:
        last = int(self._pieces[-1].rpartition("/")[2].partition("-")[0]) if self._pieces else -1
        piece = f"{self._url}{last + 1:08d}-{_FILE}"
        put_object(self._storage, piece, data)
        self._pieces.append(piece)

    def close(self) -> None:
        """Send the rest, and make one object of many: the whole is there before its parts go."""
        try:
            self.sync()
            if len(self._pieces) > _PIECES:
                before = list(self._pieces)
                self._put(os.pread(self._fd, self._end, 0))
                self._forget(before)
        finally:
            os.close(self._fd)
