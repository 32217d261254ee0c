"""Rows of Parquet and Arrow files by number: found through the footers, decoded one row group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.blobs.prefetch import CONNECTIONS
from penstock.codecs.features import METADATA_KEY, features_of
from penstock.errors import DataError
from penstock.formats.tables.arrow_file import ArrowFile
from penstock.formats.tables.columns import ABSENT, ArrowColumns
from penstock.formats.tables.parquet_file import ParquetFile, Partition, open_parquet
from penstock.formats.tables.row_groups import Batches, GroupKey, PendingGroup, RowGroupCache, default_cache_bytes
from penstock.formats.tables.values import cast_like, castable, plain_type
from penstock.lazy import cached_property
from penstock.order import I64
from penstock.plan import Condition, Fields, Reader, ShardCache, Traits
from penstock.storage import Storage, folder_times, open_storage, traits_of
from penstock.storage.cache import cached_shards
from penstock.storage.protocol import scheme

_PREFETCH_FROM = 0.6  # share of a row group: once rows beyond it are located, its successor in the file is decoded
_FEW_ROWS = 8  # fewer rows than this do not show in which order a caller reads
FileOpener = Callable[[str, str, Storage | None, Partition], ParquetFile | ArrowFile]


class ParquetReader(Reader):
    """Finds and reads the rows of Parquet files by number; safe to use from several threads, pickles as its arguments.

    Args:
        urls: The names of the files in errors.
        names: The names of the files in the dataset's identity.
        paths: The paths or URLs of the files.
        columns: The columns to read; ``None`` for all.
        partitions: For each file, the columns that its folders name, with their values.
        workers: The number of row groups that are decoded at the same time.
        storage: The storage of those files that are URLs; ``None`` to choose it by scheme.
        opener: Opens a file; the row groups of an Arrow file are its record batches.
    """

    def __init__(
        self,
        urls: Sequence[str],
        names: Sequence[str],
        paths: Sequence[str],
        columns: tuple[str, ...] | None,
        partitions: Sequence[Partition],
        workers: int,
        storage: Storage | None = None,
        opener: FileOpener = open_parquet,
    ) -> None:
        self.names = list(names)
        self._arguments = (list(urls), self.names, list(paths), columns, list(partitions), workers, storage, opener)
        self._urls, self._paths, self._partitions = list(urls), list(paths), list(partitions)
        self._columns, self._storage, self._workers = columns, storage, workers
        self._opener, self._files = opener, dict[int, ParquetFile | ArrowFile]()
        self._empty_batches: dict[tuple[str, ...], Any] = {}
        self._matches: dict[tuple[int, int, Condition], bool] = {}
        self._cache = RowGroupCache(self._decode, self._nbytes, workers, default_cache_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetReader, self._arguments

    @cached_property
    def traits(self) -> Traits:
        return traits_of(self._paths, columnar=True, find_features=lambda: self._features)

    def stamp(self) -> object:
        return folder_times(self._paths)

    def counts(self, scan: bool) -> I64 | None:
        """Return the number of rows of each file; reads the footers that are not known yet, several at a time.

        Raises:
            DataError: A file is damaged, or not in the expected format.
            StorageError: A file cannot be read.
        """
        missing = [shard for shard in range(len(self._paths)) if shard not in self._files]
        if len(missing) > 1:
            with ThreadPoolExecutor(min(len(missing), CONNECTIONS), "penstock footers") as pool:
                list(pool.map(self.file, missing))
        return np.array([self.count(shard) for shard in range(len(self._paths))], np.int64)

    def count(self, shard: int) -> int:
        return self.file(shard).rows

    def sizes(self) -> list[int]:
        return [self.file(shard).stamp.size for shard in range(len(self._paths))]

    def fields(self, shard: int) -> tuple[str, ...]:
        return tuple(self._columns or self.file(shard).schema.names)

    def url(self, shard: int) -> str:
        return self._urls[shard]

    def objects(self, shard: int) -> list[str]:
        return [self._paths[shard]]

    def metadata(self) -> dict[bytes, bytes]:
        """Return the schema metadata of the first file, where other libraries store features."""
        return dict(self.file(0).schema.metadata or {})

    @cached_property
    def _features(self) -> dict[str, Any]:
        """The features that the files declare for the columns that are read.

        Raises:
            DataError: Two files declare different features for one column.
        """
        self.counts(scan=True)  # opens the files, several at a time
        found: dict[str, tuple[Any, int]] = {}
        seen: set[bytes] = set()
        for shard in range(len(self._paths)):
            schema = self.file(shard).schema
            description = (schema.metadata or {}).get(METADATA_KEY, b"")
            if description in seen:
                continue
            seen.add(description)
            for name, feature in (features_of(schema.metadata) or {}).items():
                first, where = found.setdefault(name, (feature, shard))
                if first != feature:
                    here, there = self._urls[shard], self._urls[where]
                    raise DataError(f"column {name!r} is {feature} here, but {first} in {there}", here)
        names = self._columns or self.file(0).schema.names
        return {name: feature for name, (feature, _) in found.items() if name in names}

    def file(self, shard: int) -> ParquetFile | ArrowFile:
        """Return a file, opened on first use.

        Raises:
            DataError: The file is damaged, or not in the expected format.
            StorageError: The file cannot be read.
        """
        file = self._files.get(shard)
        if file is None:
            path, url = self._paths[shard], self._urls[shard]
            storage = None if scheme(path) == "file" else open_storage(path, self._storage)
            file = self._files[shard] = self._opener(url, path, storage, self._partitions[shard])
        return file

    def cache(self) -> ShardCache | None:
        return cached_shards(self._storage, [(path,) for path in self._paths])

    def suspend(self) -> None:
        """Stop decoding ahead and end the threads; the next ``locate`` starts them again."""
        self._cache.release()

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedGroupRows:
        """Find many rows at once, in any order, and start decoding their row groups.

        Raises:
            DataError: A file is damaged, or its columns differ from those of the first file.
            StorageError: A file cannot be read.
            IndexError: A row number is out of range.
        """
        slot, row = np.zeros(len(index), np.int64), np.empty(len(index), np.int64)
        nbytes = np.ones(len(index), np.int64)
        keys: list[GroupKey] = []
        first_use: list[int] = []  # for each key, the first position that needs it
        row_ranges: dict[int, tuple[int, int]] = {}  # for each file, the lowest and the highest row
        for number, positions in _members(shard):
            file, names = self.file(number), self._wanted_columns(number, fields)
            rows = index[positions]
            row_ranges[number] = lowest, highest = int(rows.min()), int(rows.max())
            if lowest < 0 or highest >= file.rows:
                raise IndexError(f"row {highest} of {file.rows} in {file.url}")
            groups = np.searchsorted(file.row_offsets, rows, "right") - 1
            row[positions] = rows - file.row_offsets[groups]
            for group, members in _members(groups, positions):
                if not self._may_match(number, group, names, fields):
                    row[members] = ABSENT
                    continue
                key = GroupKey(number, group, names)
                slot[members], nbytes[members] = len(keys), max(1, self._nbytes(key) // max(1, _rows(file, group)))
                keys.append(key)
                first_use.append(members.start if isinstance(members, slice) else int(members[0]))
        order = sorted(range(len(keys)), key=first_use.__getitem__)
        requested = self._request([keys[i] for i in order], shard, index, fields, row_ranges)
        by_key = dict(zip(order, requested, strict=True))
        pending = [by_key[i] for i in range(len(keys))]
        empty = self._empty_batch(int(shard[0]), fields) if len(shard) else None
        return LocatedGroupRows(nbytes, pending, slot, row, empty)

    def _request(
        self, keys: list[GroupKey], shard: I64, index: I64, fields: Fields, row_ranges: dict[int, tuple[int, int]]
    ) -> list[PendingGroup]:
        """Start decoding row groups, and those that a reader in this order needs next."""
        if _is_sequential(shard, index):
            upcoming = self._next_groups(int(shard[-1]), int(index[-1]), fields)
            return self._cache.request(keys, upcoming, evict_others=True)
        if len(index) < _FEW_ROWS:
            return self._cache.request(keys)
        ahead: list[GroupKey] = []
        first_needed: dict[int, int] = {}  # a shuffle's windows move through each file from front to back
        for number, (lowest, highest) in row_ranges.items():
            offsets = self.file(number).row_offsets
            first, last = (int(group) - 1 for group in np.searchsorted(offsets, (lowest, highest), "right"))
            first_needed[number] = first - 1  # the one before may hold a few rows that are still to be read
            if highest - offsets[last] > (offsets[last + 1] - offsets[last]) * _PREFETCH_FROM:
                ahead += self._next_groups(number, highest, fields)[:1]
        upcoming = [key for key in ahead if key.shard in row_ranges]
        return self._cache.request(keys, upcoming, first_needed=first_needed)

    def _next_groups(self, shard: int, index: int, fields: Fields) -> list[GroupKey]:
        """Return the row groups after the one that holds a row, at most as many as are decoded at the same time."""
        keys: list[GroupKey] = []
        group = int(np.searchsorted(self.file(shard).row_offsets, index, "right"))
        while len(keys) < self._workers and shard < len(self._paths):
            if shard not in self._files and self.traits.remote:
                break
            file = self.file(shard)
            while group < file.groups and len(keys) < self._workers:
                names = self._wanted_columns(shard, fields)
                if _rows(file, group) and self._may_match(shard, group, names, fields):
                    keys.append(GroupKey(shard, group, names))
                group += 1
            shard, group = shard + 1, 0
        return keys

    def _may_match(self, shard: int, group: int, names: tuple[str, ...], fields: Fields) -> bool:
        """Return whether rows of a row group may meet the condition, or fail before it decides."""
        where: Condition | None = fields.where
        if where is None or not fields.required.issubset(names):
            return True
        key = (shard, group, where)
        try:
            if key not in self._matches:
                self._matches[key] = self.file(shard).may_match(group, where)
            return self._matches[key]
        except TypeError:  # the condition holds a value that cannot be hashed
            return self.file(shard).may_match(group, where)

    def _wanted_columns(self, shard: int, fields: Fields) -> tuple[str, ...]:
        """Return the columns to decode, after checking them against those of the first file.

        Raises:
            DataError: A column is missing, is there twice, is of another type, or is not in the first file.
        """
        first, file = self.file(0).schema, self.file(shard)
        names = tuple(name for name in (self._columns or first.names) if fields.wants(name))
        if names in file.checked:
            return names
        for name in names:
            if name not in file.schema.names:
                present = ", ".join(file.schema.names[:20])
                raise DataError(
                    f"there is no column {name!r}, only {present}; choose columns with columns=[...]", file.url
                )
            if file.schema.names.count(name) > 1:
                raise DataError(f"two columns are named {name!r}; choose others with columns=[...]", file.url)
            kind, expected = (plain_type(schema.field(name).type) for schema in (file.schema, first))
            if kind != expected and not castable(kind, expected):
                raise DataError(
                    f"column {name!r} is {kind} in this file and {expected} in {self._urls[0]}: all files of a dataset "
                    "must have the same columns; choose columns with columns=[...], or read the files separately",
                    file.url,
                )
        if self._columns is None and (
            extra := [n for n in file.schema.names if n not in first.names and fields.wants(n)]
        ):
            raise DataError(
                f"there is a column {extra[0]!r} that {self._urls[0]} does not have; choose columns with columns=[...]",
                file.url,
            )
        file.checked.add(names)
        return names

    def _empty_batch(self, shard: int, fields: Fields) -> Any:
        """Return a batch without rows: the columns of located rows of which none has values."""
        import pyarrow as pa

        names = self._wanted_columns(shard, fields)
        if names not in self._empty_batches:
            wanted = [self.file(0).schema.field(name) for name in names]
            schema = pa.schema([field.with_type(plain_type(field.type)) for field in wanted])
            self._empty_batches[names] = pa.RecordBatch.from_pylist([], schema=schema)
        return self._empty_batches[names]

    def _nbytes(self, key: GroupKey) -> int:
        return self.file(key.shard).nbytes(key.group, key.names)

    def _decode(self, key: GroupKey) -> Batches:
        batches = self.file(key.shard).decode(key.group, key.names)
        return batches if key.shard == 0 else [cast_like(batch, self.file(0).schema) for batch in batches]


def _is_sequential(shard: I64, index: I64) -> bool:
    """Return whether rows are requested front to back in steps of one width; false for too few rows to tell."""
    if len(index) < _FEW_ROWS:
        return False
    steps, moves = np.diff(index), np.diff(shard)
    inside = steps[moves == 0]
    return bool((moves >= 0).all() and (not len(inside) or (inside[0] > 0 and (inside == inside[0]).all())))


def _members(numbers: I64, positions: slice | I64 | None = None) -> Iterator[tuple[int, slice | I64]]:
    """Yield the distinct numbers, ascending, each with its positions: a slice, where the numbers ascend.

    The numbers stand at ``positions``; by default they are counted from 0.
    """
    parts: Iterable[slice | I64]
    if bool((numbers[1:] >= numbers[:-1]).all()):
        cuts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        parts = [slice(*edges) for edges in pairwise([0, *cuts.tolist(), len(numbers)]) if len(numbers)]
    else:
        parts = (np.flatnonzero(numbers == number) for number in np.unique(numbers))
    base = positions.start if isinstance(positions, slice) else 0
    for part in parts:
        number = int(numbers[part.start if isinstance(part, slice) else part[0]])
        if isinstance(positions, np.ndarray):
            yield number, positions[part]
        else:
            yield number, slice(base + part.start, base + part.stop) if isinstance(part, slice) else base + part


def _rows(file: ParquetFile | ArrowFile, group: int) -> int:
    return int(file.row_offsets[group + 1] - file.row_offsets[group])


@dataclass(slots=True)
class LocatedGroupRows:
    """Rows of row groups that are being decoded."""

    nbytes: I64
    groups: list[PendingGroup]
    slot: I64  # for each row, the number of its row group in ``groups``
    row: I64  # for each row, its number in the row group; ABSENT where statistics rule it out
    empty: Any  # a batch without rows

    def take(self, sel: Any) -> LocatedGroupRows:
        return LocatedGroupRows(self.nbytes[sel], self.groups, self.slot[sel], self.row[sel], self.empty)

    def read(self) -> tuple[Any, dict[int, DataError | None]]:
        """Return the rows as columns, and by number the errors of those whose row group cannot be decoded.

        The error of a row that statistics rule out is ``None``.

        Raises:
            StorageError: A file is gone or has changed, or its storage does not answer.
        """
        row, slot = self.row, self.slot
        batches: list[Any] = []
        errors: dict[int, DataError | None] = dict.fromkeys(np.flatnonzero(row < 0).tolist())
        row_bytes = float(self.nbytes[0]) if len(self.nbytes) else 0.0
        first = int(slot[0]) if len(slot) else 0
        if (
            len(row)
            and int(row.min()) >= 0
            and bool((slot == first).all())
            and (batch := self._single_batch(first)) is not None
        ):
            return ArrowColumns([batch], row, row_bytes=row_bytes), {}
        new_slot, new_row = np.zeros(len(row), np.int64), np.full(len(row), ABSENT, np.int64)
        present = np.flatnonzero(row >= 0)
        for number, positions in _members(slot[present], present):
            try:
                decoded = self.groups[number].batches()
            except DataError as exc:
                errors.update(dict.fromkeys(np.arange(len(row))[positions].tolist(), exc))
                continue
            offsets = np.cumsum([0, *(batch.num_rows for batch in decoded)])
            part = np.searchsorted(offsets, row[positions], "right") - 1
            new_slot[positions], new_row[positions] = len(batches) + part, row[positions] - offsets[part]
            batches += decoded
        return ArrowColumns(batches or [self.empty], new_row, new_slot, row_bytes=row_bytes), errors

    def _single_batch(self, number: int) -> Any:
        """Return the batch of a row group that has just one; ``None`` if it has several or cannot be decoded."""
        try:
            decoded = self.groups[number].batches()
        except DataError:
            return None
        return decoded[0] if len(decoded) == 1 else None
