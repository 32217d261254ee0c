"""One Parquet file, local or remote: its footer, and its row groups decoded one at a time.

What Parquet and Arrow files share is here too: stamps, partition columns, and remote files that Arrow can read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError, StorageError
from penstock.formats.tables.values import is_number, plain, plain_type
from penstock.lazy import cached_property
from penstock.order import I64
from penstock.plan.expressions import Condition, Extent
from penstock.storage import Storage, redacted

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_FIRST_READ_BYTES = 1 << 16  # read from the end of a remote file at first: most footers are shorter
_MERGE_GAP_BYTES = 1 << 20  # two ranges that are closer than this are fetched in one request
_MAGIC = b"PAR1"
Partition = tuple[tuple[str, Any], ...]  # the columns that a file's folders name, with their values


@dataclass(frozen=True, slots=True)
class TableStamp:
    """Recognises a change of a file: its size, and its modification time or its storage's tag."""

    size: int
    tag: str | int | None


@dataclass(frozen=True, eq=False)
class ParquetFile:
    """A file whose footer was read; holds no file handle, so any thread may decode from it.

    Attributes:
        url: The file's name in errors.
        path: The file's path or URL.
        storage: The storage that reads it; ``None`` for a local file.
        stamp: The file's stamp when the footer was read.
        footer: The footer.
        partition: The columns that the file's folders name, with their values.
        checked: The sets of columns that were found to match those of the dataset's first file.
    """

    url: str
    path: str
    storage: Storage | None
    stamp: TableStamp
    footer: pq.FileMetaData
    partition: Partition = ()
    checked: set[tuple[str, ...]] = field(default_factory=set)

    @cached_property
    def schema(self) -> pa.Schema:
        """The file's columns, and those that its folders name."""
        import pyarrow as pa

        schema: pa.Schema = self.footer.schema.to_arrow_schema()
        for name, value in self.partition:
            if name not in schema.names:
                schema = schema.append(pa.field(name, partition_type(value)))
        return schema

    @cached_property
    def row_offsets(self) -> I64:
        """The number of the first row of each row group, and at the end the number of rows."""
        rows = [self.footer.row_group(group).num_rows for group in range(self.footer.num_row_groups)]
        return np.cumsum([0, *rows], dtype=np.int64)

    @property
    def groups(self) -> int:
        """The number of row groups."""
        return int(self.footer.num_row_groups)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.footer.num_rows)

    def nbytes(self, group: int, names: Sequence[str]) -> int:
        """Estimate the size of some columns of a row group in memory."""
        chunks = self._chunks(group, names)
        return sum(chunk.total_uncompressed_size for chunk in chunks) or self.footer.row_group(group).num_rows

    def _chunks(self, group: int, names: Sequence[str]) -> list[Any]:
        wanted, row_group = set(names), self.footer.row_group(group)
        return [row_group.column(leaf) for leaf, name in enumerate(self._leaf_columns) if name in wanted]

    @cached_property
    def _leaf_columns(self) -> list[str]:
        """The name of the top-level column that each leaf of the file's own schema belongs to."""
        return [own.name for own in self.footer.schema.to_arrow_schema() for _ in range(_leaves(own.type))]

    def may_match(self, group: int, where: Condition) -> bool:
        """Return whether a row of a row group may meet the condition, or may fail when it is evaluated."""
        if not where.defined_for({name: _values_of(self.schema, name) for name in where.fields()}):
            return True
        try:
            return where.possible({name: self._extent(group, name) for name in where.fields()})
        except TypeError:
            return True

    def _extent(self, group: int, name: str) -> Extent:
        import pyarrow as pa

        rows = self.footer.row_group(group).num_rows
        for column, value in self.partition:
            if column == name and name not in self._leaf_columns:
                return Extent(value, value, rows if value is None else 0, rows)
        chunks = self._chunks(group, (name,))
        statistics = chunks[0].statistics if len(chunks) == 1 and chunks[0].path_in_schema == name else None
        if statistics is None:
            return Extent()
        kind, types = self.schema.field(name).type, pa.types
        ordered = types.is_integer(kind) or types.is_floating(kind) or types.is_string(kind)
        nulls = statistics.null_count if statistics.has_null_count else None
        if statistics.has_min_max and ordered:
            return Extent(statistics.min, statistics.max, nulls, rows)
        return Extent(None, None, nulls, rows)

    def decode(self, group: int, names: Sequence[str]) -> list[pa.RecordBatch]:
        """Return the rows of a row group, in as few batches as Arrow can hold them.

        Raises:
            DataError: The row group is damaged.
            StorageError: The file is gone, or has changed since its footer was read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        stored = [name for name in names if name in self._leaf_columns]
        try:
            with pq.ParquetFile(self._source(group, stored), metadata=self.footer, pre_buffer=False) as file:
                table = file.read_row_group(group, columns=stored, use_threads=False)
            rows = self.footer.row_group(group).num_rows
            return plain_batches(with_partition(table, names, self.schema, self.partition, rows))
        except StorageError:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as exc:
            raise DataError(f"row group {group} cannot be decoded: {first_line(exc)}", self.url) from exc

    def _source(self, group: int, names: Sequence[str]) -> Any:
        if self.storage is not None:
            ranges = [_chunk_range(chunk) for chunk in self._chunks(group, names)]
            return RemoteFile(self.path, self.storage, self.stamp, ranges)
        if local_stamp(self.path, self.url) != self.stamp:
            raise StorageError("the file was changed while it was being read", self.url)
        return self.path


def _leaves(kind: pa.DataType) -> int:
    """Return how many leaves a Parquet file has for a column of this type."""
    kind = getattr(kind, "storage_type", kind)
    return sum(_leaves(kind.field(child).type) for child in range(kind.num_fields)) or 1


def _values_of(schema: pa.Schema, name: str) -> type | None:
    """Return the type of a column's values, as ``Condition.defined_for`` takes it."""
    import pyarrow as pa

    kind = plain_type(schema.field(name).type) if name in schema.names else pa.null()
    if is_number(kind):
        return float
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return str
    return bytes if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else None


def with_partition(
    table: pa.Table, names: Sequence[str], schema: pa.Schema, partition: Partition, rows: int
) -> pa.Table:
    """Return the columns in the order of ``names``; those that the table lacks are filled from ``partition``."""
    import pyarrow as pa

    values = dict(partition)
    stored = set(table.column_names)
    filled = {
        name: pa.repeat(pa.scalar(values[name], partition_type(values[name])), rows)
        for name in names
        if name not in stored
    }
    arrays = [filled[name] if name in filled else table.column(name) for name in names]
    fields = [schema.field(name) for name in names]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=schema.metadata))


def partition_type(value: Any) -> pa.DataType:
    """Return the type of a partition column with this value."""
    import pyarrow as pa

    return pa.int64() if isinstance(value, int) else pa.string()


def plain_batches(table: pa.Table) -> list[pa.RecordBatch]:
    """Return a table of plain types in one batch, or in several if a column has more than 2 GB of text or bytes."""
    import pyarrow as pa

    fields, columns = [], []
    for column_field, column in zip(table.schema, table.columns, strict=True):
        chunks = [plain(chunk) for chunk in column.chunks]
        kind = chunks[0].type if chunks else column_field.type
        fields.append(column_field.with_type(kind))
        columns.append(pa.chunked_array(chunks, kind))
    plain_table = pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=table.schema.metadata))
    batches: list[pa.RecordBatch] = plain_table.to_batches()
    return batches if len(batches) == 1 else list(plain_table.combine_chunks().to_batches())


def open_parquet(url: str, path: str, storage: Storage | None, partition: Partition) -> ParquetFile:
    """Read the footer of a file.

    Raises:
        DataError: The file is not a Parquet file, is cut off, or has a damaged footer.
        StorageError: The file does not exist or cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    stamp = local_stamp(path, url) if storage is None else remote_stamp(path, storage)
    if path.startswith("~"):  # which Arrow takes for the home folder
        path = f"./{path}"
    try:
        source: Any = path
        if storage is not None:
            source = RemoteFile(path, storage, stamp, [_footer_range(path, storage, stamp, url)])
        with pq.ParquetFile(source, pre_buffer=False) as file:
            footer = file.metadata
    except (DataError, StorageError):
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as exc:
        raise DataError(f"not a complete Parquet file: {first_line(exc)}", url) from exc
    return ParquetFile(url, path, storage, stamp, footer, partition)


def _footer_range(path: str, storage: Storage, stamp: TableStamp, url: str) -> tuple[int, int]:
    """Return the range of bytes that holds the footer, and more if the footer is short."""
    if stamp.size < 12:
        raise DataError("not a complete Parquet file: it is too short", url)
    trailer = bytes(storage.read(path, stamp.size - 8, stamp.size))
    length = int.from_bytes(trailer[:4], "little") + 8
    if trailer[4:] != _MAGIC or length > stamp.size:
        raise DataError("not a complete Parquet file: it does not end with a Parquet footer", url)
    return stamp.size - min(stamp.size, max(length, _FIRST_READ_BYTES)), stamp.size


def local_stamp(path: str, url: str) -> TableStamp:
    """Return the current stamp of a local file.

    Raises:
        StorageError: The file does not exist or cannot be read.
    """
    try:
        status = os.stat(path)
    except OSError as exc:
        raise StorageError(f"cannot read the file: {exc.strerror or exc}", url) from exc
    return TableStamp(status.st_size, status.st_mtime_ns)


def remote_stamp(path: str, storage: Storage) -> TableStamp:
    """Return the current stamp of a remote file.

    Raises:
        StorageError: The file does not exist, or the server does not report its size.
    """
    info = storage.info(path)
    if info.size is None:
        raise StorageError(
            "the server does not report the size of the file, which is needed to read it from its end", redacted(path)
        )
    return TableStamp(info.size, info.tag)


def _chunk_range(chunk: Any) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def first_line(exc: Exception) -> str:
    """Return the first line of Arrow's message, or the type of the exception if it has none."""
    return str(exc).strip().split("\n")[0] or type(exc).__name__


class RemoteFile(io.RawIOBase):
    """A remote file for Arrow to read; some ranges are fetched at once, all others when they are read."""

    def __init__(self, url: str, storage: Storage, stamp: TableStamp, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch the ranges; those that are close together in one request.

        Raises:
            StorageError: A range cannot be read, or the file has changed.
        """
        self._url, self._storage, self._stamp = url, storage, stamp
        self._position = 0
        self._fetched: list[tuple[int, bytes | memoryview]] = []
        for start, stop in _merge_ranges(ranges):
            self._fetched.append((start, self._fetch(start, stop)))

    def _fetch(self, start: int, stop: int) -> bytes | memoryview:
        tag = self._stamp.tag
        return self._storage.read(self._url, start, stop, tag=tag if isinstance(tag, str) else None)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        """Return the size of the file, which Arrow asks for."""
        return self._stamp.size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stamp.size}[whence]
        self._position = offset + origin
        return self._position

    def read(self, size: int = -1) -> Any:
        stop = self._stamp.size if size is None or size < 0 else min(self._position + size, self._stamp.size)
        start, self._position = self._position, max(self._position, stop)
        if stop <= start:
            return b""
        for first, data in self._fetched:
            if first <= start and stop <= first + len(data):
                return memoryview(data)[start - first : stop - first]
        return self._fetch(start, stop)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start - merged[-1][1] <= _MERGE_GAP_BYTES:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
