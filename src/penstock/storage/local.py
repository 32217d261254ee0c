"""Files on this machine."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

from penstock.errors import StorageError
from penstock.storage.protocol import Info, Listed, NotFound, Upload, changed_error, past_end_error, range_size
from penstock.storage.urls import local_path

_PIECE_BYTES = 1 << 20  # larger reads from the page cache are not faster


@dataclass(frozen=True, slots=True)
class Local:
    """Reads and writes paths and ``file:`` URLs."""

    def info(self, url: str) -> Info:
        with _open(url) as file:
            return _info(file)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        size = range_size(start, stop, into)
        with _open(url) as file:
            _require_tag(file, url, tag)
            file.seek(start)
            data = file.read(size) if into is None else b""
            read_size = len(data) if into is None else file.readinto(into)
            if read_size < size:
                raise past_end_error(url, os.fstat(file.fileno()).st_size, stop)
            _require_tag(file, url, tag)
        return data if into is None else into

    def stream(self, url: str) -> Iterator[bytes]:
        with _open(url) as file:
            tag = _info(file).tag
            while piece := file.read(_PIECE_BYTES):
                yield piece
            _require_tag(file, url, tag)

    def list(self, prefix: str) -> Iterator[Listed]:
        folder = local_path(prefix)
        is_url = prefix.startswith("file:")
        found = []
        for parent, _, names in os.walk(folder, onerror=_raise_unless_missing):
            for path in (os.path.join(parent, name) for name in names if not _is_partial(name)):
                if os.path.isfile(path):
                    found.append((f"file://{os.path.abspath(path)}" if is_url else path, os.path.getsize(path)))
        return (Listed(url, size) for url, size in sorted(found))

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


def is_special(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a FIFO, a device or a socket: no file may replace it, so it is written to directly."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


class _FileUpload(Upload):
    """Writes to a hidden file beside the target (of a link, the file it leads to), which is renamed at commit."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        path = local_path(url)
        self._special = is_special(path)
        self._path = path if self._special else os.path.realpath(path)
        folder, name = os.path.split(self._path)
        self._partial = os.path.join(folder, f".{name[:180]}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        try:
            if self._special:
                self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by commit or abort
            else:
                os.makedirs(folder, exist_ok=True)
                self._file = open(self._partial, "xb", buffering=0)  # noqa: SIM115
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
            if self._special:
                self._file.close()
                return Info(self.written, None, False)
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
        if self._special:
            return
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


def _require_tag(file: BufferedReader, url: str, tag: str | None) -> None:
    if tag is not None and _info(file).tag != tag:
        raise changed_error(url)


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


def _sync_folder(folder: str) -> None:
    """Flush the folder to disk, so that the new name survives a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise _error(error, str(error.filename)) from error


def _error(error: OSError, url: str) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return NotFound("there is no such file", url)
    if isinstance(error, IsADirectoryError):
        return StorageError("this is a folder", url)
    if isinstance(error, PermissionError):
        return StorageError("permission denied", url)
    return StorageError(f"{(error.strerror or type(error).__name__).lower()}", url)
