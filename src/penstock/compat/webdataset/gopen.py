"""Streams by URL: local files, commands, and every storage that Penstock reads, behind WebDataset's table of schemes.

The module can be called: ``wds.gopen(url)`` is ``wds.gopen.gopen(url)``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from penstock.blobs.prefetch import Fetcher, read_whole
from penstock.compat.webdataset import utils
from penstock.storage import open_storage, redacted
from penstock.storage.protocol import Upload, per_process

info: dict[str, Any] = {}
_PIPE_CLOSED = (0, 141, -13)  # a command whose reader stopped early ends with SIGPIPE


class Pipe:
    """One end of a running command; a command that fails is an ``OSError`` for its reader or writer."""

    def __init__(
        self,
        *args: Any,
        mode: str = "rb",
        timeout: float = 7200.0,
        ignore_errors: bool = False,
        ignore_status: Any = (),
        bufsize: int = -1,
        **options: Any,
    ) -> None:
        self.ignore_errors, self.ignore_status, self.timeout = ignore_errors, [0, *ignore_status], timeout
        self.args = (args, options)
        end = "stdout" if mode[0] == "r" else "stdin"
        streams: dict[str, Any] = {end: subprocess.PIPE, "bufsize": max(bufsize, 1 << 16), **options}
        self.proc: subprocess.Popen[bytes] = subprocess.Popen(*args, **streams)
        self.stream: Any = getattr(self.proc, end)
        self.status: int | None = None

    def check_status(self, wait: bool = False) -> None:
        """Raise ``OSError`` if the command has ended with a status that is not ignored."""
        self.status = self.proc.wait(self.timeout) if wait else self.proc.poll()
        if self.status is not None and self.status not in self.ignore_status and not self.ignore_errors:
            raise OSError(f"{self.args}: exit {self.status}")

    def read(self, size: int = -1) -> bytes:
        return self._checked(self.stream.read(size))

    def read1(self, size: int = -1) -> bytes:
        return self._checked(self.stream.read1(size))

    def _checked(self, found: bytes) -> bytes:
        self.check_status(wait=not found)
        return found

    def write(self, data: Any) -> int:
        written: int = self.stream.write(data)
        self.check_status()
        return written

    def close(self) -> None:
        """Close the stream and wait for the command."""
        if not self.stream.closed:
            self.stream.close()
            self.check_status(wait=True)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a destructor has no caller
            self.close()


class RemoteStream(io.RawIOBase):
    """An object of a storage, front to back over several connections; fetching begins at once, in the background."""

    def __init__(self, url: str) -> None:
        fetcher = per_process("wds", Fetcher)
        self._chunks = self._fetched(url, fetcher, fetcher.next_priority())
        self._head: bytes | Exception = b""
        self._first = threading.Thread(target=self._load_first, name="penstock open", daemon=True)
        self._first.start()

    @staticmethod
    def _fetched(url: str, fetcher: Fetcher, priority: int) -> Generator[bytes]:
        storage = open_storage(url)
        if (path := storage.local_path(url)) is not None:
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    yield chunk
            return
        yield from read_whole(storage, url, redacted(url), storage.info(url), fetcher, priority)

    def _load_first(self) -> None:
        try:
            self._head = next(self._chunks, b"")
        except Exception as exc:  # raised to the reader
            self._head = exc

    def head(self) -> bytes:
        """Return the bytes at the front that have arrived, without consuming them; empty at the end."""
        self._first.join()
        if isinstance(self._head, Exception):
            raise self._head
        self._head = self._head or next(self._chunks, b"")
        return self._head

    def chunks(self) -> Iterator[bytes]:
        """Yield the remaining bytes in large pieces, without copying them."""
        while chunk := self.head():
            self._head = b""
            yield chunk

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Return ``size`` bytes, fewer only at the end."""
        parts, missing = [], sys.maxsize if size is None or size < 0 else size
        while missing and (chunk := self.head()):
            part, self._head = chunk[:missing], chunk[missing:]
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._first.join()
            self._chunks.close()
        super().close()


class UploadStream(io.RawIOBase):
    """An object being written; it appears when the stream is closed, and not if an error ends its ``with`` block."""

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
        if not self.closed:  # abandoned, not closed: the object must not appear
            self._upload.abort()
            super().close()


def gopen_file(url: str, mode: str = "rb", bufsize: int = -1) -> Any:
    """Open a local file, given as a path or as a ``file:`` URL."""
    return open(url2pathname(urlparse(url).path) if url.startswith("file:") else url, mode)


def gopen_pipe(url: str, mode: str = "rb", bufsize: int = 8192) -> Pipe:
    """Start the shell command of a ``pipe:`` URL; ``ValueError`` if commands are not trusted."""
    enforced = "gopen_pipe: unsafe_gopen is False, cannot open pipe URLs"
    utils.require_trust("pipe", f"{url!r} runs a shell command, which is refused", enforced)
    return Pipe(url[5:], mode=mode, shell=True, bufsize=bufsize, ignore_status=_PIPE_CLOSED)


def gopen_storage(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> RemoteStream | UploadStream:
    """Open an object of a storage: HTTP, S3, and by fsspec gs, az, hf, sftp and others."""
    storage = open_storage(url)  # an unknown scheme is an error here, not in the background
    return RemoteStream(url) if mode[0] == "r" else UploadStream(storage.put(url))


def gopen_error(url: str, *args: Any, **options: Any) -> Any:
    raise ValueError(f"{url}: no gopen handler defined")


gopen_curl = gopen_gsutil = gopen_hf = gopen_ais = gopen_htgs = gopen_storage
_SCHEMES = ("__default__", "http", "https", "s3", "gs", "hf", "az", "ais", "sftp", "ftps", "scp", "htgs")
gopen_schemes: dict[str, Callable[..., Any]] = {"pipe": gopen_pipe, **dict.fromkeys(_SCHEMES, gopen_storage)}
"""Which function opens which scheme, ``f(url, mode, bufsize)``; programs register their own here."""


def set_options(obj: Any, **options: Any) -> bool:
    """Set ``timeout``, ``ignore_errors`` or ``ignore_status`` of a pipe; False for any other stream."""
    if not isinstance(obj, Pipe):
        return False
    for name, value in options.items():
        if value is not None:
            setattr(obj, name, value)
    return True


def rewrite_url(url: str) -> str:
    """Apply the first matching rule of ``GOPEN_REWRITE="regex=replacement;..."``; ``ValueError`` if not trusted."""
    rules = os.environ.get("GOPEN_REWRITE")
    if rules is None:
        return url
    enforced = "rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment variables"
    utils.require_trust("pipe", "GOPEN_REWRITE in the environment changes URLs, which is refused", enforced)
    for rule in rules.split(";"):
        pattern, _, replacement = rule.partition("=")
        if (changed := re.sub("^" + pattern, replacement, url)) != url:
            return changed
    return url


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
    """Open a URL, ``"rb"`` or ``"wb"``; ``"-"`` is standard input or output."""
    if mode not in ("rb", "wb"):
        raise ValueError(f"gopen(mode={mode!r}): use 'rb' or 'wb'")
    if url == "-":
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    url = rewrite_url(url)
    scheme = urlparse(url).scheme
    if scheme in ("", "file"):
        if utils.enforce_security:
            raise ValueError("gopen: unsafe_gopen is False, cannot open local files")
        return gopen_file(url, mode)
    handler: Any = gopen_schemes.get(scheme, gopen_schemes["__default__"])
    return handler(url, mode, bufsize, **options)


def reader(url: str, **options: Any) -> Any:
    return gopen(url, "rb", **options)


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.gopen(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
