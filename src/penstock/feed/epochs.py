"""Counts the epochs of a dataset, together with the worker processes of a DataLoader."""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, reduction
from typing import Any

from penstock.blobs.content import memory_file
from penstock.feed.torch_workers import TorchWorker

_MAX_BYTES = 1 << 16  # more than the count ever needs
_MAX_PASSES = 8  # over one dataset that may be starting at the same time

# For each process that is being started, its duplicates of files by file descriptor.
_duplicates: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()

# A pass: the group of its workers, its epoch, and the ids of the workers that have started it.
_Pass = tuple[int, int, list[int]]


class Epochs:
    """Counts the passes over a dataset: each is the next epoch.

    A ``shared`` count is used by this process and by all processes that are forked or spawned from it. It is stored in
    an unnamed file and guarded by a file lock. A lock of ``multiprocessing`` would depend on how those processes are
    started, and needs another process for its cleanup.
    """

    __slots__ = ("__weakref__", "_file", "_upcoming")

    def __init__(self, first: int = 0) -> None:
        """Begin with epoch ``first``."""
        self._upcoming = first  # not used once the count is shared
        self._file: int | None = None

    @property
    def shared(self) -> bool:
        """Whether processes that are started from this one use the same count."""
        return self._file is not None or self in _shared_on_fork

    def share(self) -> None:
        """Let processes that are started from now on use this count."""
        if self._file is None:
            self._attach(memory_file())
            self._write(self._upcoming, [])

    def share_on_fork(self) -> None:
        """Share the count when this process forks; until then it takes no file descriptor."""
        _shared_on_fork.add(self)

    def _attach(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file)

    def __reduce__(self) -> tuple[Any, ...]:
        child = context.get_spawning_popen()
        if child is None:
            return Epochs, ()  # saved, or sent to a process that cannot share the file: a new count
        self.share()
        assert self._file is not None
        duplicates = _duplicates.setdefault(child, {})  # one per process, even if it receives the dataset several times
        if self._file not in duplicates:
            duplicates[self._file] = reduction.DupFd(self._file)
        return _unpickle_epochs, (duplicates[self._file],)

    def peek(self) -> int:
        """Return the epoch of the next pass."""
        if self._file is None:
            return self._upcoming
        with self._locked():
            return self._read()[0]

    def next(self, worker: TorchWorker | None = None) -> int:
        """Begin a pass and return its epoch: one and the same for all workers of a DataLoader."""
        if self._file is None:
            self._upcoming += 1
            return self._upcoming - 1
        with self._locked():
            upcoming, passes = self._read()
            if worker is not None:
                for group, epoch, started in reversed(passes):
                    # A worker that has started this pass begins another one: persistent workers keep their group.
                    if group == worker.group and worker.id not in started:
                        started.append(worker.id)
                        self._write(upcoming, passes)
                        return epoch
                passes.append((worker.group, upcoming, [worker.id]))
            self._write(upcoming + 1, passes[-_MAX_PASSES:])
            return upcoming

    def set(self, epoch: int) -> None:
        """Make ``epoch`` the next one."""
        self._upcoming = epoch
        if self._file is not None:
            with self._locked():
                self._write(epoch, self._read()[1])

    def reach(self, epoch: int) -> None:
        """Make ``epoch`` the next one, unless the count is beyond it."""
        if self._file is None:
            self._upcoming = max(self._upcoming, epoch)
        else:
            with self._locked():
                upcoming, passes = self._read()
                self._write(max(upcoming, epoch), passes)

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
        upcoming, passes = json.loads(os.pread(self._file, _MAX_BYTES, 0))
        return upcoming, passes

    def _write(self, upcoming: int, passes: list[_Pass]) -> None:
        assert self._file is not None
        text = json.dumps([upcoming, passes]).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))


_shared_on_fork: weakref.WeakSet[Epochs] = weakref.WeakSet()


def _share_before_fork() -> None:
    for epochs in list(_shared_on_fork):
        epochs.share()
    _shared_on_fork.clear()


os.register_at_fork(before=_share_before_fork)


def _unpickle_epochs(file: Any) -> Epochs:
    epochs = Epochs()
    epochs._attach(os.dup(file.detach()))  # several counts in this process may share the file
    return epochs
