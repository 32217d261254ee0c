"""Write copied samples to standard output, or to one archive with an index."""

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
from penstock.formats.tar.archive import END_MARKER, EncodedSamples
from penstock.formats.tar.shard_names import on_disk
from penstock.storage import local_path

STDOUT = "-"
_BATCH_BYTES = 1 << 20  # written at once: larger batches take a pipe twice the time
_BATCH_PIECES = 512  # writev takes at most 1,024
_MAX_IOVECS = 1024
_QUEUED_BATCHES = 2  # to a pipe
_QUEUED_FILE_BATCHES = 16  # to a file, per thread
_RANGE_WEIGHT = 8  # a byte that stays in its file counts 1/8: a few large copies leave this process idle
_PIPE_BYTES = 1 << 20  # the most that an unprivileged process may ask for


class StreamWriter(Protocol):
    """Writes samples one after the other; a named archive appears only if the ``with`` block succeeds."""

    def write_encoded(self, encoded: EncodedSamples) -> int:
        """Add samples and return the number of archive bytes they take.

        Raises:
            DataError: A key was written before.
            OSError: These samples or earlier ones cannot be written.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...


def open_stream_writer(target: str, compress: str | None = None) -> StreamWriter:
    """Open standard output (``-``), a path or a URL for one archive; a path or URL gets an index beside it.

    Raises:
        PlanError: The compression is unknown.
        StorageError: The target cannot be written.
    """
    if target != STDOUT:
        return _ArchiveStreamWriter(target, compress)
    if compress is not None:
        return _ArchiveStreamWriter(sys.stdout.buffer, compress)
    return DescriptorStreamWriter(sys.stdout.fileno())


class DescriptorStreamWriter:
    """Writes an archive to a file descriptor in a background thread; the system copies ranges of files.

    Needs no numpy, so that a pipeline of tools starts quickly.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._keys: set[str] = set()
        self._pieces: list[Any] = []
        self._pending_bytes = 0
        self._write_thread = BackgroundThread("penstock-write", _QUEUED_BATCHES)
        with suppress(OSError, AttributeError):  # not a pipe, not permitted, or not Linux
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def write_encoded(self, encoded: EncodedSamples) -> int:
        self._add_keys(encoded.keys)
        first = encoded.pieces[0]
        if type(first) is not FileRange:
            self._pieces += encoded.pieces
            self._flush_if_full(encoded.nbytes)
            return encoded.nbytes
        last = self._pieces[-1] if self._pieces else None
        if type(last) is not FileRange or not last.grow(first):
            self._pieces.append(first)  # the only piece of these samples and used nowhere else: it may grow
        self._flush_if_full(encoded.nbytes // _RANGE_WEIGHT)
        return encoded.nbytes

    def _add_keys(self, keys: list[str]) -> None:
        if not self._keys.isdisjoint(keys):
            repeated = next(key for key in keys if key in self._keys)
            raise DataError("the key was written before; make keys unique with penstock cat --rename", STDOUT, repeated)
        self._keys.update(keys)

    def _flush_if_full(self, nbytes: int) -> None:
        self._pending_bytes += nbytes
        if self._pending_bytes >= _BATCH_BYTES or len(self._pieces) >= _BATCH_PIECES:
            self._flush()

    def _flush(self) -> None:
        pieces, self._pieces, self._pending_bytes = self._pieces, [], 0
        self._write_thread(partial(_write_pieces, self._fd, pieces))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._write_thread.stop(after_all=issubclass(kind, Exception) and not issubclass(kind, BrokenPipeError))
            return
        self._pieces.append(END_MARKER)
        try:
            self._flush()
        finally:
            self._write_thread.finish()


def _write_pieces(fd: int, pieces: list[Any]) -> None:
    for run in runs(pieces):
        if isinstance(run, FileRange):
            run.copy_to(fd)
        else:
            _write_buffers(fd, [piece for piece in run if len(piece)])


def _write_buffers(fd: int, buffers: list[Any]) -> None:
    """Write all buffers, even if the system accepts only some bytes at once."""
    while buffers:
        written = os.writev(fd, buffers[:_MAX_IOVECS])
        done = 0
        while done < len(buffers) and written >= len(buffers[done]):
            written -= len(buffers[done])
            done += 1
        buffers = buffers[done:]
        if written:
            buffers[0] = memoryview(buffers[0])[written:]


class _ArchiveStreamWriter:
    """Writes, compresses and hashes one archive in background threads; a named archive gets an index beside it."""

    def __init__(self, target: str | BinaryIO, compress: str | None) -> None:
        self._threads = {
            f"{task}_thread": BackgroundThread(f"penstock-{task}", _QUEUED_FILE_BATCHES) for task in ("write", "hash")
        }
        module = import_module("penstock.formats.tar.writer")  # needs numpy, which standard output does not
        try:
            if isinstance(target, str):
                _make_folder(target)
            self._writer = module.TarWriter(target, compress=compress, **self._threads)
        except BaseException:
            self._stop()
            raise

    def write_encoded(self, encoded: EncodedSamples) -> int:
        nbytes: int = self._writer.write_encoded(encoded)
        return nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._stop()
            self._writer.abort()
            return
        try:
            self._writer.close()
            for thread in self._threads.values():
                thread.finish()
        except BaseException:
            self._stop()
            self._writer.abort()
            raise

    def _stop(self) -> None:
        for thread in self._threads.values():
            thread.stop(after_all=False)


def _make_folder(target: str) -> None:
    """Create the folder of a local path; remote storages need none."""
    if not on_disk(target):
        return
    folder = os.path.dirname(local_path(target))
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except OSError as exc:
        raise StorageError(f"cannot create the folder: {exc.strerror or exc}", folder) from exc
