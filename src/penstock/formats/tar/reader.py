"""Shards to samples: spots of many samples are found at once, and read when their block is due."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.blobs.content import Content
from penstock.blobs.prefetch import CONNECTIONS, Fetcher, PrefetchedBytes
from penstock.errors import DataError, StorageError
from penstock.formats.manifest import Manifest, ShardEntry, read_manifest, read_manifest_at
from penstock.formats.tar.index import I64, Index
from penstock.formats.tar.located import BAD, LocatedTar, OpenShard
from penstock.formats.tar.remote import open_remote, remote_index
from penstock.formats.tar.scan import open_shard
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import scheme

_OPEN_SHARDS = 32  # a window reads 16 at once, and the next one may be begun


class Fields(Protocol):
    """Which fields the reader of a sample wants."""

    def wants(self, name: str) -> bool:
        """Tell whether a field (or ``__key__``, ``__url__``) is wanted."""


class TarReader:
    """Finds and reads the samples of tar shards by number.

    Opens a shard when a sample of it is first asked for and keeps the last 32 open. Safe to use from several
    threads; pickles as its arguments.

    Args:
        urls: What the shards are called in samples and errors.
        names: What they are called in the dataset's identity.
        paths: Where they are: local files, or URLs.
        counts: How many samples each has, where a manifest says so for all.
        limits: How far compressed shards may unpack.
        storage: Where those lie that are URLs; ``None``: as their schemes say.
        manifests: Those of remote folders, where they are known.
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
        self._given = counts
        self._found: dict[int, int] = {}
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._indexes: OrderedDict[int, Index] = OrderedDict()  # of shards that were counted and not yet opened
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return TarReader, (self._urls, self.names, self._paths, self._given, self._limits, self._storage)

    def counts(self, scan: bool) -> I64 | None:
        """Give the number of samples of every shard; None where one is unknown and may not be looked for.

        Args:
            scan: Load or make the index of every shard whose count is unknown.

        Raises:
            StorageError: A shard cannot be read.
        """
        if self._given is not None:
            return self._given
        shards = range(len(self._paths))
        if not scan and not all(shard in self._found for shard in shards):
            return None
        return np.array([self.count(shard) for shard in shards], np.int64)

    def count(self, shard: int) -> int:
        """Give the number of samples of one shard, bad ones too.

        Raises:
            StorageError: The shard cannot be read.
        """
        if self._given is not None:
            return int(self._given[shard])
        if shard not in self._found:
            self._keep(shard, self._load(shard, mapped=False))
        return self._found[shard]

    def countable(self) -> bool:
        """Tell whether all counts can be had without fetching a shard just for that; indexes of remote ones are."""
        if self._given is not None or not self.remote:
            return True
        unknown = [n for n in range(len(self._paths)) if n not in self._found and scheme(self._paths[n]) != "file"]
        with ThreadPoolExecutor(CONNECTIONS, "penstock count") as pool:
            for shard, index in zip(unknown, pool.map(self._index_beside, unknown), strict=True):
                if index is None:
                    pool.shutdown(cancel_futures=True)
                    return False
                self._keep(shard, (index, None))
        return True

    def _index_beside(self, shard: int) -> Index | None:
        place = self._paths[shard]
        return remote_index(place, open_storage(place, self._storage))

    def sizes(self) -> list[int]:
        """Give the file sizes: as the manifest says, else as they are on disk.

        Raises:
            StorageError: A shard is missing.
        """
        return [self._size(shard) for shard in range(len(self._paths))]

    def url(self, shard: int) -> str:
        """Give what the shard is called in samples and errors."""
        return self._urls[shard]

    def folders(self) -> set[str]:
        """Give the local folders the shards lie in."""
        return {os.path.dirname(path) or "." for path in self._paths if scheme(path) == "file"}

    @property
    def remote(self) -> bool:
        """Whether a shard is no file of this machine."""
        return any(scheme(path) != "file" for path in self._paths[:1] + self._paths[-1:])

    def rest(self) -> None:
        """Fetch nothing ahead any more; whoever reads after this opens remote shards anew."""
        with self._lock:
            fetcher, self._fetcher = self._fetcher, Fetcher()
            for number in [n for n, shard in self._open.items() if isinstance(shard.content.bytes, PrefetchedBytes)]:
                del self._open[number]
        fetcher.rest()

    def key(self, shard: int, index: int) -> str:
        """Give the key of a sample.

        Raises:
            StorageError: The shard cannot be read.
            IndexError: It has fewer samples.
        """
        found = self._shard(shard).index
        if not 0 <= index < found.samples:
            raise IndexError(f"sample {index} of {found.samples} in {self._urls[shard]}")
        return found.key(index)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedTar:
        """Find many samples at once, in any order.

        Args:
            shard: The number of each sample's shard.
            index: Its number in the shard.
            fields: What to read of it.

        Raises:
            StorageError: A shard cannot be read, or has changed under the reader.
            DataError: A shard does not hold what its manifest says.
            IndexError: A number is beyond its shard.
        """
        few = len(self._paths) < 1 << 15  # 16-bit numbers are sorted by radix, five times as fast
        order = np.argsort(shard.astype(np.int16) if few else shard, kind="stable")
        cuts = np.flatnonzero(np.diff(shard[order])) + 1
        chart = _Chart(len(index), fields, _as_they_lie(order, shard, index))
        groups = np.split(order, cuts) if len(order) else []
        for which, found, places in self._opened([(int(shard[places[0]]), places) for places in groups]):
            rows = index[places]
            if not (int(rows.min()) >= 0 and int(rows.max()) < found.index.samples):
                raise IndexError(f"sample {int(rows.max())} of {found.index.samples} in {self._urls[which]}")
            chart.add(found, places, rows)
            found.release(found.index.begin(int(rows.min())))
        self._release_others(chart)
        return chart.spots(index)

    def _opened(self, groups: list[tuple[int, I64]]) -> Iterator[tuple[int, OpenShard, I64]]:
        """The groups with their open shards; remote ones are opened side by side, since each takes a few trips."""
        closed = [which for which, _ in groups if which not in self._open and scheme(self._paths[which]) != "file"]
        if len(closed) < 2:
            yield from ((which, self._shard(which), places) for which, places in groups)
            return
        self._entry(closed[0])  # the manifest, once for all
        with ThreadPoolExecutor(min(len(closed), CONNECTIONS), "penstock open") as pool:
            opening = {which: pool.submit(self._shard, which) for which in closed[:_OPEN_SHARDS]}
            for which, places in groups:
                yield which, opening[which].result() if which in opening else self._shard(which), places

    def _release_others(self, chart: _Chart) -> None:
        """Let go of the shards that are open and not being read."""
        with self._lock:
            idle = [shard for shard in self._open.values() if not chart.holds(shard)]
        for shard in idle:
            shard.release()

    def _size(self, shard: int) -> int:
        entry = self._entry(shard)
        if entry is not None:
            return entry.bytes
        if scheme(self._paths[shard]) != "file":
            place = self._paths[shard]
            size = open_storage(place, self._storage).info(place).size
            return -1 if size is None else size
        try:
            return os.stat(self._paths[shard]).st_size
        except OSError as exc:
            raise StorageError(f"cannot read the shard: {exc.strerror or exc}", self._urls[shard]) from exc

    def _entry(self, shard: int) -> ShardEntry | None:
        """What a manifest says about the shard."""
        path = self._paths[shard]
        if scheme(path) == "file":
            manifest = read_manifest(os.path.dirname(path) or ".")
            return manifest.entry(os.path.basename(path)) if manifest is not None else None
        folder, _, name = path.rpartition("/")
        if folder not in self._manifests:
            self._manifests[folder] = read_manifest_at(folder, open_storage(path, self._storage), optional=True)
        manifest = self._manifests[folder]
        return manifest.entry(name) if manifest is not None else None

    def _shard(self, shard: int) -> OpenShard:
        """Give an open shard, opening it if need be."""
        with self._lock:
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
        if found is None:
            found = self._keep(shard, self._load(shard, mapped=True))
            assert found is not None
        if found.content.resized():
            raise StorageError("the shard was changed while it was being read", found.url)
        return found

    def _load(self, shard: int, mapped: bool) -> tuple[Index, Content | None]:
        """Load the index of a shard, and its content if it is asked for or had to be looked at."""
        url = self._urls[shard]
        expected = self._found.get(shard) if self._given is None else int(self._given[shard])
        place, known = self._paths[shard], self._indexes.pop(shard, None)
        if scheme(place) == "file":
            index, content = open_shard(
                place, expected=expected, shard=url, mapped=mapped, limits=self._limits, known=known
            )
        else:
            entry = self._entry(shard)
            index, content = open_remote(
                place,
                open_storage(place, self._storage),
                self._fetcher,
                expected=expected,
                sha256=entry.sha256 if entry is not None else None,
                mapped=mapped,
                limits=self._limits,
                known=known,
            )
        if expected is not None and index.samples != expected:
            told = "the manifest" if self._given is not None else "the first look"
            problem = f"{told} says {expected} samples, the shard holds {index.samples}: index it again"
            raise DataError(problem, url)
        return index, content

    def _keep(self, shard: int, loaded: tuple[Index, Content | None]) -> OpenShard | None:
        """Remember the count of a shard, and the shard itself where it is open."""
        index, content = loaded
        with self._lock:
            self._found[shard] = index.samples
            if content is None:
                self._indexes[shard] = index
                if len(self._indexes) > _OPEN_SHARDS:
                    self._indexes.popitem(last=False)
                return None
            if shard in self._open:  # another thread was faster
                return self._open[shard]
            kept = OpenShard(self._urls[shard], index, content)
            if isinstance(content.bytes, PrefetchedBytes) and content.bytes.fetcher.over:
                return kept
            self._open[shard] = kept
            gone = self._open.popitem(last=False)[1] if len(self._open) > _OPEN_SHARDS else None
        if gone is not None and isinstance(gone.content.bytes, PrefetchedBytes):
            gone.content.bytes.close()
        return kept


def _as_they_lie(order: I64, shard: I64, index: I64) -> bool:
    """Whether samples are asked for front to back, one shard after the other; ``order`` sorts them by shard."""
    inside = np.diff(index) > 0
    return bool((np.diff(order) == 1).all() and (inside | (np.diff(shard) != 0)).all())


class _Chart:
    """Gathers the spots of samples, shard by shard."""

    def __init__(self, count: int, fields: Fields, ascending: bool) -> None:
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
        """Find the samples ``rows`` of a shard, asked for at ``places``; what is not here is sent for."""
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
            return  # a sample without fields is a bad one
        wanted = [column for column, name in enumerate(names) if self._fields.wants(name)]
        fields = tuple(names[column] for column in wanted)
        members = (index.first[rows][:, None] + np.array(wanted, np.int64)).ravel()
        start, size = index.start[members], index.size[members]
        self._starts.append(start)
        self._stops.append(start + size)
        if isinstance(shard.content.bytes, PrefetchedBytes):
            shard.content.bytes.want(start, start + size, ascending=self._ascending)
        self._kind[places] = self._kinds.setdefault(fields, len(self._kinds))
        self._first[places] = np.arange(len(rows)) * len(wanted) + self._members
        self._nbytes[places] = size.reshape(len(rows), len(wanted)).sum(axis=1)
        self._members += len(members)

    def holds(self, shard: OpenShard) -> bool:
        """Tell whether samples of a shard were added."""
        return any(shard is one for one in self._shards)

    def spots(self, index: I64) -> LocatedTar:
        """Give the spots of all that was added."""
        none = np.zeros(0, np.int64)
        return LocatedTar(
            self._nbytes,
            self._shards,
            self._slot,
            index,
            list(self._kinds),
            self._kind,
            self._first,
            np.concatenate([none, *self._starts]),
            np.concatenate([none, *self._stops]),
            self._keys,
            self._fields.wants("__url__"),
            self._ascending,
        )
