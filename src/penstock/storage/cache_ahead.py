"""Fetch ahead into a cache: publish what a run will use, and fetch it while there is room for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import StorageError
from penstock.storage.cache_folder import use_key
from penstock.storage.cache_policy import F64, NEVER, Uses
from penstock.storage.cache_uses import PublishedUses
from penstock.storage.retry import while_wanted

if TYPE_CHECKING:
    from penstock.storage.cache import CachedStorage

_log = logging.getLogger("penstock.storage")
_POLL_S = 0.1  # between looks at the progress of the run
_STOP_S = 5.0  # for a request that is under way
_BEGIN_POSITIONS = 1000.0  # of a run before it fetches ahead, if its first shard is longer

FindUses = Callable[[], tuple[F64, F64, F64] | None]  # of each shard: first and last use, and first of the next epoch


@dataclass(slots=True)
class CachedShards:
    """The shards of a source that are read through a cache.

    Attributes:
        storage: The cached storage.
        urls: The objects of each shard; the first is the shard itself.
    """

    storage: CachedStorage
    urls: Sequence[tuple[str, ...]]
    _thread: _FetchAhead | None = field(default=None, init=False, repr=False)

    def expect(self, find: FindUses, *, whole: bool) -> None:
        """Publish when shards will be used, as soon as ``find`` has computed it in a thread, and fetch shards ahead.

        Args:
            find: Returns the uses of each shard.
            whole: Shards are read whole, so that all bytes that are fetched are used.
        """
        self.dismiss()
        self._thread = _FetchAhead(self, find, whole)
        self._thread.start()

    def advance(self, done: int) -> None:
        """Record that the run has reached a position."""
        if self._thread is not None:
            self._thread.advance(done)

    def dismiss(self) -> None:
        """End the thread; the plan remains known for a while, because another epoch may follow."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()
            self.storage.keep_plan(thread.published)


class _FetchAhead(threading.Thread):
    """Publishes the uses of a run; once the run has passed its first shard, or 1,000 samples, fetches later shards."""

    def __init__(self, cache: CachedShards, find: FindUses, whole: bool) -> None:
        super().__init__(name="penstock cache", daemon=True)
        self._cache, self._find, self._whole = cache, find, whole
        self._ended = threading.Event()
        self.published: PublishedUses | None = None
        self._done = 0

    def run(self) -> None:
        try:
            with while_wanted(lambda: not self._ended.is_set()):
                self._publish()
                if self.published is not None and self._whole:
                    self._fetch(self.published)
        except (StorageError, OSError) as error:  # the run itself reports what it cannot read
            _log.debug("not fetching ahead into the cache: %s", error)

    def advance(self, done: int) -> None:
        self._done = done
        if self.published is not None:
            self.published.advance(done)

    def end(self) -> None:
        """Stop fetching."""
        self._ended.set()
        if self.published is not None:
            self.published.end()
        if self is not threading.current_thread():
            self.join(_STOP_S)

    def _publish(self) -> None:
        found = self._find()
        if found is None or self._ended.is_set():
            return
        storage = self._cache.storage
        rows = [(use_key(storage.url_key(url)), row) for row, urls in enumerate(self._cache.urls) for url in urls]
        keys, order = np.unique(np.array([key for key, _ in rows], np.uint64), return_index=True)
        shards = np.array([row for _, row in rows], np.int64)[order]
        self.published = storage.publish(Uses(keys, *(column[shards] for column in found)))
        if self.published is not None:
            self.published.advance(self._done)

    def _fetch(self, published: PublishedUses) -> None:
        """Fetch shards in the order of their use, as long as nothing has to be evicted for them."""
        begin = min(float(published.uses.last[published.uses.last >= 0].min(initial=0.0)), _BEGIN_POSITIONS)
        while published.progress <= begin and not self._ended.wait(_POLL_S):
            pass  # a caller that reads a few samples wants no other shards
        for url in self._by_use(published):
            if self._ended.is_set() or not self._cache.storage.fetch_ahead(url, self._ended.is_set):
                return

    def _by_use(self, published: PublishedUses) -> Iterator[str]:
        """Yield the shards that the run has not reached yet, then all shards in the order of the next epoch."""
        uses, storage = published.uses, self._cache.storage
        position = {}
        for urls in self._cache.urls:
            if (row := uses.row(use_key(storage.url_key(urls[0])))) is not None:
                position[urls[0]] = float(uses.first[row]), float(uses.following[row])
        for url in sorted(position, key=lambda url: position[url][0]):
            if published.progress < position[url][0] < NEVER:
                yield url
        for url in sorted(position, key=lambda url: position[url][1]):
            if position[url][1] < NEVER:
                yield url
