"""Sort any number of samples: an external merge sort of records that hold the location of each sample.

Samples in files are read in place; those of pipes and compressed archives are spilled to one temporary file first.
Records are sorted in memory; if there are too many, sorted runs are spilled and merged.
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
from itertools import islice
from operator import itemgetter
from typing import IO, Any

from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.tar.archive import EncodedSamples
from penstock.tarstream.raw import RawSample

SORT_TYPES = ("text", "int", "float", "shuffle")
_Record = list[Any]  # value, source, begin, length, key, kind, starts, sizes
_RUN_RECORDS = 200_000  # records of one sorted run: about 150 MB
_CHUNK = 1000  # records read back from a run at once
_READ_AHEAD = 64  # samples that the system is asked to prefetch
_MAX_OPEN = 64  # files open at a time
_SPILL = -1  # the source of samples in the temporary file


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

    def value(self, raw: RawSample) -> Any:
        """Return the value that a sample is sorted by.

        Raises:
            DataError: The sample does not have the field, or its value is not a number.
        """
        if self.type == "shuffle":
            return hashlib.blake2b(f"{self.seed}/{raw.key}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        text = raw.key if self.by in ("key", "__key__") else self._text(raw)
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

    def _text(self, raw: RawSample) -> str:
        data = raw.value(self.by)
        if data is None:
            raise DataError(f"cannot sort by the field {self.by!r}: the sample does not have it", raw.shard, raw.key)
        return data.decode("utf-8", "surrogateescape")


def sort_samples(stream: Iterable[RawSample], order: SortOrder, folder: str | None = None) -> Iterator[EncodedSamples]:
    """Yield samples in sorted order, equal ones in their original order; memory does not grow with their number.

    Args:
        stream: The samples.
        order: The order.
        folder: Where temporary files are created; by default in the system's temporary folder.

    Raises:
        DataError: A sample has no value to sort by.
        StorageError: A temporary file cannot be written, or an archive changed in the meantime.
    """
    with _SampleStore(folder) as store:
        runs: list[Callable[[], Iterator[_Record]]] = []
        run: list[_Record] = []
        for raw in stream:
            run.append([order.value(raw), *store.add(raw)])
            if len(run) >= _RUN_RECORDS:
                runs.append(store.spill_records(_sorted(run, order)))
                run = []
        last = _sorted(run, order)
        merged = heapq.merge(*(read() for read in runs), last, key=itemgetter(0), reverse=order.reverse)
        yield from store.samples(merged if runs else iter(last))


def _sorted(run: list[_Record], order: SortOrder) -> list[_Record]:
    run.sort(key=itemgetter(0), reverse=order.reverse)
    return run


class _SampleStore:
    """Records where samples are stored, in their archives or in a temporary file, and reads them back."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._sources: dict[str, int] = {}
        self._paths: list[str] = []
        self._kinds: dict[tuple[str, ...], int] = {}
        self._open: OrderedDict[int, int] = OrderedDict()
        self._spill_file: IO[bytes] | None = None
        self._spilled_bytes = 0
        self._record_files: list[IO[bytes]] = []

    def __enter__(self) -> _SampleStore:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        for file in (self._spill_file, *self._record_files):
            if file is not None:
                file.close()

    def add(self, raw: RawSample) -> _Record:
        """Return the record of a sample without its sort value; a sample that is not in a file is spilled."""
        encoded = raw.encode()
        kind = self._kinds.setdefault(encoded.field_names, len(self._kinds))
        if raw.file is not None and (extent := raw.extent) is not None:
            source = self._sources.setdefault(raw.shard, len(self._sources))
            begin = extent[0]
        else:
            source, begin = _SPILL, self._spilled_bytes
            self._spill_sample(encoded.pieces)
            self._spilled_bytes += encoded.nbytes
        return [source, begin, encoded.nbytes, raw.key, kind, encoded.starts, encoded.sizes]

    def _spill_sample(self, pieces: list[Any]) -> None:
        try:
            if self._spill_file is None:
                self._spill_file = tempfile.TemporaryFile(prefix="penstock-sort-", dir=self._folder)  # noqa: SIM115
            self._spill_file.writelines(pieces)
        except OSError as exc:
            raise self._cannot_write(exc) from exc

    def spill_records(self, run: list[_Record]) -> Callable[[], Iterator[_Record]]:
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

    def samples(self, records: Iterator[_Record]) -> Iterator[EncodedSamples]:
        """Yield the samples of records, in order."""
        if self._spill_file is not None:
            self._spill_file.flush()
        self._paths = list(self._sources)
        kinds = list(self._kinds)
        while batch := list(islice(records, _READ_AHEAD)):
            for _, source, begin, length, *_rest in batch if hasattr(os, "posix_fadvise") else ():
                os.posix_fadvise(self._fd(source), begin, length, os.POSIX_FADV_WILLNEED)
            for _, source, begin, length, key, kind, starts, sizes in batch:
                data = os.pread(self._fd(source), length, begin)
                if len(data) < length:
                    raise StorageError("the shard became shorter while it was being sorted", self._paths[source])
                yield EncodedSamples([key], kinds[kind], [data], starts, sizes, length)

    def _fd(self, source: int) -> int:
        if source == _SPILL:
            assert self._spill_file is not None
            return self._spill_file.fileno()
        if source in self._open:
            self._open.move_to_end(source)
            return self._open[source]
        if len(self._open) >= _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            fd = os.open(self._paths[source], os.O_RDONLY)
        except OSError as exc:
            raise StorageError(f"cannot read the shard: {exc.strerror or exc}", self._paths[source]) from exc
        self._open[source] = fd
        return fd
