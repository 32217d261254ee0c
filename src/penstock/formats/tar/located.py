"""Where samples lie in open shards; reading them needs nothing else."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from penstock.blobs.content import Content
from penstock.errors import DataError
from penstock.formats.tar.index import I64, Index

BAD = -1  # the kind of a sample that cannot be read
_PAGE = mmap.PAGESIZE
_STEP = 1 << 20  # what a shard lets go of at once


@dataclass(slots=True, eq=False)
class OpenShard:
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
class LocatedTar:
    """Where samples lie, in the order they were asked for; reading them needs nothing else.

    Safe to read from any thread. Holds maps of files, so it stays in its process.
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
        """Give the spots of some of the samples; a slice costs about a microsecond."""
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
