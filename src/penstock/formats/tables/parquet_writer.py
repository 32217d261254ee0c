"""Tables into Parquet files of bounded size.

A row group is cut where its rows have so many bytes, whatever the tables they came in, so that the same rows give the
same files. Whether one more row group fits into a file is known before it is written: from its size in memory while
there is room, and near the limit by encoding it beside the file first. Bytes that do not shrink, such as those of
pictures, are stored as they are: which columns hold such bytes is decided once, by the first rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError, PlanError
from penstock.order import I64

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_BYTES = 32_000_000  # of values in memory: a shuffle holds a row group of each of 16 files
GROUP_ROWS = 65_536
_SAID = 400  # what a footer says about a column of a row group, beside its least and its greatest value
_LONGEST = 4096  # of such a value; a longer one is left out
_PAGES = 65_536  # what headers and levels may add to the values of a column
_OFFSETS = 64  # what longer offsets may add to that in a large file
COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is complete."""

    path: str
    rows: int
    nbytes: int


class TableWriter:
    """Writes tables into files of a folder, ``00000.parquet`` and so on.

    Args:
        folder: Where; it is there.
        max_bytes: The most bytes of a file, unless one row alone has more.
        max_rows: The most rows of a file.
        compression: How pages are compressed.
        schema: The columns; ``None``: those of the first row group.
        layout: How each column is stored; ``None``: as the first row group suggests.
        start: The number of the first file.
        finished: Called with every file when it is complete.
        describe: Adds what the file shall say beside its columns, once they are known.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_bytes: int,
        max_rows: int | None = None,
        compression: str = "zstd",
        schema: pa.Schema | None = None,
        layout: Layout | None = None,
        start: int = 0,
        finished: Callable[[Written], object] = lambda _: None,
        describe: Callable[[pa.Schema], pa.Schema] = lambda schema: schema,
    ) -> None:
        self._folder, self._max_bytes, self._max_rows = folder, max_bytes, max_rows or (1 << 62)
        self._compression, self.schema, self._number, self._finished = compression, schema, start, finished
        self._describe, self.layout = describe, layout
        self._group_bytes = min(GROUP_BYTES, max(1, max_bytes // 8))
        self._pending: list[pa.Table] = []
        self._sizes: list[I64] = []
        self._file: _OpenFile | None = None

    def write(self, table: pa.Table) -> None:
        """Append rows.

        Raises:
            DataError: they do not have the columns of those before.
            OSError: the folder cannot be written.
        """
        if table.num_rows:
            self._pending.append(table)
            self._sizes.append(row_sizes(table))
        while (many := self._due()) is not None:
            self._place(self._cut(many))

    def close(self) -> None:
        """Write what is left and complete the last file."""
        if many := sum(map(len, self._sizes)):
            self._place(self._cut(many))
        self._finish()

    def drop(self) -> None:
        """End without completing the file at hand."""
        if self._file is not None:
            self._file.drop()
            self._file = None

    def _due(self) -> int | None:
        """How many rows make the next row group; ``None``: there are not enough yet."""
        rows = sum(map(len, self._sizes))
        if not rows:
            return None
        ends = np.cumsum(np.concatenate(self._sizes))
        most = min(GROUP_ROWS, self._max_rows - (self._file.rows if self._file is not None else 0))
        many = min(max(1, int(np.searchsorted(ends, self._group_bytes, "right"))), most)
        return many if many < rows or (many == rows == most) else None

    def _cut(self, many: int) -> pa.Table:
        """Take the first rows of what is pending, with the columns that all rows have."""
        import pyarrow as pa

        _check_lists(self._pending)
        try:
            whole = pa.concat_tables(self._pending, promote_options="permissive")
        except (pa.ArrowException, TypeError) as exc:
            raise DataError(f"samples do not have the same columns: {str(exc).splitlines()[0]}") from exc
        sizes = np.concatenate(self._sizes)
        left = whole.slice(many)
        self._pending, self._sizes = ([left], [sizes[many:]]) if left.num_rows else ([], [])
        return self._conform(whole.slice(0, many)).combine_chunks()

    def _conform(self, table: pa.Table) -> pa.Table:
        """The table with the columns of the first one: a column that is not there has no values."""
        import pyarrow as pa

        if self.schema is None:
            self.schema = self._describe(table.schema)
        if table.schema.equals(self.schema, check_metadata=True):
            return table
        if more := [name for name in table.schema.names if name not in self.schema.names]:
            raise DataError(f"field {more[0]!r} is not in the samples before; give every field to all, or pass schema=")
        columns = []
        for field in self.schema:
            if field.name not in table.schema.names:
                columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
                continue
            own, column = table.schema.field(field.name), table.column(field.name)
            if (own.metadata or {}) != (field.metadata or {}) and own.metadata:
                raise DataError(f"field {field.name!r} has arrays of another shape than before; pad or flatten them")
            try:
                columns.append(column if own.type == field.type else column.cast(field.type))
            except pa.ArrowException as exc:
                problem = f"field {field.name!r} is {field.type} in the samples before and does not fit here"
                raise DataError(f"{problem} ({str(exc).splitlines()[0]}); pass schema=") from exc
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _place(self, group: pa.Table) -> None:
        """Write a row group to the file at hand if it fits, else to the next one; one too large for any is parted."""
        if self._file is not None and not self._file.fits(group):
            self._finish()
        if self._file is None:
            path = os.path.join(self._folder, f"{self._number:05d}.parquet")
            if self.layout is None:
                self.layout = layout_for(group, self._compression)
            self._file = _OpenFile(path, group.schema, self.layout, self._max_bytes)
        if group.num_rows > 1 and not self._file.rows and not self._file.fits(group):
            half = group.num_rows // 2
            self._place(group.slice(0, half))
            self._place(group.slice(half))
            return
        self._file.append(group)
        if self._file.rows >= self._max_rows:
            self._finish()

    def _finish(self) -> None:
        if self._file is not None:
            done = self._file.close()
            self._file, self._number = None, self._number + 1
            self._finished(done)


def _check_lists(tables: Iterable[pa.Table]) -> None:
    """Require lists and arrays of one kind, as among samples that come together; Arrow would make one of two.

    Raises:
        DataError: they differ.
    """
    known: dict[str, pa.Field] = {}
    for field in (field for table in tables for field in table.schema):
        first = known.setdefault(field.name, field)
        if _empty(first.type):
            known[field.name] = field
        elif not _empty(field.type) and field is not first:
            if (field.metadata or {}) != (first.metadata or {}):
                raise DataError(f"field {field.name!r} has arrays of different shapes; pad them, or flatten them")
            kinds = {str(kind.value_type) for kind in (first.type, field.type) if _is_list(kind)}
            if len(kinds) > 1 and kinds != {"int64", "double"}:
                raise DataError(f"field {field.name!r} has lists of {' and '.join(sorted(kinds))}; make them one type")


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _empty(kind: Any) -> bool:
    """Whether nothing is known of the values: there were none."""
    import pyarrow as pa

    return bool(pa.types.is_null(kind) or (_is_list(kind) and _empty(kind.value_type)))


class _OpenFile:
    """A file being written, which knows what fits into it."""

    def __init__(self, path: str, schema: pa.Schema, layout: Layout, max_bytes: int) -> None:
        self._path, self._schema, self._layout, self._max_bytes = path, schema, layout, max_bytes
        self._sink = open(path, "wb")  # noqa: SIM115
        self._writer = layout.writer(self._sink, schema)
        self._frame = len(layout.encoded(schema.empty_table())[0])  # what a file without rows has
        self._said = 0  # bytes that the footer may have beyond that
        self._last: tuple[pa.Table, tuple[int, int]] | None = None  # what was asked last, and the answer
        self.rows = 0

    def fits(self, group: pa.Table) -> bool:
        """Whether the file stays within its bound with one more row group."""
        return sum(self._needs(group)) <= self._room()

    def _room(self) -> int:
        return self._max_bytes - int(self._sink.tell()) - self._frame - self._said

    def _needs(self, group: pa.Table) -> tuple[int, int]:
        """The most bytes that a row group has in the file, and in its footer."""
        if self._last is None or self._last[0] is not group:
            bound = group.nbytes * 5 // 4 + _leaf_count(group.schema) * _PAGES, _said(group)
            self._last = group, bound if sum(bound) <= self._room() else self._measured(group)
        return self._last[1]

    def _measured(self, group: pa.Table) -> tuple[int, int]:
        """The same, by encoding it."""
        data, metadata = self._layout.encoded(group)
        chunks = [metadata.row_group(0).column(leaf) for leaf in range(metadata.num_columns)]
        pages = sum(chunk.total_compressed_size for chunk in chunks)
        return pages, len(data) - pages - self._frame + _OFFSETS * (len(chunks) + 1)

    def append(self, group: pa.Table) -> None:
        """Write a row group."""
        self._said += self._needs(group)[1]
        self._last = None
        self._writer.write_table(group, row_group_size=max(1, group.num_rows))
        self.rows += group.num_rows

    def close(self) -> Written:
        """Complete the file, on the disk."""
        self._writer.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        nbytes = self._sink.tell()
        self._sink.close()
        return Written(self._path, self.rows, nbytes)

    def drop(self) -> None:
        """Leave it as it is: nobody will give it a name."""
        with suppress(Exception):  # it is ended because something failed; that is what is told
            self._writer.close()  # else its finalizer writes to a closed file
        self._sink.close()


def _leaf_count(schema: Iterable[pa.Field]) -> int:
    def count(kind: Any) -> int:
        return sum(count(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1

    return sum(count(field.type) for field in schema)


def _said(group: pa.Table) -> int:
    """The most bytes that a footer says about a row group: of each leaf two values, each of them twice."""
    import pyarrow.compute as pc

    total = 0
    for field, column in zip(group.schema, group.columns, strict=True):
        leaves = _leaf_count([field])
        longest = _LONGEST if field.type.num_fields else 16
        if not field.type.num_fields and _is_bytes(field.type):
            longest = min(_LONGEST, int(pc.max(pc.binary_length(column)).as_py() or 0))
        total += leaves * (_SAID + 4 * longest + len(field.name))
    return total


def row_sizes(table: pa.Table) -> I64:
    """About how many bytes the values of each row have: the same, whatever table the row is in."""
    out = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        at = 0
        for chunk in column.chunks:
            out[at : at + len(chunk)] += _sizes(chunk)
            at += len(chunk)
    return out


def _sizes(array: pa.Array) -> I64:
    import pyarrow as pa
    import pyarrow.compute as pc

    types, kind = pa.types, array.type
    if types.is_null(kind):
        return np.zeros(len(array), np.int64)
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(array.storage)
    if _is_bytes(kind):
        return _filled(pc.binary_length(array))
    if types.is_struct(kind):
        return sum((_sizes(part) for part in array.flatten()), np.zeros(len(array), np.int64))
    if _is_list(kind):
        lengths = _filled(pc.list_value_length(array))
        elements = array.flatten()
        if types.is_primitive(elements.type) and not elements.null_count:
            return lengths * _width(elements.type)
        inner = _sizes(elements)
        ends = np.concatenate([[0], np.cumsum(inner)])
        stops = np.cumsum(lengths)
        return ends[stops] - ends[stops - lengths] if len(inner) == int(lengths.sum()) else lengths * 8
    there: I64 = array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    return there * _width(kind)


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    text = types.is_string(kind) or types.is_large_string(kind)
    return bool(text or types.is_binary(kind) or types.is_large_binary(kind))


def _width(kind: Any) -> int:
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return 16


def _filled(lengths: Any) -> I64:
    lengths = lengths.fill_null(0) if lengths.null_count else lengths
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def check_compression(compression: str) -> None:
    """Require a compression that Parquet readers know.

    Raises:
        PlanError: it is none.
    """
    if compression not in COMPRESSIONS:
        raise PlanError(f"compression={compression!r}: choose one of {', '.join(map(repr, COMPRESSIONS))}")


if TYPE_CHECKING:
    import pyarrow as pa

_SAMPLE = 1 << 20  # bytes of a column that are tried
_EACH = 1 << 18  # of one value
_LARGE = 512  # bytes of a usual value; shorter ones may repeat, which a dictionary makes use of
_WORTH = 0.9  # what compression must leave at most
_PAGE = 1 << 20  # bytes of values that are looked at together: a page is not much larger
_BATCH = 1024  # values, where they are small


@dataclass(frozen=True, slots=True)
class Layout:
    """What Parquet does with each column.

    Attributes:
        compression: How pages are compressed.
        as_is: Paths of the leaves that are not: without compression, dictionary, least and greatest values.
        batch: Rows after which Parquet looks whether a page is full.
    """

    compression: str
    as_is: tuple[str, ...] = ()
    batch: int = _BATCH

    def writer(self, sink: Any, schema: pa.Schema) -> Any:
        """A writer of a file."""
        import pyarrow.parquet as pq

        if not self.as_is:
            return pq.ParquetWriter(sink, schema, compression=self.compression)
        leaves = _paths(schema)
        others = [path for path in leaves if path not in self.as_is]
        ways = {path: self.compression if path in others else "none" for path in leaves}
        return pq.ParquetWriter(
            sink,
            schema,
            compression=ways,
            use_dictionary=others,
            write_statistics=others,
            write_batch_size=self.batch,
        )

    def encoded(self, table: pa.Table) -> tuple[Any, Any]:
        """A file of its own of a table, in memory, and its footer."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        with self.writer(sink, table.schema) as writer:
            if table.num_rows:
                writer.write_table(table, row_group_size=table.num_rows)
        data = sink.getvalue()
        return data, pq.read_metadata(pa.BufferReader(data))


def layout_for(group: pa.Table, compression: str) -> Layout:
    """The layout that the first rows suggest: large binary values that do not shrink stay as they are."""
    leaves = [leaf for column in group.columns for leaf in _leaf_arrays(column.combine_chunks())]
    stored = [not _shrinks(leaf) for leaf in leaves]
    paths = _paths(group.schema) if any(stored) else []
    if len(paths) != len(stored):  # a type whose leaves are not what they seem
        return Layout(compression)
    usual = max(
        (leaf.nbytes // max(1, len(leaf)) for leaf, as_is in zip(leaves, stored, strict=True) if as_is), default=0
    )
    batch = min(_BATCH, max(1, _PAGE // max(1, usual)))
    return Layout(compression, tuple(path for path, as_is in zip(paths, stored, strict=True) if as_is), batch)


def _paths(schema: pa.Schema) -> list[str]:
    """What Parquet calls the leaves of a schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, schema).close()
    found = pq.read_metadata(pa.BufferReader(sink.getvalue())).schema
    return [str(found.column(leaf).path) for leaf in range(len(found))]


def _leaf_arrays(array: Any) -> Iterator[Any]:
    import pyarrow as pa

    types, kind = pa.types, array.type
    if isinstance(array, pa.ChunkedArray):  # more than one array holds
        array = array.chunk(0)
    if isinstance(kind, pa.BaseExtensionType):
        yield from _leaf_arrays(array.storage)
    elif types.is_struct(kind):
        for part in array.flatten():
            yield from _leaf_arrays(part)
    elif types.is_map(kind):
        yield from _leaf_arrays(array.keys)
        yield from _leaf_arrays(array.items)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        yield from _leaf_arrays(array.flatten())
    else:
        yield array


def _shrinks(leaf: Any) -> bool:
    """Whether compression makes the first values smaller; of other kinds than large binary values it is believed."""
    import pyarrow as pa

    if not (pa.types.is_binary(leaf.type) or pa.types.is_large_binary(leaf.type)):
        return True
    tried, size = [], 0
    for value in leaf.drop_null():
        tried.append(value.as_buffer()[:_EACH])
        size += len(tried[-1])
        if size >= _SAMPLE:
            break
    if size < _LARGE * max(1, len(tried)):
        return True
    packed = pa.compress(b"".join(tried), codec="zstd", asbytes=True)
    return len(packed) < size * _WORTH
