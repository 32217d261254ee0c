"""A lock on an output folder, so that only one run writes to it at a time.

On a disk it is a lock file, locked with ``flock``: the system releases it when its process ends, however that happens.
In a remote folder, the journal names the process that wrote it last. If that process runs on this machine, the folder
is in use. Whether a process on another machine is still running cannot be determined, so a new run takes over, and the
other run stops when it reads the journal after its next shard.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PlanError
from penstock.formats.tar.shard_names import on_disk
from penstock.storage import redacted

LOCK = ".penstock-pack.lock"
_UNLOCKABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_active_runs: set[str] = set()  # the ids of the runs in this process


@dataclass(frozen=True, slots=True)
class Owner:
    """The process and run that writes to a folder.

    Attributes:
        host: The name of the machine.
        pid: The process id.
        started_at: When the process started, by the system's clock: a later process may get the same id.
        run_id: Distinguishes the runs of one process.
    """

    host: str
    pid: int
    started_at: str
    run_id: str

    def is_alive(self) -> bool:
        """Return whether the run is still active; False if it is on another machine, where that is unknown."""
        if self.host != socket.gethostname():
            return False
        if self.pid == os.getpid():
            return self.run_id in _active_runs
        return is_running(self.pid) and _process_start_time(self.pid) == self.started_at

    def to_json(self) -> dict[str, Any]:
        """Return the owner as it is stored in journals."""
        return {"host": self.host, "pid": self.pid, "born": self.started_at, "mark": self.run_id}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Owner:
        """Return the owner that a journal stores.

        Raises:
            KeyError: A value is missing.
        """
        return cls(obj["host"], obj["pid"], obj["born"], obj["mark"])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def folder_lock(folder: str, work: str = "packing run") -> Iterator[Owner]:
    """Lock a folder for one run.

    A remote folder is not locked: the caller stores the owner in the folder and checks the one stored before.

    Args:
        folder: The folder; on a disk, it is created if necessary.
        work: What kind of run it is, for the error message.

    Raises:
        PlanError: Another run holds the lock.
        OSError: The folder cannot be created.
    """
    owner = Owner(socket.gethostname(), os.getpid(), _process_start_time(os.getpid()), secrets.token_hex(8))
    _active_runs.add(owner.run_id)
    try:
        if on_disk(folder):
            with _lock_file(folder, owner, work):
                yield owner
        else:
            yield owner
    finally:
        _active_runs.discard(owner.run_id)


def folder_in_use(folder: str, owner: str, work: str = "packing run") -> PlanError:
    """Return the error for a run that finds its folder in use by another one."""
    return PlanError(
        f"{redacted(folder)}: another {work} ({owner}) is writing there; wait for it to end, or choose another folder"
    )


@contextmanager
def _lock_file(folder: str, owner: Owner, work: str) -> Iterator[None]:
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, LOCK)
    handle = _acquire(path, folder, work)
    if handle is None:  # locking is impossible there; if writing is too, the first write fails
        yield
        return
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, str(owner).encode(), 0)
        yield
    finally:
        Path(path).unlink(missing_ok=True)  # before the release: the next owner must not lock a file without a name
        os.close(handle)


def _acquire(path: str, folder: str, work: str) -> int | None:
    """Open and lock the lock file; return None if the file system does not allow that."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            if exc.errno in _UNLOCKABLE:
                return None
            raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 200, 0).decode("utf-8", "replace")
            os.close(handle)
            raise folder_in_use(folder, owner or "just started", work) from None
        except OSError as exc:
            os.close(handle)
            if exc.errno in _UNLOCKABLE:
                return None
            raise
        if _is_open_file(handle, path):
            return handle
        os.close(handle)  # the previous owner removed the file between open and lock


def _is_open_file(handle: int, path: str) -> bool:
    """Return whether an open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def is_running(pid: int) -> bool:
    """Return whether a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _process_start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if that is unknown or the process is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start_time = stat[0], stat[19]
    return "" if state in "ZX" else start_time
