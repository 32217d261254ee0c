"""One file of Arrow's own format, a file or a stream, and its record batches.

A message is a length, a small table of what it holds, and a body. A file lists its messages at its end; in a stream
each is found behind the one before. Of a local file the bodies are mapped, not read; of a remote one what stands before
the bodies is read to know the rows, and a body when its rows are due.
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
    Fetched,
    Stamp,
    Told,
    completed,
    kind_of,
    local_stamp,
    remote_stamp,
    whole,
    words,
)
from penstock.order import I64
from penstock.plan.expressions import Condition, Extent
from penstock.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"
_BEGIN = 8  # where the first message of a file begins; that of a stream is at 0
_MARK = 0xFFFFFFFF  # stands before the length of a message, but for very old ones
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # what a message holds
_LOOK = 1 << 16  # what is fetched of a remote file to see a message


@dataclass(frozen=True, slots=True)
class _Message:
    """A message: what it holds, where it lies, and of a record batch its rows."""

    holds: int
    start: int
    stop: int
    rows: int = 0
    compressed: bool = False


@dataclass(frozen=True, eq=False)
class ArrowFile:
    """A file whose messages are known; holds no handle, so that any thread may read from it.

    Attributes:
        url: What it is called in errors.
        path: Where it is.
        storage: Who reads it; ``None``: it is a local file.
        stamp: What it was when the messages were looked for.
        own: Its columns.
        head: The bytes of its schema; of a file, where its end begins.
        messages: Its dictionaries and record batches, in order.
        extra: Columns that the name of the file tells, with their values.
    """

    url: str
    path: str
    storage: Storage | None
    stamp: Stamp
    own: pa.Schema
    head: bytes | int
    messages: tuple[_Message, ...]
    extra: Told = ()
    checked: set[tuple[str, ...]] = field(default_factory=set)

    @cached_property
    def schema(self) -> pa.Schema:
        """Its columns, and those that its name tells."""
        import pyarrow as pa

        found = self.own
        for name, value in self.extra:
            if name not in found.names:
                found = found.append(pa.field(name, kind_of(value)))
        return found

    @cached_property
    def _batches(self) -> list[int]:
        return [number for number, message in enumerate(self.messages) if message.holds == _BATCH]

    @cached_property
    def edges(self) -> I64:
        """The number of the first row of every record batch, and of all rows."""
        return np.cumsum([0, *(self.messages[number].rows for number in self._batches)], dtype=np.int64)

    @property
    def groups(self) -> int:
        """How many record batches it has."""
        return len(self._batches)

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return int(self.edges[-1])

    def nbytes(self, group: int, names: Sequence[str]) -> int:
        """About how many bytes some columns of a record batch have: their share by number."""
        message = self.messages[self._batches[group]]
        return max(1, (message.stop - message.start) * len(names) // max(1, len(self.own)))

    def may_hold(self, group: int, where: Condition) -> bool:
        """Whether a row of a record batch may fulfil a condition, as far as the file's name tells."""
        rows = self.messages[self._batches[group]].rows
        told = {
            name: Extent(value, value, rows if value is None else 0, rows)
            for name, value in self.extra
            if name not in self.own.names
        }
        try:
            return where.possible({name: told.get(name, Extent()) for name in where.fields()})
        except TypeError:
            return True

    def decode(self, group: int, names: Sequence[str]) -> list[pa.RecordBatch]:
        """The rows of a record batch; of a local file that is not compressed, where they lie.

        Raises:
            DataError: the record batch is damaged.
            StorageError: the file is gone or changed.
        """
        import pyarrow as pa

        number = self._batches[group]
        own = [name for name in names if name in self.own.names]
        try:
            batch = self._batch(number, own)
            batch.validate(full=True)  # else what is damaged would be read beyond its end
            table = pa.Table.from_batches([batch])
            return whole(completed(table, names, self.schema, self.extra, batch.num_rows))
        except StorageError:
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as exc:
            raise DataError(f"record batch {group} cannot be decoded: {words(exc)}", self.url) from exc

    def _batch(self, number: int, names: Sequence[str]) -> pa.RecordBatch:
        import pyarrow as pa

        message = self.messages[number]
        dictionaries = [one for one in self.messages if one.holds == _DICTIONARY]
        places = sorted(self.own.get_field_index(name) for name in names)
        wanted = pa.ipc.IpcReadOptions(included_fields=places) if names and message.compressed else None
        source = self._source()
        if isinstance(self.head, int):
            spans = [(one.start, one.stop) for one in (*dictionaries, message)]
            with pa.ipc.open_file(source.part([*spans, (self.head, self.stamp.size)]), options=wanted) as file:
                return file.get_batch(self._batches.index(number)).select(names)
        before = [one for one in dictionaries if one.start < message.start]
        if not (before or message.compressed):
            found = pa.ipc.read_message(source.read(message.start, message.stop))
            return pa.ipc.read_record_batch(found, self.own).select(names)
        parts = [source.read(one.start, one.stop) for one in (*before, message)]
        joined = pa.py_buffer(b"".join([self.head, *(memoryview(part) for part in parts)]))
        with pa.ipc.open_stream(joined, options=wanted) as reader:
            return reader.read_next_batch().select(names)

    def _source(self) -> _Local | _Remote:
        if self.storage is not None:
            return _Remote(self.path, self.storage, self.stamp)
        if local_stamp(self.path, self.url) != self.stamp:
            raise StorageError("the file was changed while it was being read", self.url)
        return _Local(self.path, self.stamp)


def open_ipc(url: str, path: str, storage: Storage | None, extra: Told) -> ArrowFile:
    """Find the messages of a file.

    Raises:
        DataError: it is no file of Arrow's, or not whole.
        StorageError: it is not there.
    """
    import pyarrow as pa

    stamp = local_stamp(path, url) if storage is None else remote_stamp(path, storage)
    try:
        source = _Local(path, stamp) if storage is None else _Remote(path, storage, stamp)
        begin = bytes(memoryview(source.read(0, min(stamp.size, _BEGIN))))
        if begin[:6] == _MAGIC:
            start, messages = _listed(source, stamp.size)
            with pa.ipc.open_file(source.part([(start, stamp.size)])) as file:
                schema = _named(file.schema)
            return ArrowFile(url, path, storage, stamp, schema, start, tuple(messages), extra)
        if begin[:4] == b"FEA1":
            raise ValueError("it is Feather of the first version, which pyarrow.feather can read and write anew")
        messages = _streamed(source, stamp.size)
        if not messages or messages[0].holds != _SCHEMA:
            raise ValueError("it does not begin with its columns")
        head = bytes(memoryview(source.read(messages[0].start, messages[0].stop)))
        schema = _named(pa.ipc.read_schema(pa.py_buffer(head)))
    except (DataError, StorageError):
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError, struct.error) as exc:
        raise DataError(f"this is no whole Arrow file: {words(exc)}", url) from exc
    return ArrowFile(url, path, storage, stamp, schema, head, tuple(messages[1:]), extra)


def _named(schema: pa.Schema) -> pa.Schema:
    """The schema, if its columns have names: one that is damaged fails here, not where it is first used."""
    if not all(isinstance(name, str) for name in schema.names):
        raise ValueError("a column has no name")
    return schema


def _listed(source: _Local | _Remote, size: int) -> tuple[int, list[_Message]]:
    """Where the end of a file begins, and the messages that it lists.

    Raises:
        ValueError: it has no such end, or what should be a message is none.
    """
    tail = bytes(memoryview(source.read(max(0, size - 10), size)))
    start = size - 10 - int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or start < _BEGIN:
        raise ValueError("it does not end like one")
    end = memoryview(source.read(start, size))
    (root,) = struct.unpack_from("<I", end, 0)
    spans = [(_DICTIONARY, *one) for one in _blocks(end, _slot(end, root, 2))]
    spans += [(_BATCH, *one) for one in _blocks(end, _slot(end, root, 3))]
    if any(
        first < _BEGIN or before < 8 or body < 0 or first + before + body > start for _, first, before, body in spans
    ):
        raise ValueError("it lists what lies outside of it")
    if isinstance(source, _Remote):
        with ThreadPoolExecutor(CONNECTIONS, "penstock footers") as pool:
            heads = list(pool.map(lambda one: source.read(one[1], one[1] + one[2]), spans))
    else:
        heads = [source.read(first, first + before) for _, first, before, _ in spans]
    out = []
    for (holds, first, before, body), head in zip(spans, heads, strict=True):
        view = memoryview(head)
        told, _ = _told(view[8 if int.from_bytes(view[:4], "little") == _MARK else 4 :], first)
        if told.holds != holds:
            raise ValueError(f"what is at byte {first} is not what it is listed as")
        out.append(_Message(holds, first, first + before + body, told.rows, told.compressed))
    return start, out


def _blocks(end: memoryview, place: int) -> list[tuple[int, int, int]]:
    """Where listed messages begin, how long they are before their bodies, and their bodies."""
    if not place:
        return []
    place += struct.unpack_from("<I", end, place)[0]
    (many,) = struct.unpack_from("<I", end, place)
    if place + 4 + 24 * many > len(end):
        raise ValueError("its end is damaged")
    return [struct.unpack_from("<qi4xq", end, place + 4 + 24 * number) for number in range(many)]


def _streamed(source: _Local | _Remote, size: int) -> list[_Message]:
    """All messages of a stream up to the mark of the end.

    Raises:
        ValueError: there is no such mark, or what should be a message is none.
    """
    at = 0
    out: list[_Message] = []
    while at + 4 <= size:
        look = source.look(at)
        (length,) = struct.unpack_from("<I", look, 0)
        skip = 4
        if length == _MARK:
            (length,) = struct.unpack_from("<I", look, 4)
            skip = 8
        if not length:
            return out
        if at + skip + length > size:
            raise ValueError(f"it ends within a message that begins at byte {at}")
        if skip + length > len(look):
            look = memoryview(source.read(at, at + skip + length))
        told, body = _told(look[skip : skip + length], at)
        stop = at + skip + length + body
        if body < 0 or stop > size:
            raise ValueError(f"it ends within a message that begins at byte {at}")
        out.append(_Message(told.holds, at, stop, told.rows, told.compressed))
        at = stop
    raise ValueError("it ends without the mark of its end: it was not written whole")


def _told(metadata: memoryview, at: int) -> tuple[_Message, int]:
    """What a message says of itself, and the bytes of its body; its tables are FlatBuffers."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        (holds,) = struct.unpack_from("<B", metadata, _slot(metadata, root, 1))
        place = _slot(metadata, root, 3)
        body = struct.unpack_from("<q", metadata, place)[0] if place else 0
        if holds != _BATCH:
            return _Message(holds, at, at), body
        place = _slot(metadata, root, 2)
        batch = place + struct.unpack_from("<I", metadata, place)[0]
        place = _slot(metadata, batch, 0)
        rows = struct.unpack_from("<q", metadata, place)[0] if place else 0
        compressed = bool(_slot(metadata, batch, 3))
    except struct.error as exc:
        raise ValueError(f"what is at byte {at} is no message") from exc
    if rows < 0:
        raise ValueError(f"what is at byte {at} is no message")
    return _Message(holds, at, at, rows, compressed), body


def _slot(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table lies; 0 where it has none."""
    (back,) = struct.unpack_from("<i", data, table)
    index = table - back
    if index < 0:
        raise struct.error("no table")
    (size,) = struct.unpack_from("<H", data, index)
    if 6 + 2 * number > size:
        return 0
    (offset,) = struct.unpack_from("<H", data, index + 4 + 2 * number)
    return table + offset if offset else 0


class _Local:
    """A file that is mapped while something of it is used."""

    def __init__(self, path: str, stamp: Stamp) -> None:
        import pyarrow as pa

        self._data: Any = pa.py_buffer(b"")
        if stamp.size:
            with pa.memory_map(path) as file:
                self._data = file.read_buffer()

    def part(self, spans: Sequence[tuple[int, int]]) -> Any:
        """What Arrow reads the whole file from."""
        return self._data

    def read(self, start: int, stop: int) -> Any:
        """Some bytes, not copied."""
        return self._data.slice(start, max(0, stop - start))

    def look(self, at: int) -> memoryview:
        """Some bytes from a place on."""
        return memoryview(self._data.slice(at, min(_LOOK, self._data.size - at)))


class _Remote:
    """A file behind a storage; what was looked at last is kept."""

    def __init__(self, path: str, storage: Storage, stamp: Stamp) -> None:
        self._path, self._storage, self._stamp = path, storage, stamp
        self._at, self._seen = 0, memoryview(b"")

    def part(self, spans: Sequence[tuple[int, int]]) -> Any:
        """What Arrow reads the whole file from, with some of it fetched."""
        return Fetched(self._path, self._storage, self._stamp, spans)

    def read(self, start: int, stop: int) -> Any:
        """Some bytes."""
        import pyarrow as pa

        tag = self._stamp.tag
        return pa.py_buffer(self._storage.read(self._path, start, stop, tag=tag if isinstance(tag, str) else None))

    def look(self, at: int) -> memoryview:
        """Some bytes from a place on: at least those of a small message, where there are so many."""
        inside = self._seen[at - self._at :] if 0 <= at - self._at < len(self._seen) else self._seen[:0]
        if len(inside) < 8 or len(inside) < 8 + int.from_bytes(inside[4:8], "little"):
            self._at = at
            self._seen = inside = memoryview(self.read(at, min(at + _LOOK, self._stamp.size)))
        return inside
