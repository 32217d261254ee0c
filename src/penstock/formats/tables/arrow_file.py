"""One file in Arrow's IPC format, in its file or stream variant, and its record batches.

A message is a length, metadata as a FlatBuffers table, and a body. The file format lists its messages in a footer; the
stream format is walked from message to message. The bodies of a local file are mapped, not read. Of a remote file, the
metadata of all messages is read to count the rows, and a body when its rows are due.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blobs.prefetch import CONNECTIONS
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
from penstock.order import I64
from penstock.plan.expressions import Condition, Extent
from penstock.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"
_FILE_START = 8  # offset of the first message in the file format; a stream's first message is at 0
_CONTINUATION = 0xFFFFFFFF  # stands before the length of a message, except before Arrow 0.15
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # the kinds of messages, as FlatBuffers numbers them
_PEEK_BYTES = 1 << 16  # read of a remote stream at a time to find the next messages


@dataclass(frozen=True, slots=True)
class _Message:
    """A message: its kind, its range of bytes, and for a record batch the number of rows."""

    kind: int
    start: int
    stop: int
    rows: int = 0
    compressed: bool = False


@dataclass(frozen=True, eq=False)
class ArrowFile:
    """A file whose messages are known; holds no file handle, so any thread may read from it.

    Attributes:
        url: The file's name in errors.
        path: The file's path or URL.
        storage: The storage that reads it; ``None`` for a local file.
        stamp: The file's stamp when the messages were listed.
        file_schema: The columns that the file stores.
        head: The schema message of a stream, or the offset of the footer of a file.
        messages: The dictionaries and record batches, in the order of the file.
        partition: The columns that the file's folders name, with their values.
        checked: The sets of columns that were found to match those of the dataset's first file.
    """

    url: str
    path: str
    storage: Storage | None
    stamp: TableStamp
    file_schema: pa.Schema
    head: bytes | int
    messages: tuple[_Message, ...]
    partition: Partition = ()
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
    def _batches(self) -> list[int]:
        """The numbers of the messages that are record batches."""
        return [number for number, message in enumerate(self.messages) if message.kind == _BATCH]

    @cached_property
    def row_offsets(self) -> I64:
        """The number of the first row of each record batch, and at the end the number of rows."""
        return np.cumsum([0, *(self.messages[number].rows for number in self._batches)], dtype=np.int64)

    @property
    def groups(self) -> int:
        """The number of record batches."""
        return len(self._batches)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.row_offsets[-1])

    def nbytes(self, group: int, names: Sequence[str]) -> int:
        """Estimate the size of some columns of a record batch: all columns are taken to be equally large."""
        message = self.messages[self._batches[group]]
        return max(1, (message.stop - message.start) * len(names) // max(1, len(self.file_schema)))

    def may_match(self, group: int, where: Condition) -> bool:
        """Return whether the partition columns leave it possible that a row of a record batch meets the condition."""
        rows = self.messages[self._batches[group]].rows
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
            StorageError: The file is gone, or has changed since its messages were listed.
        """
        import pyarrow as pa

        number = self._batches[group]
        stored = [name for name in names if name in self.file_schema.names]
        try:
            batch = self._read_batch(number, stored)
            batch.validate(full=True)  # Arrow would follow damaged offsets beyond the end of the buffers
            table = pa.Table.from_batches([batch])
            return plain_batches(with_partition(table, names, self.schema, self.partition, batch.num_rows))
        except StorageError:
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as exc:
            raise DataError(f"record batch {group} cannot be decoded: {first_line(exc)}", self.url) from exc

    def _read_batch(self, number: int, names: Sequence[str]) -> pa.RecordBatch:
        import pyarrow as pa

        message = self.messages[number]
        dictionaries = [other for other in self.messages if other.kind == _DICTIONARY]
        columns = sorted(self.file_schema.get_field_index(name) for name in names)
        options = pa.ipc.IpcReadOptions(included_fields=columns) if names and message.compressed else None
        source = self._source()
        if isinstance(self.head, int):
            ranges = [(needed.start, needed.stop) for needed in (*dictionaries, message)]
            with pa.ipc.open_file(source.file([*ranges, (self.head, self.stamp.size)]), options=options) as file:
                return file.get_batch(self._batches.index(number)).select(names)
        earlier = [other for other in dictionaries if other.start < message.start]
        if not (earlier or message.compressed):
            encoded = pa.ipc.read_message(source.read(message.start, message.stop))
            return pa.ipc.read_record_batch(encoded, self.file_schema).select(names)
        bodies = [source.read(needed.start, needed.stop) for needed in (*earlier, message)]
        stream = pa.py_buffer(b"".join([self.head, *(memoryview(body) for body in bodies)]))
        with pa.ipc.open_stream(stream, options=options) as reader:
            return reader.read_next_batch().select(names)

    def _source(self) -> _LocalBytes | _RemoteBytes:
        if self.storage is not None:
            return _RemoteBytes(self.path, self.storage, self.stamp)
        if local_stamp(self.path, self.url) != self.stamp:
            raise StorageError("the file was changed while it was being read", self.url)
        return _LocalBytes(self.path, self.stamp)


def open_arrow(url: str, path: str, storage: Storage | None, partition: Partition) -> ArrowFile:
    """List the messages of a file.

    Raises:
        DataError: The file is not an Arrow file, is cut off, or is damaged.
        StorageError: The file does not exist or cannot be read.
    """
    import pyarrow as pa

    stamp = local_stamp(path, url) if storage is None else remote_stamp(path, storage)
    try:
        source = _LocalBytes(path, stamp) if storage is None else _RemoteBytes(path, storage, stamp)
        start = bytes(memoryview(source.read(0, min(stamp.size, _FILE_START))))
        if start[:6] == _MAGIC:
            footer, messages = _list_file(source, stamp.size)
            with pa.ipc.open_file(source.file([(footer, stamp.size)])) as file:
                schema = _check_names(file.schema)
            return ArrowFile(url, path, storage, stamp, schema, footer, tuple(messages), partition)
        if start[:4] == b"FEA1":
            raise ValueError("it is a Feather file of version 1; rewrite it with pyarrow.feather")
        messages = _list_stream(source, stamp.size)
        if not messages or messages[0].kind != _SCHEMA:
            raise ValueError("it does not begin with a schema")
        head = bytes(memoryview(source.read(messages[0].start, messages[0].stop)))
        schema = _check_names(pa.ipc.read_schema(pa.py_buffer(head)))
    except (DataError, StorageError):
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError, struct.error) as exc:
        raise DataError(f"not a complete Arrow file: {first_line(exc)}", url) from exc
    return ArrowFile(url, path, storage, stamp, schema, head, tuple(messages[1:]), partition)


def _check_names(schema: pa.Schema) -> pa.Schema:
    """Return the schema if its columns have names, so that a damaged one fails when the file is opened."""
    if not all(isinstance(name, str) for name in schema.names):
        raise ValueError("a column has no name")
    return schema


def _list_file(source: _LocalBytes | _RemoteBytes, size: int) -> tuple[int, list[_Message]]:
    """Return the offset of the footer of a file, and the messages that the footer lists.

    Raises:
        ValueError: The footer is missing or damaged, or lists something that is not a message.
    """
    trailer = bytes(memoryview(source.read(max(0, size - 10), size)))
    start = size - 10 - int.from_bytes(trailer[:4], "little")
    if trailer[4:] != _MAGIC or start < _FILE_START:
        raise ValueError("it does not end with an Arrow footer")
    footer = memoryview(source.read(start, size))
    (root,) = struct.unpack_from("<I", footer, 0)
    blocks = [(_DICTIONARY, *block) for block in _footer_blocks(footer, _field_position(footer, root, 2))]
    blocks += [(_BATCH, *block) for block in _footer_blocks(footer, _field_position(footer, root, 3))]
    if any(
        offset < _FILE_START or head_bytes < 8 or body_bytes < 0 or offset + head_bytes + body_bytes > start
        for _, offset, head_bytes, body_bytes in blocks
    ):
        raise ValueError("its footer lists a message outside the file")
    if isinstance(source, _RemoteBytes):
        with ThreadPoolExecutor(CONNECTIONS, "penstock footers") as pool:
            heads = list(pool.map(lambda block: source.read(block[1], block[1] + block[2]), blocks))
    else:
        heads = [source.read(offset, offset + head_bytes) for _, offset, head_bytes, _ in blocks]
    messages = []
    for (kind, offset, head_bytes, body_bytes), head in zip(blocks, heads, strict=True):
        view = memoryview(head)
        message, _ = _parse(view[8 if int.from_bytes(view[:4], "little") == _CONTINUATION else 4 :], offset)
        if message.kind != kind:
            raise ValueError(f"the message at byte {offset} is not of the type that the footer gives")
        stop = offset + head_bytes + body_bytes
        messages.append(_Message(kind, offset, stop, message.rows, message.compressed))
    return start, messages


def _footer_blocks(footer: memoryview, position: int) -> list[tuple[int, int, int]]:
    """Return the offset, the length of the metadata and the length of the body of each message in a list."""
    if not position:
        return []
    position += struct.unpack_from("<I", footer, position)[0]
    (count,) = struct.unpack_from("<I", footer, position)
    if position + 4 + 24 * count > len(footer):
        raise ValueError("its footer is damaged")
    return [struct.unpack_from("<qi4xq", footer, position + 4 + 24 * number) for number in range(count)]


def _list_stream(source: _LocalBytes | _RemoteBytes, size: int) -> list[_Message]:
    """Return all messages of a stream up to its end-of-stream marker.

    Raises:
        ValueError: The marker is missing, or something in the stream is not a message.
    """
    offset = 0
    messages: list[_Message] = []
    while offset + 4 <= size:
        head = source.peek(offset)
        (length,) = struct.unpack_from("<I", head, 0)
        prefix = 4
        if length == _CONTINUATION:
            (length,) = struct.unpack_from("<I", head, 4)
            prefix = 8
        if not length:
            return messages
        if offset + prefix + length > size:
            raise ValueError(f"it ends within the message that begins at byte {offset}")
        if prefix + length > len(head):
            head = memoryview(source.read(offset, offset + prefix + length))
        message, body_bytes = _parse(head[prefix : prefix + length], offset)
        stop = offset + prefix + length + body_bytes
        if body_bytes < 0 or stop > size:
            raise ValueError(f"it ends within the message that begins at byte {offset}")
        messages.append(_Message(message.kind, offset, stop, message.rows, message.compressed))
        offset = stop
    raise ValueError("it has no end-of-stream marker, so its writer did not finish")


def _parse(metadata: memoryview, offset: int) -> tuple[_Message, int]:
    """Return the message that FlatBuffers metadata describes, without its range, and the length of its body."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        (kind,) = struct.unpack_from("<B", metadata, _field_position(metadata, root, 1))
        position = _field_position(metadata, root, 3)
        body_bytes = struct.unpack_from("<q", metadata, position)[0] if position else 0
        if kind != _BATCH:
            return _Message(kind, offset, offset), body_bytes
        position = _field_position(metadata, root, 2)
        batch = position + struct.unpack_from("<I", metadata, position)[0]
        position = _field_position(metadata, batch, 0)
        rows = struct.unpack_from("<q", metadata, position)[0] if position else 0
        compressed = bool(_field_position(metadata, batch, 3))
    except struct.error as exc:
        raise ValueError(f"there is no valid message at byte {offset}") from exc
    if rows < 0:
        raise ValueError(f"there is no valid message at byte {offset}")
    return _Message(kind, offset, offset, rows, compressed), body_bytes


def _field_position(data: memoryview, table: int, number: int) -> int:
    """Return the position of a field of a FlatBuffers table; 0 if the table does not have it."""
    (distance,) = struct.unpack_from("<i", data, table)
    vtable = table - distance
    if vtable < 0:
        raise struct.error("not a table")
    (size,) = struct.unpack_from("<H", data, vtable)
    if 6 + 2 * number > size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number)
    return table + offset if offset else 0


class _LocalBytes:
    """The bytes of a local file, mapped into memory while a part of them is in use."""

    def __init__(self, path: str, stamp: TableStamp) -> None:
        import pyarrow as pa

        self._data: Any = pa.py_buffer(b"")
        if stamp.size:
            with pa.memory_map(path) as file:
                self._data = file.read_buffer()

    def file(self, ranges: Sequence[tuple[int, int]]) -> Any:
        """Return a source from which Arrow reads the file; ``ranges`` are those that it will need."""
        return self._data

    def read(self, start: int, stop: int) -> Any:
        """Return a range of bytes as an Arrow buffer; not copied."""
        return self._data.slice(start, max(0, stop - start))

    def peek(self, offset: int) -> memoryview:
        """Return some bytes from an offset on: at least those of the metadata of a small message."""
        return memoryview(self._data.slice(offset, min(_PEEK_BYTES, self._data.size - offset)))


class _RemoteBytes:
    """The bytes of a remote file, with the same methods; keeps what ``peek`` read last."""

    def __init__(self, path: str, storage: Storage, stamp: TableStamp) -> None:
        self._path, self._storage, self._stamp = path, storage, stamp
        self._peeked_from, self._peeked = 0, memoryview(b"")

    def file(self, ranges: Sequence[tuple[int, int]]) -> Any:
        return RemoteFile(self._path, self._storage, self._stamp, ranges)

    def read(self, start: int, stop: int) -> Any:
        import pyarrow as pa

        tag = self._stamp.tag
        return pa.py_buffer(self._storage.read(self._path, start, stop, tag=tag if isinstance(tag, str) else None))

    def peek(self, offset: int) -> memoryview:
        ahead = offset - self._peeked_from
        rest = self._peeked[ahead:] if 0 <= ahead < len(self._peeked) else self._peeked[:0]
        if len(rest) < 8 or len(rest) < 8 + int.from_bytes(rest[4:8], "little"):
            self._peeked_from = offset
            self._peeked = rest = memoryview(self.read(offset, min(offset + _PEEK_BYTES, self._stamp.size)))
        return rest
