"""Samples that do not fit into memory, for a while in a temporary file; and a reader over pieces of samples."""

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
from penstock.formats.rows.reader import Answer, distinct, in_order
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64
from penstock.plan import Columns, Fields, pick_rows, weight

_OPEN_PIECES = 4  # pieces of a file that are kept for the next who asks: readers go from front to back


class SpillFile(Sequence[Sequence[Any]]):
    """Pieces of samples in a file without a name: it is gone when this is, whatever the process ends of.

    Safe to read from several threads. Columns are written as Arrow has them, other samples by pickle, which reads
    nothing here but what this process wrote.
    """

    def __init__(self) -> None:
        try:
            with tempfile.TemporaryFile(prefix="penstock-") as file:
                self._file = os.dup(file.fileno())
        except OSError as exc:
            raise _failed(exc) from exc
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._where: list[tuple[int, int]] = []
        self.rows: list[int] = []  # samples in each piece
        self.nbytes: list[int] = []  # about what each holds in memory

    def add(self, items: Sequence[Any]) -> int:
        """Write a piece; its number.

        Raises:
            StorageError: there is no room.
        """
        data = pickle.dumps(items, protocol=5)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, memoryview(data)[written:], self._end + written)
        except OSError as exc:
            raise _failed(exc) from exc
        self._where.append((self._end, len(data)))
        self._end += len(data)
        self.rows.append(len(items))
        self.nbytes.append(size_of(items))
        return len(self._where) - 1

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, which: Any) -> Any:
        begin, size = self._where[which]
        parts = []
        while size > 0:
            part = os.pread(self._file, size, begin)
            if not part:
                raise StorageError("a temporary file was cut off", tempfile.gettempdir())
            parts.append(part)
            begin, size = begin + len(part), size - len(part)
        return pickle.loads(parts[0] if len(parts) == 1 else b"".join(parts))

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return (self[number] for number in range(len(self)))


def _failed(exc: OSError) -> StorageError:
    folder = tempfile.gettempdir()
    return StorageError(
        f"cannot keep what does not fit into memory: {exc.strerror or exc}; TMPDIR chooses a folder", folder
    )


def size_of(items: Sequence[Any]) -> int:
    """About how many bytes samples hold; lists are judged by a few of them."""
    if isinstance(items, ArrowColumns):
        return int(items.nbytes) + 8 * len(items)
    if not len(items):
        return 0
    some = [items[i] for i in range(0, len(items), max(1, len(items) // 8))]
    each = sum(weight(one) + 300 for one in some) / len(some)  # 300: a dict and the objects in it
    return int(each * len(items))


class PiecesReader:
    """One shard: pieces of samples in a row, in memory or in a spool; safe to use from several threads."""

    at_hand = True  # of this process, and nowhere else

    def __init__(self, pieces: Sequence[Sequence[Any]], features: dict[str, Any] | None = None) -> None:
        self.names = ["items"]
        self.features = features or {}  # what is known of the fields
        self._pieces = pieces
        spool = pieces if isinstance(pieces, SpillFile) else None
        rows = [len(piece) for piece in pieces] if spool is None else spool.rows
        sizes = [size_of(piece) for piece in pieces] if spool is None else spool.nbytes
        self._spooled = spool is not None
        self._edges = np.cumsum([0, *rows], dtype=np.int64)
        self._each = max(1, sum(sizes) // max(1, int(self._edges[-1])))
        self._open: OrderedDict[int, Sequence[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return PiecesReader, (list(self._pieces), self.features)

    def counts(self, scan: bool) -> I64 | None:
        """The number of samples."""
        return self._edges[-1:].copy()

    def count(self, shard: int) -> int:
        """The number of samples."""
        return int(self._edges[-1])

    def sizes(self) -> list[int]:
        """About how many bytes there are."""
        return [self._each * int(self._edges[-1])]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedPieces:
        """Remember which."""
        return LocatedPieces(self, index, fields, np.full(len(index), self._each, np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """The sample's number, unless it carries a key."""
        number = int(np.searchsorted(self._edges, index, "right")) - 1
        item = self._piece(number)[index - int(self._edges[number])]
        return str(item["__key__"]) if isinstance(item, dict) and "__key__" in item else str(index)

    def url(self, shard: int) -> str:
        """They lie nowhere."""
        return "items"

    def read(self, index: I64, fields: Fields) -> Sequence[Any]:
        """Samples by number; dicts as copies."""
        slot = np.searchsorted(self._edges, index, "right") - 1
        parts: list[tuple[I64, Answer]] = []
        for number in distinct(slot):
            places = np.flatnonzero(slot == number)
            found = pick_rows(self._piece(number), index[places] - self._edges[number])
            parts.append((places, (_own(found, fields), {})))
        return in_order(parts)[0]

    def _piece(self, number: int) -> Sequence[Any]:
        if not self._spooled:
            return self._pieces[number]
        with self._lock:
            found = self._open.get(number)
            if found is None:
                found = self._open[number] = self._pieces[number]
            self._open.move_to_end(number)
            if len(self._open) > _OPEN_PIECES:
                self._open.popitem(last=False)
            return found


def _own(items: Sequence[Any], fields: Fields) -> Sequence[Any]:
    """Samples that the caller may change; columns without those that nobody wants."""
    if isinstance(items, Columns):
        wanted = {name: name for name in items.names if fields.wants(name)}
        return items if len(wanted) == len(items.names) else items.renamed(wanted)
    return [item.copy() if isinstance(item, dict) else item for item in items]


class LocatedPieces:
    """Samples by number."""

    __slots__ = ("_fields", "_index", "_reader", "nbytes")

    def __init__(self, reader: PiecesReader, index: I64, fields: Fields, nbytes: I64) -> None:
        self._reader, self._index, self._fields, self.nbytes = reader, index, fields, nbytes

    def take(self, sel: Any) -> LocatedPieces:
        """Some of them."""
        return LocatedPieces(self._reader, self._index[sel], self._fields, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        """The samples."""
        return self._reader.read(self._index, self._fields), {}
