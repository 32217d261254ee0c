"""Writes tables to Parquet files of bounded size.

A row group ends where its rows reach a number of bytes, however the rows are split into tables, so the same rows give
the same files. The writer knows before it writes a row group whether the file stays within its bound: from the size of
the group in memory while there is room, and near the bound by encoding the group in memory first. Binary values that do
not compress, such as JPEG images, are stored uncompressed: the first row group decides once which columns these are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError, PlanError
from penstock.formats.tables.arrow_table import concatenated
from penstock.formats.tables.values import is_list
from penstock.order import I64

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")
GROUP_BYTES = 32_000_000  # of values in memory: a shuffle holds one row group of each of 16 files
GROUP_ROWS = 65_536
# How much a row group adds to a file, at most:
_CHUNK_FOOTER_BYTES = 400  # the footer's entry for a column of a row group, without its minimum and maximum
_MAX_STATISTIC_BYTES = 4096  # a minimum or maximum in the footer; Parquet leaves longer ones out
_PAGE_OVERHEAD_BYTES = 65_536  # page headers and levels of a column
_OFFSET_GROWTH_BYTES = 64  # offsets in the footer are longer in a large file than in one of a single row group
# How columns that do not compress are recognised:
_PROBE_BYTES = 1 << 20  # of a column that are compressed on trial
_PROBE_VALUE_BYTES = 1 << 18  # of one value, so that a large one does not decide alone
_LARGE_VALUE_BYTES = 512  # mean size from which values are probed; short ones may repeat and gain from a dictionary
_MAX_RATIO = 0.9  # of compressed to original size above which compression is not worth its time
# How large the pages of such columns become:
_PAGE_BYTES = 1 << 20
_WRITE_BATCH = 1024  # values between two checks whether a page is full; fewer where values are large


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A complete Parquet file."""

    path: str
    rows: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParquetLayout:
    """How Parquet stores each column.

    Attributes:
        compression: The codec of the pages.
        as_is: The paths of the leaf columns that are stored without compression, dictionary and statistics.
        batch: The number of values after which Parquet checks whether a page is full.
    """

    compression: str
    as_is: tuple[str, ...] = ()
    batch: int = _WRITE_BATCH

    def writer(self, sink: Any, schema: pa.Schema) -> Any:
        """Return a ``pyarrow.parquet.ParquetWriter`` that stores columns this way."""
        import pyarrow.parquet as pq

        if not self.as_is:
            return pq.ParquetWriter(sink, schema, compression=self.compression)
        leaves = _leaf_paths(schema)
        others = [path for path in leaves if path not in self.as_is]
        codecs = {path: self.compression if path in others else "none" for path in leaves}
        return pq.ParquetWriter(
            sink,
            schema,
            compression=codecs,
            use_dictionary=others,
            write_statistics=others,
            write_batch_size=self.batch,
        )

    def encode(self, table: pa.Table) -> tuple[Any, Any]:
        """Return a file of one row group in memory, and its footer."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        with self.writer(sink, table.schema) as writer:
            if table.num_rows:
                writer.write_table(table, row_group_size=table.num_rows)
        data = sink.getvalue()
        return data, pq.read_metadata(pa.BufferReader(data))


def choose_layout(group: pa.Table, compression: str) -> ParquetLayout:
    """Return the layout for a file that begins with this row group."""
    leaves = [leaf for column in group.columns for leaf in _leaf_arrays(column.combine_chunks())]
    uncompressed = [not _compresses(leaf) for leaf in leaves]
    paths = _leaf_paths(group.schema) if any(uncompressed) else []
    if len(paths) != len(uncompressed):  # a type that Parquet stores in other leaves than Arrow
        return ParquetLayout(compression)
    mean_bytes = max(
        (leaf.nbytes // max(1, len(leaf)) for leaf, as_is in zip(leaves, uncompressed, strict=True) if as_is), default=0
    )
    batch = min(_WRITE_BATCH, max(1, _PAGE_BYTES // max(1, mean_bytes)))
    return ParquetLayout(
        compression, tuple(path for path, as_is in zip(paths, uncompressed, strict=True) if as_is), batch
    )


def _leaf_paths(schema: pa.Schema) -> list[str]:
    """Return the names that Parquet gives to the leaf columns of a schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, schema).close()
    found = pq.read_metadata(pa.BufferReader(sink.getvalue())).schema
    return [str(found.column(leaf).path) for leaf in range(len(found))]


def _leaf_arrays(array: Any) -> Iterator[Any]:
    import pyarrow as pa

    types, kind = pa.types, array.type
    if isinstance(array, pa.ChunkedArray):  # a column of more than 2 GB
        array = array.chunk(0)
    if isinstance(kind, pa.BaseExtensionType):
        yield from _leaf_arrays(array.storage)
    elif types.is_struct(kind):
        for child in array.flatten():
            yield from _leaf_arrays(child)
    elif types.is_map(kind):
        yield from _leaf_arrays(array.keys)
        yield from _leaf_arrays(array.items)
    elif is_list(kind):
        yield from _leaf_arrays(array.flatten())
    else:
        yield array


def _compresses(leaf: Any) -> bool:
    """Return whether compression makes the first values smaller; only large binary values are tested."""
    import pyarrow as pa

    if not (pa.types.is_binary(leaf.type) or pa.types.is_large_binary(leaf.type)):
        return True
    probe, size = [], 0
    for value in leaf.drop_null():
        probe.append(value.as_buffer()[:_PROBE_VALUE_BYTES])
        size += len(probe[-1])
        if size >= _PROBE_BYTES:
            break
    if size < _LARGE_VALUE_BYTES * max(1, len(probe)):
        return True
    compressed = pa.compress(b"".join(probe), codec="zstd", asbytes=True)
    return len(compressed) < size * _MAX_RATIO


class TableWriter:
    """Writes tables into files of a folder, named ``00000.parquet`` and so on.

    Args:
        folder: An existing folder.
        max_bytes: The maximum size of a file, unless a single row is larger.
        max_rows: The maximum number of rows of a file.
        compression: The codec of the pages.
        schema: The columns; ``None`` for those of the first row group.
        layout: How each column is stored; ``None`` to choose it by the first row group.
        start: The number of the first file.
        finished: Called with each file when it is complete.
        describe: Adds metadata to the schema, once the columns are known.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_bytes: int,
        max_rows: int | None = None,
        compression: str = "zstd",
        schema: pa.Schema | None = None,
        layout: ParquetLayout | None = None,
        start: int = 0,
        finished: Callable[[WrittenFile], object] = lambda _: None,
        describe: Callable[[pa.Schema], pa.Schema] = lambda schema: schema,
    ) -> None:
        self._folder, self._max_bytes, self._max_rows = folder, max_bytes, max_rows or (1 << 62)
        self._compression, self.schema, self._number, self._finished = compression, schema, start, finished
        self._describe, self.layout = describe, layout
        self._group_bytes = min(GROUP_BYTES, max(1, max_bytes // 8))
        self._pending: list[pa.Table] = []
        self._sizes: list[I64] = []  # of the rows of each pending table
        self._file: _OpenFile | None = None

    def write(self, table: pa.Table) -> None:
        """Append rows.

        Raises:
            DataError: The columns do not match those of earlier rows.
            OSError: The folder cannot be written.
        """
        if table.num_rows:
            self._pending.append(table)
            self._sizes.append(row_sizes(table))
        while (rows := self._next_group_rows()) is not None:
            self._write_group(self._take(rows))

    def close(self, at_least_one: bool = False) -> None:
        """Write the pending rows and complete the last file; with ``at_least_one``, write one without rows if need be.

        Raises:
            DataError: The columns of the pending rows do not match those of earlier rows.
            OSError: The folder cannot be written.
        """
        if rows := sum(map(len, self._sizes)):
            self._write_group(self._take(rows))
        elif at_least_one and self._file is None:
            import pyarrow as pa

            self._write_group(self._conform(pa.table({})))
        self._close_file()

    def drop(self) -> None:
        """End without completing the current file."""
        if self._file is not None:
            self._file.drop()
            self._file = None

    def _next_group_rows(self) -> int | None:
        """Return how many pending rows make the next row group; ``None`` if there are not enough yet."""
        pending = sum(map(len, self._sizes))
        if not pending:
            return None
        ends = np.cumsum(np.concatenate(self._sizes))
        limit = min(GROUP_ROWS, self._max_rows - (self._file.rows if self._file is not None else 0))
        rows = min(max(1, int(np.searchsorted(ends, self._group_bytes, "right"))), limit)
        return rows if rows < pending or (rows == pending == limit) else None

    def _take(self, rows: int) -> pa.Table:
        """Remove the first pending rows and return them with the columns of the file."""
        _check_lists(self._pending)
        pending = concatenated(self._pending)
        sizes = np.concatenate(self._sizes)
        rest = pending.slice(rows)
        self._pending, self._sizes = ([rest], [sizes[rows:]]) if rest.num_rows else ([], [])
        return self._conform(pending.slice(0, rows)).combine_chunks()

    def _conform(self, table: pa.Table) -> pa.Table:
        """Return the table with the columns of the first row group; a missing column is filled with nulls."""
        import pyarrow as pa

        if self.schema is None:
            self.schema = self._describe(table.schema)
        if table.schema.equals(self.schema, check_metadata=True):
            return table
        if extra := [name for name in table.schema.names if name not in self.schema.names]:
            raise DataError(
                f"field {extra[0]!r} is not in earlier samples; give all samples the same fields, or pass schema="
            )
        columns = []
        for field in self.schema:
            if field.name not in table.schema.names:
                columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
                continue
            own, column = table.schema.field(field.name), table.column(field.name)
            if (own.metadata or {}) != (field.metadata or {}) and own.metadata:
                raise DataError(
                    f"field {field.name!r} has arrays of another shape than in earlier samples; pad or flatten them"
                )
            try:
                columns.append(column if own.type == field.type else column.cast(field.type))
            except pa.ArrowException as exc:
                raise DataError(
                    f"field {field.name!r} is {field.type} in earlier samples, and a value cannot be converted to it "
                    f"({str(exc).splitlines()[0]}); pass schema="
                ) from exc
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _write_group(self, group: pa.Table) -> None:
        """Write a row group to the current file if it fits, else to the next; one too large for any file is split."""
        if self._file is not None and not self._file.fits(group):
            self._close_file()
        if self._file is None:
            path = os.path.join(self._folder, f"{self._number:05d}.parquet")
            if self.layout is None:
                self.layout = choose_layout(group, self._compression)
            self._file = _OpenFile(path, group.schema, self.layout, self._max_bytes)
        if group.num_rows > 1 and not self._file.rows and not self._file.fits(group):
            half = group.num_rows // 2
            self._write_group(group.slice(0, half))
            self._write_group(group.slice(half))
            return
        self._file.append(group)
        if self._file.rows >= self._max_rows:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            written = self._file.close()
            self._file, self._number = None, self._number + 1
            self._finished(written)


def _check_lists(tables: Iterable[pa.Table]) -> None:
    """Check that lists and arrays of a field have one type and shape; Arrow would convert them silently.

    Raises:
        DataError: Types or shapes differ.
    """
    first_fields: dict[str, pa.Field] = {}
    for field in (field for table in tables for field in table.schema):
        first = first_fields.setdefault(field.name, field)
        if _is_untyped(first.type):
            first_fields[field.name] = field
        elif not _is_untyped(field.type) and field is not first:
            if (field.metadata or {}) != (first.metadata or {}):
                raise DataError(f"field {field.name!r} has arrays of different shapes; pad them, or flatten them")
            kinds = {str(kind.value_type) for kind in (first.type, field.type) if is_list(kind)}
            if len(kinds) > 1 and kinds != {"int64", "double"}:
                names = " and ".join(sorted(kinds))
                raise DataError(f"field {field.name!r} has lists of {names}; convert them to one type")


def _is_untyped(kind: Any) -> bool:
    """Return whether all values are null or empty lists, so that their type is not known."""
    import pyarrow as pa

    return bool(pa.types.is_null(kind) or (is_list(kind) and _is_untyped(kind.value_type)))


class _OpenFile:
    """A file being written, which knows whether one more row group fits."""

    def __init__(self, path: str, schema: pa.Schema, layout: ParquetLayout, max_bytes: int) -> None:
        self._path, self._schema, self._layout, self._max_bytes = path, schema, layout, max_bytes
        self._sink = open(path, "xb")  # noqa: SIM115
        self._writer = layout.writer(self._sink, schema)
        self._empty_bytes = len(layout.encode(schema.empty_table())[0])  # the size of a file without rows
        self._footer_bytes = 0  # bound of the footer's entries for the row groups so far
        self._last_bound: tuple[pa.Table, tuple[int, int]] | None = None  # of the row group asked for last
        self.rows = 0

    def fits(self, group: pa.Table) -> bool:
        """Return whether the file stays within ``max_bytes`` with one more row group."""
        return sum(self._bound(group)) <= self._room()

    def _room(self) -> int:
        return self._max_bytes - int(self._sink.tell()) - self._empty_bytes - self._footer_bytes

    def _bound(self, group: pa.Table) -> tuple[int, int]:
        """Return the maximum number of bytes that a row group takes in the file, and in the footer."""
        if self._last_bound is None or self._last_bound[0] is not group:
            pages = group.nbytes * 5 // 4 + _leaf_count(group.schema) * _PAGE_OVERHEAD_BYTES
            bound = pages, _footer_bound(group)
            self._last_bound = group, bound if sum(bound) <= self._room() else self._encoded_size(group)
        return self._last_bound[1]

    def _encoded_size(self, group: pa.Table) -> tuple[int, int]:
        """Return the same two sizes by encoding the row group: slower than an estimate, but close to exact."""
        data, metadata = self._layout.encode(group)
        chunks = [metadata.row_group(0).column(leaf) for leaf in range(metadata.num_columns)]
        pages = sum(chunk.total_compressed_size for chunk in chunks)
        return pages, len(data) - pages - self._empty_bytes + _OFFSET_GROWTH_BYTES * (len(chunks) + 1)

    def append(self, group: pa.Table) -> None:
        """Write a row group."""
        self._footer_bytes += self._bound(group)[1]
        self._last_bound = None
        self._writer.write_table(group, row_group_size=max(1, group.num_rows))
        self.rows += group.num_rows

    def close(self) -> WrittenFile:
        """Complete the file and sync it to the disk."""
        self._writer.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        nbytes = self._sink.tell()
        self._sink.close()
        return WrittenFile(self._path, self.rows, nbytes)

    def drop(self) -> None:
        """Close the file as it is; the caller does not publish it."""
        with suppress(Exception):  # the caller is already failing with an error that matters more
            self._writer.close()  # else its finalizer writes to a closed file
        self._sink.close()


def _leaf_count(schema: Iterable[pa.Field]) -> int:
    def count(kind: Any) -> int:
        return sum(count(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1

    return sum(count(field.type) for field in schema)


def _footer_bound(group: pa.Table) -> int:
    """Return the maximum size of the footer's entry for a row group: it has minimum and maximum of each leaf twice."""
    import pyarrow.compute as pc

    total = 0
    for field, column in zip(group.schema, group.columns, strict=True):
        leaves = _leaf_count([field])
        longest = _MAX_STATISTIC_BYTES if field.type.num_fields else 16
        if not field.type.num_fields and _is_text_or_binary(field.type):
            longest = min(_MAX_STATISTIC_BYTES, int(pc.max(pc.binary_length(column)).as_py() or 0))
        total += leaves * (_CHUNK_FOOTER_BYTES + 4 * longest + len(field.name))
    return total


def row_sizes(table: pa.Table) -> I64:
    """Estimate the bytes of each row's values; a row has the same size in every table."""
    out = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        start = 0
        for chunk in column.chunks:
            out[start : start + len(chunk)] += _value_sizes(chunk)
            start += len(chunk)
    return out


def _value_sizes(array: pa.Array) -> I64:
    import pyarrow as pa
    import pyarrow.compute as pc

    types, kind = pa.types, array.type
    if types.is_null(kind):
        return np.zeros(len(array), np.int64)
    if isinstance(kind, pa.BaseExtensionType):
        return _value_sizes(array.storage)
    if _is_text_or_binary(kind):
        return _lengths(pc.binary_length(array))
    if types.is_struct(kind):
        return sum((_value_sizes(child) for child in array.flatten()), np.zeros(len(array), np.int64))
    if is_list(kind):
        lengths = _lengths(pc.list_value_length(array))
        elements = array.flatten()
        if types.is_primitive(elements.type) and not elements.null_count:
            return lengths * _width(elements.type)
        inner = _value_sizes(elements)
        ends = np.concatenate([[0], np.cumsum(inner)])
        stops = np.cumsum(lengths)
        return ends[stops] - ends[stops - lengths] if len(inner) == int(lengths.sum()) else lengths * 8
    valid: I64 = array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    return valid * _width(kind)


def _is_text_or_binary(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    text = types.is_string(kind) or types.is_large_string(kind)
    return bool(text or types.is_binary(kind) or types.is_large_binary(kind))


def _width(kind: Any) -> int:
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return 16


def _lengths(lengths: Any) -> I64:
    """Return Arrow's lengths as numpy's; 0 for a null."""
    lengths = lengths.fill_null(0) if lengths.null_count else lengths
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def check_compression(compression: str) -> None:
    """Check the name of a codec.

    Raises:
        PlanError: Parquet has no codec of this name.
    """
    if compression not in PARQUET_COMPRESSIONS:
        raise PlanError(f"compression={compression!r}: choose one of {', '.join(map(repr, PARQUET_COMPRESSIONS))}")
