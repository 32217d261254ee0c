"""The bytes of a local file: memory-mapped, after decompression to a temporary file if it is compressed."""

from __future__ import annotations

import builtins
import functools
import io
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from penstock.blobs.compression import LIMITS, ArchiveLimits, decompressed, detect
from penstock.blobs.remote_bytes import Buffer, RemoteBytes, limited, new_buffer
from penstock.errors import DataError, StorageError

MAX_UNSIZED = 16 << 30  # a file whose server does not declare its size may have this many bytes
HEAD = 512  # bytes by which a file is recognised
_COPY_BYTES = 4 << 20  # twice the stored bytes of a block


class MappedFile(mmap.mmap):
    """A local file, mapped for reading; ranges can be copied without mapping their pages, which takes longer.

    Attributes:
        fd: The file, open for as long as the mapping exists.
    """

    fd: int

    @classmethod
    def of(cls, file: BinaryIO | io.RawIOBase) -> MappedFile:
        """Map an open file, which is not empty."""
        keep_freed_memory()
        mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.fd = os.dup(file.fileno())
        weakref.finalize(mapped, os.close, mapped.fd)
        return mapped

    def copied(self, start: int, stop: int) -> mmap.mmap | None:
        """Copy a range to a buffer of this thread, which is valid until the next call; None if it does not fit in.

        Raises:
            OSError: The file cannot be read.
        """
        return copied(self.fd, start, stop)


def copied(fd: int, start: int, stop: int) -> mmap.mmap | None:
    """Copy a range of an open file to a buffer of this thread, as :meth:`MappedFile.copied` does."""
    if stop - start > _COPY_BYTES or not hasattr(os, "preadv"):
        return None
    buffer, view = _copies.buffer
    return buffer if os.preadv(fd, [view[: stop - start]], start) == stop - start else None


@functools.cache
def keep_freed_memory() -> None:
    """Free one large block, after which glibc keeps the memory of dropped samples instead of returning it each time."""
    bytes(16 << 20)  # never touched; the allocator keeps up to twice as much from now on


class _Copies(threading.local):
    """A buffer for each thread."""

    def __init__(self) -> None:
        buffer = new_buffer(_COPY_BYTES)
        self.buffer = buffer, memoryview(buffer)


_copies = _Copies()


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a file, decompressed.

    Attributes:
        bytes: The bytes; of a damaged stream, those before the damage.
        problem: Why the bytes end early, if the compressed stream is damaged or refused.
    """

    bytes: Buffer | RemoteBytes
    problem: str | None = None

    @property
    def buffer(self) -> Buffer:
        """The bytes, where all of them are on this machine."""
        assert not isinstance(self.bytes, RemoteBytes)
        return self.bytes

    def cut(self, starts: Sequence[int], stops: Sequence[int]) -> list[builtins.bytes]:
        """Read many ranges.

        Raises:
            StorageError: A range cannot be fetched.
            DataError: A range arrived damaged.
        """
        content = self.bytes
        if isinstance(content, RemoteBytes):
            return content.cut(starts, stops)
        return [content[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def resized(self) -> bool:
        """Return whether the file has another size than when it was mapped; reading it further could crash."""
        return isinstance(self.bytes, mmap.mmap) and self.bytes.size() != len(self.bytes)


def open_content(
    path: str, url: str, limits: ArchiveLimits = LIMITS, detect: Callable[[bytes], str | None] = detect
) -> Content:
    """Map the file at ``path``; a compressed one is decompressed to an unlinked temporary file first.

    Args:
        path: The file.
        url: What to call it in errors.
        limits: How large it may become when it is decompressed.
        detect: Recognises the compression by the first 512 bytes.

    Raises:
        StorageError: The file cannot be read, or the temporary file cannot be written.
        MissingExtra: The file is compressed by zstd and zstandard is not installed.
    """
    try:
        with open(path, "rb") as file:
            kind = detect(file.read(HEAD))
            if kind is None:
                return Content(_mapped(file))
            file.seek(0)
            return _decompressed(file, kind, limits, url)
    except OSError as exc:
        if isinstance(exc, StorageError):
            raise
        raise StorageError(f"cannot read the file: {exc.strerror or exc}", url) from exc


def room_for(size: int | None, url: str) -> int:
    """Return how many bytes of a file may be written to the temporary folder.

    Args:
        size: The declared size; None if the storage does not say.
        url: What to call the file in errors.

    Raises:
        StorageError: The folder has no room for that many.
    """
    free = shutil.disk_usage(tempfile.gettempdir()).free
    limit = min(MAX_UNSIZED, free // 2) if size is None else size
    if limit > free:
        raise StorageError(f"its {size:,} bytes do not fit into {tempfile.gettempdir()}; set TMPDIR", url)
    return limit


def memory_file(size: int = 0) -> int:
    """Return the descriptor of a new file without a name, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


@contextmanager
def temporary_copy(chunks: Iterable[bytes], url: str, size: int | None) -> Iterator[str]:
    """Write fetched bytes to an unlinked temporary file, and provide a path that only this process can open.

    Args:
        chunks: The bytes.
        url: What to call the file in errors.
        size: How many bytes there are; None if the storage does not say.

    Raises:
        StorageError: The temporary folder has no room for that many bytes, or cannot be written.
    """
    within = limited(chunks, room_for(size, url), url)
    with tempfile.TemporaryFile(prefix="penstock-") as file, ExitStack() as connection:
        if isinstance(chunks, Generator):
            connection.callback(chunks.close)
        for chunk in within:
            try:
                file.write(chunk)
            except OSError as exc:
                problem = f"cannot write the fetched file to {tempfile.gettempdir()}: {exc.strerror or exc}"
                raise StorageError(problem, url) from exc
        file.flush()
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _mapped(file: BinaryIO) -> Buffer:
    return MappedFile.of(file) if os.fstat(file.fileno()).st_size else b""


def _decompressed(file: BinaryIO, kind: str, limits: ArchiveLimits, url: str) -> Content:
    packed = os.fstat(file.fileno()).st_size
    problem = None
    with tempfile.TemporaryFile(prefix="penstock-") as out:
        try:
            for chunk in decompressed(file, kind, lambda: packed, limits):
                _write(out, chunk, url)
        except DataError as exc:
            problem = exc.problem
            if problem.startswith("refused"):
                out.truncate(0)
        out.flush()
        return Content(_mapped(out), problem)


def _write(out: BinaryIO, chunk: bytes, url: str) -> None:
    try:
        out.write(chunk)
    except OSError as exc:
        problem = f"cannot decompress the file to {tempfile.gettempdir()}: {exc.strerror or exc}"
        raise StorageError(problem, url) from exc
