"""One Parquet file: its footer, and its row groups decoded one at a time; here or far away."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError, StorageError
from penstock.formats.tables.values import plain
from penstock.order import I64
from penstock.plan.expressions import Condition, Extent
from penstock.storage import Storage, redacted

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_TAIL = 1 << 16  # what is fetched of a remote file at first: most footers are shorter
_GAP = 1 << 20  # bytes between two wanted columns that are rather fetched along than asked for apart
_MAGIC = b"PAR1"
Told = tuple[tuple[str, Any], ...]  # the columns that a file's name tells, with their values


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one content of a file from another."""

    size: int
    tag: str | int | None


@dataclass(frozen=True, eq=False)
class ParquetFile:
    """A file whose footer was read; holds no handle, so that any thread may decode from it.

    Attributes:
        url: What it is called in errors.
        path: Where it is.
        storage: Who reads it; ``None``: it is a local file.
        stamp: What it was when the footer was read.
        footer: The footer.
        extra: Columns that the name of the file tells, with their values.
    """

    url: str
    path: str
    storage: Storage | None
    stamp: Stamp
    footer: pq.FileMetaData
    extra: Told = ()
    checked: set[tuple[str, ...]] = field(default_factory=set)

    @cached_property
    def schema(self) -> pa.Schema:
        """Its columns, and those that its name tells."""
        import pyarrow as pa

        found: pa.Schema = self.footer.schema.to_arrow_schema()
        for name, value in self.extra:
            if name not in found.names:
                found = found.append(pa.field(name, kind_of(value)))
        return found

    @cached_property
    def edges(self) -> I64:
        """The number of the first row of every row group, and of all rows."""
        rows = [self.footer.row_group(group).num_rows for group in range(self.footer.num_row_groups)]
        return np.cumsum([0, *rows], dtype=np.int64)

    @property
    def groups(self) -> int:
        """How many row groups it has."""
        return int(self.footer.num_row_groups)

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return int(self.footer.num_rows)

    def nbytes(self, group: int, names: Sequence[str]) -> int:
        """About how many bytes some columns of a row group have in memory."""
        chunks = self._chunks(group, names)
        return sum(chunk.total_uncompressed_size for chunk in chunks) or self.footer.row_group(group).num_rows

    def _chunks(self, group: int, names: Sequence[str]) -> list[Any]:
        wanted, found = set(names), self.footer.row_group(group)
        return [found.column(leaf) for leaf, name in enumerate(self._roots) if name in wanted]

    @cached_property
    def _roots(self) -> list[str]:
        """The column that each leaf of the file's own schema belongs to."""
        schema = self.footer.schema
        return [schema.column(leaf).path.partition(".")[0] for leaf in range(len(schema))]

    def may_hold(self, group: int, where: Condition) -> bool:
        """Whether a row of a row group may fulfil a condition, as far as its statistics tell."""
        try:
            return where.possible({name: self._extent(group, name) for name in where.fields()})
        except TypeError:
            return True

    def _extent(self, group: int, name: str) -> Extent:
        import pyarrow as pa

        rows = self.footer.row_group(group).num_rows
        for own, value in self.extra:
            if own == name and name not in self._roots:
                return Extent(value, value, rows if value is None else 0, rows)
        chunks = self._chunks(group, (name,))
        known = chunks[0].statistics if len(chunks) == 1 and chunks[0].path_in_schema == name else None
        if known is None:
            return Extent()
        kind, types = self.schema.field(name).type, pa.types
        told = known.has_min_max and (types.is_integer(kind) or types.is_floating(kind) or types.is_string(kind))
        nulls = known.null_count if known.has_null_count else None
        return Extent(known.min, known.max, nulls, rows) if told else Extent(None, None, nulls, rows)

    def decode(self, group: int, names: Sequence[str]) -> list[pa.RecordBatch]:
        """The rows of a row group, in as few batches as Arrow can hold them.

        Raises:
            DataError: the row group is damaged.
            StorageError: the file is gone or changed.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        own = [name for name in names if name in self._roots]
        try:
            with pq.ParquetFile(self._source(group, own), metadata=self.footer, pre_buffer=False) as file:
                table = file.read_row_group(group, columns=own, use_threads=False)
            table = completed(table, names, self.schema, self.extra, self.footer.row_group(group).num_rows)
            return whole(table)
        except StorageError:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as exc:
            raise DataError(f"row group {group} cannot be decoded: {words(exc)}", self.url) from exc

    def _source(self, group: int, names: Sequence[str]) -> Any:
        if self.storage is not None:
            ranges = [_span(chunk) for chunk in self._chunks(group, names)]
            return Fetched(self.path, self.storage, self.stamp, ranges)
        if local_stamp(self.path, self.url) != self.stamp:
            raise StorageError("the file was changed while it was being read", self.url)
        return self.path


def completed(table: pa.Table, names: Sequence[str], schema: pa.Schema, extra: Told, rows: int) -> pa.Table:
    """The columns in the order asked for, those that the file's name tells among them."""
    import pyarrow as pa

    told = dict(extra)
    own = set(table.column_names)
    given = {name: pa.repeat(pa.scalar(told[name], kind_of(told[name])), rows) for name in names if name not in own}
    arrays = [given[name] if name in given else table.column(name) for name in names]
    fields = [schema.field(name) for name in names]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=schema.metadata))


def kind_of(value: Any) -> pa.DataType:
    """The type of a column that a file's name tells."""
    import pyarrow as pa

    return pa.int64() if isinstance(value, int) else pa.string()


def whole(table: pa.Table) -> list[pa.RecordBatch]:
    """One batch, unless a column has more than 2 GB of text or bytes; without dictionaries, views and extensions."""
    import pyarrow as pa

    fields, columns = [], []
    for own, column in zip(table.schema, table.columns, strict=True):
        chunks = [plain(chunk) for chunk in column.chunks]
        kind = chunks[0].type if chunks else own.type
        fields.append(own.with_type(kind))
        columns.append(pa.chunked_array(chunks, kind))
    made = pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=table.schema.metadata))
    batches: list[pa.RecordBatch] = made.to_batches()
    return batches if len(batches) == 1 else list(made.combine_chunks().to_batches())


def open_file(url: str, path: str, storage: Storage | None, extra: Told) -> ParquetFile:
    """Read the footer of a file.

    Raises:
        DataError: it is no Parquet file, or its footer is damaged.
        StorageError: it is not there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    stamp = local_stamp(path, url) if storage is None else remote_stamp(path, storage)
    try:
        source = path if storage is None else Fetched(path, storage, stamp, [_tail(path, storage, stamp, url)])
        with pq.ParquetFile(source, pre_buffer=False) as file:
            footer = file.metadata
    except (DataError, StorageError):
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as exc:
        raise DataError(f"this is no whole Parquet file: {words(exc)}", url) from exc
    return ParquetFile(url, path, storage, stamp, footer, extra)


def _tail(path: str, storage: Storage, stamp: Stamp, url: str) -> tuple[int, int]:
    """Where the footer lies."""
    if stamp.size < 12:
        raise DataError("this is no whole Parquet file: it is too short", url)
    tail = bytes(storage.read(path, stamp.size - 8, stamp.size))
    length = int.from_bytes(tail[:4], "little") + 8
    if tail[4:] != _MAGIC or length > stamp.size:
        raise DataError("this is no whole Parquet file: it does not end like one", url)
    return stamp.size - min(stamp.size, max(length, _TAIL)), stamp.size


def local_stamp(path: str, url: str) -> Stamp:
    """What a local file is now.

    Raises:
        StorageError: it is not there.
    """
    try:
        found = os.stat(path)
    except OSError as exc:
        raise StorageError(f"cannot read the file: {exc.strerror or exc}", url) from exc
    return Stamp(found.st_size, found.st_mtime_ns)


def remote_stamp(path: str, storage: Storage) -> Stamp:
    """What a remote file is now.

    Raises:
        StorageError: it is not there, or nobody tells how large it is.
    """
    info = storage.info(path)
    if info.size is None:
        raise StorageError(
            "the server does not tell how large the file is, and such a file is read from its end", redacted(path)
        )
    return Stamp(info.size, info.tag)


def _span(chunk: Any) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def words(exc: Exception) -> str:
    """What Arrow says, in one line."""
    return str(exc).strip().split("\n")[0] or type(exc).__name__


class Fetched(io.RawIOBase):
    """A remote file of which some ranges were fetched; others are fetched when they are read."""

    def __init__(self, url: str, storage: Storage, stamp: Stamp, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch the ranges, those that lie close together in one go.

        Raises:
            StorageError: they cannot be read, or the file has changed.
        """
        self._url, self._storage, self._stamp = url, storage, stamp
        self._at = 0
        self._parts: list[tuple[int, bytes | memoryview]] = []
        for start, stop in _merged(ranges):
            self._parts.append((start, self._fetch(start, stop)))

    def _fetch(self, start: int, stop: int) -> bytes | memoryview:
        tag = self._stamp.tag
        return self._storage.read(self._url, start, stop, tag=tag if isinstance(tag, str) else None)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        """Its bytes."""
        return self._stamp.size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._stamp.size}[whence]
        return self._at

    def read(self, many: int = -1) -> Any:
        stop = self._stamp.size if many is None or many < 0 else min(self._at + many, self._stamp.size)
        start, self._at = self._at, max(self._at, stop)
        if stop <= start:
            return b""
        for first, data in self._parts:
            if first <= start and stop <= first + len(data):
                return memoryview(data)[start - first : stop - first]
        return self._fetch(start, stop)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start - out[-1][1] <= _GAP:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out
