"""The storage protocol, and how a URL finds its storage.

A storage is a small value that holds settings, not connections. It can be pickled, sent to other processes and used by
many threads at once. Connections and clients are created on first use, once per process, and again in a forked child.
"""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable
from urllib.parse import parse_qsl, urlsplit

from penstock.errors import PlanError, StorageError

_URL = re.compile(r"^([a-z][a-z0-9+.-]+)://(?:([^/?#]*)@)?([^?#]*)(\?[^#]*)?(#.*)?$", re.IGNORECASE | re.DOTALL)
_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):", re.IGNORECASE)
_SECRET = re.compile(r"token|secret|passw|credential|jwt|api_?key|access_?key", re.IGNORECASE)
_SIGNATURE = re.compile(r"(?:.*-)?sig(?:nature)?", re.IGNORECASE)
_SIGNED_WITH = re.compile(r"x-[a-z]+-.*|.*accesskeyid|.*accessid|expires|policy|key-pair-id|s[a-z]{1,4}", re.IGNORECASE)
_LITERAL_KEYS = frozenset({"s3", "memory"})  # these URLs have no query: "?" and "#" are part of the key
_BUILT_IN = {
    "file": "penstock.storage.local:Local",
    "memory": "penstock.storage.memory:Memory",
    "http": "penstock.storage.http:HTTP",
    "https": "penstock.storage.http:HTTP",
    "s3": "penstock.storage.s3:S3",
}
_ENTRY_POINT_GROUP = "penstock.storages"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Info:
    """What is known about an object without reading it.

    Attributes:
        size: Size in bytes; ``None`` if the server does not report it.
        tag: Identifies the content: it changes when the content does. ``None`` if the storage cannot detect changes.
        ranges: Whether a byte range can be read without reading everything before it.
    """

    size: int | None
    tag: str | None
    ranges: bool


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing.

    Attributes:
        url: The object.
        size: Its size in bytes; None if the listing does not say.
        tag: Changes when the content does, see ``Info.tag``; None if the listing does not say.
    """

    url: str
    size: int | None
    tag: str | None = None


class Upload(ABC):
    """An object being written; it becomes visible, whole, at ``commit``. Leaving the context without one aborts."""

    def __init__(self, url: str) -> None:
        self.url = redacted(url)
        self.written = 0
        self._open = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes. The caller may reuse the buffer when the call returns.

        Raises:
            StorageError: The bytes cannot be stored, or the upload has ended.
        """
        self._require_open()
        self._write(data)
        self.written += len(data)

    def commit(self) -> Info:
        """Make the object visible. An upload that cannot be completed is aborted.

        Raises:
            StorageError: The upload cannot be completed, or has already ended.
        """
        self._require_open()
        try:
            info = self._commit()
        except BaseException:
            self.abort()
            raise
        self._open = False
        return info

    def abort(self) -> None:
        """Discard what was written. Does nothing once the upload has ended."""
        if self._open:
            self._open = False
            self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def _require_open(self) -> None:
        if not self._open:
            raise StorageError("the upload has ended: it was committed or aborted", self.url)

    @abstractmethod
    def _write(self, data: bytes | bytearray | memoryview) -> None: ...

    @abstractmethod
    def _commit(self) -> Info: ...

    @abstractmethod
    def _abort(self) -> None: ...


@runtime_checkable
class Storage(Protocol):
    """A place that holds objects. Every failure is a ``StorageError`` whose message is one sentence without secrets."""

    def info(self, url: str) -> Info:
        """Return the size and tag of an object.

        Raises:
            NotFound: The object does not exist.
            StorageError: The object cannot be read.
        """
        ...

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        """Read exactly the bytes from ``start`` up to, but not including, ``stop``.

        Args:
            url: The object.
            start: Offset of the first byte.
            stop: Offset after the last byte.
            into: A buffer of exactly ``stop - start`` bytes, which is filled and returned. Default: new bytes.
            tag: The tag that ``info`` returned; content with another tag is an error.

        Raises:
            NotFound: The object does not exist.
            StorageError: The object cannot be read, ends before ``stop``, or has changed.
            ValueError: The range is not valid, or ``into`` has another size.
        """
        ...

    def stream(self, url: str) -> Iterator[bytes]:
        """Yield an object front to back, in pieces of any size.

        Raises:
            NotFound: The object does not exist.
            StorageError: The object cannot be read, or changes while it is read.
        """
        ...

    def list(self, prefix: str) -> Iterator[Listed]:
        """List all objects below a folder, recursively and sorted by URL. A folder that does not exist is empty.

        Raises:
            StorageError: The folder cannot be listed.
        """
        ...

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        """Start to write an object. Committing the upload replaces an object of the same name.

        Args:
            url: The object.
            size_hint: The expected size, which need not be exact; storages choose part sizes by it.

        Raises:
            StorageError: The object cannot be written.
        """
        ...

    def delete(self, url: str) -> None:
        """Delete an object. Deleting one that does not exist is not an error.

        Raises:
            StorageError: The object cannot be deleted.
        """
        ...

    def local_path(self, url: str) -> str | None:
        """Return the path of an object that is a file on this machine, else ``None``."""
        ...


@runtime_checkable
class LateBuffers(Protocol):
    """A storage that asks for a buffer only when bytes arrive, so that waiting requests hold no memory. Optional."""

    def receive(self, url: str, start: int, stop: int, buffer: Callable[[], memoryview], tag: str | None) -> None:
        """Read as ``Storage.read`` does, into what ``buffer`` returns; after a broken connection it is called again.

        Raises:
            NotFound: The object does not exist.
            StorageError: The object cannot be read, ends before ``stop``, or has changed.
        """
        ...


Factory = Callable[[], Storage]
_registered: dict[str, Factory] = {}


def register(scheme: str, factory: Factory) -> None:
    """Serve every URL ``scheme://...`` in this process by the storage that ``factory`` returns.

    A package can do the same for all processes with an entry point in the group ``penstock.storages``: the name of the
    entry point is the scheme, its value is the factory.
    """
    _registered[scheme.lower()] = factory


def check_storage(storage: Any) -> None:
    """Require that ``storage`` is a storage or ``None``.

    Raises:
        PlanError: ``storage`` is something else.
    """
    if storage is not None and (isinstance(storage, type) or not hasattr(storage, "stream")):
        raise PlanError(f"storage={storage!r} is not a storage; pass one, such as ps.S3(...)")


def pairs_of(name: str, given: Any) -> tuple[tuple[str, Any], ...]:
    """Return the names and values in ``given``, pairs or a dict, as a tuple, which can be hashed.

    Raises:
        PlanError: ``given`` is something else; the message names the argument ``name``.
    """
    pairs = tuple(given.items() if isinstance(given, Mapping) else given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise PlanError(f"{name}: give (name, value) pairs, or a dict")
    return tuple((key, value) for key, value in pairs)


def open_storage(url: str, storage: Storage | None = None) -> Storage:
    """Return the storage that serves a URL: ``storage`` if given, else the one of the URL's scheme.

    Connects to nothing. A scheme is looked up among the registered ones, the built-in ones, the entry points, and
    then fsspec, which reports an unknown scheme when the storage is first used.

    Raises:
        PlanError: ``storage`` is not a storage.
    """
    if storage is not None:
        check_storage(storage)
        return storage
    name = scheme(url)
    if name in _registered:
        return _registered[name]()
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        built_in: Storage = getattr(import_module(module), attribute)()
        return built_in
    return (_from_entry_point(name) or _fsspec_storage)()


def _fsspec_storage() -> Storage:
    fallback: Storage = import_module("penstock.storage.fsspec").FsspecStorage()
    return fallback


@cache
def _from_entry_point(name: str) -> Factory | None:
    # Imported here: importlib.metadata takes longer to import than this whole package.
    for point in import_module("importlib.metadata").entry_points(group=_ENTRY_POINT_GROUP, name=name):
        factory: Factory = point.load()
        return factory
    return None


def scheme(url: str) -> str:
    """Return the scheme of a URL in lower case; a path has the scheme ``file``."""
    match = None if url.startswith("/") else _SCHEME.match(url)
    return match[1].lower() if match else "file"


def exists(storage: Storage, url: str) -> bool:
    """Return whether an object exists.

    Raises:
        StorageError: The storage cannot determine it: no permission, no such bucket, no answer.
    """
    try:
        storage.info(url)
    except NotFound:
        return False
    return True


class NotFound(StorageError):
    """The object does not exist."""


class Forbidden(StorageError):
    """Access is denied. Servers that do not allow listing also answer this for objects that do not exist."""


def redacted(url: str) -> str:
    """Return a URL that is safe to print: without user, password and query.

    >>> redacted("https://user:secret@host/a.tar?token=secret")
    'https://host/a.tar?...'
    """
    match = _URL.match(url)
    if not match or match[1].lower() == "file":
        return url
    kind, user, rest, query, fragment = match[1], match[2], match[3], match[4] or "", match[5] or ""
    if kind.lower() in _LITERAL_KEYS:
        return f"{kind}://{'anonymous@' if user == 'anonymous' else ''}{rest}{query}{fragment}"
    return f"{kind}://{rest}{'?...' if query else ''}"


def bare_url(url: str) -> str:
    """Return a path, or a URL without user, password, query and fragment.

    >>> bare_url("https://user:secret@host/a.tar?token=secret")
    'https://host/a.tar'
    """
    return redacted(without_query(url))


def without_query(url: str) -> str:
    """Return a path, or a URL without query and fragment."""
    match = _URL.match(url)
    if not match or match[1].lower() in ("file", *_LITERAL_KEYS):
        return url
    return url[: match.end(3)]


def unsigned(url: str) -> str:
    """Return a name for a URL that stays the same when its signature or token is renewed; it may hold other secrets.

    >>> unsigned("https://me:word@host/get?file=a.tar&token=abc")
    'https://host/get?... file=a.tar'
    """
    name = redacted(url)
    if not name.endswith("?..."):
        return name
    query = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    if any(_SIGNATURE.fullmatch(key) for key, _ in query):
        query = [(key, value) for key, value in query if not (_SIGNED_WITH.fullmatch(key) or _SIGNATURE.fullmatch(key))]
    return " ".join([name, *sorted(f"{key}={value}" for key, value in query if not _SECRET.search(key))])


def range_size(start: int, stop: int, into: memoryview | None) -> int:
    """Check the arguments of :meth:`Storage.read`, and return how many bytes they ask for.

    Raises:
        ValueError: The range is not valid, or ``into`` has another size.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"start={start}, stop={stop} is not a byte range; use 0 <= start <= stop")
    if into is not None and into.nbytes != stop - start:
        raise ValueError(f"the buffer has {into.nbytes} bytes, but the range has {stop - start}")
    return stop - start


def changed_error(url: str) -> StorageError:
    """Return the error for an object whose content has changed."""
    return StorageError("the object changed while it was being read", redacted(url))


def past_end_error(url: str, size: int, stop: int) -> StorageError:
    """Return the error for a read beyond the end of an object."""
    return StorageError(f"the object has {size:,} bytes, but bytes up to {stop:,} were requested", redacted(url))


_process_values: dict[Hashable, Any] = {}
_process_values_lock = threading.RLock()


def per_process(key: Hashable, make: Callable[[], _T]) -> _T:
    """Return this process's value for ``key``, created by ``make`` on first use. A forked child starts without any.

    Thread-safe: concurrent callers get the same value.
    """
    found: _T | None = _process_values.get(key)
    if found is None:
        with _process_values_lock:
            found = _process_values.get(key)
            if found is None:
                found = _process_values[key] = make()
    return found


def _reset_after_fork() -> None:
    """Drop the parent's connections, and its lock, which a thread that the child does not have may hold."""
    global _process_values, _process_values_lock
    _process_values, _process_values_lock = {}, threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)
