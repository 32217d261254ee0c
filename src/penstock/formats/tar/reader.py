"""Shards to samples: spots of many samples are found at once, and read when their block is due."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from penstock.errors import DataError, StorageError
from penstock.formats.arriving import CONNECTIONS, Arriving, Fetcher
from penstock.formats.manifest import Manifest, ShardEntry, read_manifest, read_manifest_at
from penstock.formats.tar.compression import LIMITS, ArchiveLimits, Content
from penstock.formats.tar.index import I64, Index
from penstock.formats.tar.remote import open_remote
from penstock.formats.tar.scan import open_shard
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import scheme

_OPEN_SHARDS = 32  # a window reads 16 at once, and the next one may be begun
_PAGE = mmap.PAGESIZE
_STEP = 1 << 20  # what a shard lets go of at once
_BAD = -1


class Fields(Protocol):
    """Which fields the reader of a sample wants."""

    def wants(self, name: str) -> bool:
        """Tell whether a field (or ``__key__``, ``__url__``) is wanted."""


@dataclass(slots=True, eq=False)
class _Shard:
    """One open shard; the map lives as long as a Spots of it."""

    url: str
    index: Index
    content: Content
    released: int = 0

    def release(self, upto: int | None = None) -> None:
        """Let go of the pages before ``upto``: they count as the process's memory until somebody says so.

        Reading them again is allowed: they come back from the page cache.
        """
        data = self.content.bytes
        upto = (len(data) if upto is None else upto) // _PAGE * _PAGE
        if upto - self.released >= _STEP and isinstance(data, mmap.mmap):
            data.madvise(mmap.MADV_DONTNEED, self.released, upto - self.released)
            self.released = upto


@dataclass(frozen=True, slots=True, eq=False)
class Spots:
    """Where samples lie, in the order they were asked for; reading them needs nothing else.

    Safe to read from any thread. Holds maps of files, so it stays in its process.
    """

    nbytes: I64
    _shards: list[_Shard]
    _slot: I64
    _index: I64
    _kinds: list[tuple[str, ...]]
    _kind: I64
    _first: I64
    _start: I64
    _stop: I64
    _keys: tuple[I64, I64] | None
    _with_url: bool
    _ascending: bool

    def __len__(self) -> int:
        return len(self._index)

    def take(self, sel: slice | I64) -> Spots:
        """Give the spots of some of the samples; a slice costs about a microsecond."""
        keys = self._keys
        return Spots(
            self.nbytes[sel],
            self._shards,
            self._slot[sel],
            self._index[sel],
            self._kinds,
            self._kind[sel],
            self._first[sel],
            self._start,
            self._stop,
            None if keys is None else (keys[0][sel], keys[1][sel]),
            self._with_url,
            self._ascending,
        )

    def read(self) -> tuple[list[dict[str, Any] | None], dict[int, DataError]]:
        """Read the samples, in order.

        Returns:
            The samples, None in the place of one that cannot be read; and by their numbers, what is wrong
            with those.
        """
        try:
            return self._read()
        except DataError:  # bytes that arrive damaged: whose they are shows when each is read alone
            return self._one_by_one()

    def _one_by_one(self) -> tuple[list[dict[str, Any] | None], dict[int, DataError]]:
        samples: list[dict[str, Any] | None] = []
        errors: dict[int, DataError] = {}
        for place in range(len(self)):
            try:
                some, wrong = self.take(slice(place, place + 1))._read()
                if wrong:
                    errors[place] = wrong[0]
            except DataError as exc:
                some, errors[place] = [None], exc
            samples += some
        return samples, errors

    def _read(self) -> tuple[list[dict[str, Any] | None], dict[int, DataError]]:
        if len(self) and self._kind[0] != _BAD and bool((self._kind == self._kind[0]).all()):
            return list(self._rows(self._kinds[self._kind[0]])), {}
        samples: list[dict[str, Any] | None] = [None] * len(self)
        errors: dict[int, DataError] = {}
        for kind in np.unique(self._kind).tolist():
            places = np.flatnonzero(self._kind == kind)
            if kind == _BAD:
                errors = {int(place): self._error(int(place)) for place in places}
            else:
                for place, sample in zip(places.tolist(), self.take(places)._rows(self._kinds[kind]), strict=True):
                    samples[place] = sample
        return samples, errors

    def _rows(self, fields: tuple[str, ...]) -> list[dict[str, Any]]:
        """Read samples that all have the same fields: column by column, then one dict a row."""
        slots = self._slot.tolist()
        if self._ascending and fields:
            for shard in self._shards[: slots[0]]:
                shard.release()
            self._shards[slots[0]].release(int(self._start[self._first[0]]))
        names: list[str] = []
        columns: list[Any] = []
        if self._keys is not None:
            names.append("__key__")
            texts = _per_row([shard.index.text for shard in self._shards], slots)
            spans = zip(texts, self._keys[0].tolist(), self._keys[1].tolist(), strict=False)
            columns.append([text[i:j] for text, i, j in spans])
        if self._with_url:
            names.append("__url__")
            columns.append(_per_row([shard.url for shard in self._shards], slots))
        maps = _per_row([shard.content.bytes for shard in self._shards], slots)
        for number, field in enumerate(fields):
            names.append(field)
            rows = self._first + number
            spots = zip(maps, self._start[rows].tolist(), self._stop[rows].tolist(), strict=False)
            columns.append([content[i:j] for content, i, j in spots])
        if not any(isinstance(column, list) for column in columns):
            columns.append(slots)  # nothing, or the same for all: there are as many samples nonetheless
        return _dicts(names, columns)

    def _error(self, place: int) -> DataError:
        shard, index = self._shards[self._slot[place]], int(self._index[place])
        return DataError(shard.index.bad[index], shard.url, shard.index.key(index) or None)


def _per_row(values: list[Any], slots: list[int]) -> Any:
    """The value of each row's shard; ``repeat`` where all rows lie in one."""
    return repeat(values[slots[0]]) if slots.count(slots[0]) == len(slots) else list(map(values.__getitem__, slots))


def _dicts(names: list[str], columns: list[Any]) -> list[dict[str, Any]]:
    """Turn columns into rows; usual widths by a dict display, at a third of the cost of ``dict(zip())``."""
    if len(names) == 1:
        return [{names[0]: row[0]} for row in zip(*columns, strict=False)]
    if len(names) == 3:
        a, b, c = names
        return [{a: i, b: j, c: k} for i, j, k in zip(*columns, strict=False)]
    if len(names) == 4:
        a, b, c, d = names
        return [{a: i, b: j, c: k, d: m} for i, j, k, m in zip(*columns, strict=False)]
    if len(names) == 5:
        a, b, c, d, e = names
        return [{a: i, b: j, c: k, d: m, e: n} for i, j, k, m, n in zip(*columns, strict=False)]
    return [dict(zip(names, row, strict=False)) for row in zip(*columns, strict=False)]


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
        self._open: OrderedDict[int, _Shard] = OrderedDict()
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
            with self._lock:
                self._keep(shard, self._load(shard, mapped=False))
        return self._found[shard]

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
        """Fetch nothing ahead any more."""
        self._fetcher.rest()

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

    def locate(self, shard: I64, index: I64, fields: Fields) -> Spots:
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
        chart = _Chart(len(index), fields)
        few = len(self._paths) < 1 << 15  # 16-bit numbers are sorted by radix, five times as fast
        order = np.argsort(shard.astype(np.int16) if few else shard, kind="stable")
        cuts = np.flatnonzero(np.diff(shard[order])) + 1
        if self.remote:
            self._open_together(np.unique(shard).tolist())
        for places in np.split(order, cuts) if len(order) else []:
            which = int(shard[places[0]])
            found = self._shard(which)
            rows = index[places]
            if not (int(rows.min()) >= 0 and int(rows.max()) < found.index.samples):
                raise IndexError(f"sample {int(rows.max())} of {found.index.samples} in {self._urls[which]}")
            chart.add(found, places, rows)
            found.release(found.index.begin(int(rows.min())))
        chart.ask()
        self._release_others(chart)
        return chart.spots(index)

    def _open_together(self, shards: list[int]) -> None:
        """Open remote shards that will be read, many at a time: each takes a few trips to its server."""
        closed = [shard for shard in shards if shard not in self._open and scheme(self._paths[shard]) != "file"]
        if len(closed) < 2:
            return
        self._entry(closed[0])  # the manifest, once for all
        some = closed[:_OPEN_SHARDS]
        with ThreadPoolExecutor(min(len(some), CONNECTIONS), thread_name_prefix="penstock open") as pool:
            loaded = list(pool.map(lambda shard: self._load(shard, mapped=True), some))
        with self._lock:
            for shard, found in zip(some, loaded, strict=True):
                if shard not in self._open:
                    self._keep(shard, found)

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
            self._manifests[folder] = read_manifest_at(folder, open_storage(path, self._storage))
        manifest = self._manifests[folder]
        return manifest.entry(name) if manifest is not None else None

    def _shard(self, shard: int) -> _Shard:
        """Give an open shard, opening it if need be."""
        with self._lock:
            found = self._open.get(shard)
            if found is None:
                found = self._keep(shard, self._load(shard, mapped=True))
                assert found is not None
            self._open.move_to_end(shard)
        if found.content.grown_or_shrunk():
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

    def _keep(self, shard: int, loaded: tuple[Index, Content | None]) -> _Shard | None:
        """Remember the count of a shard, and the shard itself where it is open."""
        index, content = loaded
        self._found[shard] = index.samples
        if content is None:
            self._indexes[shard] = index
            if len(self._indexes) > _OPEN_SHARDS:
                self._indexes.popitem(last=False)
            return None
        kept = self._open[shard] = _Shard(self._urls[shard], index, content)
        if len(self._open) > _OPEN_SHARDS:
            _, gone = self._open.popitem(last=False)
            if isinstance(gone.content.bytes, Arriving):
                gone.content.bytes.close()
        return kept


class _Chart:
    """Gathers the spots of samples, shard by shard."""

    def __init__(self, count: int, fields: Fields) -> None:
        self._fields = fields
        self._shards: list[_Shard] = []
        self._slot = np.zeros(count, np.int64)
        self._kinds: dict[tuple[str, ...], int] = {}
        self._kind = np.full(count, _BAD, np.int64)
        self._first = np.zeros(count, np.int64)
        self._nbytes = np.zeros(count, np.int64)
        self._starts: list[I64] = []
        self._stops: list[I64] = []
        self._members = 0
        self._asked: list[tuple[Arriving, I64, I64]] = []  # ranges of shards that are not here
        self._ascending = True  # the samples were asked for as they lie
        self._last = -1  # place of the last sample asked for of the shards so far
        keys = fields.wants("__key__")
        self._keys = (np.zeros(count, np.int64), np.zeros(count, np.int64)) if keys else None

    def add(self, shard: _Shard, places: I64, rows: I64) -> None:
        """Find the samples ``rows`` of a shard; they are asked for at ``places``."""
        index = shard.index
        inward = int(places[0]) > self._last and bool((np.diff(rows) > 0).all())
        self._ascending, self._last = self._ascending and inward, int(places[-1])
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

    def _add_kind(self, shard: _Shard, kind: int, places: I64, rows: I64) -> None:
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
        if isinstance(shard.content.bytes, Arriving):
            self._asked.append((shard.content.bytes, start, start + size))
        self._kind[places] = self._kinds.setdefault(fields, len(self._kinds))
        self._first[places] = np.arange(len(rows)) * len(wanted) + self._members
        self._nbytes[places] = size.reshape(len(rows), len(wanted)).sum(axis=1)
        self._members += len(members)

    def ask(self) -> None:
        """Have the bytes of shards that are not here fetched, in the order they were added."""
        for arriving, starts, stops in self._asked:
            arriving.want(starts, stops, ascending=self._ascending)

    def holds(self, shard: _Shard) -> bool:
        """Tell whether samples of a shard were added."""
        return any(shard is one for one in self._shards)

    def spots(self, index: I64) -> Spots:
        """Give the spots of all that was added."""
        none = np.zeros(0, np.int64)
        return Spots(
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
