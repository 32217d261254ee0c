"""Parquet and Arrow files to samples: rows are found by footers, and decoded a row group at a time when due."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.blobs.prefetch import CONNECTIONS
from penstock.codecs.features import features_of
from penstock.errors import DataError
from penstock.formats.tables.arrow_file import ArrowFile
from penstock.formats.tables.columns import ABSENT, ArrowColumns
from penstock.formats.tables.parquet_file import ParquetFile, Told, open_file
from penstock.formats.tables.row_groups import Batches, Decoded, Groups, Key, memory_for_groups
from penstock.formats.tables.values import cast_like, castable, plain_type
from penstock.order import I64
from penstock.plan import Condition, Fields
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import scheme

_SOON = 0.6  # of a row group: from there on the next one of its file is decoded
Open = Callable[[str, str, Storage | None, Told], ParquetFile | ArrowFile]


class ParquetReader:
    """Finds and reads the rows of Parquet files by number; safe to use from several threads, pickles as its arguments.

    Args:
        urls: What the files are called in errors.
        names: What they are called in the dataset's identity.
        paths: Where they are: local files, or URLs.
        columns: The columns to read; ``None``: all.
        told: What the name of each file tells.
        workers: How many row groups are decoded at a time.
        storage: Where those lie that are URLs; ``None``: as their schemes say.
        opened: Opens a file; one of Arrow's has record batches for row groups.
    """

    def __init__(
        self,
        urls: Sequence[str],
        names: Sequence[str],
        paths: Sequence[str],
        columns: tuple[str, ...] | None,
        told: Sequence[Told],
        workers: int,
        storage: Storage | None = None,
        opened: Open = open_file,
    ) -> None:
        self.names = list(names)
        self._made_of = (list(urls), self.names, list(paths), columns, list(told), workers, storage, opened)
        self._urls, self._paths, self._told = list(urls), list(paths), list(told)
        self._columns, self._storage, self._workers = columns, storage, workers
        self._open, self._files = opened, dict[int, ParquetFile | ArrowFile]()
        self._samples: dict[tuple[str, ...], Any] = {}
        self._hopeless: dict[tuple[int, int, Condition], bool] = {}
        self._groups = Groups(self._decode, self._nbytes, workers, memory_for_groups())
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetReader, self._made_of

    @property
    def remote(self) -> bool:
        """Whether a file is none of this machine."""
        return any(scheme(path) != "file" for path in self._paths[:1] + self._paths[-1:])

    def counts(self, scan: bool) -> I64 | None:
        """Rows of every file: footers are small, and read side by side.

        Raises:
            DataError: a file is no Parquet file.
            StorageError: a file cannot be read.
        """
        missing = [shard for shard in range(len(self._paths)) if shard not in self._files]
        if len(missing) > 1:
            with ThreadPoolExecutor(min(len(missing), CONNECTIONS), "penstock footers") as pool:
                list(pool.map(self.file, missing))
        return np.array([self.count(shard) for shard in range(len(self._paths))], np.int64)

    def count(self, shard: int) -> int:
        """Rows of one file."""
        return self.file(shard).rows

    def sizes(self) -> list[int]:
        """Bytes of every file."""
        return [self.file(shard).stamp.size for shard in range(len(self._paths))]

    def key(self, shard: int, index: int) -> str | None:
        """The number of the row."""
        return str(index)

    def url(self, shard: int) -> str:
        """What the file is called in errors."""
        return self._urls[shard]

    def metadata(self) -> dict[bytes, bytes]:
        """What the first file says beside its columns: the features that others have written there."""
        return dict(self.file(0).schema.metadata or {})

    @cached_property
    def features(self) -> dict[str, Any]:
        """What the first file says its columns mean, where it says so."""
        known = features_of(self.metadata()) or {}
        names = self._columns or self.file(0).schema.names
        return {name: feature for name, feature in known.items() if name in names}

    def file(self, shard: int) -> ParquetFile | ArrowFile:
        """A file with its footer.

        Raises:
            DataError: it is no Parquet file.
            StorageError: it cannot be read.
        """
        found = self._files.get(shard)
        if found is None:
            path, url = self._paths[shard], self._urls[shard]
            storage = None if scheme(path) == "file" else open_storage(path, self._storage)
            found = self._files[shard] = self._open(url, path, storage, self._told[shard])
        return found

    def rest(self) -> None:
        """Decode nothing ahead any more."""
        self._groups.rest()

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedGroupRows:
        """Find many rows at once, in any order, and begin to decode their row groups.

        Raises:
            DataError: a file is damaged, or its columns are not those of the others.
            StorageError: a file cannot be read.
            IndexError: a number is beyond its file.
        """
        slot, row = np.zeros(len(index), np.int64), np.empty(len(index), np.int64)
        nbytes = np.ones(len(index), np.int64)
        keys: list[Key] = []
        firsts: list[int] = []  # where each of them is needed first
        reach: dict[int, tuple[int, int]] = {}  # the least and the greatest row of each file
        for which in _distinct(shard):
            mine = np.flatnonzero(shard == which)
            file, names = self.file(which), self._wanted(which, fields)
            rows = index[mine]
            reach[which] = least, most = int(rows.min()), int(rows.max())
            if least < 0 or most >= file.rows:
                raise IndexError(f"row {most} of {file.rows} in {file.url}")
            group = np.searchsorted(file.edges, rows, "right") - 1
            row[mine] = rows - file.edges[group]
            for number in _distinct(group):
                here = mine[group == number]
                if fields.where is not None and not self._may_hold(which, number, fields.where):
                    row[here] = ABSENT
                    continue
                key = Key(which, number, names)
                slot[here], nbytes[here] = len(keys), max(1, self._nbytes(key) // max(1, _rows(file, number)))
                keys.append(key)
                firsts.append(int(here[0]))
        order = sorted(range(len(keys)), key=firsts.__getitem__)
        begun = self._begin([keys[i] for i in order], shard, index, fields, reach)
        placed = dict(zip(order, begun, strict=True))
        decoded = [placed[i] for i in range(len(keys))]
        return LocatedGroupRows(nbytes, decoded, slot, row, self._sample(int(shard[0]), fields) if len(shard) else None)

    def _begin(
        self, keys: list[Key], shard: I64, index: I64, fields: Fields, reach: dict[int, tuple[int, int]]
    ) -> list[Decoded]:
        """Have row groups decoded in the order of their need, and those that will be needed next."""
        if _front_to_back(shard, index):
            return self._groups.want(keys, self._following(int(shard[-1]), int(index[-1]), fields), passing=True)
        if len(index) < 8:
            return self._groups.want(keys)
        ahead: list[Key] = []
        behind: dict[int, int] = {}  # of a window over files that are read front to back: what lies before it
        for which, (least, most) in reach.items():
            edges = self.file(which).edges
            first, last = (int(group) - 1 for group in np.searchsorted(edges, (least, most), "right"))
            behind[which] = first - 1  # the one before may hold a few rows that are still to come
            if most - edges[last] > (edges[last + 1] - edges[last]) * _SOON:
                ahead += self._following(which, most, fields)[:1]
        return self._groups.want(keys, [key for key in ahead if key.shard in reach], behind=behind)

    def _following(self, shard: int, index: int, fields: Fields) -> list[Key]:
        """The row groups that come after a row, as many as are decoded at a time."""
        out: list[Key] = []
        group = int(np.searchsorted(self.file(shard).edges, index, "right"))
        while len(out) < self._workers and shard < len(self._paths):
            if shard not in self._files and self.remote:
                break
            file = self.file(shard)
            while group < file.groups and len(out) < self._workers:
                if _rows(file, group) and (fields.where is None or self._may_hold(shard, group, fields.where)):
                    out.append(Key(shard, group, self._wanted(shard, fields)))
                group += 1
            shard, group = shard + 1, 0
        return out

    def _may_hold(self, shard: int, group: int, where: Condition) -> bool:
        key = (shard, group, where)
        try:
            if key not in self._hopeless:
                self._hopeless[key] = self.file(shard).may_hold(group, where)
            return self._hopeless[key]
        except TypeError:  # a value in the condition that cannot be hashed
            return self.file(shard).may_hold(group, where)

    def _wanted(self, shard: int, fields: Fields) -> tuple[str, ...]:
        """The columns to decode, which must be those of the first file.

        Raises:
            DataError: a column is missing, or of another type.
        """
        first, file = self.file(0).schema, self.file(shard)
        names = tuple(name for name in (self._columns or first.names) if fields.wants(name))
        if names in file.checked:
            return names
        for name in names:
            if name not in file.schema.names:
                have = ", ".join(file.schema.names[:20])
                raise DataError(f"there is no column {name!r}, only {have}; choose with columns=[...]", file.url)
            here, there = (plain_type(schema.field(name).type) for schema in (file.schema, first))
            if here != there and not castable(here, there):
                raise DataError(
                    f"column {name!r} is {here} here and {there} in {self._urls[0]}: files of one dataset have the "
                    "same columns; choose with columns=[...], or read them apart",
                    file.url,
                )
        if self._columns is None and (
            more := [n for n in file.schema.names if n not in first.names and fields.wants(n)]
        ):
            raise DataError(
                f"there is a column {more[0]!r} that {self._urls[0]} does not have; choose with columns=[...]", file.url
            )
        file.checked.add(names)
        return names

    def _sample(self, shard: int, fields: Fields) -> Any:
        """An empty batch with the columns of all the others, for rows that need no values."""
        import pyarrow as pa

        names = self._wanted(shard, fields)
        if names not in self._samples:
            kept = [self.file(0).schema.field(name) for name in names]
            schema = pa.schema([own.with_type(plain_type(own.type)) for own in kept])
            self._samples[names] = pa.RecordBatch.from_pylist([], schema=schema)
        return self._samples[names]

    def _nbytes(self, key: Key) -> int:
        return self.file(key.shard).nbytes(key.group, key.names)

    def _decode(self, key: Key) -> Batches:
        batches = self.file(key.shard).decode(key.group, key.names)
        return batches if key.shard == 0 else [cast_like(batch, self.file(0).schema) for batch in batches]


def _front_to_back(shard: I64, index: I64) -> bool:
    """Whether rows are asked for as they lie, or every so many of them; of a few rows nobody can say."""
    if len(index) < 8:
        return False
    steps, moves = np.diff(index), np.diff(shard)
    inside = steps[moves == 0]
    return bool((moves >= 0).all() and (not len(inside) or (inside[0] > 0 and (inside == inside[0]).all())))


def _distinct(numbers: I64) -> list[int]:
    """The different ones among numbers, ascending; most often they are so already."""
    steps = np.diff(numbers, prepend=-1)
    found: I64 = numbers[steps != 0] if (steps >= 0).all() else np.unique(numbers)
    return [int(number) for number in found]


def _rows(file: ParquetFile | ArrowFile, group: int) -> int:
    return int(file.edges[group + 1] - file.edges[group])


@dataclass(slots=True)
class LocatedGroupRows:
    """Rows of row groups that are being decoded."""

    nbytes: I64
    groups: list[Decoded]
    slot: I64
    row: I64
    sample: Any  # a batch without rows

    def take(self, sel: Any) -> LocatedGroupRows:
        """Some of them."""
        return LocatedGroupRows(self.nbytes[sel], self.groups, self.slot[sel], self.row[sel], self.sample)

    def read(self) -> tuple[Any, dict[int, DataError]]:
        """The rows as columns, and by number those whose row group cannot be decoded.

        Raises:
            StorageError: a file is gone or changed, or its storage does not answer.
        """
        row, slot = self.row, self.slot
        batches: list[Any] = []
        bad: dict[int, DataError] = {}
        each = float(self.nbytes[0]) if len(self.nbytes) else 0.0
        first = int(slot[0]) if len(slot) else 0
        if (
            len(row)
            and int(row.min()) >= 0
            and bool((slot == first).all())
            and (alone := self._alone(first)) is not None
        ):
            return ArrowColumns([alone], row, row_bytes=each), {}
        new_slot, new_row = np.zeros(len(row), np.int64), np.full(len(row), ABSENT, np.int64)
        for which in _distinct(slot[row >= 0]):
            mine = np.flatnonzero((slot == which) & (row >= 0))
            try:
                found = self.groups[which].batches()
            except DataError as exc:
                bad.update(dict.fromkeys(mine.tolist(), exc))
                continue
            edges = np.cumsum([0, *(batch.num_rows for batch in found)])
            part = np.searchsorted(edges, row[mine], "right") - 1
            new_slot[mine], new_row[mine] = len(batches) + part, row[mine] - edges[part]
            batches += found
        return ArrowColumns(batches or [self.sample], new_row, new_slot, row_bytes=each), bad

    def _alone(self, which: int) -> Any:
        """The only batch of a row group that is whole."""
        try:
            found = self.groups[which].batches()
        except DataError:
            return None
        return found[0] if len(found) == 1 else None
