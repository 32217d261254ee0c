"""Files of this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

from penstock.errors import StorageError
from penstock.storage.protocol import Info, Listed, NotFound, Upload, changed, span, too_short
from penstock.storage.urls import local_path

_PIECE = 1 << 20  # one read from the disk's cache: larger ones gain nothing


@dataclass(frozen=True, slots=True)
class Local:
    """Reads and writes paths and ``file:`` URLs."""

    def info(self, url: str) -> Info:
        with _open(url) as file:
            return _info(file)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        size = span(start, stop, into)
        with _open(url) as file:
            _must_be(file, url, tag)
            file.seek(start)
            data = file.read(size) if into is None else b""
            came = len(data) if into is None else file.readinto(into)
            if came < size:
                raise too_short(url, os.fstat(file.fileno()).st_size, stop)
            _must_be(file, url, tag)
        return data if into is None else into

    def stream(self, url: str) -> Iterator[bytes]:
        with _open(url) as file:
            tag = _info(file).tag
            while piece := file.read(_PIECE):
                yield piece
            _must_be(file, url, tag)

    def list(self, prefix: str) -> Iterator[Listed]:
        folder = local_path(prefix)
        is_url = prefix.startswith("file:")
        found = []
        for parent, _, names in os.walk(folder, onerror=_refuse):
            for path in (os.path.join(parent, name) for name in names if not _is_partial(name)):
                if os.path.isfile(path):
                    found.append((f"file://{os.path.abspath(path)}" if is_url else path, os.path.getsize(path)))
        return (Listed(*one) for one in sorted(found))

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return _FileUpload(url)

    def delete(self, url: str) -> None:
        try:
            os.unlink(local_path(url))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _error(error, url) from error

    def local_path(self, url: str) -> str | None:
        return local_path(url)


class _FileUpload(Upload):
    """A hidden file in the same folder, renamed when complete."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._path = os.path.abspath(local_path(url))
        folder, name = os.path.split(self._path)
        self._partial = os.path.join(folder, f".{name[:180]}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = open(self._partial, "xb", buffering=0)  # noqa: SIM115 - it is closed by commit or abort
        except OSError as error:
            raise _error(error, url) from error

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise _error(error, self.url) from error

    def _commit(self) -> Info:
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)
            _sync_folder(os.path.dirname(self._path))
        except OSError as error:
            raise _error(error, self.url) from error
        with _open(self._path) as file:
            return _info(file)

    def _abort(self) -> None:
        self._file.close()
        try:
            os.unlink(self._partial)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _error(error, self.url) from error


def _open(url: str) -> BufferedReader:
    try:
        return open(local_path(url), "rb")
    except OSError as error:
        raise _error(error, url) from error


def _info(file: BufferedReader) -> Info:
    stat = os.fstat(file.fileno())
    return Info(stat.st_size, f"{stat.st_mtime_ns}-{stat.st_size}-{stat.st_ino}", True)


def _must_be(file: BufferedReader, url: str, tag: str | None) -> None:
    if tag is not None and _info(file).tag != tag:
        raise changed(url)


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


def _sync_folder(folder: str) -> None:
    """Make the new name survive a power cut too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise _error(error, str(error.filename)) from error


def _error(error: OSError, url: str) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return NotFound("there is no such file", url)
    if isinstance(error, IsADirectoryError):
        return StorageError("this is a folder", url)
    if isinstance(error, PermissionError):
        return StorageError("it may not be opened: permission denied", url)
    return StorageError(f"{(error.strerror or type(error).__name__).lower()}", url)
