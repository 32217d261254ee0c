"""Sort any number of samples: an external merge sort of records that say where the members of each sample are.

Members are read in place from files; those of pipes and compressed archives are spilled to one temporary file first.
The members of a sample may lie apart: its parts are joined by a sort of their own. Records are sorted in memory; if
there are too many, sorted runs are spilled and merged.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import IO, Any

from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.tar.archive import EncodedSamples
from penstock.plan import no_field
from penstock.tarstream.gather import ErrorHandler, raise_error
from penstock.tarstream.raw import RawSample

SORT_TYPES = ("text", "int", "float", "shuffle")
SampleSelector = Callable[[Iterator[RawSample]], Iterator[RawSample]]
_Record = list[Any]  # key, number, value, source, exact, field names, spans: of a sample, or of a part of one
_KEY, _NUMBER, _VALUE, _SOURCE, _EXACT, _FIELDS, _SPANS = range(7)
_RUN_RECORDS = 200_000  # records of one sorted run: about 150 MB
_CHUNK = 1000  # records read back from a run at once
_READ_AHEAD = 64  # samples that the system is asked to prefetch
_MAX_OPEN = 64  # files open at a time


@dataclass(frozen=True, slots=True)
class SortOrder:
    """The order in which samples are sorted.

    Attributes:
        by: ``key``, or the name of a field.
        type: How values compare: as "text", "int" or "float"; "shuffle" sorts by a hash of the key.
        reverse: Whether the order is descending.
        seed: The seed of a shuffle.

    Raises:
        PlanError: The type is unknown.
    """

    by: str = "key"
    type: str = "text"
    reverse: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.type not in SORT_TYPES:
            raise PlanError(f"unknown sort type {self.type!r}: use one of {', '.join(SORT_TYPES)}")

    @property
    def by_key(self) -> bool:
        """Whether samples are sorted by their keys as text."""
        return self.type == "text" and self.by in ("key", "__key__")

    def value(self, raw: RawSample) -> Any:
        """Return the value that a sample is sorted by; None if the sample, or this part of it, does not have it.

        Raises:
            DataError: The value is not a number.
        """
        if self.type == "shuffle":
            return hashlib.blake2b(f"{self.seed}/{raw.key}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        if self.by in ("key", "__key__"):
            text = raw.key
        elif (data := raw.value(self.by)) is not None:
            text = data.decode("utf-8", "surrogateescape")
        else:
            return None
        if self.type == "text":
            return text
        try:
            number = int(text) if self.type == "int" else float(text)
        except ValueError:
            problem = f"cannot sort by the field {self.by!r}: {text[:40]!r} is not of type {self.type}"
            raise DataError(problem, raw.shard, raw.key) from None
        if number != number:
            raise DataError(f"cannot sort by the field {self.by!r}: its value is NaN", raw.shard, raw.key)
        return number


def sort_samples(
    parts: Iterable[RawSample],
    order: SortOrder,
    folder: str | None = None,
    *,
    select: SampleSelector | None = None,
    on_error: ErrorHandler = raise_error,
) -> Iterator[EncodedSamples]:
    """Yield samples in sorted order, equal ones in their original order; memory does not grow with their number.

    Args:
        parts: The samples, or parts of samples whose members lie apart.
        order: The order.
        folder: Where temporary files are created; by default in the system's temporary folder.
        select: Selects samples, given all of them in their original order; by default all are sorted.
        on_error: Called for each sample whose parts do not fit together; raises by default.

    Raises:
        DataError: A sample has no value to sort by, or has a field twice.
        StorageError: A temporary file cannot be written, or an archive changed in the meantime.
    """
    with _SampleRecords(folder) as store:
        records = (store.add(raw, number, order.value(raw)) for number, raw in enumerate(parts))
        if order.by_key and select is None:
            samples = store.join(store.sort(records, _KEY, order.reverse), on_error)
        else:
            samples = store.sort(store.join(store.sort(records, _KEY), on_error), _NUMBER)
            if select is not None:
                samples = store.select(samples, select)
            samples = store.sort(store.with_values(samples, order), _VALUE, order.reverse)
        yield from store.encode(samples)


class _SampleRecords:
    """Records where samples are stored, in their archives or in a temporary file, and reads them back."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._shards: list[str] = []  # the archive of each source
        self._spilled: list[bool] = []  # whether its members are in the temporary file
        self._open: OrderedDict[int, int] = OrderedDict()
        self._spill_file: IO[bytes] | None = None
        self._spilled_bytes = 0
        self._record_files: list[IO[bytes]] = []

    def __enter__(self) -> _SampleRecords:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        for file in (self._spill_file, *self._record_files):
            if file is not None:
                file.close()

    def add(self, raw: RawSample, number: int, value: Any) -> _Record:
        """Return the record of a sample or part; one that is not in a file is spilled."""
        spilled = raw.file is None
        if not self._shards or (self._shards[-1], self._spilled[-1]) != (raw.shard, spilled):
            self._shards.append(raw.shard)
            self._spilled.append(spilled)
        spans = raw.spans
        if spilled:
            members = raw.members()
            moved = self._spilled_bytes - spans[0][0]
            spans = [(head + moved, body + moved, size, end + moved) for head, body, size, end in spans]
            self._spill(members)
        return [raw.key, number, value, len(self._shards) - 1, raw.exact, raw.field_names, spans]

    def _spill(self, members: memoryview) -> None:
        try:
            if self._spill_file is None:
                self._spill_file = tempfile.TemporaryFile(prefix="penstock-sort-", dir=self._folder)  # noqa: SIM115
            self._spill_file.write(members)
            self._spilled_bytes += len(members)
        except OSError as exc:
            raise self._cannot_write(exc) from exc

    def sort(self, records: Iterable[_Record], column: int, reverse: bool = False) -> Iterator[_Record]:
        """Yield records sorted by one of their columns, equal ones in their order."""
        runs: list[Callable[[], Iterator[_Record]]] = []
        run: list[_Record] = []
        for record in records:
            run.append(record)
            if len(run) >= _RUN_RECORDS:
                run.sort(key=itemgetter(column), reverse=reverse)
                runs.append(self._spill_records(run))
                run = []
        run.sort(key=itemgetter(column), reverse=reverse)
        return heapq.merge(*(read() for read in runs), run, key=itemgetter(column), reverse=reverse)

    def _spill_records(self, run: list[_Record]) -> Callable[[], Iterator[_Record]]:
        """Write a sorted run of records to a temporary file; return a function that reads it back."""
        try:
            file = tempfile.TemporaryFile(prefix="penstock-sort-", dir=self._folder)  # noqa: SIM115
            self._record_files.append(file)
            for start in range(0, len(run), _CHUNK):
                file.write(json.dumps(run[start : start + _CHUNK]).encode() + b"\n")
            file.seek(0)
        except OSError as exc:
            raise self._cannot_write(exc) from exc
        return lambda: (record for line in file for record in json.loads(line))

    def _cannot_write(self, exc: OSError) -> StorageError:
        folder = self._folder or tempfile.gettempdir()
        return StorageError(
            f"cannot write temporary files: {exc.strerror or exc}; choose another folder with --tmp", folder
        )

    def join(self, parts: Iterator[_Record], on_error: ErrorHandler) -> Iterator[_Record]:
        """Join neighbouring parts with the same key and archive into samples."""
        for (key, source), group in groupby(parts, key=itemgetter(_KEY, _SOURCE)):
            first, *others = group
            if not others:
                yield first
                continue
            names = [name for part in (first, *others) for name in part[_FIELDS]]
            if twice := next((name for name in names if names.count(name) > 1), None):
                on_error(DataError(f"the field {twice!r} appears twice", self._shards[source], key))
                continue
            spans = [span for part in (first, *others) for span in part[_SPANS]]
            value = next((part[_VALUE] for part in (first, *others) if part[_VALUE] is not None), None)
            exact = all(part[_EXACT] for part in (first, *others))
            yield [key, first[_NUMBER], value, source, exact, names, spans]

    def with_values(self, samples: Iterator[_Record], order: SortOrder) -> Iterator[_Record]:
        """Yield the records after a check that each of them has a value to sort by."""
        for record in samples:
            if record[_VALUE] is None:
                problem = f"cannot sort: the sample has {no_field([order.by], record[_FIELDS])}"
                raise DataError(problem, self._shards[record[_SOURCE]], record[_KEY])
            yield record

    def select(self, samples: Iterator[_Record], select: SampleSelector) -> Iterator[_Record]:
        """Yield the records of the samples that are selected."""
        records: dict[int, _Record] = {}  # of the samples that are being looked at, by the object that stands for them

        def looked_at() -> Iterator[RawSample]:
            for record in samples:
                raw = self._read(record)
                records.clear()
                records[id(raw)] = record
                yield raw

        for raw in select(looked_at()):
            yield records[id(raw)]

    def encode(self, samples: Iterator[_Record]) -> Iterator[EncodedSamples]:
        """Yield the samples of records for a writer, in order."""
        while batch := list(islice(samples, _READ_AHEAD)):
            for record in batch if hasattr(os, "posix_fadvise") else ():
                for begin, end in _pieces(record[_SPANS]):
                    os.posix_fadvise(self._fd(record[_SOURCE]), begin, end - begin, os.POSIX_FADV_WILLNEED)
            for record in batch:
                yield self._read(record).encode()

    def _read(self, record: _Record) -> RawSample:
        """Read a sample; its members become neighbours."""
        source, fd = record[_SOURCE], self._fd(record[_SOURCE])
        data = b""
        for begin, end in _pieces(record[_SPANS]):
            piece = os.pread(fd, end - begin, begin)
            if len(piece) < end - begin:
                raise StorageError("the shard became shorter while it was being sorted", self._shards[source])
            data += piece
        spans, position = [], 0
        for head, body, size, end in record[_SPANS]:
            spans.append((position, position + body - head, size, position + end - head))
            position += end - head
        fields = tuple(record[_FIELDS])
        return RawSample(record[_KEY], fields, spans, self._shards[source], data, 0, record[_EXACT])

    def _fd(self, source: int) -> int:
        if self._spilled[source]:
            assert self._spill_file is not None
            self._spill_file.flush()
            return self._spill_file.fileno()
        if source in self._open:
            self._open.move_to_end(source)
            return self._open[source]
        if len(self._open) >= _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            fd = os.open(self._shards[source], os.O_RDONLY)
        except OSError as exc:
            raise StorageError(f"cannot read the shard: {exc.strerror or exc}", self._shards[source]) from exc
        self._open[source] = fd
        return fd


def _pieces(spans: list[Any]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of an archive that members lie in; neighbours are one range."""
    begin, end = spans[0][0], spans[0][3]
    for head, _, _, stop in spans[1:]:
        if head != end:
            yield begin, end
            begin = head
        end = stop
    yield begin, end
