"""Objects of all other schemes, through fsspec: ``gs``, ``az``, ``hf``, ``sftp`` and whatever else it supports."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.errors import StorageError, import_extra
from penstock.storage.protocol import (
    Info,
    Listed,
    NotFound,
    Upload,
    changed_error,
    pairs_of,
    past_end_error,
    per_process,
    range_size,
    redacted,
    scheme,
)  # fmt: skip
from penstock.storage.retry import Retry, TransientError, check_retry, with_retries

_PIECE_BYTES = 4 << 20  # the size of one request of a stream: fsspec returns whole ranges
_TAG_KEYS = (  # what file systems report that changes with the content
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
_PERMANENT = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    NotImplementedError,
)
# Object stores, which show an object only when it is complete; on others it is written under a hidden name and renamed.
_ATOMIC_PUT = frozenset({"gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "s3a", "hf", "oci", "r2"})
_FEW_TRIES = Retry(tries=3)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FsspecStorage:
    """Reads and writes URLs of any scheme that fsspec knows.

    Attributes:
        options: Arguments of the fsspec file system, as (name, value) pairs; keys and tokens belong here.
        retry: How persistent to be, on top of the retries that the file system does by itself.
    """

    options: tuple[tuple[str, Any], ...] = field(default=(), repr=False, hash=False)  # values may be dicts
    retry: Retry = _FEW_TRIES

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", pairs_of("FsspecStorage(options=)", self.options))
        check_retry(self.retry)

    def info(self, url: str) -> Info:
        details = self._call(url, lambda filesystem: filesystem.info(url))
        if details.get("type") == "directory":
            raise StorageError("this is a folder", redacted(url))
        return Info(details.get("size"), _tag(details), True)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        size = range_size(start, stop, into)
        data: bytes = (
            self._call(url, lambda filesystem: filesystem.cat_file(url, start=start, end=stop)) if size else b""
        )
        if tag is not None and self.info(url).tag != tag:  # checked after the read, so that it covers what was read
            raise changed_error(url)
        if len(data) != size:
            raise past_end_error(url, self.info(url).size or 0, stop)
        if into is None:
            return data
        into.cast("B")[:] = data
        return into

    def stream(self, url: str) -> Iterator[bytes]:
        info = self.info(url)
        if info.size is None:
            raise StorageError("the file system does not report its size, so it cannot be streamed", redacted(url))
        for start in range(0, info.size, _PIECE_BYTES):
            yield bytes(self.read(url, start, min(start + _PIECE_BYTES, info.size), tag=info.tag))

    def list(self, prefix: str) -> Iterator[Listed]:
        folder = prefix.rstrip("/") + "/"
        root = self._filesystem(prefix)._strip_protocol(folder).rstrip("/") + "/"
        try:
            found = self._call(prefix, lambda filesystem: filesystem.find(folder, detail=True))
        except NotFound:
            found = {}
        below = {path.removeprefix(root): details for path, details in found.items() if path.startswith(root)}
        return (Listed(f"{folder}{name}", below[name].get("size"), _tag(below[name])) for name in sorted(below))

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        return _FsspecUpload(self, url)

    def delete(self, url: str) -> None:
        with suppress(NotFound):
            self._call(url, lambda filesystem: filesystem.rm_file(url))

    def local_path(self, url: str) -> str | None:
        return None

    def _call(self, url: str, action: Callable[[Any], _T]) -> _T:
        """Call ``action`` with the fsspec file system, with retries."""
        filesystem = self._filesystem(url)

        def attempt() -> _T:
            with translated_errors(url):
                return action(filesystem)

        return with_retries(attempt, url, self.retry)

    def _filesystem(self, url: str) -> Any:
        name = scheme(url)
        return per_process(("fsspec", name, repr(self.options)), lambda: self._make_filesystem(name, url))

    def _make_filesystem(self, name: str, url: str) -> Any:
        fsspec = import_extra("fsspec", f"{name}:// URLs", "fsspec")
        try:
            return fsspec.filesystem(name, skip_instance_cache=True, **dict(self.options))
        except ImportError as error:
            raise StorageError(f"{name}: URLs need a package that is not installed: {error}", redacted(url)) from None
        except ValueError:
            raise StorageError(f"there is no storage for {name}: URLs", redacted(url)) from None


class translated_errors:
    """A context that turns what fsspec raises into Penstock's errors, without the messages, which may hold tokens."""

    def __init__(self, url: str) -> None:
        self._url = redacted(url)

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, StorageError | TransientError):
            return
        if isinstance(error, FileNotFoundError):
            raise NotFound("there is no such object", self._url) from None
        if isinstance(error, PermissionError):
            raise StorageError("permission denied", self._url) from None
        if isinstance(error, _PERMANENT):
            raise StorageError(f"the file system refuses the operation ({type(error).__name__})", self._url) from None
        raise TransientError(f"the file system failed ({type(error).__name__})") from None


class _FsspecUpload(Upload):
    """Spills to a temporary file until commit, because some file systems show objects that are half written.

    The file has no name: a process that is killed leaves nothing.
    """

    def __init__(self, storage: FsspecStorage, url: str) -> None:
        super().__init__(url)
        self._storage, self._target = storage, url
        self._spill = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115 - closed by commit or abort

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._spill.write(data)
        except OSError as error:
            raise StorageError(
                f"the upload cannot be written to a temporary file: {error.strerror}", self.url
            ) from error

    def _commit(self) -> Info:
        self._spill.flush()
        self._storage._call(self._target, self._upload)
        self._spill.close()
        return self._storage.info(self._target)

    def _abort(self) -> None:
        self._spill.close()

    def _upload(self, filesystem: Any) -> None:
        self._spill.seek(0)  # where opening /dev/fd duplicates the descriptor
        path = f"/dev/fd/{self._spill.fileno()}"
        if scheme(self._target) in _ATOMIC_PUT:
            filesystem.put_file(path, self._target)
        else:
            folder, _, name = self._target.rpartition("/")
            partial = f"{folder}/.{name[:180]}.{secrets.token_hex(4)}.partial"
            filesystem.makedirs(folder, exist_ok=True)
            filesystem.put_file(path, partial)
            filesystem.mv(partial, self._target)
        filesystem.invalidate_cache()


def _tag(details: dict[str, Any]) -> str | None:
    """Return what identifies the content; the size alone does not."""
    values = [str(details[key]) for key in _TAG_KEYS if details.get(key) is not None]
    return "-".join([*values, str(details.get("size"))]) if values else None
