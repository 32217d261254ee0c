"""Which epoch comes next, counted together with the worker processes of a DataLoader."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, reduction
from typing import Any

from penstock.feed.torch_workers import TorchWorker

_ROOM = 1 << 16  # bytes that the count never needs
_PASSES = 8  # of one dataset that may be begun at the same time

_taken: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()  # by processes being started

# A pass: the name its workers share, its epoch, and the workers that have come to it.
_Pass = tuple[int, int, list[int]]


class Epochs:
    """Counts the passes over a dataset: each is the next epoch.

    Once it is ``shared``, processes that are forked or spawned from this one count with it. The count then lies in a
    file without a name, under a lock that belongs to a process: a lock of ``multiprocessing`` would need to know
    beforehand how those processes are started, and a process of its own to clean up behind it.
    """

    __slots__ = ("__weakref__", "_file", "_here")

    def __init__(self, first: int = 0) -> None:
        """Begin with epoch ``first``."""
        self._here = first
        self._file: int | None = None

    @property
    def shared(self) -> bool:
        """Whether other processes can count with this one."""
        return self._file is not None

    def share(self) -> None:
        """Let processes started from now on count with this one."""
        if self._file is None:
            self._attach(_unnamed())
            self._write(self._here, [])

    def _attach(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file)

    def __reduce__(self) -> tuple[Any, ...]:
        child = context.get_spawning_popen()
        if child is None:
            return Epochs, ()  # kept, or on its way to who knows where: a count of its own
        self.share()
        assert self._file is not None
        taken = _taken.setdefault(child, {})  # a file goes to a process once, however often the dataset does
        if self._file not in taken:
            taken[self._file] = reduction.DupFd(self._file)
        return _attached, (taken[self._file],)

    def coming(self) -> int:
        """The epoch of the next pass."""
        if self._file is None:
            return self._here
        with self._locked():
            return self._read()[0]

    def next(self, worker: TorchWorker | None = None) -> int:
        """Begin a pass and give its epoch; workers of one DataLoader that begin it together get the same."""
        if self._file is None:
            self._here += 1
            return self._here - 1
        with self._locked():
            coming, passes = self._read()
            if worker is not None:
                for name, epoch, come in reversed(passes):
                    # One that comes a second time begins another pass: workers that are kept have one name for all.
                    if name == worker.of and worker.id not in come:
                        come.append(worker.id)
                        self._write(coming, passes)
                        return epoch
                passes.append((worker.of, coming, [worker.id]))
            self._write(coming + 1, passes[-_PASSES:])
            return coming

    def set(self, epoch: int) -> None:
        """Make ``epoch`` the next."""
        self._here = epoch
        if self._file is not None:
            with self._locked():
                self._write(epoch, self._read()[1])

    def reach(self, epoch: int) -> None:
        """Make ``epoch`` the next, unless it is past."""
        if self._file is None:
            self._here = max(self._here, epoch)
        else:
            with self._locked():
                coming, passes = self._read()
                self._write(max(coming, epoch), passes)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        assert self._file is not None
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _read(self) -> tuple[int, list[_Pass]]:
        assert self._file is not None
        coming, passes = json.loads(os.pread(self._file, _ROOM, 0))
        return coming, passes

    def _write(self, coming: int, passes: list[_Pass]) -> None:
        assert self._file is not None
        text = json.dumps([coming, passes]).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))


def _unnamed() -> int:
    """A file in memory that is gone with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-epochs")
    file, path = tempfile.mkstemp(prefix="penstock-")
    os.unlink(path)
    return file


def _attached(file: Any) -> Epochs:
    epochs = Epochs()
    epochs._attach(os.dup(file.detach()))  # what comes several times has one file
    return epochs
