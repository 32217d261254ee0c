"""Tar shards read by sample number: samples are located in batches, and read when their block is processed."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.blobs.content import Content
from penstock.blobs.draft import read_object
from penstock.blobs.prefetch import CONNECTIONS, SEQUENTIAL_BYTES, Fetcher, PrefetchedBytes
from penstock.blobs.small_objects import OBJECT_CONNECTIONS
from penstock.errors import DataError, StorageError
from penstock.formats.manifest import MANIFEST, Manifest, ShardEntry, read_manifest, read_manifest_at, shard_name
from penstock.formats.tar.archive import RECORD, long_padding
from penstock.formats.tar.index import I64, INDEX_SUFFIX, Index
from penstock.formats.tar.located import LocatedTar, Locator, OpenShard
from penstock.formats.tar.open_shards import OPEN_SHARDS, Opened, close, content_size, remote_bytes, shards_to_close
from penstock.formats.tar.remote import (
    GivenManifest,
    index_url,
    is_remembered,
    open_in_order,
    open_remote,
    remembered_index,
    remote_index,
)
from penstock.formats.tar.scan import open_shard
from penstock.formats.tar.unindexed import UnindexedShard
from penstock.lazy import cached_property
from penstock.plan import Fields, Reader, ShardCache, Traits
from penstock.storage import Storage, folder_times, open_storage, traits_of
from penstock.storage.cache import cached_shards
from penstock.storage.protocol import scheme, without_query
from penstock.storage.retry import while_wanted

log = logging.getLogger(__name__)
_MAX_OPENING = 24  # remote shards that are opened or counted ahead at a time


class TarReader(Reader):
    """Locates and reads the samples of tar shards by number.

    Opens a shard when one of its samples is first requested, and keeps the 32 most recently used open, and remote ones
    as long as their indexes are small. Safe to use from several threads; pickles as its arguments.

    Args:
        urls: What the shards are called in samples and errors.
        names: What they are called in the dataset's identity.
        paths: Where they are: local paths or URLs.
        counts: The number of samples of each shard, if manifests list all of them.
        limits: How large compressed shards may become.
        storage: The storage of URLs; None: chosen by their schemes.
        manifests: The manifests of remote folders, as far as they have been read.
        given: A manifest that is stored apart from the shards.
    """

    def __init__(
        self,
        urls: Sequence[str],
        names: Sequence[str],
        paths: Sequence[str],
        counts: I64 | None = None,
        limits: ArchiveLimits = LIMITS,
        storage: Storage | None = None,
        manifests: Mapping[str, Manifest | None] | None = None,
        given: GivenManifest | None = None,
    ) -> None:
        self.names = list(names)
        self._storage = storage
        self._fetcher = Fetcher()
        self._manifests, self._given = dict(manifests or {}), given
        self._urls, self._paths, self._limits = list(urls), [os.fspath(path) for path in paths], limits
        self._manifest_counts = counts
        self._index_counts: dict[int, int] = {}
        self._open: OrderedDict[int, Opened] = OrderedDict()
        self._opening: dict[int, Future[None]] = {}  # shards that are opened or counted ahead
        self._ahead: set[int] = set()  # open shards that were opened ahead, and not used since
        self._countable: bool | None = None
        self._indexes: OrderedDict[int, Index] = OrderedDict()  # of shards that were counted but not opened yet
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        places = (self._urls, self.names, self._paths)
        return TarReader, (*places, self._manifest_counts, self._limits, self._storage, None, self._given)

    def counts(self, scan: bool) -> I64 | None:
        """Return the number of samples of every shard; None if one is unknown and must not be scanned.

        Args:
            scan: Load or build the index of every shard whose count is unknown.

        Raises:
            StorageError: A shard cannot be read.
        """
        if self._manifest_counts is not None:
            return self._manifest_counts
        shards = range(len(self._paths))
        if not all(shard in self._index_counts for shard in shards):
            if not scan:
                return None
            self._find_countable()  # fetches the indexes beside remote shards, many at a time
        return np.array([self.count(shard) for shard in shards], np.int64)

    def count(self, shard: int) -> int:
        """Return the number of samples of one shard, bad ones included.

        Raises:
            StorageError: The shard cannot be read.
        """
        if self._manifest_counts is not None:
            return int(self._manifest_counts[shard])
        self._wait_for(shard)
        if shard not in self._index_counts:
            unindexed = self._open.get(shard)
            if isinstance(unindexed, UnindexedShard):
                self._remember_count(shard, unindexed.grow(sys.maxsize)[0])
            else:
                self._remember(shard, self._load(shard, mapped=False))
        return self._index_counts[shard]

    def grow(self, shard: int, beyond: int) -> tuple[int, bool]:
        """Return how many samples of a shard are known to be there, more than ``beyond`` unless these are all.

        Raises:
            StorageError: The shard cannot be read.
        """
        if self._manifest_counts is not None or shard in self._index_counts or scheme(self._paths[shard]) == "file":
            return self.count(shard), True
        opened = self._open_in_order(shard)
        if not isinstance(opened, UnindexedShard):
            return opened.index.samples, True
        known, whole = opened.grow(beyond)
        if whole:
            self._remember_count(shard, known)
        return known, whole

    def expect(self, shards: Sequence[int], whole: bool) -> None:
        """Open remote shards ahead, in threads: as many as may be read soon, or with ``whole`` count all of them."""
        if self._manifest_counts is not None:
            return
        remote = [shard for shard in shards if scheme(self._paths[shard]) != "file"]
        with self._lock:
            if whole:
                remote = remote[:OPEN_SHARDS]  # more would close those that are being read
            else:
                sizes = [max(1, content_size(opened)) for opened in self._open.values()]
                remote = remote[: 2 + max(1, SEQUENTIAL_BYTES * len(sizes) // sum(sizes) if sizes else 0)]
            known = self._index_counts if whole else self._open
            new = [shard for shard in remote if shard not in known and shard not in self._opening]
            new = new[: _MAX_OPENING - len(self._opening)]
            self._opening.update((shard, Future()) for shard in new)
            fetcher = self._fetcher
        for shard in new:
            prepare = partial(self._prepare, shard, fetcher, None if whole else fetcher.next_priority())
            threading.Thread(target=prepare, name="penstock open", daemon=True).start()

    def _prepare(self, shard: int, fetcher: Fetcher, priority: int | None) -> None:
        """Open a shard, or without a priority count it; if that fails, it is opened again where it is read."""
        future = self._opening[shard]
        try:
            with while_wanted(lambda: not fetcher.stopped):
                if priority is None:
                    self._remember(shard, self._load(shard, mapped=False))
                else:
                    with self._lock:
                        self._ahead.add(shard)
                    content = remote_bytes(self._load_in_order(shard, priority))
                    if isinstance(content, PrefetchedBytes):
                        content.fetch_small()
        except Exception as exc:
            log.debug("%s was not opened ahead: %s", self._urls[shard], exc)
        finally:
            with self._lock:
                self._opening.pop(shard, None)
            future.set_result(None)

    def _wait_for(self, shard: int) -> None:
        """Wait until a shard that is being opened ahead is open."""
        future = self._opening.get(shard)
        if future is not None:
            future.result()

    def _open_in_order(self, shard: int) -> Opened:
        """Return an open shard; opens it to be read in order if necessary."""
        self._wait_for(shard)
        with self._lock:
            found = self._use(shard)
        return found or self._load_in_order(shard, self._fetcher.next_priority())

    def _use(self, shard: int) -> Opened | None:
        """Return a shard if it is open, which is then the one used last; call with the lock held."""
        self._ahead.discard(shard)
        if shard in self._open:
            self._open.move_to_end(shard)
        return self._open.get(shard)

    def _load_in_order(self, shard: int, priority: int) -> Opened:
        path = self._paths[shard]
        loaded = open_in_order(path, open_storage(path, self._storage), self._fetcher, priority, limits=self._limits)
        if isinstance(loaded, UnindexedShard):
            return self._keep_open(shard, loaded)
        opened = self._remember(shard, loaded)
        assert opened is not None
        return opened

    def index(self, shard: int) -> Index:
        """Return the index of a shard, without opening its content if the index is stored beside it.

        Raises:
            StorageError: The shard cannot be read.
        """
        with self._lock:
            opened, known = self._open.get(shard), self._indexes.get(shard)
        if isinstance(opened, OpenShard):
            return opened.index
        if known is not None:
            return known
        loaded = self._load(shard, mapped=False)
        self._remember(shard, loaded)
        return loaded[0]

    def stored_index(self, shard: int) -> bytes | None:
        """Return the index that is stored beside a shard as bytes, not checked; None if there is none.

        Raises:
            StorageError: The storage cannot determine whether there is an index.
        """
        path = self._paths[shard]
        if scheme(path) != "file":
            return read_object(open_storage(path, self._storage), index_url(path), optional=True)
        try:
            with open(path + INDEX_SUFFIX, "rb") as file:
                return file.read()
        except OSError:
            return None

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The class names that the manifests list, for the numbers in ``cls``; None if there are none."""
        folders = {os.path.dirname(path) or "." for path in self._paths if scheme(path) == "file"}
        found = [*self._manifests.values(), *(read_manifest(folder) for folder in sorted(folders))]
        return next((manifest.classes for manifest in found if manifest is not None and manifest.classes), None)

    @cached_property
    def traits(self) -> Traits:
        return traits_of(self._paths, grows=True, find_countable=self._find_countable)

    def recall(self) -> bool:
        """Return whether all counts are known; also from the indexes that earlier runs kept in the user's cache.

        Raises:
            StorageError: The storage cannot tell whether a shard has changed.
        """
        shards = [shard for shard in range(len(self._paths)) if shard not in self._index_counts]
        shards = [] if self._manifest_counts is not None else shards
        paths = (self._paths[shard] for shard in shards)
        if not all(is_remembered(path, open_storage(path, self._storage)) for path in paths):
            return False
        with ThreadPoolExecutor(OBJECT_CONNECTIONS, "penstock count") as pool:
            for shard, index in zip(shards, pool.map(self._recalled, shards), strict=True):
                if index is None:
                    pool.shutdown(cancel_futures=True)
                    return False
                self._remember(shard, (index, None))
        return True

    def _recalled(self, shard: int) -> Index | None:
        url = self._paths[shard]
        storage = open_storage(url, self._storage)
        return remembered_index(url, storage, storage.info(url))

    def _find_countable(self) -> bool:
        """Return whether all counts can be found without fetching whole shards; fetches indexes of remote shards."""
        if self._countable is None:
            self._countable = self._manifest_counts is not None or self._find_indexes()
        return self._countable

    def _find_indexes(self) -> bool:
        """Fetch the indexes of all remote shards; return whether all have one."""
        unknown = [
            shard
            for shard, path in enumerate(self._paths)
            if shard not in self._index_counts and scheme(path) != "file"
        ]
        with ThreadPoolExecutor(CONNECTIONS, "penstock count") as pool:
            for shard, index in zip(unknown, pool.map(self._index_beside, unknown), strict=True):
                if index is None:
                    pool.shutdown(cancel_futures=True)
                    return False
                self._remember(shard, (index, None))
        return True

    def _index_beside(self, shard: int) -> Index | None:
        url = self._paths[shard]
        return remote_index(url, open_storage(url, self._storage))

    def sizes(self) -> list[int]:
        """Return the file sizes: those in the manifest, else those that the storage reports; -1 if it reports none.

        Raises:
            StorageError: A shard is missing.
        """
        shards = range(len(self._paths))
        if all(scheme(path) == "file" for path in self._paths):
            return [self._size(shard) for shard in shards]
        self._entry(0)  # reads a manifest, once for all
        with ThreadPoolExecutor(min(len(shards), OBJECT_CONNECTIONS), "penstock sizes") as pool:
            return list(pool.map(self._size, shards))

    def url(self, shard: int) -> str:
        return self._urls[shard]

    def objects(self, shard: int) -> list[str]:
        return [self._paths[shard]]

    def folders(self) -> set[str]:
        """Return the local folders that hold the shards."""
        return {os.path.dirname(path) or "." for path in self._paths if scheme(path) == "file"}

    def stamp(self) -> object:
        return folder_times(self._paths)

    def cache(self) -> ShardCache | None:
        return cached_shards(self._storage, [(path, index_url(path)) for path in self._paths])

    def suspend(self) -> None:
        """Stop prefetching and close remote shards; later reads open them again."""
        with self._lock:
            fetcher, self._fetcher = self._fetcher, Fetcher()
            remote = [shard for shard, opened in self._open.items() if remote_bytes(opened) is not None]
            closed = [self._open.pop(shard) for shard in remote]
        for opened in closed:
            close(opened)
        fetcher.stop()

    def key(self, shard: int, index: int) -> str:
        """Return the key of a sample.

        Raises:
            StorageError: The shard cannot be read.
            IndexError: The shard has no sample of this number.
        """
        for part, _ in self._parts(self._shard(shard), np.array([index])):
            return part.index.key(index - part.base)
        raise AssertionError

    def fields(self, shard: int) -> tuple[str, ...]:
        opened = self._shard(shard)
        if isinstance(opened, UnindexedShard):
            return opened.fields()
        return tuple(dict.fromkeys(name for kind in opened.index.kinds for name in kind))

    def _parts(self, opened: Opened, rows: I64) -> Iterator[tuple[OpenShard, I64]]:
        """Yield the parts of a shard that hold samples, each with the places in ``rows`` of its samples.

        Raises:
            IndexError: The shard has no sample of one of these numbers.
        """
        if isinstance(opened, UnindexedShard):
            yield from opened.parts(rows)
            return
        if not (int(rows.min()) >= 0 and int(rows.max()) < opened.index.samples):
            raise IndexError(f"sample {int(rows.max())} of {opened.index.samples} in {opened.url}")
        yield opened, np.arange(len(rows))
        if isinstance(opened.content.bytes, PrefetchedBytes):
            last = int(rows.max())
            end = opened.index.end(last) if last + 1 < opened.index.samples else len(opened.content.bytes)
            opened.content.bytes.pass_over(end)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedTar:
        """Locate many samples at once, in any order.

        Args:
            shard: The number of each sample's shard.
            index: Each sample's number in its shard.
            fields: The fields to read.

        Raises:
            StorageError: A shard cannot be read, or changed while it was being read.
            DataError: A shard does not hold what its manifest says.
            IndexError: A shard has no sample of one of these numbers.
        """
        few = len(self._paths) < 1 << 15  # 16-bit numbers are sorted by radix, five times as fast
        order = np.argsort(shard.astype(np.int16) if few else shard, kind="stable")
        cuts = np.flatnonzero(np.diff(shard[order])) + 1
        locator = Locator(len(index), fields, _is_sequential(order, shard, index))
        groups = np.split(order, cuts) if len(order) else []
        for found, places in self._with_shards([(int(shard[places[0]]), places) for places in groups]):
            for part, chosen in self._parts(found, index[places]):
                rows = index[places[chosen]] - part.base
                locator.add(part, places[chosen], rows)
                part.release(part.index.begin(int(rows.min())))
        self._release_others(locator)
        return locator.located(index)

    def _with_shards(self, groups: list[tuple[int, I64]]) -> Iterator[tuple[Opened, I64]]:
        """Yield the groups with their open shards; remote shards are opened concurrently: each takes round trips."""
        closed = [number for number, _ in groups if number not in self._open and scheme(self._paths[number]) != "file"]
        if len(closed) < 2:
            yield from ((self._shard(number), places) for number, places in groups)
            return
        self._entry(closed[0])  # reads the manifest, once for all
        coming = iter(closed)
        with ThreadPoolExecutor(min(len(closed), CONNECTIONS), "penstock open") as pool:
            opening = {number: pool.submit(self._shard, number) for number in islice(coming, CONNECTIONS)}
            for number, places in groups:
                if number in opening:
                    opened = opening.pop(number).result()
                    opening.update((after, pool.submit(self._shard, after)) for after in islice(coming, 1))
                    yield opened, places
                else:
                    yield self._shard(number), places

    def _release_others(self, locator: Locator) -> None:
        """Release the pages of open shards that are not being read."""
        with self._lock:
            opened = [shard for shard in self._open.values() if isinstance(shard, OpenShard)]
            unused = [shard for shard in opened if not locator.holds(shard)]
        for shard in unused:
            shard.release()

    def _size(self, shard: int) -> int:
        entry = self._entry(shard)
        if entry is not None:
            return entry.bytes
        if scheme(self._paths[shard]) != "file":
            url = self._paths[shard]
            size = open_storage(url, self._storage).info(url).size
            return -1 if size is None else size
        try:
            return os.stat(self._paths[shard]).st_size
        except OSError as exc:
            raise StorageError(f"cannot read the shard: {exc.strerror or exc}", self._urls[shard]) from exc

    def _entry(self, shard: int) -> ShardEntry | None:
        """Return the shard's entry in the given manifest, or in that of its folder, if there is one."""
        path = self._paths[shard]
        if self._given is not None:
            return self._given.manifest.entry_of(path)
        if scheme(path) == "file":
            manifest = read_manifest(os.path.dirname(path) or ".")
            return manifest.entry(os.path.basename(path)) if manifest is not None else None
        folder = without_query(path).rpartition("/")[0]
        if folder not in self._manifests:
            self._manifests[folder] = read_manifest_at(folder, open_storage(path, self._storage), optional=True)
        manifest = self._manifests[folder]
        return manifest.entry(shard_name(path)) if manifest is not None else None

    def _shard(self, shard: int) -> Opened:
        """Return an open shard; opens it if necessary."""
        self._wait_for(shard)
        with self._lock:
            found = self._use(shard)
        if found is None:
            found = self._remember(shard, self._load(shard, mapped=True))
            assert found is not None
        if isinstance(found, OpenShard) and found.content.resized():
            raise StorageError("the shard was changed while it was being read", found.url)
        return found

    def _load(self, shard: int, mapped: bool) -> tuple[Index, Content | None]:
        """Load the index of a shard, and its content if it is ``mapped`` or had to be scanned."""
        url = self._urls[shard]
        counts = self._manifest_counts
        expected = self._index_counts.get(shard) if counts is None else int(counts[shard])
        path, known = self._paths[shard], self._indexes.pop(shard, None)
        if scheme(path) == "file":
            index, content = open_shard(
                path, expected=expected, shard=url, mapped=mapped, limits=self._limits, known=known
            )
        else:
            entry = self._entry(shard)
            if known is None and self._given is not None:
                known = self._given.index(path)
            index, content = open_remote(
                path,
                open_storage(path, self._storage),
                self._fetcher,
                expected=expected,
                sha256=entry.sha256 or None if entry is not None else None,
                mapped=mapped,
                limits=self._limits,
                known=known,
            )
        if expected is not None and index.samples != expected:
            raise self._changed(shard, expected, index.samples)
        if index.padding > RECORD and shard not in self._index_counts:  # once: the count is remembered
            log.warning("%s: %s", url, long_padding(index.padding))
        return index, content

    def _changed(self, shard: int, expected: int, found: int) -> DataError:
        """Return the error for a shard that was written again and holds another number of samples than before."""
        if self._manifest_counts is None:
            return DataError(
                f"the shard was changed during the run: it had {expected} samples, now {found}", self._urls[shard]
            )
        folder = self._urls[shard].rpartition("/")[0] or "."
        problem = f"the shard was written again: {MANIFEST} says {expected} samples, the shard holds {found}"
        return DataError(f"{problem}; run `penstock index {shlex.quote(folder)}` to update it", self._urls[shard])

    def _remember(self, shard: int, loaded: tuple[Index, Content | None]) -> Opened | None:
        """Remember the count of a shard, and the open shard if its content was loaded."""
        index, content = loaded
        with self._lock:
            self._index_counts[shard] = index.samples
            if content is None:
                self._indexes[shard] = index
                if len(self._indexes) > OPEN_SHARDS:
                    self._indexes.popitem(last=False)
                return None
        return self._keep_open(shard, OpenShard(self._urls[shard], index, content))

    def _remember_count(self, shard: int, count: int) -> None:
        """Remember the count of a shard whose end has arrived, and use its whole index from now on."""
        with self._lock:
            self._index_counts[shard] = count
            unindexed = self._open.get(shard)
            if isinstance(unindexed, UnindexedShard) and unindexed.whole is not None:
                self._open[shard] = unindexed.whole

    def _keep_open(self, shard: int, opened: Opened) -> Opened:
        """Keep a shard open, unless prefetching has stopped, and close the one that was used least recently."""
        with self._lock:
            if shard in self._open:  # another thread was faster
                return self._open[shard]
            content = remote_bytes(opened)
            if isinstance(content, PrefetchedBytes) and content.fetcher.stopped:
                return opened
            self._open[shard] = opened
            evicted = [self._open.pop(other) for other in shards_to_close(self._open, self._ahead, shard)]
        for other in evicted:
            close(other)
        return opened


def _is_sequential(order: I64, shard: I64, index: I64) -> bool:
    """Return whether samples are requested front to back, shard after shard; ``order`` sorts them by shard."""
    inside = np.diff(index) > 0
    return bool((np.diff(order) == 1).all() and (inside | (np.diff(shard) != 0)).all())
