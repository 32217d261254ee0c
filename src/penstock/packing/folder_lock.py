"""One packing at a time in a folder: the second is told who the first is.

On disks a lock of the system says so, which ends with the process that holds it, however that ends. Elsewhere the
journal names who wrote it last: a process of this machine that still runs is left alone; of one on another machine
nobody can know, so the newcomer takes over, and the other stops when it finds that out, at its next shard.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PlanError
from penstock.formats.tar.shard_names import on_disk
from penstock.storage import redacted

LOCK = ".penstock-pack.lock"
_UNLOCKABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_here: set[str] = set()  # the packings of this process


@dataclass(frozen=True, slots=True)
class Owner:
    """Who packs.

    Attributes:
        host: The machine.
        pid: The process there.
        born: When that process began, so that a later one of the same number is not taken for it.
        mark: Tells the packings of one process apart.
    """

    host: str
    pid: int
    born: str
    mark: str

    def lives(self) -> bool:
        """Whether this packing still runs, as far as that can be known from here."""
        if self.host != socket.gethostname():
            return False
        if self.pid == os.getpid():
            return self.mark in _here
        return is_running(self.pid) and _born(self.pid) == self.born

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def folder_lock(folder: str, work: str = "packing") -> Iterator[Owner]:
    """Have a folder to oneself for some work.

    Raises:
        PlanError: another one has it.
        OSError: the folder cannot be made.
    """
    me = Owner(socket.gethostname(), os.getpid(), _born(os.getpid()), secrets.token_hex(8))
    _here.add(me.mark)
    try:
        if on_disk(folder):
            with _locked(folder, me, work):
                yield me
        else:
            yield me
    finally:
        _here.discard(me.mark)


def busy(folder: str, who: str, work: str = "packing") -> PlanError:
    """The error of the one who came second."""
    return PlanError(
        f"{redacted(folder)}: another {work} ({who}) is writing there; wait for it to end, or choose another folder"
    )


@contextmanager
def _locked(folder: str, me: Owner, work: str) -> Iterator[None]:
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, LOCK)
    handle = _taken(path, folder, work)
    if handle is None:  # nothing can be locked there; what cannot be written either will say so
        yield
        return
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, str(me).encode(), 0)
        yield
    finally:
        Path(path).unlink(missing_ok=True)  # first: whoever waits for the lock must not get a file without a name
        os.close(handle)


def _taken(path: str, folder: str, work: str) -> int | None:
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
            who = os.pread(handle, 200, 0).decode("utf-8", "replace")
            os.close(handle)
            raise busy(folder, who or "just begun", work) from None
        except OSError as exc:
            os.close(handle)
            if exc.errno in _UNLOCKABLE:
                return None
            raise
        if _is_at(handle, path):
            return handle
        os.close(handle)  # the one before has just ended and taken the file away


def _is_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def is_running(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _born(pid: int) -> str:
    """When a process began, as the system counts; empty where it does not say, or the process has only to be buried."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if told[0] in "ZX" else told[19]
