"""Samples in another order, however many: what is sorted is where they lie.

Samples of files stay where they are; those of pipes and compressed archives go to one temporary file first. Records of
where they lie are sorted in memory, in runs that are merged where there are more than fit.
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

Record = list[Any]  # value, source, begin, length, key, kind, starts, sizes
_RECORDS = 200_000  # of one run: about 150 MB
_CHUNK = 1000  # records read back from a run at once
_AHEAD = 64  # samples the disk is told about before they are read
_MOST_OPEN = 64  # files open at a time
_SPOOL = -1
TYPES = ("text", "int", "float", "shuffle")


@dataclass(frozen=True, slots=True)
class SortOrder:
    """What samples are sorted by.

    Attributes:
        by: ``key``, or the name of a field.
        type: How its values compare: as "text", "int", "float"; "shuffle": by a hash of the key.
        reverse: The largest first.
        seed: Decides the order of a shuffle.
    """

    by: str = "key"
    type: str = "text"
    reverse: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise PlanError(f"{self.type!r} is no way to compare values: one of {', '.join(TYPES)}")

    def value(self, raw: RawSample) -> Any:
        """What a sample is sorted by.

        Raises:
            DataError: It has no such field, or its value is no number.
        """
        if self.type == "shuffle":
            return hashlib.blake2b(f"{self.seed}/{raw.key}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        text = raw.key if self.by in ("key", "__key__") else self._text(raw)
        if self.type == "text":
            return text
        try:
            number = int(text) if self.type == "int" else float(text)
        except ValueError:
            raise DataError(f"{text[:40]!r} is no {self.type} to sort by", raw.shard, raw.key) from None
        if number != number:
            raise DataError("it is not a number, and nothing can be sorted by that", raw.shard, raw.key)
        return number

    def _text(self, raw: RawSample) -> str:
        data = raw.value(self.by)
        if data is None:
            raise DataError(f"there is no field {self.by!r} to sort by", raw.shard, raw.key)
        return data.decode("utf-8", "surrogateescape")


def ordered(stream: Iterable[RawSample], order: SortOrder, folder: str | None = None) -> Iterator[EncodedSamples]:
    """Give samples in another order; equal ones as they came. Memory does not grow with the samples.

    Args:
        stream: The samples.
        order: What they are sorted by.
        folder: Where temporary files go.

    Raises:
        DataError: A sample has no value to be sorted by.
        StorageError: There is no room for temporary files.
    """
    with _Places(folder) as places:
        runs: list[Callable[[], Iterator[Record]]] = []
        run: list[Record] = []
        for raw in stream:
            run.append([order.value(raw), *places.put(raw)])
            if len(run) >= _RECORDS:
                runs.append(places.spill(_sorted(run, order)))
                run = []
        last = _sorted(run, order)
        merged = heapq.merge(*(read() for read in runs), last, key=itemgetter(0), reverse=order.reverse)
        yield from places.samples(merged if runs else iter(last))


def _sorted(run: list[Record], order: SortOrder) -> list[Record]:
    run.sort(key=itemgetter(0), reverse=order.reverse)
    return run


class _Places:
    """Where samples lie: in files that are there, or in a temporary one."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._names: list[str] = []
        self._kinds: dict[tuple[str, ...], int] = {}
        self._open: OrderedDict[int, int] = OrderedDict()
        self._spool: IO[bytes] | None = None
        self._end = 0
        self._runs: list[IO[bytes]] = []

    def __enter__(self) -> _Places:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        for file in (self._spool, *self._runs):
            if file is not None:
                file.close()

    def put(self, raw: RawSample) -> Record:
        """Give where a sample lies, after it was stored if it lies nowhere."""
        parts = raw.parts()
        kind = self._kinds.setdefault(parts.kind, len(self._kinds))
        if raw.file is not None and (span := raw.span) is not None:
            source = self._files.setdefault(raw.shard, len(self._files))
            begin = span[0]
        else:
            source, begin = _SPOOL, self._end
            self._store(parts.pieces)
            self._end += parts.nbytes
        return [source, begin, parts.nbytes, raw.key, kind, parts.starts, parts.sizes]

    def _store(self, pieces: list[Any]) -> None:
        try:
            if self._spool is None:
                self._spool = tempfile.TemporaryFile(prefix="penstock-sort-", dir=self._folder)  # noqa: SIM115
            self._spool.writelines(pieces)
        except OSError as exc:
            raise self._no_room(exc) from exc

    def spill(self, run: list[Record]) -> Callable[[], Iterator[Record]]:
        """Store a sorted run of records; give what reads it back."""
        try:
            file = tempfile.TemporaryFile(prefix="penstock-sort-", dir=self._folder)  # noqa: SIM115
            self._runs.append(file)
            for at in range(0, len(run), _CHUNK):
                file.write(json.dumps(run[at : at + _CHUNK]).encode() + b"\n")
            file.seek(0)
        except OSError as exc:
            raise self._no_room(exc) from exc
        return lambda: (record for line in file for record in json.loads(line))

    def _no_room(self, exc: OSError) -> StorageError:
        where = self._folder or tempfile.gettempdir()
        return StorageError(f"cannot write temporary files: {exc.strerror or exc}; name another folder", where)

    def samples(self, records: Iterator[Record]) -> Iterator[EncodedSamples]:
        """Read the samples that records lead to."""
        if self._spool is not None:
            self._spool.flush()
        self._names = list(self._files)
        kinds = list(self._kinds)
        while batch := list(islice(records, _AHEAD)):
            for _, source, begin, length, *_rest in batch:
                os.posix_fadvise(self._fd(source), begin, length, os.POSIX_FADV_WILLNEED)
            for _, source, begin, length, key, kind, starts, sizes in batch:
                data = os.pread(self._fd(source), length, begin)
                if len(data) < length:
                    raise StorageError("the shard has become shorter while it was sorted", self._names[source])
                yield EncodedSamples([key], kinds[kind], [data], starts, sizes, length)

    def _fd(self, source: int) -> int:
        if source == _SPOOL:
            assert self._spool is not None
            return self._spool.fileno()
        if source in self._open:
            self._open.move_to_end(source)
            return self._open[source]
        if len(self._open) >= _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            fd = os.open(self._names[source], os.O_RDONLY)
        except OSError as exc:
            raise StorageError(f"cannot read the shard: {exc.strerror or exc}", self._names[source]) from exc
        self._open[source] = fd
        return fd
