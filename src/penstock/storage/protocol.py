"""What a storage promises, and which one serves a URL.

A storage is a small value: settings, no connections. It can be pickled, sent to other processes and used by many
threads at once; what it needs to talk is made when first used, once a process, and again in a forked child.
"""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from penstock.errors import MissingExtra, PlanError, StorageError

_URL = re.compile(r"^([a-z][a-z0-9+.-]+)://(?:([^/?#]*)@)?([^?#]*)(\?[^#]*)?(#.*)?$", re.IGNORECASE | re.DOTALL)
_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]+):", re.IGNORECASE)
_KEYS_AS_THEY_ARE = frozenset({"s3", "memory"})  # no queries there: a question mark is a letter of the name
_BUILT_IN = {
    "file": "penstock.storage.local:Local",
    "memory": "penstock.storage.memory:Memory",
    "http": "penstock.storage.http:Http",
    "https": "penstock.storage.http:Http",
    "s3": "penstock.storage.s3:S3",
}
_GROUP = "penstock.storages"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Info:
    """What is known of an object without reading it.

    Attributes:
        size: Its bytes; ``None`` where the server does not say.
        tag: Another one means another content; ``None`` where nothing tells contents apart.
        ranges: Whether a part can be had without all that lies before it.
    """

    size: int | None
    tag: str | None
    ranges: bool


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing."""

    url: str
    size: int | None


class Upload(ABC):
    """An object on its way: nothing is visible before ``commit``; leaving the context without it aborts."""

    def __init__(self, url: str) -> None:
        self.url = redacted(url)
        self.written = 0
        self._open = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; the caller may reuse the buffer at once.

        Raises:
            StorageError: they cannot be stored, or the upload has ended.
        """
        self._must_be_open()
        self._write(data)
        self.written += len(data)

    def commit(self) -> Info:
        """Make the object visible, whole; an upload that cannot be completed is aborted.

        Raises:
            StorageError: it cannot be completed, or has ended before.
        """
        self._must_be_open()
        try:
            info = self._commit()
        except BaseException:
            self.abort()
            raise
        self._open = False
        return info

    def abort(self) -> None:
        """Drop what was written; after ``commit`` or a second time it does nothing."""
        if self._open:
            self._open = False
            self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()

    def _must_be_open(self) -> None:
        if not self._open:
            raise StorageError("this upload has ended", self.url)

    @abstractmethod
    def _write(self, data: bytes | bytearray | memoryview) -> None: ...

    @abstractmethod
    def _commit(self) -> Info: ...

    @abstractmethod
    def _abort(self) -> None: ...


@runtime_checkable
class Storage(Protocol):
    """Where bytes live. Every failure is a ``StorageError`` with one sentence and no secret in it."""

    def info(self, url: str) -> Info:
        """Look at an object.

        Raises:
            StorageError: it is not there, or may not be read.
        """
        ...

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        """Read exactly the bytes from ``start`` up to ``stop``.

        Args:
            url: The object.
            start: The first byte.
            stop: The byte behind the last one.
            into: Filled and given back, if given; as long as what is asked for.
            tag: What ``info`` told; another content is an error.

        Raises:
            StorageError: they cannot be read, the object ends before ``stop``, or it has changed.
            ValueError: the range or ``into`` makes no sense.
        """
        ...

    def stream(self, url: str) -> Iterator[bytes]:
        """Read an object front to back, in pieces of any size.

        Raises:
            StorageError: it cannot be read, or changes meanwhile.
        """
        ...

    def list(self, prefix: str) -> Iterator[Listed]:
        """List all objects below a folder, also in folders within, by name; none where there is no such folder.

        Raises:
            StorageError: the place cannot be listed.
        """
        ...

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        """Begin to write an object; it replaces one of the same name when committed.

        Raises:
            StorageError: nothing can be written there.
        """
        ...

    def delete(self, url: str) -> None:
        """Remove an object; one that is not there is fine.

        Raises:
            StorageError: it cannot be removed.
        """
        ...

    def local_path(self, url: str) -> str | None:
        """The path of the object where it is a file of this machine."""
        ...


Factory = Callable[[], Storage]
_registered: dict[str, Factory] = {}


def register(scheme: str, factory: Factory) -> None:
    """Let ``factory`` make the storage of every URL ``scheme://...`` in this process.

    A package does the same for all processes with an entry point in the group ``penstock.storages``: its name is the
    scheme, its value the factory.
    """
    _registered[scheme.lower()] = factory


def check_storage(storage: Any) -> None:
    """Require a storage, or none.

    Raises:
        PlanError: it is something else.
    """
    if storage is not None and not hasattr(storage, "stream"):
        raise PlanError(f"storage={storage!r}: give a storage, such as ps.S3(...)")


def open_storage(url: str, storage: Storage | None = None) -> Storage:
    """Find the storage of a URL; the one the user gave wins. Nothing is opened.

    Raises:
        MissingExtra: the scheme needs a package that is not installed.
        PlanError: what the user gave is no storage.
        StorageError: nobody knows the scheme.
    """
    if storage is not None:
        check_storage(storage)
        return storage
    name = scheme(url)
    if name in _registered:
        return _registered[name]()
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        made: Storage = getattr(import_module(module), attribute)()
        return made
    return (_from_entry_point(name) or _fsspec_factory)()


def _fsspec_factory() -> Storage:
    made: Storage = import_module("penstock.storage.fsspec").FsspecStorage()
    return made


@cache
def _from_entry_point(name: str) -> Factory | None:
    # Found when needed, like the storages themselves: the module takes longer to import than all of this room.
    for point in import_module("importlib.metadata").entry_points(group=_GROUP, name=name):
        factory: Factory = point.load()
        return factory
    return None


def scheme(url: str) -> str:
    """The scheme of a URL in small letters; that of a path is ``file``."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else "file"


def exists(storage: Storage, url: str) -> bool:
    """Tell whether there is such an object.

    Raises:
        StorageError: it cannot be known: no permission, no such bucket, no answer.
    """
    try:
        storage.info(url)
    except NotFound:
        return False
    return True


class NotFound(StorageError):
    """There is no such object."""


class Forbidden(StorageError):
    """It may not be read; where listing is not allowed, this is also what is said of what is not there."""


def redacted(url: str) -> str:
    """The URL as it may be shown: without user, password, and what stands in the query.

    >>> shown("https://user:secret@host/a.tar?token=secret")
    'https://host/a.tar?...'
    """
    match = _URL.match(url)
    if not match or match[1].lower() == "file":
        return url
    kind, user, rest, query, fragment = match[1], match[2], match[3], match[4] or "", match[5] or ""
    if kind.lower() in _KEYS_AS_THEY_ARE:
        return f"{kind}://{'anonymous@' if user == 'anonymous' else ''}{rest}{query}{fragment}"
    return f"{kind}://{rest}{'?...' if query else ''}"


def span(start: int, stop: int, into: memoryview | None) -> int:
    """How many bytes a read asks for.

    Raises:
        ValueError: the range or the buffer makes no sense.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"there is no range from {start} to {stop}")
    if into is not None and into.nbytes != stop - start:
        raise ValueError(f"the buffer holds {into.nbytes} bytes, the range {stop - start}")
    return stop - start


def changed(url: str) -> StorageError:
    """The error of an object that is another one now."""
    return StorageError("it changed while it was being read", redacted(url))


def too_short(url: str, size: int, stop: int) -> StorageError:
    """The error of a read behind the end."""
    return StorageError(f"it has {size:,} bytes, and those up to {stop:,} were asked for", redacted(url))


def needed(module: str, what: str, extra: str) -> Any:
    """Import a module of an optional package.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(what, extra) from error


_made: dict[Hashable, Any] = {}
_making = threading.RLock()


def own(key: Hashable, make: Callable[[], _T]) -> _T:
    """Give what this process made for ``key``, or make it now; a forked child starts with nothing."""
    found: _T | None = _made.get(key)
    if found is None:
        with _making:
            found = _made.get(key)
            if found is None:
                found = _made[key] = make()
    return found


def _start_anew() -> None:
    """In a forked child: connections belong to the parent, and the lock may be held by a thread that is not here."""
    global _made, _making
    _made, _making = {}, threading.RLock()


os.register_at_fork(after_in_child=_start_anew)
