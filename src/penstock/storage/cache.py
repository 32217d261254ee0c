"""A disk cache before any storage: what was read once is read from this machine the next time."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from penstock.errors import PlanError, StorageError
from penstock.plan.values import size_in_bytes
from penstock.storage.cache_folder import CacheFolder, cache_folder
from penstock.storage.cached_object import CELL, RUN, URL_DIGITS, CachedObject
from penstock.storage.protocol import (
    Info,
    Listed,
    NotFound,
    Storage,
    Upload,
    changed,
    open_storage,
    own,
    redacted,
    scheme,
    span,
    too_short,
)

_SECRET = re.compile(r"token|secret|passw|credential|jwt|api_?key|access_?key", re.IGNORECASE)
_SIGNATURE = re.compile(r"(?:.*-)?sig(?:nature)?", re.IGNORECASE)
_SIGNED_WITH = re.compile(r"x-[a-z]+-.*|.*accesskeyid|.*accessid|expires|policy|key-pair-id|s[a-z]{1,4}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cache:
    """Keeps remote shards in a folder of this machine, for all processes that name the same folder.

    A value: it can be pickled, and opens nothing. The folder is made when it is first used. Files of others in it are
    left alone; what was not used for longest goes when there is no room.

    Attributes:
        folder: Where; on a disk of this machine.
        max_bytes: What it may hold: a number, or a text like ``"200GB"``. ``None``: what the disk has, but for a 20th.
        fresh_s: For how many seconds a process believes that a copy is still true before it asks the server again.

    >>> Cache("/scratch/cache", max_bytes="200GB")
    Cache(folder='/scratch/cache', max_bytes=200000000000, fresh_s=300.0)

    Raises:
        PlanError: the size or time is none, or the folder is remote or has no name.
    """

    folder: str
    max_bytes: int | None
    fresh_s: float

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: float | str | None = None, fresh_s: float = 300.0
    ) -> None:
        name = os.fspath(folder)
        if not name or "://" in name:
            raise PlanError(f"folder={redacted(name)!r}: give a folder of this machine")
        object.__setattr__(self, "folder", os.path.abspath(os.path.expanduser(name)))
        most = None if max_bytes is None else size_in_bytes("max_bytes", max_bytes)
        object.__setattr__(self, "max_bytes", most)
        if not fresh_s >= 0:
            raise PlanError(f"fresh_s={fresh_s!r}: give a number of seconds from 0")
        object.__setattr__(self, "fresh_s", float(fresh_s))

    def over(self, storage: Storage) -> Cached:
        """Give a storage that reads from ``storage`` what is not in the cache.

        What it gives remembers for ``fresh_s`` what it saw of each object; what another call of this gives looks again.
        """
        if isinstance(storage, Cached):
            storage = storage.storage
        return Cached(self, storage)

    def shared(self, storage: Storage) -> Cached:
        """Give the one of this process: an epoch knows what the one before it saw."""
        return own(("cached", self, storage), lambda: self.over(storage))


def through(cache: Cache | None, places: Iterable[str], storage: Storage | None) -> Storage | None:
    """The storage of those places that are remote, with a cache before it where there is one.

    Raises:
        PlanError: they are of several kinds, and one cache is for one.
    """
    remote = {scheme(place): place for place in places if scheme(place) != "file"}
    if cache is None or not remote:
        return storage
    if len(remote) > 1 and storage is None:
        raise PlanError(f"one cache is for one kind of URL, not for {', '.join(remote)}; union() joins datasets")
    return cache.shared(open_storage(next(iter(remote.values())), storage))


@dataclass(frozen=True, slots=True)
class Cached:
    """A storage that keeps what it reads in a folder; files of this machine are read where they are.

    Attributes:
        cache: The folder.
        storage: Where objects come from.
    """

    cache: Cache
    storage: Storage
    _seen: dict[str, tuple[Info, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Cached, (self.cache, self.storage)

    def info(self, url: str) -> Info:
        if self._is_local(url):
            return self.storage.info(url)
        info, seen = self._seen.get(url, (None, 0.0))
        return info if info is not None and time.monotonic() - seen < self.cache.fresh_s else self._look(url)

    def read(
        self, url: str, start: int, stop: int, *, into: memoryview | None = None, tag: str | None = None
    ) -> bytes | memoryview:
        size = span(start, stop, into)
        if self._is_local(url):
            return self.storage.read(url, start, stop, into=into, tag=tag)
        info = self._expected(url, stop, tag)
        target = memoryview(bytearray(size)) if into is None else into
        if not size:
            return b"" if into is None else into
        kept = self._kept(url, info)
        try:
            if kept is None or not kept.read(start, stop, target.cast("B")):
                return self.storage.read(url, start, stop, into=into, tag=info.tag)
        except StorageError:
            self._seen.pop(url, None)  # it may have changed: the next one looks
            raise
        return bytes(target) if into is None else into

    def stream(self, url: str) -> Iterator[bytes]:
        if self._is_local(url):
            return self.storage.stream(url)
        info = self.info(url)
        kept = self._kept(url, info)
        if kept is None or not (info.ranges or kept.fetch()):
            return self.storage.stream(url)
        return self._pieces(url, info)

    def list(self, prefix: str) -> Iterator[Listed]:
        return self.storage.list(prefix)

    def put(self, url: str, *, size_hint: int | None = None) -> Upload:
        if self._is_local(url):
            return self.storage.put(url, size_hint=size_hint)
        self._shelf()  # a folder that cannot be used is told before anything is sent
        return _Replacing(url, self, self.storage.put(url, size_hint=size_hint))

    def delete(self, url: str) -> None:
        self.storage.delete(url)
        self.forget(url)

    def local_path(self, url: str) -> str | None:
        path = self.storage.local_path(url)
        if path is not None:
            return path
        try:
            kept = self._kept(url, self.info(url))
        except NotFound:
            return None
        return None if kept is None else kept.path()

    def forget(self, url: str) -> None:
        """Drop what is kept of an object and known about it."""
        self._seen.pop(url, None)
        if not self._is_local(url):
            self._shelf().drop_all(_url_key(self.storage, url))

    def _is_local(self, url: str) -> bool:
        return self.storage.local_path(url) is not None

    def _shelf(self) -> CacheFolder:
        return cache_folder(self.cache.folder)

    def _look(self, url: str) -> Info:
        info = self.storage.info(url)
        self._seen[url] = info, time.monotonic()
        return info

    def _expected(self, url: str, stop: int, tag: str | None) -> Info:
        """What a range is read from; looked at again before it is called another content or too short."""
        info = self.info(url)
        if _is_other(info, stop, tag):
            info = self._look(url)
        if tag not in (None, info.tag):
            raise changed(url)
        if info.size is not None and stop > info.size:
            raise too_short(url, info.size, stop)
        return info

    def _kept(self, url: str, info: Info) -> CachedObject | None:
        """What is kept of an object; ``None`` where nothing would tell whether it is still true."""
        where = self._shelf()
        if info.tag is None or not info.size:
            return None
        start = _url_key(self.storage, url)
        key = start + _digits(f"{start}\n{info.tag}\n{info.size}")
        return CachedObject(where, key, self.storage, url, info, self.cache.max_bytes)

    def _pieces(self, url: str, info: Info) -> Iterator[bytes]:
        assert info.size is not None
        for start in range(0, info.size, CELL * RUN):
            yield bytes(self.read(url, start, min(info.size, start + CELL * RUN), tag=info.tag))


class _Replacing(Upload):
    """An upload after which the copy of what was there before is gone."""

    def __init__(self, url: str, cached: Cached, upload: Upload) -> None:
        super().__init__(url)
        self._place, self._cached, self._upload = url, cached, upload

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._upload.write(data)

    def _commit(self) -> Info:
        info = self._upload.commit()
        self._cached.forget(self._place)
        return info

    def _abort(self) -> None:
        self._upload.abort()


def _is_other(info: Info, stop: int, tag: str | None) -> bool:
    return tag not in (None, info.tag) or (info.size is not None and stop > info.size)


def _url_key(storage: Storage, url: str) -> str:
    """What the files of a URL begin with: a hash of its server and name, without anything secret."""
    server = getattr(storage, "endpoint", None) or ""
    return _digits(f"{redacted(str(server))}\n{_name(url)}")


def _name(url: str) -> str:
    """The URL without what opens it, so that a new signature or token does not make it another object.

    >>> _name("https://me:word@host/get?file=a.tar&token=abc")
    'https://host/get?... file=a.tar'
    """
    name = redacted(url)
    if not name.endswith("?..."):
        return name
    query = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    if any(_SIGNATURE.fullmatch(key) for key, _ in query):
        query = [(key, value) for key, value in query if not (_SIGNED_WITH.fullmatch(key) or _SIGNATURE.fullmatch(key))]
    return " ".join([name, *sorted(f"{key}={value}" for key, value in query if not _SECRET.search(key))])


def _digits(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:URL_DIGITS]
