"""A block of samples that the reader has located: offsets into open shards, which a worker reads."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from penstock.blobs.content import Content, MappedFile
from penstock.blobs.prefetch import PrefetchedBytes
from penstock.blobs.remote_bytes import Buffer, RemoteBytes
from penstock.errors import DataError, StorageError
from penstock.formats.tar.index import I64, Index
from penstock.plan import Fields

BAD = -1  # the kind of a sample that cannot be read
_PAGE = mmap.PAGESIZE
_MIN_RELEASE = 1 << 20  # bytes: releasing fewer pages is not worth the call


@dataclass(slots=True, eq=False)
class OpenShard:
    """One open shard, which stays mapped as long as a :class:`LocatedTar` refers to it.

    Attributes:
        url: What the shard is called in samples and errors.
        index: Its index.
        content: Its bytes.
        released: The offset up to which its pages have been given back to the system.
        base: The number in the shard of the first sample of the index, which may be the index of a part of the shard.
    """

    url: str
    index: Index
    content: Content
    released: int = 0
    base: int = 0

    def release(self, upto: int | None = None) -> None:
        """Give the pages before ``upto`` back to the system, by default all: until then they count as process memory.

        They can still be read: the page cache supplies them again.
        """
        data = self.content.bytes
        if not isinstance(data, mmap.mmap):
            return
        upto = (len(data) if upto is None else upto) // _PAGE * _PAGE
        if upto - self.released >= _MIN_RELEASE:
            data.madvise(mmap.MADV_DONTNEED, self.released, upto - self.released)
            self.released = upto


@dataclass(frozen=True, slots=True, eq=False)
class LocatedTar:
    """The locations of samples, in the order in which they were requested.

    Safe to read from any thread. Holds mapped files, so it cannot leave its process.

    Attributes:
        nbytes: The size of each sample's wanted fields.
        _shards: The open shards.
        _slot: For each sample, its shard in ``_shards``.
        _index: For each sample, its number in the shard.
        _kinds: The distinct tuples of wanted fields.
        _kind: For each sample, its position in ``_kinds``, or BAD.
        _first: For each sample, the row of its first field in ``_start`` and ``_stop``.
        _start: For each field, where its bytes begin.
        _stop: For each field, where they end.
        _keys: For each sample, where its key begins and ends in the index's text; None if keys are not wanted.
        _with_url: Whether ``__url__`` is wanted.
        _ascending: Whether samples are read in the order in which they are stored, so that pages can be released.
    """

    nbytes: I64
    _shards: list[OpenShard]
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

    def take(self, sel: slice | I64) -> LocatedTar:
        """Return some of the samples; a slice costs about a microsecond."""
        keys = self._keys
        return LocatedTar(
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
            The samples, with None in place of each that cannot be read; and what is wrong with those, by position.
        """
        try:
            return self._read()
        except DataError:  # bytes arrived damaged: reading each sample alone shows which ones
            return self._one_by_one()

    def _one_by_one(self) -> tuple[list[dict[str, Any] | None], dict[int, DataError]]:
        samples: list[dict[str, Any] | None] = []
        errors: dict[int, DataError] = {}
        for place in range(len(self)):
            try:
                sample, error = self.take(slice(place, place + 1))._read()
                if error:
                    errors[place] = error[0]
            except DataError as exc:
                sample, errors[place] = [None], exc
            samples += sample
        return samples, errors

    def _read(self) -> tuple[list[dict[str, Any] | None], dict[int, DataError]]:
        if len(self) and self._kind[0] != BAD and bool((self._kind == self._kind[0]).all()):
            return list(self._rows(self._kinds[self._kind[0]])), {}
        samples: list[dict[str, Any] | None] = [None] * len(self)
        errors: dict[int, DataError] = {}
        for kind in np.unique(self._kind).tolist():
            places = np.flatnonzero(self._kind == kind)
            if kind == BAD:
                errors = {int(place): self._error(int(place)) for place in places}
            else:
                for place, sample in zip(places.tolist(), self.take(places)._rows(self._kinds[kind]), strict=True):
                    samples[place] = sample
        return samples, errors

    def _rows(self, fields: tuple[str, ...]) -> list[dict[str, Any]]:
        """Read samples that all have the same fields: field by field, then one dict per sample."""
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
        names += fields
        if any(isinstance(shard.content.bytes, RemoteBytes) for shard in self._shards):
            columns += self._cut(len(fields), slots)
        else:
            rows = [self._first + number for number in range(len(fields))]
            starts, stops = [self._start[places] for places in rows], [self._stop[places] for places in rows]
            contents, base = self._copied(starts, stops, slots)
            for start, stop in zip(starts, stops, strict=True):
                spans = zip(contents, (start - base).tolist(), (stop - base).tolist(), strict=False)
                columns.append([content[i:j] for content, i, j in spans])
        if not any(isinstance(column, list) for column in columns):
            columns.append(slots)  # every column is endless: this one sets the number of rows
        return _dicts(names, columns)

    def _copied(self, starts: list[I64], stops: list[I64], slots: list[int]) -> tuple[Iterable[Buffer], int]:
        """Return the content of each row's shard, or a copy of the part with all rows and where this part begins."""
        if starts and slots.count(slots[0]) == len(slots):
            shard = self._shards[slots[0]]
            low, high = min(int(start.min()) for start in starts), max(int(stop.max()) for stop in stops)
            if isinstance(shard.content.bytes, MappedFile) and 2 * int(self.nbytes.sum()) > high - low:
                try:
                    copy = shard.content.bytes.copied(low, high)
                except OSError as exc:
                    raise StorageError(f"cannot read the shard: {exc.strerror or exc}", shard.url) from exc
                if copy is not None:
                    return repeat(copy), low
        return _per_row([shard.content.buffer for shard in self._shards], slots), 0

    def _cut(self, width: int, slots: list[int]) -> list[list[bytes]]:
        """Read all fields of samples that arrive, shard by shard: the values of each field, by place."""
        low, high = int(self._first[0]), int(self._first[-1]) + width
        neighbours = self._ascending and high - low == width * len(slots)
        rows: slice | I64 = slice(low, high) if neighbours else (self._first[:, None] + np.arange(width)).ravel()
        starts, stops = self._start[rows], self._stop[rows]
        used = list(dict.fromkeys(slots))
        if len(used) == 1:
            values = self._shards[used[0]].content.cut(starts.tolist(), stops.tolist())
            return [values[number::width] for number in range(width)]
        columns: list[list[bytes]] = [[b""] * len(slots) for _ in range(width)]
        for slot in used:
            places = np.flatnonzero(self._slot == slot)
            spans = (edges.reshape(-1, width)[places].ravel().tolist() for edges in (starts, stops))
            values = self._shards[slot].content.cut(*spans)
            for number, column in enumerate(columns):
                for place, value in zip(places.tolist(), values[number::width], strict=True):
                    column[place] = value
        return columns

    def _error(self, place: int) -> DataError:
        shard = self._shards[self._slot[place]]
        index = int(self._index[place]) - shard.base
        return DataError(shard.index.bad[index], shard.url, shard.index.key(index) or None)


def _per_row(values: list[Any], slots: list[int]) -> Any:
    """Return the value of each row's shard; an endless ``repeat`` if all rows are in one shard."""
    return repeat(values[slots[0]]) if slots.count(slots[0]) == len(slots) else list(map(values.__getitem__, slots))


def _dicts(names: list[str], columns: list[Any]) -> list[dict[str, Any]]:
    """Turn columns into rows; common widths use dict displays, at a third of the cost of ``dict(zip())``."""
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


class Locator:
    """Collects the locations of samples, shard by shard."""

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
