"""One file in Arrow's IPC format, in its file or stream variant, and its record batches.

The bodies of a local file are mapped, not read. A remote file is read by ranges: its smallest column, to count the
rows, and a record batch when its rows are due. A remote stream has no footer that says where its record batches are,
so it is fetched whole.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blobs.content import temporary_copy
from penstock.blobs.prefetch import CONNECTIONS, Fetcher, read_whole
from penstock.errors import DataError, StorageError
from penstock.formats.tables.parquet_file import (
    Partition,
    RemoteFile,
    TableStamp,
    first_line,
    local_stamp,
    partition_type,
    plain_batches,
    remote_stamp,
    with_partition,
)
from penstock.lazy import cached_property
from penstock.order import I64
from penstock.plan.expressions import Condition, Extent
from penstock.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"  # stands before the length of a message, except before Arrow 0.15
_READ_AHEAD_BYTES = 1 << 16  # of a remote file: most metadata of a record batch is shorter
_MAX_BATCH_ROWS = (1 << 31) - 1  # what Arrow's format recommends; a column of nulls could claim any number


@dataclass(frozen=True, slots=True)
class _Batch:
    """A record batch: its rows, and in a stream the offset of its messages and whether dictionaries are among them."""

    rows: int
    offset: int = 0
    has_dictionaries: bool = False


@dataclass(frozen=True, eq=False)
class ArrowFile:
    """A file whose record batches are known; holds no file handle, so any thread may read from it.

    Attributes:
        url: The file's name in errors.
        path: The file's path or URL.
        storage: The storage that reads it; ``None`` for a local file.
        stamp: The file's stamp when it was opened.
        file_schema: The columns that the file stores.
        batches: The record batches, in the order of the file.
        is_stream: Whether the file has no footer, so that Arrow has to be told where a record batch is.
        fetched: The content of a remote stream.
        partition: The columns that the file's folders name, with their values.
        checked: The sets of columns that were found to match those of the dataset's first file.
    """

    url: str
    path: str
    storage: Storage | None
    stamp: TableStamp
    file_schema: pa.Schema
    batches: Sequence[_Batch]
    is_stream: bool
    fetched: pa.Buffer | None
    partition: Partition
    checked: set[tuple[str, ...]] = field(default_factory=set)

    @cached_property
    def schema(self) -> pa.Schema:
        """The file's columns, and those that its folders name."""
        import pyarrow as pa

        schema = self.file_schema
        for name, value in self.partition:
            if name not in schema.names:
                schema = schema.append(pa.field(name, partition_type(value)))
        return schema

    @cached_property
    def row_offsets(self) -> I64:
        """The number of the first row of each record batch, and at the end the number of rows."""
        return np.cumsum([0, *(batch.rows for batch in self.batches)], dtype=np.int64)

    @cached_property
    def _with_dictionaries(self) -> list[int]:
        return [number for number, batch in enumerate(self.batches) if batch.has_dictionaries]

    @property
    def groups(self) -> int:
        """The number of record batches."""
        return len(self.batches)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.row_offsets[-1])

    def nbytes(self, group: int, names: Sequence[str]) -> int:
        """Estimate the size of some columns of a record batch: all rows and columns are taken to be equally large."""
        batch_bytes = self.stamp.size * self.batches[group].rows // max(1, self.rows)
        return max(1, batch_bytes * len(names) // max(1, len(self.file_schema)))

    def may_match(self, group: int, where: Condition) -> bool:
        """Return whether the partition columns leave it possible that a row of a record batch meets the condition."""
        rows = self.batches[group].rows
        extents = {
            name: Extent(value, value, rows if value is None else 0, rows)
            for name, value in self.partition
            if name not in self.file_schema.names
        }
        try:
            return where.possible({name: extents.get(name, Extent()) for name in where.fields()})
        except TypeError:
            return True

    def decode(self, group: int, names: Sequence[str]) -> list[pa.RecordBatch]:
        """Return the rows of a record batch; views of the mapped file if it is local and not compressed.

        Raises:
            DataError: The record batch is damaged.
            StorageError: The file is gone, or has changed since it was opened.
        """
        import pyarrow as pa

        stored = [name for name in names if name in self.file_schema.names]
        try:
            batch = self._read_batch(group, stored)
            batch.validate(full=True)  # Arrow would follow damaged offsets beyond the end of the buffers
            table = pa.Table.from_batches([batch])
            return plain_batches(with_partition(table, names, self.schema, self.partition, batch.num_rows))
        except StorageError:
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as exc:
            raise DataError(f"record batch {group} cannot be decoded: {first_line(exc)}", self.url) from exc

    def _read_batch(self, group: int, names: Sequence[str]) -> pa.RecordBatch:
        import pyarrow as pa

        options = None
        if len(names) < len(self.file_schema):
            columns = [self.file_schema.get_field_index(name) for name in names]
            options = pa.ipc.IpcReadOptions(included_fields=columns or [_smallest_column(self.file_schema)])
        if not self.is_stream:
            with pa.ipc.open_file(self._source(), options=options) as file:
                return file.get_batch(group).select(names)
        source = pa.BufferReader(self._source())
        with pa.ipc.open_stream(source, options=options) as stream:
            for number in self._with_dictionaries:
                if number < group:  # Arrow has to see the dictionaries, which come with the batch that follows them
                    source.seek(self.batches[number].offset)
                    stream.read_next_batch()
            source.seek(self.batches[group].offset)
            return stream.read_next_batch().select(names)

    def _source(self) -> Any:
        if self.fetched is not None:
            return self.fetched
        if self.storage is not None:
            return _remote_source(self.path, self.storage, self.stamp)
        if local_stamp(self.path, self.url) != self.stamp:
            raise StorageError("the file was changed while it was being read", self.url)
        return _mapped(self.path, self.stamp)


def open_arrow(url: str, path: str, storage: Storage | None, partition: Partition) -> ArrowFile:
    """Count the rows of the record batches of a file.

    Raises:
        DataError: The file is not an Arrow file, is cut off, or is damaged.
        StorageError: The file does not exist or cannot be read.
    """
    import pyarrow as pa

    stamp = local_stamp(path, url) if storage is None else remote_stamp(path, storage)
    fetched = None
    try:
        if storage is None:
            source = _mapped(path, stamp)
            start = bytes(source.slice(0, 8))
        else:
            source = _remote_source(path, storage, stamp)
            start = bytes(source.read(8))
        if start[:4] == b"FEA1":
            raise ValueError("it is a Feather file of version 1; rewrite it with pyarrow.feather")
        is_stream = not start.startswith(_MAGIC)
        if is_stream and storage is not None:
            source = fetched = _fetch(path, url, storage)
        schema, batches = _list_stream(source) if is_stream else _list_file(source, path, storage, stamp)
    except (DataError, StorageError):
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as exc:
        raise DataError(f"not a complete Arrow file: {first_line(exc)}", url) from exc
    return ArrowFile(url, path, storage, stamp, schema, batches, is_stream, fetched, partition)


def _list_file(source: Any, path: str, storage: Storage | None, stamp: TableStamp) -> tuple[pa.Schema, list[_Batch]]:
    """Return the schema and the record batches of a file with a footer; of a remote file, several at a time."""
    import pyarrow as pa

    with pa.ipc.open_file(source) as file:
        schema, count = _check_names(file.schema), file.num_record_batches

    def rows_of(numbers: Sequence[int]) -> list[int]:
        own = source if storage is None else _remote_source(path, storage, stamp)
        with pa.ipc.open_file(own, options=_counting_options(schema)) as file:
            return [_checked_rows(file.get_batch(number)) for number in numbers]

    if storage is None or count <= 1:
        return schema, [_Batch(rows) for rows in rows_of(range(count))]
    workers = min(count, CONNECTIONS)
    counts = np.empty(count, np.int64)
    with ThreadPoolExecutor(workers, "penstock footers") as pool:
        for first, rows in enumerate(pool.map(rows_of, [range(n, count, workers) for n in range(workers)])):
            counts[first::workers] = rows
    return schema, [_Batch(rows) for rows in counts.tolist()]


def _list_stream(data: pa.Buffer) -> tuple[pa.Schema, list[_Batch]]:
    """Return the schema and the record batches of a stream.

    Raises:
        ValueError: The end-of-stream marker is missing, or a record batch is damaged.
    """
    import pyarrow as pa

    with pa.ipc.open_stream(data) as whole:
        schema = _check_names(whole.schema)
    source, batches, dictionaries = pa.BufferReader(data), [], 0
    with pa.ipc.open_stream(source, options=_counting_options(schema)) as stream:
        offset = source.tell()
        with suppress(StopIteration):
            while True:
                rows = _checked_rows(stream.read_next_batch())
                before, dictionaries = dictionaries, stream.stats.num_dictionary_batches
                batches.append(_Batch(rows, offset, dictionaries > before))
                offset = source.tell()
    continuation = _CONTINUATION if bytes(data.slice(0, 4)) == _CONTINUATION else b""
    if bytes(data.slice(offset, source.tell() - offset)) != continuation + bytes(4):
        raise ValueError("it has no end-of-stream marker, so its writer did not finish")
    return schema, batches


def _checked_rows(batch: pa.RecordBatch) -> int:
    """Return the number of rows of a record batch, after checking that its buffers hold as many.

    Raises:
        ValueError: They hold fewer.
    """
    batch.validate()
    if batch.num_rows > _MAX_BATCH_ROWS:
        raise ValueError(f"a record batch claims {batch.num_rows} rows")
    return int(batch.num_rows)


def _counting_options(schema: pa.Schema) -> pa.ipc.IpcReadOptions | None:
    """Return options to read as little as possible of each record batch."""
    import pyarrow as pa

    return pa.ipc.IpcReadOptions(included_fields=[_smallest_column(schema)]) if len(schema) else None


def _smallest_column(schema: pa.Schema) -> int:
    """Return the number of the column with the smallest values; a column of nulls has none that could be checked."""
    import pyarrow as pa

    def bits(number: int) -> float:
        kind = schema.field(number).type
        return kind.bit_width if pa.types.is_primitive(kind) else float("inf") if pa.types.is_null(kind) else 1 << 20

    return min(range(len(schema)), key=bits)


def _check_names(schema: pa.Schema) -> pa.Schema:
    """Return the schema if its columns have names, so that a damaged one fails when the file is opened."""
    if not all(isinstance(name, str) for name in schema.names):
        raise ValueError("a column has no name")
    return schema


def _mapped(path: str, stamp: TableStamp) -> pa.Buffer:
    import pyarrow as pa

    if not stamp.size:
        return pa.py_buffer(b"")
    with pa.memory_map(path) as file:
        return file.read_buffer()


def _remote_source(path: str, storage: Storage, stamp: TableStamp) -> Any:
    """Return a remote file for Arrow to read: it starts with the end, where the footer is."""
    end = (max(0, stamp.size - _READ_AHEAD_BYTES), stamp.size)
    return io.BufferedReader(RemoteFile(path, storage, stamp, [end]), _READ_AHEAD_BYTES)


def _fetch(path: str, url: str, storage: Storage) -> pa.Buffer:
    """Fetch a remote file whole into an unlinked temporary file, unless a cache has it."""
    import pyarrow as pa

    if (cached := storage.local_path(path)) is not None:
        with pa.memory_map(cached) as file:
            return file.read_buffer()
    fetcher = Fetcher()
    try:
        info = storage.info(path)
        chunks = read_whole(storage, path, url, info, fetcher)
        with temporary_copy(chunks, url, info.size) as copy, pa.memory_map(copy) as file:
            return file.read_buffer()
    finally:
        fetcher.stop()
