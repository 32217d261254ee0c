"""Where the bytes of an archive go: through a compressor, past the checksums, into a draft; in the background."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import queue
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from penstock.errors import MissingExtra, PlanError
from penstock.formats.publish import Draft
from penstock.formats.tar.compression import SUFFIXES
from penstock.formats.tar.index import GridSum

Job = Callable[[], object]


class Sink(io.RawIOBase):
    """A draft that keeps the checksums and the number of its bytes."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.hash = hashlib.sha256()
        self.grid = GridSum()
        self.count = 0

    def writable(self) -> bool:
        """Tell that it can be written."""
        return True

    def write(self, data: Any) -> int:
        """Write it all."""
        self.hash.update(data)
        self.grid.update(data)
        self._draft.write(data)
        self.count += len(data)
        return len(data)


class OpenFile:
    """A file of the user's as a draft: it is written to as it is, and stays."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def publish(self) -> None:
        """It is where it should be."""

    def drop(self) -> None:
        """What it has got stays there."""


def compressor(sink: Sink, kind: str | None) -> Any:
    """Put a compressor before a file; the same bytes come out for the same bytes in.

    Raises:
        PlanError: There is no such compression.
        MissingExtra: It is zstd and there is no zstandard.
    """
    file = cast(BinaryIO, sink)
    if kind is None:
        return sink
    if kind == "gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6)
    if kind == "bz2":
        return bz2.BZ2File(file, "wb")
    if kind == "xz":
        return lzma.LZMAFile(file, "wb")
    if kind != "zst":
        raise PlanError(f"unknown compression {kind!r}: one of {', '.join(SUFFIXES)}")
    try:
        import zstandard
    except ImportError as exc:
        raise MissingExtra("writing zstd", "zstd") from exc
    return zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(file, closefd=False)


def at_once(job: Job) -> None:
    """Do a job here and now."""
    job()


class Line:
    """A thread that does jobs one after the other; after one that failed, none.

    The failure is raised to whoever gives the next job, or ends the line.
    """

    def __init__(self, name: str, room: int) -> None:
        """Begin; with ``room`` jobs waiting, giving another one waits too."""
        self._jobs: queue.Queue[Job | None] = queue.Queue(room)
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __call__(self, job: Job) -> None:
        """Give it a job."""
        self._check()
        self._jobs.put(job)

    def finish(self) -> None:
        """Wait until all is done, and end."""
        self._end()
        self._check()

    def stop(self) -> None:
        """End after the job at hand; those that wait are not done."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._failure is None and not self._stopped:
                try:
                    job()
                except BaseException as exc:  # raised again where somebody can see it
                    self._failure = exc
            del job
