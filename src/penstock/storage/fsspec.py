"""Everything else, by way of fsspec: ``gs``, ``az``, ``hf``, ``sftp`` and whatever is installed for it."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.errors import StorageError
from penstock.storage.protocol import (
    Info,
    Listed,
    NotFound,
    Upload,
    changed,
    needed,
    own,
    redacted,
    scheme,
    span,
    too_short,
)  # fmt: skip
from penstock.storage.retry import Retry, Temporary, again

_PIECE = 4 << 20  # one request of a stream: fsspec reads whole ranges
_TAGS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "content_md5",
    "uid",
    "mtime",
    "updated",
    "LastModified",
    "last_modified",
    "created",
)
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, NotImplementedError)
# Stores that show an object when it is complete; elsewhere it is written under a hidden name and renamed.
_APPEAR_WHOLE = frozenset({"gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "s3a", "hf", "oci", "r2"})
_FEW = Retry(tries=3)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FsspecStorage:
    """Reads and writes URLs of any scheme that fsspec knows.

    Attributes:
        options: Given to the file system of fsspec, as pairs; keys and tokens belong here.
        retry: How patient to be, on top of what the file system does by itself.
    """

    options: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    retry: Retry = _FEW

    def info(self, url: str) -> Info:
        told = self._do(url, lambda files: files.info(url))
        if told.get("type") == "directory":
            raise StorageError("this is a folder", redacted(url))
        return Info(told.get("size"), _tag(told), True)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        size = span(start, stop, into)
        data: bytes = self._do(url, lambda files: files.cat_file(url, start=start, end=stop)) if size else b""
        if tag is not None and self.info(url).tag != tag:  # asked afterwards: what was read is then of that content
            raise changed(url)
        if len(data) != size:
            raise too_short(url, self.info(url).size or 0, stop)
        if into is None:
            return data
        into.cast("B")[:] = data
        return into

    def stream(self, url: str) -> Iterator[bytes]:
        info = self.info(url)
        if info.size is None:
            raise StorageError("its size is not known: it cannot be streamed", redacted(url))
        for at in range(0, info.size, _PIECE):
            yield bytes(self.read(url, at, min(at + _PIECE, info.size), tag=info.tag))

    def list(self, prefix: str) -> Iterator[Listed]:
        folder = prefix.rstrip("/") + "/"
        files = self._files(prefix)
        root = files._strip_protocol(folder).rstrip("/") + "/"
        try:
            found = self._do(prefix, lambda files: files.find(folder, detail=True))
        except NotFound:
            found = {}
        below = ((name.removeprefix(root), told.get("size")) for name, told in found.items() if name.startswith(root))
        return (Listed(f"{folder}{name}", size) for name, size in sorted(below, key=lambda one: one[0]))

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return _FsspecUpload(self, url)

    def delete(self, url: str) -> None:
        with suppress(NotFound):
            self._do(url, lambda files: files.rm_file(url))

    def local_path(self, url: str) -> str | None:
        return None

    def _do(self, url: str, action: Callable[[Any], _T]) -> _T:
        files = self._files(url)

        def once() -> _T:
            with guarded(url):
                return action(files)

        return again(once, url, self.retry)

    def _files(self, url: str) -> Any:
        """The file system of fsspec, made once a process."""
        name = scheme(url)
        return own(("fsspec", name, repr(self.options)), lambda: self._make(name, url))

    def _make(self, name: str, url: str) -> Any:
        fsspec = needed("fsspec", f"{name}:// URLs", "fsspec")
        try:
            return fsspec.filesystem(name, skip_instance_cache=True, **dict(self.options))
        except ImportError as error:
            raise StorageError(f"{name}: URLs need a package that is not installed: {error}", redacted(url)) from None
        except ValueError:
            raise StorageError(f"there is no storage for {name}: URLs", redacted(url)) from None


class guarded:
    """Turns what fsspec raises into what we raise, without its words: they may hold tokens."""

    def __init__(self, url: str) -> None:
        self._url = redacted(url)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, StorageError | Temporary):
            return
        if isinstance(error, FileNotFoundError):
            raise NotFound("there is no such object", self._url) from None
        if isinstance(error, PermissionError):
            raise StorageError("it may not be read or written: permission denied", self._url) from None
        if isinstance(error, _FINAL):
            raise StorageError(f"it cannot be done ({type(error).__name__})", self._url) from None
        raise Temporary(f"it failed ({type(error).__name__})") from None


class _FsspecUpload(Upload):
    """Kept in a file here until it is committed: file systems differ in what they show of an object half written."""

    def __init__(self, storage: FsspecStorage, url: str) -> None:
        super().__init__(url)
        self._storage, self._at = storage, url
        self._spool = tempfile.NamedTemporaryFile(prefix="penstock-")  # noqa: SIM115 - closed by commit or abort

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._spool.write(data)
        except OSError as error:
            raise StorageError(f"there is no room to prepare it: {error.strerror}", self.url) from error

    def _commit(self) -> Info:
        self._spool.flush()
        self._storage._do(self._at, self._upload)
        self._spool.close()
        return self._storage.info(self._at)

    def _abort(self) -> None:
        self._spool.close()

    def _upload(self, files: Any) -> None:
        if scheme(self._at) in _APPEAR_WHOLE:
            files.put_file(self._spool.name, self._at)
        else:
            folder, _, name = self._at.rpartition("/")
            partial = f"{folder}/.{name[:180]}.{secrets.token_hex(4)}.partial"
            files.makedirs(folder, exist_ok=True)
            files.put_file(self._spool.name, partial)
            files.mv(partial, self._at)
        files.invalidate_cache()


def _tag(told: dict[str, Any]) -> str | None:
    """What tells contents apart; the size alone does not."""
    marks = [str(told[name]) for name in _TAGS if told.get(name) is not None]
    return "-".join([*marks, str(told.get("size"))]) if marks else None
