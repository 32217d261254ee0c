"""Reads rows of files as samples: any row of any file, found by row offsets, and read when its block is processed.

A ``RowFormat`` says what a row is: a line of text, JSON or CSV, or a record. A worker reads exactly the rows of its
block, so many workers can read one large file.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np

from penstock.blobs.content import Content, open_content, temporary_copy
from penstock.blobs.prefetch import Fetcher, read_whole
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError, StorageError
from penstock.formats.manifest import check_sets, current_files
from penstock.formats.rows.row_offsets import RowOffsets, read_cached_offsets, write_cached_offsets
from penstock.lazy import cached_property
from penstock.order import I64
from penstock.plan import Fields, Reader, Resources, ShardCache, Source, Traits, join_columns, pick_rows
from penstock.plan.values import Workers
from penstock.storage import (
    Cache,
    Storage,
    expand,
    folder_times,
    local_path,
    open_storage,
    redacted,
    relative_names,
    traits_of,
)
from penstock.storage.cache import cached_shards, check_places, wrap_with_cache
from penstock.storage.protocol import scheme

FileBytes = mmap.mmap | bytes
ReadResult = tuple[Sequence[Any], dict[int, DataError]]  # the samples, and by position the errors of those that failed

_OPEN_FILES = 32  # a window reads 16 files at once, and the next window may have begun
_FIRST_ROWS = 100  # rows whose fields are looked at
_GROUP_ROWS, _GROUP_BYTES = 16_384, 2 << 20  # rows that are read together if many of them are wanted soon
_DENSE = 64  # "many" is one row in 64: reading a row alone costs as much as reading 50 rows together
_CACHED_GROUP_BYTES = 64_000_000  # groups stay in memory for readers of their other rows, up to this size
_EVICTION_CANDIDATES = 8  # how many of the oldest groups are considered for eviction when one is added


@dataclass(frozen=True, slots=True, eq=False)
class RowFile:
    """An open file: its decompressed bytes and the offsets of its rows."""

    url: str
    data: FileBytes
    offsets: RowOffsets


class RowFormat(Protocol):
    """What a row is in files of one format. An immutable value, safe to use from several threads."""

    @property
    def columnar(self) -> bool:
        """Whether ``read`` returns columns, which any number of readers may share."""

    @property
    def function_name(self) -> str:
        """The name of the function that reads such files, such as ``"read_csv"``."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of such files in a folder."""

    @property
    def cheap(self) -> bool:
        """Whether reading a row costs less than passing it to another worker."""

    @property
    def scan_key(self) -> str:
        """What the row offsets depend on besides the file; part of the key of their cache."""

    def scan(self, data: FileBytes, problem: str | None) -> RowOffsets:
        """Find the rows of a file; ``problem`` says why ``data`` ends early, if the file is damaged."""

    def infer_schema(self, file: RowFile) -> Any:
        """Return what all files must have in common, from the first file that has rows.

        Raises:
            DataError: The file has no valid schema.
        """

    def read(self, file: RowFile, rows: I64, fields: Fields, schema: Any) -> ReadResult:
        """Read rows, in the requested order."""

    def key(self, file: RowFile, row: int) -> str:
        """Return the name of a row for messages."""


@dataclass(frozen=True, slots=True)
class RowsSource(Source):
    """Files of rows, by the patterns that the user passed."""

    patterns: tuple[str, ...]
    row_format: RowFormat
    workers: Workers = None
    storage: Storage | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        check_places(self.storage, self.cache)

    @property
    def resources(self) -> Resources | None:
        """Set unless reading is cheap and the user asked for no workers."""
        return None if self.row_format.cheap and self.workers is None else Resources(self.workers)

    def open(self) -> RowsReader:
        return open_rows(self.patterns, self.row_format.suffixes, self.row_format, self.storage, self.cache)

    def describe(self) -> str:
        shown = ", ".join(repr(redacted(pattern)) for pattern in self.patterns[:3])
        return f"{self.row_format.function_name}({shown}{', ...' if len(self.patterns) > 3 else ''})"


def open_rows(
    patterns: Sequence[str],
    suffixes: Sequence[str],
    row_format: RowFormat,
    storage: Storage | None,
    cache: Cache | None,
) -> RowsReader:
    """List files and return a reader of their rows.

    Raises:
        StorageError: No file matches, or a file does not exist.
    """
    endings = tuple(suffix + packed for suffix in suffixes for packed in ("", ".gz", ".bz2", ".xz", ".zst"))

    def list_files() -> list[str]:
        urls = expand(patterns, endings, storage)
        return [local_path(url) if scheme(url) == "file" else url for url in urls]

    paths = current_files(list_files, patterns, suffixes[0][1:], storage)
    folders = {pattern.rstrip("/") for pattern in patterns}
    check_sets([path for path in paths if path.rpartition("/")[0] in folders], storage)
    for path in paths:
        if scheme(path) == "file" and not os.path.isfile(path):
            raise StorageError("no such file", path)
    cached_storage = wrap_with_cache(cache, paths, storage)
    return RowsReader([redacted(path) for path in paths], relative_names(paths), paths, row_format, cached_storage)


class RowsReader(Reader):
    """Reads the rows of files by index; safe to use from several threads, pickled as its constructor arguments.

    A remote file is fetched whole when it is first used, since only its bytes tell where rows begin.
    """

    def __init__(
        self,
        urls: Sequence[str],
        names: Sequence[str],
        paths: Sequence[str],
        row_format: RowFormat,
        storage: Storage | None,
    ) -> None:
        self.names = list(names)
        self._urls, self._paths, self._format, self._storage = list(urls), list(paths), row_format, storage
        self._offsets: dict[int, RowOffsets] = {}
        self._open: OrderedDict[int, RowFile] = OrderedDict()
        self._field_names: dict[int, tuple[str, ...]] = {}
        self._schema: tuple[Any] | None = None  # in a tuple, since a schema may be None
        self._lock = threading.Lock()
        self._file_locks = [threading.Lock() for _ in paths]
        self._schema_lock = threading.Lock()
        self._fetcher = Fetcher()
        self._groups = _GroupCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowsReader, (self._urls, self.names, self._paths, self._format, self._storage)

    @cached_property
    def traits(self) -> Traits:
        columnar = self._format.columnar
        return traits_of(self._paths, columnar=columnar, fields_vary=not columnar, find_countable=self._find_countable)

    def stamp(self) -> object:
        return folder_times(self._paths)

    def cache(self) -> ShardCache | None:
        return cached_shards(self._storage, [(path,) for path in self._paths])

    def suspend(self) -> None:
        """Stop fetching, and free the cached groups."""
        fetcher, self._fetcher = self._fetcher, Fetcher()
        fetcher.stop()
        self._groups.clear()

    def counts(self, scan: bool) -> I64 | None:
        """Return the rows of each file; ``None`` if one is unknown and ``scan`` is false.

        Raises:
            StorageError: A file cannot be read.
        """
        shards = range(len(self._paths))
        if not scan and not all(shard in self._offsets for shard in shards):
            return None
        return np.array([self.count(shard) for shard in shards], np.int64)

    def _find_countable(self) -> bool:
        """Return whether all counts are known or can be found without fetching a remote file."""
        return all(scheme(path) == "file" or shard in self._offsets for shard, path in enumerate(self._paths))

    def count(self, shard: int) -> int:
        """Return the rows of one file.

        Raises:
            StorageError: The file cannot be read.
        """
        return self._offsets_of(shard).row_count

    def sizes(self) -> list[int]:
        """Return the bytes of each file; -1 if a server does not report the size."""
        return [self._size(path) for path in self._paths]

    def _size(self, path: str) -> int:
        size = open_storage(path, self._storage if scheme(path) != "file" else None).info(path).size
        return -1 if size is None else size

    def key(self, shard: int, index: int) -> str | None:
        offsets = self._offsets_of(shard)
        return None if index >= offsets.readable_rows else self._format.key(self.file(shard), index)

    def fields(self, shard: int) -> tuple[str, ...]:
        if shard not in self._field_names:
            rows = min(_FIRST_ROWS, self._offsets_of(shard).readable_rows)
            items = self.read_rows(shard, np.arange(rows), Fields())[0] if rows else ()
            names = (name for item in items if isinstance(item, dict) for name in item)
            self._field_names[shard] = tuple(dict.fromkeys(names))
        return self._field_names[shard]

    def url(self, shard: int) -> str:
        return self._urls[shard]

    def objects(self, shard: int) -> list[str]:
        return [self._paths[shard]]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedRows:
        """Find rows; rows of a group of which many are wanted are marked to be read with the whole group."""
        nbytes, group = np.empty(len(index), np.int64), np.full(len(index), -1, np.int64)
        for number in distinct(shard):
            positions = np.flatnonzero(shard == number)
            nbytes[positions] = self._mean_row_bytes(number)
            if self._format.columnar:
                rows, group_rows = index[positions], self._group_rows(number)
                groups = rows // group_rows
                # At the edge of a consecutive run few rows of a group are wanted, but its other rows will be soon.
                consecutive = bool((np.diff(rows) == 1).all())
                wanted = np.full(len(rows), len(rows)) if consecutive else np.bincount(groups)[groups]
                is_dense = (wanted * _DENSE >= group_rows) & (rows < self._offsets_of(number).readable_rows)
                group[positions] = np.where(is_dense, groups, -1)
        return LocatedRows(self, shard, index, group, fields, nbytes)

    def _mean_row_bytes(self, shard: int) -> int:
        offsets = self._offsets_of(shard)
        rows = offsets.readable_rows
        return (offsets.end - int(offsets.starts[0])) // rows if rows else 0

    def _group_rows(self, shard: int) -> int:
        """Return how many rows a group of a file has: a power of two, at least the interval of its offsets."""
        limit = min(_GROUP_ROWS, max(1, _GROUP_BYTES // max(1, self._mean_row_bytes(shard))))
        return max(self._offsets_of(shard).interval, 1 << (limit.bit_length() - 1))

    def read_groups(self, groups: Sequence[tuple[int, int]], fields: Fields) -> list[ReadResult]:
        """Read groups, each given by its file and its number in the file."""
        wanted = (fields.only, fields.excluded, fields.meta)
        reads = {(shard, number, *wanted): partial(self._read_group, shard, number, fields) for shard, number in groups}
        return self._groups.get(reads)

    def pick(self, shard: int, number: int, group: ReadResult, rows: I64) -> ReadResult:
        """Return rows of a file from the group that holds them."""
        items, errors = group
        rows_in_group = rows - number * self._group_rows(shard)
        numbered = enumerate(rows_in_group.tolist()) if errors else ()
        return pick_rows(items, rows_in_group), {n: errors[row] for n, row in numbered if row in errors}

    def _read_group(self, shard: int, number: int, fields: Fields) -> ReadResult:
        size = self._group_rows(shard)
        end = min((number + 1) * size, self._offsets_of(shard).readable_rows)
        return self.read_rows(shard, np.arange(number * size, end), fields)

    def read_rows(self, shard: int, rows: I64, fields: Fields) -> ReadResult:
        """Read exactly these rows; the error of a file that cannot be read at all is the error of each row."""
        try:
            file = self.file(shard)
            is_readable = rows < file.offsets.readable_rows
            if len(rows) and bool(is_readable.all()):
                return self._format.read(file, rows, fields, self._common_schema())
            good = np.flatnonzero(is_readable)
            result = self._format.read(file, rows[good], fields, self._common_schema()) if len(good) else ([], {})
        except DataError as exc:
            return [None] * len(rows), dict.fromkeys(range(len(rows)), exc)
        lost = np.flatnonzero(~is_readable)
        errors = dict.fromkeys(range(len(lost)), DataError(file.offsets.problem, file.url))
        return merge_results([(good, result), (lost, ([None] * len(lost), errors))])

    def _common_schema(self) -> Any:
        """Return the schema of all files, inferred once from the first file that has rows."""
        with self._schema_lock:
            if self._schema is None:
                shards = range(len(self._paths))
                first = next((shard for shard in shards if self._offsets_of(shard).readable_rows), 0)
                self._schema = (self._format.infer_schema(self.file(first)),)
            return self._schema[0]

    def _offsets_of(self, shard: int) -> RowOffsets:
        offsets = self._offsets.get(shard)
        if offsets is None and scheme(path := self._paths[shard]) == "file":
            offsets = read_cached_offsets(path, self._format.scan_key, _stamp(path, self._urls[shard]))
            if offsets is not None:
                self._offsets[shard] = offsets
        return offsets or self.file(shard).offsets

    def file(self, shard: int) -> RowFile:
        """Return an open file; it is opened if it is not open yet.

        Raises:
            StorageError: The file cannot be read, or has changed.
        """
        with self._file_locks[shard]:
            with self._lock:
                file = self._open.get(shard)
                if file is not None:
                    self._open.move_to_end(shard)
            if file is None:
                file = self._open_file(shard)
                with self._lock:
                    self._open[shard] = file
                    if len(self._open) > _OPEN_FILES:
                        self._open.popitem(last=False)
        if isinstance(file.data, mmap.mmap) and file.data.size() != len(file.data):
            raise StorageError("the file was changed while it was being read", file.url)
        return file

    def _open_file(self, shard: int) -> RowFile:
        path, url, scan_key = self._paths[shard], self._urls[shard], self._format.scan_key
        if scheme(path) != "file":
            content = self._fetch(path, url)
            offsets = self._offsets.get(shard) or self._format.scan(content.buffer, content.problem)
        else:
            stamp = _stamp(path, url)
            content = open_content(path, url)
            offsets = read_cached_offsets(path, scan_key, stamp) or write_cached_offsets(
                path, scan_key, self._format.scan(content.buffer, content.problem), stamp
            )
            previous = self._offsets.get(shard)
            if previous is not None and previous.stamp != offsets.stamp:
                raise StorageError("the file was changed while it was being read", url)
        self._offsets[shard] = offsets
        return RowFile(url, content.buffer, offsets)

    def _fetch(self, path: str, url: str) -> Content:
        """Return the content of a remote file: from the cache, or fetched whole into a temporary file."""
        storage = open_storage(path, self._storage)
        cached = storage.local_path(path)
        if cached is not None:
            return open_content(cached, url)
        info = storage.info(path)
        with temporary_copy(read_whole(storage, path, url, info, self._fetcher), url, info.size) as copy:
            return open_content(copy, url)


def _stamp(path: str, url: str) -> Stamp:
    try:
        return Stamp.of(os.stat(path))
    except OSError as exc:
        raise StorageError(f"cannot read the file: {exc.strerror or exc}", url) from exc


@dataclass(slots=True)
class LocatedRows:
    """Rows by file and index; ``group`` is the group to read a row with, or -1 to read it alone."""

    reader: RowsReader
    shard: I64
    index: I64
    group: I64
    fields: Fields
    nbytes: I64

    def take(self, sel: Any) -> LocatedRows:
        return LocatedRows(
            self.reader, self.shard[sel], self.index[sel], self.group[sel], self.fields, self.nbytes[sel]
        )

    def read(self) -> ReadResult:
        wanted = [
            (shard, number, in_shard[self.group[in_shard] == number])
            for shard in distinct(self.shard)
            for in_shard in (np.flatnonzero(self.shard == shard),)
            for number in distinct(self.group[in_shard])
        ]
        reader, in_groups = self.reader, [(shard, number) for shard, number, _ in wanted if number >= 0]
        groups = iter(reader.read_groups(in_groups, self.fields))
        parts = []
        for shard, number, positions in wanted:
            rows = self.index[positions]
            if number < 0:
                parts.append((positions, reader.read_rows(shard, rows, self.fields)))
            else:
                parts.append((positions, reader.pick(shard, number, next(groups), rows)))
        return merge_results(parts)


def distinct(values: I64) -> list[int]:
    """Return the distinct values in ascending order; fast if all are equal, as they mostly are."""
    if len(values) and bool((values == values[0]).all()):
        return [int(values[0])]
    return np.unique(values).tolist()  # type: ignore[no-any-return]


def merge_results(parts: Sequence[tuple[I64, ReadResult]]) -> ReadResult:
    """Merge results into one; each comes with the positions of its items in the merged result."""
    if not parts:
        return [], {}
    if len(parts) == 1:
        return parts[0][1]
    order = np.concatenate([positions for positions, _ in parts])
    errors = {int(positions[n]): error for positions, (_, part) in parts for n, error in part.items()}
    items = join_columns([items for _, (items, _) in parts])
    if bool((order[1:] > order[:-1]).all()):
        return items, errors
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return pick_rows(items, inverse), errors


class _GroupCache:
    """The most recently used groups, up to a total size; a group is read once, however many threads want it."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Any, Future[ReadResult]] = OrderedDict()
        self._sizes: dict[Any, int] = {}  # of the groups that have been read
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, reads: Mapping[Any, Callable[[], ReadResult]]) -> list[ReadResult]:
        """Return groups by key; those that are not in the cache are read by the function that comes with the key.

        Groups that no other thread is reading come first: several threads that want the same groups share the work.
        """
        found: dict[Any, Future[ReadResult]] = {}
        for key, read in reads.items():
            with self._lock:
                future = self._entries.get(key)
                is_new = future is None
                if future is None:
                    future = self._entries[key] = Future()
                self._entries.move_to_end(key)
            found[key] = future
            if is_new:
                self._fill(key, future, read)
        return [future.result() for future in found.values()]

    def _fill(self, key: Any, future: Future[ReadResult], read: Callable[[], ReadResult]) -> None:
        try:
            future.set_result(read())
        except BaseException as exc:
            future.set_exception(exc)
            with self._lock:
                self._entries.pop(key, None)
            raise
        self._add_size(key, int(getattr(future.result()[0], "nbytes", 0)))

    def _add_size(self, key: Any, size: int) -> None:
        """Count the size of a group, and evict the oldest groups while the total is too large."""
        with self._lock:
            if key not in self._entries:  # the cache was cleared in the meantime
                return
            self._sizes[key] = size
            self._nbytes += size
            for oldest in list(islice(self._entries, _EVICTION_CANDIDATES)):
                if self._nbytes <= _CACHED_GROUP_BYTES:
                    return
                if oldest in self._sizes:
                    self._nbytes -= self._sizes.pop(oldest)
                    del self._entries[oldest]

    def clear(self) -> None:
        """Free all groups."""
        with self._lock:
            self._entries.clear()
            self._sizes.clear()
            self._nbytes = 0
