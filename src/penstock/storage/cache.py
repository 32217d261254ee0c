"""A disk cache in front of any storage: what was read once is read from this machine the next time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from numbers import Real
from typing import Any

from penstock.errors import PlanError, StorageError
from penstock.plan.values import size_in_bytes
from penstock.storage.cache_ahead import CachedShards
from penstock.storage.cache_folder import URL_DIGITS, CacheFolder, cache_folder
from penstock.storage.cache_policy import Uses
from penstock.storage.cache_uses import PublishedUses
from penstock.storage.cached_object import CHUNK_BYTES, CHUNKS_PER_REQUEST, CachedObject
from penstock.storage.protocol import (
    Info,
    Listed,
    NotFound,
    Storage,
    Upload,
    changed_error,
    check_storage,
    open_storage,
    past_end_error,
    per_process,
    range_size,
    redacted,
    scheme,
    unsigned,
)


@dataclass(frozen=True, slots=True)
class Cache:
    """Keeps remote shards in a folder on this machine, shared by all processes that name the same folder.

    A value: it can be pickled, and opens nothing. The folder is created on first use. When it is full, it keeps what
    the runs of all processes will use soonest; files that the cache did not create are left alone.

    Attributes:
        folder: The folder, on a local disk.
        max_bytes: How much it may hold: a number, or a size such as ``"200GB"``. ``None``: the free space of the disk,
            less 1/20 of the disk.
        fresh_s: How many seconds a process trusts a copy before it asks the server again whether the object changed.
            The epochs of a loader share what is known; every iteration over a dataset itself asks again.

    >>> Cache("/scratch/cache", max_bytes="200GB")
    Cache(folder='/scratch/cache', max_bytes=200000000000, fresh_s=300.0)

    Raises:
        PlanError: The size or time is not valid, or the folder is empty or remote.
    """

    folder: str
    max_bytes: int | None
    fresh_s: float

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: float | str | None = None, fresh_s: float = 300.0
    ) -> None:
        name = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
        if not name or "://" in name:
            raise PlanError(f"folder={redacted(str(folder))!r} is not a local folder")
        object.__setattr__(self, "folder", os.path.abspath(os.path.expanduser(name)))
        limit = None if max_bytes is None else size_in_bytes("max_bytes", max_bytes)
        object.__setattr__(self, "max_bytes", limit)
        if isinstance(fresh_s, bool) or not isinstance(fresh_s, Real) or not fresh_s >= 0:
            raise PlanError(f"fresh_s={fresh_s!r}: it must be a number of seconds, 0 or more")
        object.__setattr__(self, "fresh_s", float(fresh_s))

    def wrap(self, storage: Storage) -> CachedStorage:
        """Return a new storage that reads from ``storage`` what is not in the cache.

        It remembers the size and tag of each object for ``fresh_s`` seconds; each call returns one that remembers none.
        """
        if isinstance(storage, CachedStorage):
            storage = storage.storage
        return CachedStorage(self, storage)

    def shared(self, storage: Storage) -> CachedStorage:
        """Return the cached storage that this process shares, so that each epoch reuses known sizes and tags."""
        return per_process(("cached", self, storage), lambda: self.wrap(storage))


def check_places(storage: Any, cache: Any = None) -> None:
    """Check the arguments ``storage=`` and ``cache=`` of a source.

    Raises:
        PlanError: ``storage`` is not a storage, or ``cache`` is not a ``Cache``.
    """
    check_storage(storage)
    if not isinstance(cache, Cache | None):
        raise PlanError(f"cache={cache!r}: give ps.Cache(folder, max_bytes=...)")


def wrap_with_cache(cache: Cache | None, urls: Iterable[str], storage: Storage | None) -> Storage | None:
    """Return the storage of remote URLs, behind ``cache`` if given, which then asks the server about each object again.

    Raises:
        PlanError: The URLs have several schemes, and a cache serves only one.
    """
    remote = {scheme(url): url for url in urls if scheme(url) != "file"}
    if cache is None or not remote:
        return storage
    if len(remote) > 1 and storage is None:
        raise PlanError(
            f"cache= serves URLs of one scheme, not of {', '.join(remote)}; read each on its own and use union()"
        )
    cached = cache.shared(open_storage(next(iter(remote.values())), storage))
    cached.expire()  # a manifest, indexes and shards of different age would not fit together
    return cached


def cached_shards(storage: Storage | None, urls: Sequence[tuple[str, ...]]) -> CachedShards | None:
    """Return the cache that shards are read through, given the objects of each; ``None`` if there is no cache."""
    return CachedShards(storage, urls) if isinstance(storage, CachedStorage) else None


@dataclass(frozen=True, slots=True)
class CachedStorage:
    """A storage that keeps what it reads in a cache folder. Local files are read in place.

    Attributes:
        cache: The cache.
        storage: The storage that holds the objects.
    """

    cache: Cache
    storage: Storage
    _infos: dict[str, tuple[Info, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _plans: list[PublishedUses] = field(default_factory=list, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedStorage, (self.cache, self.storage)

    def info(self, url: str) -> Info:
        if self._is_local(url):
            return self.storage.info(url)
        info, asked_at = self._infos.get(url, (None, 0.0))
        if info is not None and time.monotonic() - asked_at < self.cache.fresh_s:
            return info
        return self._refresh_info(url)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        size = range_size(start, stop, into)
        if self._is_local(url):
            return self.storage.read(url, start, stop, into=into, tag=tag)
        info = self._require_info(url, stop, tag)
        target = memoryview(bytearray(size)) if into is None else into
        if not size:
            return b"" if into is None else into
        cached = self._cached_object(url, info)
        try:
            if cached is None or not cached.read(start, stop, target.cast("B")):
                return self.storage.read(url, start, stop, into=into, tag=info.tag)
        except StorageError:
            self.expire()  # it may have changed
            raise
        return bytes(target) if into is None else into

    def stream(self, url: str) -> Iterator[bytes]:
        if self._is_local(url):
            return self.storage.stream(url)
        info = self.info(url)
        cached = self._cached_object(url, info)
        if cached is None or not (info.ranges or cached.fetch()):
            return self.storage.stream(url)
        return self._pieces(url, info)

    def list(self, prefix: str) -> Iterator[Listed]:
        return self.storage.list(prefix)

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        if self._is_local(url):
            return self.storage.put(url, size_hint=size_hint)
        self._folder()  # raises before anything is sent if the folder cannot be used
        return _InvalidatingUpload(url, self, self.storage.put(url, size_hint=size_hint))

    def delete(self, url: str) -> None:
        self.storage.delete(url)
        self.forget(url)

    def local_path(self, url: str) -> str | None:
        path = self.storage.local_path(url)
        if path is not None:
            return path
        try:
            cached = self._cached_object(url, self.info(url))
        except NotFound:
            return None
        return None if cached is None else cached.path()

    def expire(self) -> None:
        """Ask the server again about each object, however recently it was asked."""
        self._infos.clear()

    def forget(self, url: str) -> None:
        """Remove an object from the cache, and what is remembered about it and what was stored with it."""
        self.expire()
        if not self._is_local(url):
            self._folder().drop_all(_url_key(self.storage, url))

    def url_key(self, url: str) -> str:
        """Return the prefix of the keys of all contents of a URL."""
        return _url_key(self.storage, url)

    def publish(self, uses: Uses) -> PublishedUses | None:
        """Tell all users of the folder what a run of this process will use; ``None`` if the folder is read-only."""
        folder = self._folder()
        if not folder.accepts:
            return None
        self._plans.clear()
        return PublishedUses(folder.folder, uses)

    def keep_plan(self, plan: PublishedUses | None) -> None:
        """Keep the plan of a run that has ended, in place of the plan of the run before it."""
        self._plans[:] = [] if plan is None else [plan]

    def fetch_ahead(self, url: str, stopped: Callable[[], bool]) -> bool:
        """Fetch an object into free space. Return False if there is none, or ``stopped`` returns true.

        Raises:
            StorageError: The object cannot be fetched.
        """
        info = self.info(url)
        cached = self._cached_object(url, info)
        if cached is None or not info.ranges or cached.is_complete:
            return True
        for start in range(0, cached.size, CHUNK_BYTES * CHUNKS_PER_REQUEST):
            stop = min(cached.size, start + CHUNK_BYTES * CHUNKS_PER_REQUEST)
            fits = cached.folder.accepts and cached.folder.has_space(stop - start, self.cache.max_bytes)
            if stopped() or not fits or not cached.fetch(start, stop):
                return False
        return True

    def _is_local(self, url: str) -> bool:
        return self.storage.local_path(url) is not None

    def _folder(self) -> CacheFolder:
        return cache_folder(self.cache.folder)

    def _refresh_info(self, url: str) -> Info:
        info = self.storage.info(url)
        if self._infos.get(url, (info, 0.0))[0] != info:
            self.expire()  # what was stored with it has changed too, such as the index of a shard
        self._infos[url] = info, time.monotonic()
        return info

    def _require_info(self, url: str, stop: int, tag: str | None) -> Info:
        """Return the info of an object that has ``tag`` and ``stop`` bytes; ask the server before raising."""
        info = self.info(url)
        if _contradicts(info, stop, tag):
            info = self._refresh_info(url)
        if tag not in (None, info.tag):
            raise changed_error(url)
        if info.size is not None and stop > info.size:
            raise past_end_error(url, info.size, stop)
        return info

    def _cached_object(self, url: str, info: Info) -> CachedObject | None:
        """Return the cached copy of an object; ``None`` if it has no tag, so that changes could not be detected."""
        folder = self._folder()
        if info.tag is None or not info.size:
            return None
        url_key = _url_key(self.storage, url)
        key = url_key + _hash_digits(f"{url_key}\n{info.tag}\n{info.size}")
        return CachedObject(folder, key, self.storage, url, info, self.cache.max_bytes)

    def _pieces(self, url: str, info: Info) -> Iterator[bytes]:
        assert info.size is not None
        for start in range(0, info.size, CHUNK_BYTES * CHUNKS_PER_REQUEST):
            yield bytes(self.read(url, start, min(info.size, start + CHUNK_BYTES * CHUNKS_PER_REQUEST), tag=info.tag))


class _InvalidatingUpload(Upload):
    """An upload whose commit removes the replaced object from the cache."""

    def __init__(self, url: str, cached: CachedStorage, upload: Upload) -> None:
        super().__init__(url)
        self._target, self._cached, self._upload = url, cached, upload

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._upload.write(data)

    def _commit(self) -> Info:
        info = self._upload.commit()
        self._cached.forget(self._target)
        return info

    def _abort(self) -> None:
        self._upload.abort()


def _contradicts(info: Info, stop: int, tag: str | None) -> bool:
    return tag not in (None, info.tag) or (info.size is not None and stop > info.size)


def _url_key(storage: Storage, url: str) -> str:
    """Return the prefix of the file names of a URL's copies: a hash of the server and the URL, without secrets."""
    server = getattr(storage, "endpoint", None) or ""
    return _hash_digits(f"{redacted(str(server))}\n{unsigned(url)}")


def _hash_digits(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:URL_DIGITS]
