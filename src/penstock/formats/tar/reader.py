"""Tar shards read by sample number: samples are located in batches, and read when their block is processed."""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.blobs.content import Content
from penstock.blobs.prefetch import CONNECTIONS, Fetcher, PrefetchedBytes
from penstock.errors import DataError, StorageError
from penstock.formats.manifest import MANIFEST, Manifest, ShardEntry, read_manifest, read_manifest_at, shard_name
from penstock.formats.tar.archive import RECORD, long_padding
from penstock.formats.tar.index import I64, Index
from penstock.formats.tar.located import BAD, LocatedTar, OpenShard
from penstock.formats.tar.remote import open_remote, remote_index
from penstock.formats.tar.scan import open_shard
from penstock.formats.tar.walker import FieldFilter
from penstock.plan import Reader, Traits
from penstock.storage import Storage, folder_times, open_storage, traits_of
from penstock.storage.protocol import scheme, without_query

log = logging.getLogger(__name__)
_OPEN_SHARDS = 32  # a window reads 16 shards at once, and the next window may have begun


class TarReader(Reader):
    """Locates and reads the samples of tar shards by number.

    Opens a shard when one of its samples is first requested, and keeps the 32 most recently used open. Safe to use
    from several threads; pickles as its arguments.

    Args:
        urls: What the shards are called in samples and errors.
        names: What they are called in the dataset's identity.
        paths: Where they are: local paths or URLs.
        counts: The number of samples of each shard, if manifests list all of them.
        limits: How large compressed shards may become.
        storage: The storage of URLs; None: chosen by their schemes.
        manifests: The manifests of remote folders, as far as they have been read.
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
    ) -> None:
        self.names = list(names)
        self._storage = storage
        self._fetcher = Fetcher()
        self._manifests = dict(manifests or {})
        self._urls, self._paths, self._limits = list(urls), [os.fspath(path) for path in paths], limits
        self._manifest_counts = counts
        self._index_counts: dict[int, int] = {}
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._indexes: OrderedDict[int, Index] = OrderedDict()  # of shards that were counted but not opened yet
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return TarReader, (self._urls, self.names, self._paths, self._manifest_counts, self._limits, self._storage)

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
        if not scan and not all(shard in self._index_counts for shard in shards):
            return None
        return np.array([self.count(shard) for shard in shards], np.int64)

    def count(self, shard: int) -> int:
        """Return the number of samples of one shard, bad ones included.

        Raises:
            StorageError: The shard cannot be read.
        """
        if self._manifest_counts is not None:
            return int(self._manifest_counts[shard])
        if shard not in self._index_counts:
            self._remember(shard, self._load(shard, mapped=False))
        return self._index_counts[shard]

    @cached_property
    def traits(self) -> Traits:
        return traits_of(self._paths, find_countable=self._find_countable)

    def _find_countable(self) -> bool:
        """Return whether all counts can be found without fetching whole shards; fetches indexes of remote shards."""
        if self._manifest_counts is not None:
            return True
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
        return [self._size(shard) for shard in range(len(self._paths))]

    def url(self, shard: int) -> str:
        return self._urls[shard]

    def folders(self) -> set[str]:
        """Return the local folders that hold the shards."""
        return {os.path.dirname(path) or "." for path in self._paths if scheme(path) == "file"}

    def stamp(self) -> object:
        return folder_times(self._paths)

    def suspend(self) -> None:
        """Stop prefetching and close remote shards; later reads open them again."""
        with self._lock:
            fetcher, self._fetcher = self._fetcher, Fetcher()
            remote = [shard for shard, open_ in self._open.items() if isinstance(open_.content.bytes, PrefetchedBytes)]
            for shard in remote:
                del self._open[shard]
        fetcher.stop()

    def key(self, shard: int, index: int) -> str:
        """Return the key of a sample.

        Raises:
            StorageError: The shard cannot be read.
            IndexError: The shard has no sample of this number.
        """
        found = self._shard(shard).index
        if not 0 <= index < found.samples:
            raise IndexError(f"sample {index} of {found.samples} in {self._urls[shard]}")
        return found.key(index)

    def fields(self, shard: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for kind in self._shard(shard).index.kinds for name in kind))

    def locate(self, shard: I64, index: I64, fields: FieldFilter) -> LocatedTar:
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
        locator = _Locator(len(index), fields, _is_sequential(order, shard, index))
        groups = np.split(order, cuts) if len(order) else []
        for number, found, places in self._with_shards([(int(shard[places[0]]), places) for places in groups]):
            rows = index[places]
            if not (int(rows.min()) >= 0 and int(rows.max()) < found.index.samples):
                raise IndexError(f"sample {int(rows.max())} of {found.index.samples} in {self._urls[number]}")
            locator.add(found, places, rows)
            found.release(found.index.begin(int(rows.min())))
        self._release_others(locator)
        return locator.located(index)

    def _with_shards(self, groups: list[tuple[int, I64]]) -> Iterator[tuple[int, OpenShard, I64]]:
        """Yield the groups with their open shards; remote shards are opened concurrently: each takes round trips."""
        closed = [number for number, _ in groups if number not in self._open and scheme(self._paths[number]) != "file"]
        if len(closed) < 2:
            yield from ((number, self._shard(number), places) for number, places in groups)
            return
        self._entry(closed[0])  # reads the manifest, once for all
        with ThreadPoolExecutor(min(len(closed), CONNECTIONS), "penstock open") as pool:
            opening = {number: pool.submit(self._shard, number) for number in closed[:_OPEN_SHARDS]}
            for number, places in groups:
                yield number, opening[number].result() if number in opening else self._shard(number), places

    def _release_others(self, locator: _Locator) -> None:
        """Release the pages of open shards that are not being read."""
        with self._lock:
            unused = [shard for shard in self._open.values() if not locator.holds(shard)]
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
        """Return the shard's entry in the manifest of its folder, if there is one."""
        path = self._paths[shard]
        if scheme(path) == "file":
            manifest = read_manifest(os.path.dirname(path) or ".")
            return manifest.entry(os.path.basename(path)) if manifest is not None else None
        folder = without_query(path).rpartition("/")[0]
        if folder not in self._manifests:
            self._manifests[folder] = read_manifest_at(folder, open_storage(path, self._storage), optional=True)
        manifest = self._manifests[folder]
        return manifest.entry(shard_name(path)) if manifest is not None else None

    def _shard(self, shard: int) -> OpenShard:
        """Return an open shard; opens it if necessary."""
        with self._lock:
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
        if found is None:
            found = self._remember(shard, self._load(shard, mapped=True))
            assert found is not None
        if found.content.resized():
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
            index, content = open_remote(
                path,
                open_storage(path, self._storage),
                self._fetcher,
                expected=expected,
                sha256=entry.sha256 if entry is not None else None,
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

    def _remember(self, shard: int, loaded: tuple[Index, Content | None]) -> OpenShard | None:
        """Remember the count of a shard, and the open shard if its content was loaded."""
        index, content = loaded
        with self._lock:
            self._index_counts[shard] = index.samples
            if content is None:
                self._indexes[shard] = index
                if len(self._indexes) > _OPEN_SHARDS:
                    self._indexes.popitem(last=False)
                return None
            if shard in self._open:  # another thread was faster
                return self._open[shard]
            opened = OpenShard(self._urls[shard], index, content)
            if isinstance(content.bytes, PrefetchedBytes) and content.bytes.fetcher.stopped:
                return opened
            self._open[shard] = opened
            evicted = self._open.popitem(last=False)[1] if len(self._open) > _OPEN_SHARDS else None
        if evicted is not None and isinstance(evicted.content.bytes, PrefetchedBytes):
            evicted.content.bytes.close()
        return opened


def _is_sequential(order: I64, shard: I64, index: I64) -> bool:
    """Return whether samples are requested front to back, shard after shard; ``order`` sorts them by shard."""
    inside = np.diff(index) > 0
    return bool((np.diff(order) == 1).all() and (inside | (np.diff(shard) != 0)).all())


class _Locator:
    """Collects the locations of samples, shard by shard."""

    def __init__(self, count: int, fields: FieldFilter, ascending: bool) -> None:
        self._fields = fields
        self._ascending = ascending
        self._shards: list[OpenShard] = []
        self._slot = np.zeros(count, np.int64)
        self._kinds: dict[tuple[str, ...], int] = {}
        self._kind = np.full(count, BAD, np.int64)
        self._first = np.zeros(count, np.int64)
        self._nbytes = np.zeros(count, np.int64)
        self._starts: list[I64] = []
        self._stops: list[I64] = []
        self._members = 0
        keys = fields.wants("__key__")
        self._keys = (np.zeros(count, np.int64), np.zeros(count, np.int64)) if keys else None

    def add(self, shard: OpenShard, places: I64, rows: I64) -> None:
        """Locate the samples ``rows`` of a shard, requested at ``places``, and prefetch them from a remote one."""
        index = shard.index
        self._slot[places] = len(self._shards)
        self._shards.append(shard)
        if self._keys is not None:
            self._keys[0][places] = index.edges[rows]
            self._keys[1][places] = index.edges[rows + 1]
        kinds = index.kind[rows]
        if bool((kinds == kinds[0]).all()):
            self._add_kind(shard, int(kinds[0]), places, rows)
            return
        for kind in np.unique(kinds).tolist():
            chosen = kinds == kind
            self._add_kind(shard, kind, places[chosen], rows[chosen])

    def _add_kind(self, shard: OpenShard, kind: int, places: I64, rows: I64) -> None:
        index = shard.index
        names = index.kinds[kind]
        if not names:
            return  # only bad samples have no fields
        wanted = [column for column, name in enumerate(names) if self._fields.wants(name)]
        fields = tuple(names[column] for column in wanted)
        members = (index.first[rows][:, None] + np.array(wanted, np.int64)).ravel()
        start, size = index.start[members], index.size[members]
        self._starts.append(start)
        self._stops.append(start + size)
        if isinstance(shard.content.bytes, PrefetchedBytes):
            shard.content.bytes.announce(start, start + size, ascending=self._ascending)
        self._kind[places] = self._kinds.setdefault(fields, len(self._kinds))
        self._first[places] = np.arange(len(rows)) * len(wanted) + self._members
        self._nbytes[places] = size.reshape(len(rows), len(wanted)).sum(axis=1)
        self._members += len(members)

    def holds(self, shard: OpenShard) -> bool:
        """Return whether samples of a shard were added."""
        return any(shard is other for other in self._shards)

    def located(self, index: I64) -> LocatedTar:
        """Return all samples added; ``index`` holds their numbers in their shards."""
        empty = np.zeros(0, np.int64)
        return LocatedTar(
            self._nbytes,
            self._shards,
            self._slot,
            index,
            list(self._kinds),
            self._kind,
            self._first,
            np.concatenate([empty, *self._starts]),
            np.concatenate([empty, *self._stops]),
            self._keys,
            self._fields.wants("__url__"),
            self._ascending,
        )
