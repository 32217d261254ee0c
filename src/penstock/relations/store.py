"""Stores of the samples of a relation: in memory, beyond the limit in a temporary file; and a reader of them."""

from __future__ import annotations

import bisect
import mmap
import os
import pickle
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from penstock.errors import DataError, StorageError
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64
from penstock.plan import Columns, Fields, Reader, Traits, join_columns, pick_rows
from penstock.relations.keys import size_of


class SampleStore:
    """Collects samples: in memory up to a third of ``memory``, then in a file without a name.

    The file is removed with the last of its samples, or when the process is killed.
    """

    def __init__(self, memory: int) -> None:
        self._limit = memory // 3
        self._held: list[Sequence[Any]] = []
        self._spilled: list[Sequence[Any]] = []
        self._size = 0
        self._file: _SpillFile | None = None

    def add(self, items: Sequence[Any]) -> None:
        """Add samples after the others.

        Raises:
            StorageError: The file cannot be written.
        """
        if not len(items):
            return
        self._held.append(items)
        self._size += size_of(items)
        if self._size > self._limit:
            self._file = self._file or _SpillFile()
            self._spilled += map(self._file.write, self._held)
            self._held, self._size = [], 0

    @property
    def has_spilled(self) -> bool:
        """Whether samples are in the file."""
        return bool(self._spilled)

    def items(self) -> Sequence[Any]:
        """Return all samples: as columns if they were added as columns of one schema."""
        parts = [*self._spilled, *self._held]
        if len(parts) == 1 or not self._spilled or all(isinstance(part, Columns) for part in parts):
            return join_columns(parts)
        return _Parts(parts)


class _SpillFile:
    """A temporary file without a name."""

    def __init__(self) -> None:
        try:
            with tempfile.TemporaryFile(prefix="penstock-") as file:
                self.number = os.dup(file.fileno())
        except OSError as exc:
            raise _failed(exc) from exc
        weakref.finalize(self, os.close, self.number)
        self._end = 0

    def write(self, items: Sequence[Any]) -> Sequence[Any]:
        """Write samples, and return them as a sequence that reads the file."""
        if not isinstance(items, ArrowColumns):
            rows = [pickle.dumps(item, protocol=5) for item in items]
            offsets = np.cumsum([self._end, *map(len, rows)])
            self._append(b"".join(rows))
            return _Rows(self, offsets)
        import pyarrow as pa

        sink, batch = pa.BufferOutputStream(), items.batch()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        data = sink.getvalue()
        self._end += -self._end % mmap.ALLOCATIONGRANULARITY
        begin = self._end
        self._append(data)
        mapped = mmap.mmap(self.number, data.size, prot=mmap.PROT_READ, offset=begin)
        stored = pa.ipc.open_stream(pa.py_buffer(mapped)).read_next_batch()
        return ArrowColumns([stored], np.arange(stored.num_rows), row_bytes=stored.nbytes / max(1, stored.num_rows))

    def _append(self, data: Any) -> None:
        view = memoryview(data)
        try:
            while len(view):
                written = os.pwrite(self.number, view, self._end)
                self._end, view = self._end + written, view[written:]
        except OSError as exc:
            raise _failed(exc) from exc


def _failed(exc: OSError) -> StorageError:
    problem = f"cannot spill samples to a temporary file: {exc.strerror or exc}; set TMPDIR to another folder"
    return StorageError(problem, tempfile.gettempdir())


class _Rows(Sequence[Any]):
    """Samples in a spill file, pickled one by one; only this process writes to the file, so unpickling is safe."""

    def __init__(self, file: _SpillFile, offsets: I64) -> None:
        self._file, self._offsets = file, offsets

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
        return pickle.loads(os.pread(self._file.number, end - begin, begin))


class _Parts(Sequence[Any]):
    """Several sequences of samples, one after another."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = bisect.bisect_right(self._ends, number)
        return self._parts[part][int(number) - (self._ends[part - 1] if part else 0)]


class LazyRows(Sequence[Any]):
    """Rows that are built when they are read."""

    __slots__ = ()

    @abstractmethod
    def rows(self, index: I64) -> list[dict[str, Any]]:
        """Return new rows, by number."""

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.rows(np.array([number]))[0]


class StoreReader(Reader):
    """Reads samples of a store as one shard; safe to use from several threads."""

    def __init__(self, items: Sequence[Any], order: I64 | None = None, features: dict[str, Any] | None = None) -> None:
        """Wrap samples.

        Args:
            items: The samples.
            order: The numbers of the samples to read, in the order to read them; ``None`` for all of them.
            features: The typed features of the fields.
        """
        self.names = ["items"]
        self._items, self._order, self._features = items, order, features or {}
        self._count = len(items) if order is None else len(order)
        self._sample_bytes = max(1, size_of(items) // max(1, len(items)))

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreReader, (self._items, self._order, self._features)

    @property
    def traits(self) -> Traits:
        return Traits(in_memory=True, columnar=True, find_features=lambda: self._features)

    def counts(self, scan: bool) -> I64 | None:
        return np.array([self._count])

    def sizes(self) -> list[int]:
        return [self._sample_bytes * self._count]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedInStore:
        return LocatedInStore(self, index, fields, np.full(len(index), self._sample_bytes, np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """Return the key of a sample, or its number if it has none."""
        (item,) = self.read(np.array([index]), Fields())
        return str(item["__key__"]) if isinstance(item, dict) and "__key__" in item else str(index)

    def fields(self, shard: int) -> tuple[str, ...]:
        return self._items.names if isinstance(self._items, Columns) else ()

    def url(self, shard: int) -> str:
        return "items"

    def read(self, index: I64, fields: Fields) -> Sequence[Any]:
        """Return samples that the caller may modify, by number; columns are reduced to the wanted fields."""
        index = index if self._order is None else self._order[index]
        if isinstance(self._items, LazyRows):
            return self._items.rows(index)
        found = pick_rows(self._items, index)
        if isinstance(found, Columns):
            wanted = {name: name for name in found.names if fields.wants(name)}
            return found if len(wanted) == len(found.names) else found.renamed(wanted)
        return [item.copy() if isinstance(item, dict) else item for item in found]


class LocatedInStore:
    """Located samples of a ``StoreReader``, not read yet."""

    __slots__ = ("_fields", "_index", "_reader", "nbytes")

    def __init__(self, reader: StoreReader, index: I64, fields: Fields, nbytes: I64) -> None:
        self._reader, self._index, self._fields, self.nbytes = reader, index, fields, nbytes

    def take(self, sel: Any) -> LocatedInStore:
        return LocatedInStore(self._reader, self._index[sel], self._fields, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        return self._reader.read(self._index, self._fields), {}
