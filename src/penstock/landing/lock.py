"""A lock on the hidden work folder of a run, so that only one run writes to a target at a time.

On a disk it is a lock file, locked with ``flock``: the system releases it when its process ends, however that happens.
In a remote folder it is an object that names the run. If that run's process is alive on this machine, the target is in
use. Whether a process on another machine is still running cannot be determined, so a new run takes over, and the other
run stops when it reads the object after its next file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.blobs.draft import put_object, read_object
from penstock.errors import PlanError, StorageError
from penstock.storage import Storage, redacted

LOCK = "lock"  # in the work folder
OWNER = "owner.json"  # in a remote work folder
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
def work_lock(work: str, storage: Storage | None, kind: str) -> Iterator[Callable[[], None]]:
    """Lock a work folder for one run; an empty one is removed afterwards.

    Args:
        work: The work folder, inside the folder that it protects; on a disk, it is created if necessary.
        storage: The storage of a remote folder; None on a disk.
        kind: What kind of run it is, for the error message.

    Yields:
        A function that checks that the run still holds the lock; on a disk it cannot be lost.

    Raises:
        PlanError: Another run holds the lock, or the work folder is a link.
        OSError: The folder cannot be created.
    """
    owner = Owner(socket.gethostname(), os.getpid(), _process_start_time(os.getpid()), secrets.token_hex(8))
    _active_runs.add(owner.run_id)
    try:
        with (
            _lock_object(work, storage, owner, kind) if storage is not None else _lock_file(work, owner, kind) as check
        ):
            yield check
    finally:
        _active_runs.discard(owner.run_id)


def folder_in_use(work: str, owner: str, kind: str) -> PlanError:
    """Return the error for a run that finds its target in use by another one."""
    folder = redacted(work.rstrip("/").rpartition("/")[0] or "/")
    return PlanError(
        f"{folder}: another {kind} ({owner}) is writing there; wait for it to end, or choose another folder"
    )


@contextmanager
def _lock_object(work: str, storage: Storage, owner: Owner, kind: str) -> Iterator[Callable[[], None]]:
    url = f"{work}/{OWNER}"

    def stored() -> Owner | None:
        try:
            data = read_object(storage, url)
            return None if data is None else Owner.from_json(json.loads(data))
        except (ValueError, KeyError, TypeError):  # not an owner: the lock is free
            return None

    def check() -> None:
        if (found := stored()) != owner:
            raise folder_in_use(work, "already finished" if found is None else str(found), kind)

    if (other := stored()) is not None and other.is_alive():
        raise folder_in_use(work, str(other), kind)
    put_object(storage, url, json.dumps(owner.to_json()).encode())
    try:
        _require_listing(storage, work)
        yield check
    finally:
        with suppress(StorageError):  # what is left names a run that is not alive
            if stored() == owner:
                storage.delete(url)


def _require_listing(storage: Storage, work: str) -> None:
    """Check that a run can find what an interrupted one has written.

    Raises:
        StorageError: The folder cannot be listed.
    """
    try:
        next(iter(storage.list(f"{work}/")), None)
    except StorageError as exc:
        problem = (
            f"a run has to list its target, to find what an interrupted one wrote: {exc.problem.partition(';')[0]}"
        )
        advice = "write to a server that can be listed (S3, WebDAV), or single archives with ps.TarWriter(url)"
        raise StorageError(f"{problem}; {advice}", redacted(work.rpartition("/")[0])) from exc


@contextmanager
def _lock_file(work: str, owner: Owner, kind: str) -> Iterator[Callable[[], None]]:
    handle = _acquire(work, kind)
    if handle is None:  # locking is impossible there; if writing is too, the first write fails
        yield lambda: None
        return
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, str(owner).encode(), 0)
        yield lambda: None
    finally:
        Path(work, LOCK).unlink(
            missing_ok=True
        )  # before the release: the next owner must not lock a file without a name
        with suppress(OSError):
            os.rmdir(work)  # if it is empty
        os.close(handle)


def _acquire(work: str, kind: str) -> int | None:
    """Open and lock the lock file; return None if the file system does not allow that."""
    path = os.path.join(work, LOCK)
    while True:
        try:
            os.makedirs(work, exist_ok=True)
        except FileExistsError:
            if os.path.lexists(work) and not os.path.isdir(work):
                raise
            continue  # the previous owner removed the folder at this moment
        if os.path.islink(work):
            raise PlanError(f"{work} is a link, which a run does not follow; remove it")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # the previous owner removed the folder after makedirs
            continue
        except OSError as exc:
            if exc.errno in _UNLOCKABLE:
                return None
            raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 200, 0).decode("utf-8", "replace")
            os.close(handle)
            raise folder_in_use(work, owner or "just started", kind) from None
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


def remove_partials(folder: str, name: str) -> None:
    """Remove the partial files of this name that killed processes left in a local folder."""
    partial = re.compile(rf"\.{re.escape(name[:180])}\.(\d+)-[0-9a-f]{{8}}\.partial")
    for found in os.listdir(folder) if os.path.isdir(folder) else ():
        if (match := partial.fullmatch(found)) and not is_running(int(match[1])):
            with suppress(OSError):
                os.unlink(os.path.join(folder, found))


def _process_start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if that is unknown or the process is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start_time = stat[0], stat[19]
    return "" if state in "ZX" else start_time


@contextmanager
def temporary_folder(key: str, *, keep: bool = True) -> Iterator[str]:
    """Provide a temporary folder that belongs to the holder of a lock; an earlier one of the same key is found again.

    Args:
        key: What the lock is on.
        keep: Whether files in the folder outlive the context, so that the next holder finds them; a folder that a
            killed process left is emptied otherwise.
    """
    prefix = f"penstock-{hashlib.sha256(key.encode()).hexdigest()[:16]}-"
    parent, mine = tempfile.gettempdir(), []
    for name in os.listdir(parent):
        if name.startswith(prefix):
            status = os.lstat(os.path.join(parent, name))
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                mine.append(os.path.join(parent, name))
    for path in mine[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    folder = mine[0] if mine and keep else tempfile.mkdtemp(prefix=prefix)
    try:
        yield folder
    finally:
        if not keep or not os.listdir(folder):
            shutil.rmtree(folder, ignore_errors=True)
