"""Remote bytes that are read while they arrive: the interface, and a stream that is kept in a temporary file."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from penstock.errors import DataError, StorageError
from penstock.storage.retry import wanted, while_wanted

Buffer = mmap.mmap | bytes
_MAX_WINDOW = 8 << 20
_END = 1 << 62  # an offset that no file has


class Window(NamedTuple):
    """A part of a file that is available.

    Attributes:
        start: Where it begins in the file.
        stop: Where it ends.
        data: Its bytes; more may follow, which do not belong to it.
    """

    start: int
    stop: int
    data: Buffer


def new_buffer(size: int) -> mmap.mmap:
    """Return memory of this process alone, in large pages, where the system has them; a slice of it is ``bytes``."""
    private = getattr(mmap, "MAP_PRIVATE", None)
    buffer = mmap.mmap(-1, size) if private is None else mmap.mmap(-1, size, flags=private | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


class RemoteBytes(ABC):
    """The bytes of a file that is still arriving; slices of it wait for their bytes."""

    problem: str | None = None  # why the bytes end early, if the compressed stream is damaged or refused

    def __len__(self) -> int:
        """Return the size of the file, and wait until it is known."""
        return self.reach(_END)

    @abstractmethod
    def __getitem__(self, sel: slice) -> bytes: ...

    @abstractmethod
    def reach(self, offset: int) -> int:
        """Wait until the bytes before ``offset`` can be read, or the size of the file is known and smaller.

        Returns:
            The size of the file, if it is known, else a number of bytes that are there: at least ``offset``.

        Raises:
            StorageError: The bytes cannot be fetched.
        """

    @abstractmethod
    def window(self, offset: int) -> Window:
        """Wait for the part that holds the byte at ``offset``; it stays valid until the next call.

        Parts begin and end at multiples of 512 bytes, as long as the offsets that are asked for do so.

        Raises:
            StorageError: The part cannot be fetched.
            DataError: The part arrived damaged.
        """

    @abstractmethod
    def cut(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        """Read many ranges.

        Raises:
            StorageError: A range cannot be fetched.
            DataError: A range arrived damaged.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop fetching, and free what is held."""


def limited(chunks: Iterable[bytes], limit: int, url: str) -> Iterator[bytes]:
    """Yield the chunks of a stream.

    Raises:
        StorageError: They have more than ``limit`` bytes.
    """
    arrived = 0
    for chunk in chunks:
        arrived += len(chunk)
        if arrived > limit:
            problem = f"the server declares no size, and sends more than {limit:,} bytes"
            raise StorageError(f"{problem}; copy it to a disk first", url)
        yield chunk


class StreamedBytes(RemoteBytes):
    """A stream, written to an unlinked temporary file by a thread as it arrives.

    Args:
        chunks: The stream.
        url: What to call it in errors.
    """

    def __init__(self, chunks: Iterator[bytes], url: str) -> None:
        self._url = url
        self._file = tempfile.TemporaryFile(prefix="penstock-", buffering=0)  # noqa: SIM115 - closed with the object
        weakref.finalize(self, self._file.close)
        self._changed = threading.Condition()
        self._arrived = 0
        self._ended = self._closed = False
        self._error: Exception | None = None
        thread = threading.Thread(target=self._receive, args=(chunks,), name="penstock stream", daemon=True)
        thread.start()

    def __getitem__(self, sel: slice) -> bytes:
        start, stop, _ = sel.indices(_END)
        stop = min(stop, self.reach(stop))
        return os.pread(self._file.fileno(), stop - start, start) if start < stop else b""

    def cut(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        return [self[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def reach(self, offset: int) -> int:
        with self._changed:
            while self._arrived < offset and not self._ended:
                if self._closed or not wanted():
                    raise StorageError("the read was cancelled: nothing waits for it any more", self._url)
                self._changed.wait(1.0)
            if self._arrived < offset and self._error is not None:
                raise self._error
            return self._arrived

    def window(self, offset: int) -> Window:
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        stop = min(self.reach(offset + 1), start + _MAX_WINDOW)
        if stop <= start:
            return Window(start, start, b"")
        data = mmap.mmap(self._file.fileno(), stop - start, access=mmap.ACCESS_READ, offset=start)
        return Window(start, stop, data)

    def mapped(self) -> Buffer:
        """Map the whole file, after its end has arrived; the bytes stay readable when this object is gone."""
        size = len(self)
        return mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) if size else b""

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _receive(self, chunks: Iterator[bytes]) -> None:
        try:
            with while_wanted(lambda: not self._closed):
                for chunk in chunks:
                    self._write(chunk)
                    with self._changed:
                        self._arrived += len(chunk)
                        self._changed.notify_all()
                        if self._closed:
                            break
        except DataError as exc:
            self.problem = exc.problem
        except Exception as exc:  # raised where the bytes are read
            self._error = exc
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _write(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as exc:
            problem = f"cannot write the fetched file to {tempfile.gettempdir()}: {exc.strerror or exc}"
            raise StorageError(problem, self._url) from exc


class ChunkReader:
    """A stream of chunks as a file that is read front to back."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes of one chunk; none at the end.

        Raises:
            StorageError: The stream cannot be read.
        """
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        found, self._rest = self._rest[:size], self._rest[size:]
        return bytes(found)

    def close(self) -> None:
        """End the transfer."""
        if (close := getattr(self._chunks, "close", None)) is not None:
            close()
