"""A cache of decoded row groups: threads decode them in parallel, all readers share them, old ones are evicted."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

Batches = list["pa.RecordBatch"]


class GroupKey(NamedTuple):
    """Some columns of one row group of a file."""

    shard: int
    group: int
    names: tuple[str, ...]


@dataclass(slots=True, eq=False)
class PendingGroup:
    """A row group that is decoded, or that a thread will decode."""

    key: GroupKey
    nbytes: int
    future: Future[Batches]
    decode: Callable[[GroupKey], Batches]

    def batches(self) -> Batches:
        """Return the rows, waiting for them if necessary.

        Raises:
            DataError: The row group cannot be decoded.
            StorageError: The file cannot be read.
        """
        try:
            return self.future.result()
        except CancelledError:  # evicted before a thread began with it, but still wanted by this caller
            return self.decode(self.key)


class RowGroupCache:
    """Decoded row groups, the least recently used ones evicted first; safe to use from several threads.

    Args:
        decode: Decodes a row group; called in a thread of the cache.
        nbytes: Estimates the decoded size of a row group.
        workers: The number of row groups that are decoded at the same time.
        max_bytes: The size above which row groups that are not in use are evicted.
    """

    def __init__(
        self, decode: Callable[[GroupKey], Batches], nbytes: Callable[[GroupKey], int], workers: int, max_bytes: int
    ) -> None:
        self._decode, self._nbytes, self._workers, self._max_bytes = decode, nbytes, workers, max_bytes
        self._entries: OrderedDict[GroupKey, PendingGroup] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def request(
        self,
        keys: Sequence[GroupKey],
        upcoming: Sequence[GroupKey] = (),
        *,
        evict_others: bool = False,
        first_needed: Mapping[int, int] | None = None,
    ) -> list[PendingGroup]:
        """Start decoding row groups in the given order, without waiting for them.

        Args:
            keys: The row groups that are needed now; they are returned even if they exceed ``max_bytes``.
            upcoming: The row groups that are needed next; they are started as far as ``max_bytes`` allows.
            evict_others: Evict all other row groups, since a sequential reader does not need them again.
            first_needed: For each shard, the first row group that is still needed; those before it are evicted.
        """
        with self._lock:
            requested = [self._start(key) for key in keys]
            held = sum(entry.nbytes for entry in requested)
            prefetched = []
            for key in upcoming:
                held += self._nbytes(key)
                if held > self._max_bytes:
                    break
                prefetched.append(self._start(key))
            in_use = {entry.key for entry in (*requested, *prefetched)}
            for key in [key for key in self._entries if key.group < (first_needed or {}).get(key.shard, 0)]:
                self._entries.pop(key).future.cancel()
            self._evict(in_use, 0 if evict_others else self._max_bytes)
            return requested

    def _start(self, key: GroupKey) -> PendingGroup:
        entry = self._entries.get(key)
        if entry is None or entry.future.cancelled():
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, "penstock parquet")
            entry = self._entries[key] = PendingGroup(
                key, self._nbytes(key), self._pool.submit(self._decode, key), self._decode
            )
        self._entries.move_to_end(key)
        return entry

    def _evict(self, in_use: set[GroupKey], max_bytes: int) -> None:
        """Evict the least recently used row groups that are not in use until the rest fits into ``max_bytes``."""
        held = sum(entry.nbytes for entry in self._entries.values())
        for key in list(self._entries):
            if held <= max_bytes:
                return
            if key not in in_use:
                evicted = self._entries.pop(key)
                evicted.future.cancel()
                held -= evicted.nbytes

    def release(self) -> None:
        """End the threads and evict everything but the row group that was used last."""
        with self._lock:
            pool, self._pool = self._pool, None
            last = next(reversed(self._entries), None)
            self._evict({last} if last is not None else set(), 0)
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def default_cache_bytes() -> int:
    """Return a quarter of the machine's memory: room for one row group of each file that a shuffle mixes."""
    try:
        return max(256 << 20, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    except (ValueError, OSError):
        return 1 << 30
