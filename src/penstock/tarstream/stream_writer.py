"""Where copied samples go: standard output, one archive, or numbered shards."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

from penstock.blobs.background import BackgroundThread
from penstock.blobs.file_range import FileRange, runs
from penstock.errors import DataError, StorageError
from penstock.formats.tar.archive import BLOCK, EncodedSamples
from penstock.formats.tar.shard_names import on_disk
from penstock.storage import local_path

STDOUT = "-"
_BATCH = 1 << 20  # bytes handed to the system at once: with more of them on their way a pipe takes twice the time
_MOST_PIECES = 512  # of them; the system takes 1,024
_ROOM = 2  # batches on their way
_LIGHT = 8  # bytes that stay in their file weigh so much less: few large copies leave this process alone


class Outlet(Protocol):
    """Takes samples one after the other; what has a name appears when all is well at the end."""

    def write_parts(self, parts: EncodedSamples) -> int:
        """Add samples, and give the number of bytes they take.

        Raises:
            DataError: A key was written before.
            OSError: They cannot be written.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...


def open_outlet(target: str, compress: str | None = None) -> Outlet:
    """Open standard output (``-``), a path or a URL for one archive.

    A path or URL gets an index beside it. Both are loaded when needed: they need numpy, and standard output does not.

    Raises:
        PlanError: The compression is unknown.
        StorageError: Nothing can be written there.
    """
    if target != STDOUT:
        return _Named(target, compress)
    if compress is not None:
        return _Named(sys.stdout.buffer, compress)
    return StreamWriter(sys.stdout.fileno())


class StreamWriter:
    """Writes an archive to a file descriptor, in a thread of its own; what lies in files is copied by the system."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._keys: set[str] = set()
        self._pieces: list[Any] = []
        self._waiting = 0
        self._line = BackgroundThread("penstock-ink", _ROOM)
        with suppress(OSError):  # no pipe, or not allowed: as it is
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)

    def write_parts(self, parts: EncodedSamples) -> int:
        """Add samples.

        Raises:
            DataError: A key was written before.
            OSError: Earlier ones could not be written.
        """
        self._enter(parts.keys)
        first = parts.pieces[0]
        if type(first) is not FileRange:
            self._pieces += parts.pieces
            self._grown(parts.nbytes)
            return parts.nbytes
        last = self._pieces[-1] if self._pieces else None
        if type(last) is not FileRange or not last.grow(first):
            self._pieces.append(first)  # all of the samples, and made for them: it may grow
        self._grown(parts.nbytes // _LIGHT)
        return parts.nbytes

    def _enter(self, keys: list[str]) -> None:
        if not self._keys.isdisjoint(keys):
            again = next(key for key in keys if key in self._keys)
            raise DataError("the key was written before; --rename gives other keys", STDOUT, again)
        self._keys.update(keys)

    def _grown(self, nbytes: int) -> None:
        self._waiting += nbytes
        if self._waiting >= _BATCH or len(self._pieces) >= _MOST_PIECES:
            self._flush()

    def _flush(self) -> None:
        pieces, self._pieces, self._waiting = self._pieces, [], 0
        self._line(partial(_write_all, self._fd, pieces))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._line.stop(after_all=issubclass(kind, Exception) and not issubclass(kind, BrokenPipeError))
            return
        self._pieces.append(bytes(2 * BLOCK))
        try:
            self._flush()
        finally:
            self._line.finish()


def _write_all(fd: int, pieces: list[Any]) -> None:
    """Write all pieces, in order."""
    for run in runs(pieces):
        if isinstance(run, FileRange):
            run.copy_to(fd)
        else:
            _write_some(fd, [piece for piece in run if len(piece)])


def _write_some(fd: int, rest: list[Any]) -> None:
    """Write buffers, however few bytes the system takes at once."""
    while rest:
        wrote = os.writev(fd, rest[:1024])
        done = 0
        while done < len(rest) and wrote >= len(rest[done]):
            wrote -= len(rest[done])
            done += 1
        rest = rest[done:]
        if wrote:
            rest[0] = memoryview(rest[0])[wrote:]


class _Named:
    """One archive, of a name with an index beside it; written, compressed and summed in the background."""

    def __init__(self, target: str | BinaryIO, compress: str | None) -> None:
        lines = {"ink": 16, "sums": 16}
        self._lines = {name: BackgroundThread(f"penstock-{name}", room) for name, room in lines.items()}
        module = import_module("penstock.formats.tar.writer")
        try:
            if isinstance(target, str):
                _make_folder(target)
            self._writer = module.TarWriter(target, compress=compress, **self._lines)
        except BaseException:
            self._stop(False)
            raise

    def write_parts(self, parts: EncodedSamples) -> int:
        written: int = self._writer.write_parts(parts)
        return written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._stop(False)
            self._writer.abort()
            return
        try:
            self._writer.close()
            for line in self._lines.values():
                line.finish()
        except BaseException:
            self._stop(False)
            self._writer.abort()
            raise

    def _stop(self, after_all: bool) -> None:
        for line in self._lines.values():
            line.stop(after_all)


def _make_folder(target: str) -> None:
    """Make the folder of a local path; elsewhere there are none to be made."""
    if not on_disk(target):
        return
    folder = os.path.dirname(local_path(target))
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except OSError as exc:
        raise StorageError(f"the folder cannot be made: {exc.strerror or exc}", folder) from exc
