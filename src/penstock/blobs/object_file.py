"""An object of a storage as a file: read front to back while it arrives, or written and published when it is closed."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Generator, Iterator
from typing import Any

from penstock.blobs.background import join_thread
from penstock.blobs.prefetch import Fetcher, read_whole
from penstock.storage import Storage, Upload, open_storage, redacted
from penstock.storage.protocol import per_process


class ObjectReader(io.BufferedIOBase):
    """An object that is fetched over several connections, from the first read on or from :meth:`fetch` on.

    All files of a process share one memory budget, in the order in which they were opened.
    """

    def __init__(self, url: str) -> None:
        fetcher = per_process(ObjectReader, Fetcher)
        self._fetched = _fetched(open_storage(url), url, fetcher, fetcher.next_priority())
        self._chunk, self._at = b"", 0
        self._error: Exception | None = None
        self._opening: threading.Thread | None = None

    def fetch(self, after: ObjectReader | None = None) -> None:
        """Start to fetch in the background: when the first bytes of ``after``, which is needed first, have arrived."""
        before = None if after is None else after._opening
        self._opening = threading.Thread(target=self._open, args=(before,), name="penstock open", daemon=True)
        self._opening.start()

    def _open(self, before: threading.Thread | None) -> None:
        try:
            if before is not None:
                before.join()
            self._chunk = next(self._fetched, b"")
        except Exception as exc:  # raised to the reader
            self._error = exc

    def _has_more(self) -> bool:
        """Wait for bytes that were not read; return False at the end."""
        if self._opening is None:
            self.fetch()
        assert self._opening is not None
        join_thread(self._opening)
        if self._error is not None:
            raise self._error
        if self._at == len(self._chunk):
            self._chunk, self._at = next(self._fetched, b""), 0
        return bool(self._chunk)

    def peek(self, size: int) -> bytes:
        """Return up to ``size`` of the next bytes without reading them; none at the end.

        Raises:
            StorageError: The object cannot be read.
        """
        return self._chunk[self._at : self._at + size] if self._has_more() else b""

    def chunks(self) -> Iterator[bytes]:
        """Read the rest in large pieces, which are not copied.

        Raises:
            StorageError: The object cannot be read.
        """
        while self._has_more():
            yield self.read1()

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        found = self.peek(sys.maxsize if size < 0 else size)
        self._at += len(found)
        return found

    def read(self, size: int | None = -1) -> bytes:
        parts, missing = [], sys.maxsize if size is None or size < 0 else size
        while missing and (part := self.read1(missing)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        if not self.closed:
            if self._opening is not None:
                join_thread(self._opening)
            self._fetched.close()
        super().close()


def _fetched(storage: Storage, url: str, fetcher: Fetcher, priority: int) -> Generator[bytes]:
    yield from read_whole(storage, url, redacted(url), storage.info(url), fetcher, priority)


class ObjectWriter(io.RawIOBase):
    """An object that appears when this file is closed, and not if an error ends its ``with`` block or it is dropped."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._upload.write(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._upload.commit()

    def __exit__(self, error_type: Any, *error: Any) -> None:
        if error_type is not None:
            self.__del__()
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            self._upload.abort()
            super().close()
