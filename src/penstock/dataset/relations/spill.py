"""A temporary file for samples beyond the memory limit, and a reader of samples in pieces."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.errors import DataError, StorageError
from penstock.formats.rows.reader import ReadResult, distinct, merge_results
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64
from penstock.plan import Columns, Fields, Reader, Traits, estimate_nbytes, pick_rows

_DICT_BYTES = 300  # of a dict and the objects in it, without their data
_OPEN_PIECES = 4  # cached by a reader: most callers read from front to back


class SpillFile(Sequence[Sequence[Any]]):
    """Pieces of samples in an unnamed temporary file, which is removed with this object or when the process is killed.

    Safe to read from several threads. Columns are stored in Arrow's format, other samples as pickle; only this
    process can write to the file, so unpickling is safe.
    """

    def __init__(self) -> None:
        try:
            with tempfile.TemporaryFile(prefix="penstock-") as file:
                self._file = os.dup(file.fileno())
        except OSError as exc:
            raise _failed(exc) from exc
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._ranges: list[tuple[int, int]] = []
        self.rows: list[int] = []  # the number of samples in each piece
        self.nbytes: list[int] = []  # the estimated size of each piece in memory

    def add(self, items: Sequence[Any]) -> int:
        """Write a piece, and return its number.

        Raises:
            StorageError: The file cannot be written.
        """
        data = pickle.dumps(items, protocol=5)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, memoryview(data)[written:], self._end + written)
        except OSError as exc:
            raise _failed(exc) from exc
        self._ranges.append((self._end, len(data)))
        self._end += len(data)
        self.rows.append(len(items))
        self.nbytes.append(size_of(items))
        return len(self._ranges) - 1

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, which: Any) -> Any:
        begin, size = self._ranges[which]
        parts = []
        while size > 0:
            part = os.pread(self._file, size, begin)
            if not part:
                raise StorageError("the temporary file is shorter than what was written to it", tempfile.gettempdir())
            parts.append(part)
            begin, size = begin + len(part), size - len(part)
        return pickle.loads(parts[0] if len(parts) == 1 else b"".join(parts))

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return (self[number] for number in range(len(self)))


def _failed(exc: OSError) -> StorageError:
    folder = tempfile.gettempdir()
    return StorageError(
        f"cannot spill samples to a temporary file: {exc.strerror or exc}; set TMPDIR to another folder", folder
    )


def size_of(items: Sequence[Any]) -> int:
    """Estimate the size of samples in memory; for a list, from some of the samples."""
    if isinstance(items, ArrowColumns):
        return int(items.nbytes) + 8 * len(items)
    if not len(items):
        return 0
    sampled = [items[i] for i in range(0, len(items), max(1, len(items) // 8))]
    item_bytes = sum(estimate_nbytes(item) + _DICT_BYTES for item in sampled) / len(sampled)
    return int(item_bytes * len(items))


class PiecesReader(Reader):
    """Reads pieces of samples, in memory or in a spill file, as one shard; safe to use from several threads."""

    def __init__(self, pieces: Sequence[Sequence[Any]], features: dict[str, Any] | None = None) -> None:
        self.names = ["items"]
        self._features = features or {}
        self._pieces = pieces
        file = pieces if isinstance(pieces, SpillFile) else None
        rows = [len(piece) for piece in pieces] if file is None else file.rows
        sizes = [size_of(piece) for piece in pieces] if file is None else file.nbytes
        self._spilled = file is not None
        self._edges = np.cumsum([0, *rows], dtype=np.int64)
        self._sample_bytes = max(1, sum(sizes) // max(1, int(self._edges[-1])))
        self._cache: OrderedDict[int, Sequence[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PiecesReader, (list(self._pieces), self._features)

    @property
    def traits(self) -> Traits:
        return Traits(in_memory=True, columnar=True, find_features=lambda: self._features)

    def counts(self, scan: bool) -> I64 | None:
        return self._edges[-1:].copy()

    def count(self, shard: int) -> int:
        return int(self._edges[-1])

    def sizes(self) -> list[int]:
        return [self._sample_bytes * int(self._edges[-1])]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedPieces:
        return LocatedPieces(self, index, fields, np.full(len(index), self._sample_bytes, np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """Return the key of a sample, or its number if it has none."""
        number = int(np.searchsorted(self._edges, index, "right")) - 1
        item = self._piece(number)[index - int(self._edges[number])]
        return str(item["__key__"]) if isinstance(item, dict) and "__key__" in item else str(index)

    def url(self, shard: int) -> str:
        return "items"

    def read(self, index: I64, fields: Fields) -> Sequence[Any]:
        """Return samples by number; dicts are copies."""
        slot = np.searchsorted(self._edges, index, "right") - 1
        parts: list[tuple[I64, ReadResult]] = []
        for number in distinct(slot):
            positions = np.flatnonzero(slot == number)
            found = pick_rows(self._piece(number), index[positions] - self._edges[number])
            parts.append((positions, (_copied(found, fields), {})))
        return merge_results(parts)[0]

    def _piece(self, number: int) -> Sequence[Any]:
        if not self._spilled:
            return self._pieces[number]
        with self._lock:
            found = self._cache.get(number)
            if found is None:
                found = self._cache[number] = self._pieces[number]
            self._cache.move_to_end(number)
            if len(self._cache) > _OPEN_PIECES:
                self._cache.popitem(last=False)
            return found


def _copied(items: Sequence[Any], fields: Fields) -> Sequence[Any]:
    """Return samples that the caller may modify; columns are reduced to the wanted fields."""
    if isinstance(items, Columns):
        wanted = {name: name for name in items.names if fields.wants(name)}
        return items if len(wanted) == len(items.names) else items.renamed(wanted)
    return [item.copy() if isinstance(item, dict) else item for item in items]


class LocatedPieces:
    """Located samples of a ``PiecesReader``, not read yet."""

    __slots__ = ("_fields", "_index", "_reader", "nbytes")

    def __init__(self, reader: PiecesReader, index: I64, fields: Fields, nbytes: I64) -> None:
        self._reader, self._index, self._fields, self.nbytes = reader, index, fields, nbytes

    def take(self, sel: Any) -> LocatedPieces:
        return LocatedPieces(self._reader, self._index[sel], self._fields, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        return self._reader.read(self._index, self._fields), {}
