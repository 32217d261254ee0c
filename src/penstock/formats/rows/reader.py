"""Files of rows to samples: any row of any file, found by marks and read when its block is due.

What a row is, a layout says: lines of text, lines of JSON or CSV, records. One large file feeds many workers, since a
worker reads whichever rows its block names.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np

from penstock.blobs.content import Content, open_content
from penstock.blobs.prefetch import Fetcher, read_whole
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError, StorageError
from penstock.formats.rows.row_offsets import RowOffsets, read_cached_offsets, write_cached_offsets
from penstock.order import I64
from penstock.plan import Fields, Resources, join_columns, pick_rows
from penstock.plan.values import Workers
from penstock.storage import Cache, Storage, expand, local_path, open_storage, redacted, relative
from penstock.storage.cache import through
from penstock.storage.protocol import scheme

Buffer = mmap.mmap | bytes
Answer = tuple[Sequence[Any], dict[int, DataError]]

_OPEN_FILES = 32  # a window reads 16 at once, and the next one may be begun
_GROUP_ROWS, _GROUP_BYTES = 8192, 1 << 20  # rows that are read together where many of them are wanted soon
_DENSE = 64  # one of so many rows of a group being wanted is many: reading a row alone costs as much as reading 50
_KEPT_BYTES = 64_000_000  # groups that are kept for those who want others of their rows
_LET_GO = 8  # so many of the oldest are looked at when one is added


@dataclass(frozen=True, slots=True, eq=False)
class RowFile:
    """An open file: its bytes, unpacked, and the marks of its rows."""

    url: str
    data: Buffer
    marks: RowOffsets


class Layout(Protocol):
    """What rows are, in files of one kind. A value: it may be asked from several threads."""

    @property
    def columnar(self) -> bool:
        """Whether answers are columns, which any number of readers may share."""

    @property
    def call(self) -> str:
        """What reads such files."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How they are called in a folder."""

    @property
    def cheap(self) -> bool:
        """Whether rows are cheaper cut than handed to another worker."""

    @property
    def how(self) -> str:
        """What the marks depend on, apart from the file."""

    def scan(self, data: Buffer, problem: str | None) -> RowOffsets:
        """Find the rows; ``problem`` says why there is no more of the file than this."""

    def learn(self, file: RowFile) -> Any:
        """What all files must agree on, from the first of them that has rows."""

    def read(self, file: RowFile, rows: I64, fields: Fields, learnt: Any) -> Answer:
        """Read rows, in the order asked for."""

    def key(self, file: RowFile, row: int) -> str:
        """What a row is called in messages."""


@dataclass(frozen=True, slots=True)
class RowsSource:
    """Files of rows: paths as the user wrote them."""

    patterns: tuple[str, ...]
    layout: Layout
    workers: Workers = None
    storage: Storage | None = None
    cache: Cache | None = None

    random_access = False

    @property
    def columnar(self) -> bool:
        """Whether samples come as columns."""
        return self.layout.columnar

    @property
    def resources(self) -> Resources | None:
        """Taking rows apart is work for workers, unless it is next to nothing."""
        return None if self.layout.cheap and self.workers is None else Resources(self.workers)

    def open(self) -> RowsReader:
        """List the files.

        Raises:
            StorageError: nothing is there.
        """
        return open_rows(self.patterns, self.layout.suffixes, self.layout, self.storage, self.cache)

    def describe(self) -> str:
        """The call that made it."""
        some = ", ".join(repr(redacted(one)) for one in self.patterns[:3]) + (", ..." if len(self.patterns) > 3 else "")
        return f"{self.layout.call}({some})"


def open_rows(
    patterns: Sequence[str], suffixes: Sequence[str], layout: Layout, storage: Storage | None, cache: Cache | None
) -> RowsReader:
    """List files and give the reader of their rows.

    Raises:
        StorageError: nothing is there.
    """
    ends = tuple(suffix + packed for suffix in suffixes for packed in ("", ".gz", ".bz2", ".xz", ".zst"))
    urls = expand(patterns, ends, storage)
    paths = [local_path(url) if scheme(url) == "file" else url for url in urls]
    for url, path in zip(urls, paths, strict=True):
        if scheme(path) == "file" and not os.path.isfile(path):
            raise StorageError("no such file", url)
    place = through(cache, paths, storage)
    return RowsReader([redacted(url) for url in urls], relative(paths), paths, layout, place)


class RowsReader:
    """Finds and reads the rows of files by number; safe to use from several threads, pickles as its arguments.

    A file that is not on this machine is fetched whole when it is first asked for, since only its bytes tell where
    rows begin.
    """

    def __init__(
        self, urls: Sequence[str], names: Sequence[str], paths: Sequence[str], layout: Layout, storage: Storage | None
    ) -> None:
        self.names = list(names)
        self._urls, self._paths, self._layout, self._storage = list(urls), list(paths), layout, storage
        self._marks: dict[int, RowOffsets] = {}
        self._open: OrderedDict[int, RowFile] = OrderedDict()
        self._learnt: tuple[Any] | None = None
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in paths]
        self._learning = threading.Lock()
        self._fetcher = Fetcher()
        self._groups = _Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowsReader, (self._urls, self.names, self._paths, self._layout, self._storage)

    @property
    def remote(self) -> bool:
        """Whether a file is none of this machine."""
        return any(scheme(path) != "file" for path in self._paths[:1] + self._paths[-1:])

    def rest(self) -> None:
        """Fetch nothing any more, and keep nothing that was read."""
        fetcher, self._fetcher = self._fetcher, Fetcher()
        fetcher.rest()
        self._groups.clear()

    def counts(self, scan: bool) -> I64 | None:
        """Rows of every file; ``None`` where one is unknown and may not be looked into.

        Raises:
            StorageError: a file cannot be read.
        """
        shards = range(len(self._paths))
        if not scan and not all(shard in self._marks for shard in shards):
            return None
        return np.array([self.count(shard) for shard in shards], np.int64)

    def countable(self) -> bool:
        """Whether all counts can be had without fetching a file just for that."""
        return all(scheme(path) == "file" or shard in self._marks for shard, path in enumerate(self._paths))

    def count(self, shard: int) -> int:
        """Rows of one file.

        Raises:
            StorageError: it cannot be read.
        """
        return self._marked(shard).rows

    def sizes(self) -> list[int]:
        """Bytes of each file; -1 where a server does not say."""
        return [self._size(path) for path in self._paths]

    def _size(self, path: str) -> int:
        size = open_storage(path, self._storage if scheme(path) != "file" else None).info(path).size
        return -1 if size is None else size

    def key(self, shard: int, index: int) -> str | None:
        """What a row is called in messages."""
        marks = self._marked(shard)
        return None if index >= marks.readable else self._layout.key(self.file(shard), index)

    def url(self, shard: int) -> str:
        """The file."""
        return self._urls[shard]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedRows:
        """Remember which, and where many are wanted of those that lie together."""
        nbytes, group = np.empty(len(index), np.int64), np.full(len(index), -1, np.int64)
        for which in distinct(shard):
            mine = np.flatnonzero(shard == which)
            mean, size = self._mean(which), self._group_rows(which)
            nbytes[mine] = mean
            if self._layout.columnar:
                rows = index[mine]
                numbers = rows // size
                # of neighbours, those that are few in a group are its edge, and the others of it are due as well
                near = bool((np.diff(rows) == 1).all())
                many = np.full(len(rows), len(rows)) if near else np.bincount(numbers)[numbers]
                wanted = (many * _DENSE >= size) & (rows < self._marked(which).readable)
                group[mine] = np.where(wanted, numbers, -1)
        return LocatedRows(self, shard, index, group, fields, nbytes)

    def _mean(self, shard: int) -> int:
        """How large a row of a file is, on the average."""
        marks = self._marked(shard)
        return (marks.end - int(marks.start[0])) // marks.readable if marks.readable else 0

    def _group_rows(self, shard: int) -> int:
        every = self._marked(shard).every
        most = min(_GROUP_ROWS, _GROUP_BYTES // max(1, self._mean(shard)))
        return max(1, most // every) * every

    def read(self, shard: int, rows: I64, group: I64, fields: Fields) -> Answer:
        """Read rows of one file, by their groups or alone (``group`` is -1)."""
        parts = []
        for number in distinct(group):
            places = np.flatnonzero(group == number)
            if number < 0:
                parts.append((places, self._alone(shard, rows[places], fields)))
                continue
            key = (shard, number, fields.only, fields.excluded, fields.meta)
            items, wrong = self._groups.get(key, partial(self._group, shard, number, fields))
            local = rows[places] - number * self._group_rows(shard)
            bad = {n: wrong[row] for n, row in enumerate(local.tolist()) if row in wrong} if wrong else {}
            parts.append((places, (pick_rows(items, local), bad)))
        return in_order(parts)

    def _group(self, shard: int, number: int, fields: Fields) -> Answer:
        size = self._group_rows(shard)
        last = min((number + 1) * size, self._marked(shard).readable)
        return self._alone(shard, np.arange(number * size, last), fields)

    def _alone(self, shard: int, rows: I64, fields: Fields) -> Answer:
        """Read rows and no others; a file that cannot be read at all is what is wrong with each of them."""
        try:
            file = self.file(shard)
            there = rows < file.marks.readable
            if bool(there.all()):
                return self._layout.read(file, rows, fields, self._common())
            good = np.flatnonzero(there)
            read = self._layout.read(file, rows[good], fields, self._common()) if len(good) else ([], {})
        except DataError as exc:
            return [None] * len(rows), dict.fromkeys(range(len(rows)), exc)
        gone = np.flatnonzero(~there)
        lost = dict.fromkeys(range(len(gone)), DataError(file.marks.bad, file.url))
        return in_order([(good, read), (gone, ([None] * len(gone), lost))])

    def _common(self) -> Any:
        """What all files agree on, as the first that has rows tells it."""
        with self._learning:
            if self._learnt is None:
                full = next((n for n in range(len(self._paths)) if self._marked(n).readable), 0)
                self._learnt = (self._layout.learn(self.file(full)),)
            return self._learnt[0]

    def _marked(self, shard: int) -> RowOffsets:
        found = self._marks.get(shard)
        if found is None and scheme(path := self._paths[shard]) == "file":
            found = read_cached_offsets(path, self._layout.how, _stamp(path, self._urls[shard]))
            if found is not None:
                self._marks[shard] = found
        return found or self.file(shard).marks

    def file(self, shard: int) -> RowFile:
        """Give an open file, opening it if need be.

        Raises:
            StorageError: it cannot be read, or has changed.
        """
        with self._opening[shard]:
            with self._lock:
                found = self._open.get(shard)
                if found is not None:
                    self._open.move_to_end(shard)
            if found is None:
                found = self._opened(shard)
                with self._lock:
                    self._open[shard] = found
                    if len(self._open) > _OPEN_FILES:
                        self._open.popitem(last=False)
        if isinstance(found.data, mmap.mmap) and found.data.size() != len(found.data):
            raise StorageError("the file was changed while it was being read", found.url)
        return found

    def _opened(self, shard: int) -> RowFile:
        path, url, how = self._paths[shard], self._urls[shard], self._layout.how
        if scheme(path) != "file":
            content = self._fetched(path, url)
            marks = self._marks.get(shard) or self._layout.scan(content.buffer, content.problem)
        else:
            stamp = _stamp(path, url)
            content = open_content(path, url)
            known = read_cached_offsets(path, how, stamp)
            marks = known or write_cached_offsets(path, how, self._layout.scan(content.buffer, content.problem), stamp)
            before = self._marks.get(shard)
            if before is not None and before.stamp != marks.stamp:
                raise StorageError("the file was changed while it was being read", url)
        self._marks[shard] = marks
        return RowFile(url, content.buffer, marks)

    def _fetched(self, place: str, url: str) -> Content:
        """Fetch a whole file, unless a cache has it."""
        storage = open_storage(place, self._storage)
        path = storage.local_path(place)
        if path is not None:
            return open_content(path, url)
        with tempfile.NamedTemporaryFile(prefix="penstock-") as spool:
            for chunk in read_whole(storage, place, url, storage.info(place), self._fetcher):
                try:
                    spool.write(chunk)
                except OSError as exc:
                    problem = f"cannot keep the file in {tempfile.gettempdir()}: {exc.strerror or exc}"
                    raise StorageError(problem, url) from exc
            spool.flush()
            return open_content(spool.name, url)


def _stamp(path: str, url: str) -> Stamp:
    try:
        return Stamp.of(os.stat(path))
    except OSError as exc:
        raise StorageError(f"cannot read the file: {exc.strerror or exc}", url) from exc


@dataclass(slots=True)
class LocatedRows:
    """Rows that will be read."""

    reader: RowsReader
    shard: I64
    index: I64
    group: I64
    fields: Fields
    nbytes: I64

    def take(self, sel: Any) -> LocatedRows:
        """Some of them."""
        return LocatedRows(
            self.reader, self.shard[sel], self.index[sel], self.group[sel], self.fields, self.nbytes[sel]
        )

    def read(self) -> Answer:
        """Read them, file by file."""
        parts = []
        for which in distinct(self.shard):
            places = np.flatnonzero(self.shard == which)
            parts.append((places, self.reader.read(which, self.index[places], self.group[places], self.fields)))
        return in_order(parts)


def distinct(values: I64) -> list[int]:
    """The values, each once, in order; most often all are the same."""
    if len(values) and bool((values == values[0]).all()):
        return [int(values[0])]
    return np.unique(values).tolist()  # type: ignore[no-any-return]


def in_order(parts: Sequence[tuple[I64, Answer]]) -> Answer:
    """Put answers together: each with the places where its items stand."""
    if not parts:
        return [], {}
    if len(parts) == 1:
        return parts[0][1]
    order = np.concatenate([places for places, _ in parts])
    bad = {int(places[n]): error for places, (_, wrong) in parts for n, error in wrong.items()}
    items = join_columns([items for _, (items, _) in parts])
    if bool((order[1:] > order[:-1]).all()):
        return items, bad
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return pick_rows(items, back), bad


class _Kept:
    """Answers that were made once for all who ask, the last ones used, within a bound of bytes."""

    def __init__(self) -> None:
        self._held: OrderedDict[Any, Future[Answer]] = OrderedDict()
        self._sizes: dict[Any, int] = {}  # of those that are made
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], Answer]) -> Answer:
        """Give the answer for ``key``: made now, or waited for where another thread makes it."""
        with self._lock:
            future = self._held.get(key)
            new = future is None
            if future is None:
                future = self._held[key] = Future()
            self._held.move_to_end(key)
        if new:
            try:
                future.set_result(make())
            except BaseException as exc:
                future.set_exception(exc)
                with self._lock:
                    self._held.pop(key, None)
                raise
            self._note(key, int(getattr(future.result()[0], "nbytes", 0)))
        return future.result()

    def _note(self, key: Any, size: int) -> None:
        """Count what was made, and let go of what was not used for long."""
        with self._lock:
            if key not in self._held:  # everything was let go of meanwhile
                return
            self._sizes[key] = size
            self._nbytes += size
            for old in list(islice(self._held, _LET_GO)):
                if self._nbytes <= _KEPT_BYTES:
                    return
                if old in self._sizes:
                    self._nbytes -= self._sizes.pop(old)
                    del self._held[old]

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._held.clear()
            self._sizes.clear()
            self._nbytes = 0
