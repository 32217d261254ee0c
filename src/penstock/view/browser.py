"""Samples of any source by position, key or condition, for pages: bounded in bytes and time, by range reads only."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from penstock.codecs.features import ClassLabel
from penstock.dataset import Dataset
from penstock.engines import Program
from penstock.errors import DataError, PenstockError, PlanError
from penstock.formats.files import FilesReader
from penstock.formats.tar.index import Index
from penstock.formats.tar.reader import TarReader
from penstock.lazy import cached_property
from penstock.order import I64, Order
from penstock.plan import Fields, Reader, unshuffled
from penstock.plan.expression_text import TextExpression
from penstock.plan.values import EngineOptions

PAGE_SAMPLE_BYTES = 16_000_000  # of one sample in a grid; larger fields are named and not read
SAMPLE_BYTES = 64_000_000  # of one sample on its own page
SEARCH_S = 1.0  # of one search; the next page continues
_CACHE_BYTES = 128_000_000
_MAX_KEY_BYTES = 512_000_000  # of stored indexes that are kept for lookups: of about eight million samples
_CONNECTIONS = 32  # indexes fetched at a time
_OPEN_SHARDS = 24  # read at a time
_SEARCH_ROWS = 4096  # samples whose fields are read at a time by a search
_HIDDEN = ("__key__", "__url__")


class SamplePlace(NamedTuple):
    """Where a sample is: its source, the number of its shard, and its number in the shard."""

    leaf: int
    shard: int
    row: int


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample, as it is stored.

    Attributes:
        position: Its position in the stored order.
        key: Its key, if it has one.
        shard: The URL of its shard.
        place: Where it is.
        fields: Its fields, except those that are too large.
        large: The sizes of the fields that are too large to be read for the page.
        problem: Why it cannot be read; None if it can.
    """

    position: int
    key: str | None
    shard: str
    place: SamplePlace
    fields: dict[str, Any]
    large: dict[str, int]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        positions: The positions of samples that meet the condition.
        after: From where to continue the search; None if everything was searched.
        searched: How many samples were searched.
        from_index: Whether the indexes alone gave the answer.
    """

    positions: list[int]
    after: int | None
    searched: int
    from_index: bool


class _SearchedRun(NamedTuple):
    """Consecutive samples of one shard that a search has seen.

    Attributes:
        begin: The position of the shard's first sample.
        start: The first row.
        stop: The row after the last one.
        matches: The rows that meet the condition.
        indexed: Whether the index alone gave the answer.
    """

    begin: int
    start: int
    stop: int
    matches: list[int]
    indexed: bool


class Browser:
    """Shows the samples of a dataset's sources, in the order in which they are stored; safe to use from threads."""

    def __init__(self, ds: Dataset) -> None:
        """Open the sources.

        Raises:
            PenstockError: A source cannot be opened, or can only be read once.
        """
        self.ds = ds
        self.program = Program(replace(unshuffled(ds.plan), engine=EngineOptions("serial"), cut=None))
        self.readers: list[Reader] = self.program.readers
        self._shards = [(leaf, shard) for leaf, reader in enumerate(self.readers) for shard in range(len(reader.names))]
        self._counts = np.full(len(self._shards), -1, np.int64)
        known = [reader.counts(scan=False) for reader in self.readers]
        if all(counts is not None for counts in known):
            self._counts = np.concatenate([np.zeros(0, np.int64), *(counts for counts in known if counts is not None)])
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[int, int], tuple[ShownSample, int]] = OrderedDict()
        self._cached_bytes = 0
        self._keys: dict[int, bytes] = {}  # the stored indexes, by number of the shard, for lookups
        self._key_bytes = 0
        self._random: dict[int, Order] = {}

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The source and number of every shard."""
        return self._shards

    @property
    def total(self) -> int | None:
        """The number of samples; None while a shard has not been counted."""
        return int(self._counts.sum()) if (self._counts >= 0).all() else None

    @property
    def counted(self) -> int:
        """The number of samples in the shards that have been counted."""
        return int(self._counts[self._counts >= 0].sum())

    @cached_property
    def indexed(self) -> bool:
        """Whether shards can be counted without fetching them whole, judged by the first shard of each source."""
        for reader in self.readers:
            unknown = isinstance(reader, TarReader) and reader.traits.remote and reader.counts(scan=False) is None
            if unknown and isinstance(reader, TarReader) and reader.names and reader.stored_index(0) is None:
                return False
        return True

    def _check_indexed(self) -> None:
        if not self.indexed:
            raise PlanError("these remote shards have no index, so all of them would be fetched: run `penstock index`")

    def count_shards(self, numbers: Iterable[int] | None = None) -> None:
        """Count shards, by default all that have not been counted, several at a time.

        Raises:
            PenstockError: A shard cannot be read.
        """
        chosen = range(len(self._shards)) if numbers is None else numbers
        with ThreadPoolExecutor(_CONNECTIONS, "penstock view count") as pool:
            list(pool.map(self.count, [number for number in chosen if self._counts[number] < 0]))

    def count(self, number: int) -> int:
        """Return the number of samples in one shard."""
        if self._counts[number] < 0:
            leaf, shard = self._shards[number]
            self._counts[number] = self.readers[leaf].count(shard)
        return int(self._counts[number])

    def begin_of(self, number: int) -> int:
        """Return the position of the first sample of a shard."""
        unknown = [before for before in range(number) if self._counts[before] < 0]
        if unknown:
            self.count_shards(unknown)
        return int(self._counts[:number].sum())

    def place(self, position: int) -> SamplePlace:
        """Return where the sample at a position is; counts only the shards up to it.

        Raises:
            IndexError: There is no such position.
        """
        begin = 0
        for number, (leaf, shard) in enumerate(self._shards):
            if self._counts[number] < 0:
                ahead = _CONNECTIONS if number and self.indexed else 1
                self.count_shards(range(number, min(number + ahead, len(self._shards))))
            size = int(self._counts[number])
            if position < begin + size:
                return SamplePlace(leaf, shard, position - begin)
            begin += size
        raise IndexError(f"there is no sample {position:,}: the last one is {begin - 1:,}")

    def position_of(self, place: SamplePlace) -> int:
        """Return the position of a sample."""
        return self.begin_of(self._shards.index((place.leaf, place.shard))) + place.row

    def random_positions(self, seed: int, start: int, count: int) -> list[int]:
        """Return positions from ``start`` on of the random order with this seed."""
        if seed not in self._random:
            if self.total is None:
                self._check_indexed()
                self.count_shards()
            plan = Dataset(self.program.plan).shuffle(all=True, seed=seed).plan
            self._random = {seed: Program(plan).order(0)}
        order = self._random[seed]
        stop = min(start + count, order.size)
        if start >= stop:
            return []
        refs = order.at(np.arange(start, stop, dtype=np.int64))
        places = zip(refs.leaf.tolist(), refs.shard.tolist(), refs.index.tolist(), strict=True)
        return [self.position_of(SamplePlace(*place)) for place in places]

    def page(self, positions: Sequence[int], max_bytes: int = PAGE_SAMPLE_BYTES) -> list[ShownSample]:
        """Return samples by position; one that cannot be read is there too, with the reason."""
        with self._lock:
            found = {at: self._cache[at, max_bytes][0] for at in positions if (at, max_bytes) in self._cache}
        places = {at: self.place(at) for at in positions if at not in found}
        shards = sorted({place[:2] for place in places.values()})
        # A reader keeps 32 shards open: a part of the samples at a time, so that none is opened twice.
        for leaf in {leaf for leaf, _ in shards}:
            own = [shard for shard in shards if shard[0] == leaf]
            for first in range(0, len(own), _OPEN_SHARDS):
                part = {*own[first : first + _OPEN_SHARDS]}
                chosen = {at: place for at, place in places.items() if place[:2] in part}
                for sample in self._read(leaf, chosen, max_bytes):
                    found[sample.position] = sample
                    self._remember(sample, max_bytes)
        return [found[at] for at in positions]

    def sample(self, position: int) -> ShownSample:
        """Return one sample, with larger fields than on a page of many."""
        return self.page([position], SAMPLE_BYTES)[0]

    def _read(self, leaf: int, places: dict[int, SamplePlace], max_bytes: int) -> Iterator[ShownSample]:
        reader = self.readers[leaf]
        shards = np.array([place.shard for place in places.values()], np.int64)
        rows = np.array([place.row for place in places.values()], np.int64)
        sizes = _sample_sizes(reader, shards, rows)
        fits = np.flatnonzero(sizes <= max_bytes)
        items, errors = reader.locate(shards[fits], rows[fits], Fields()).read() if len(fits) else ([], {})
        numbers = {row: number for number, row in enumerate(fits.tolist())}
        values = list(items)
        for row, (position, place) in enumerate(places.items()):
            if row in numbers:
                number = numbers[row]
                value = None if number in errors else values[number]
                yield self._shown(position, place, value, {}, errors.get(number))
            else:
                yield self._read_small_fields(position, place, int(sizes[row]), max_bytes)

    def _read_small_fields(self, position: int, place: SamplePlace, nbytes: int, max_bytes: int) -> ShownSample:
        reader, large = self.readers[place.leaf], {"sample": nbytes}
        if not isinstance(reader, TarReader):
            return self._shown(position, place, {}, large, None)
        sizes = sorted(field_spans(reader.index(place.shard), place.row).items(), key=lambda item: item[1][1])
        kept, used = set(), 0
        for name, (_, size) in sizes:
            used += size
            if used > max_bytes:
                break
            kept.add(name)
        large = {name: size for name, (_, size) in sizes if name not in kept}
        where = (np.array([place.shard]), np.array([place.row]))
        items, errors = reader.locate(*where, Fields(only=frozenset(kept))).read()
        return self._shown(position, place, None if errors else next(iter(items)), large, errors.get(0))

    def _shown(
        self, position: int, place: SamplePlace, value: Any, large: dict[str, int], error: DataError | None
    ) -> ShownSample:
        reader = self.readers[place.leaf]
        problem = None if error is None else error.problem
        fields = value if isinstance(value, dict) else {} if value is None else {"value": value}
        key = fields.get("__key__") if isinstance(fields.get("__key__"), str) else _key_of(reader, place)
        shown = {str(name): inner for name, inner in fields.items() if name not in _HIDDEN}
        return ShownSample(position, key, reader.url(place.shard), place, shown, large, problem)

    def _remember(self, sample: ShownSample, max_bytes: int) -> None:
        nbytes = 1000 + sum(_nbytes(value) for value in sample.fields.values())
        with self._lock:
            self._cache[sample.position, max_bytes] = (sample, nbytes)
            self._cached_bytes += nbytes
            while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1][1]

    def find_key(self, key: str) -> int | None:
        """Return the position of the sample with a key; None if there is none.

        Only stored indexes are read, not checked, and kept for the next lookup; a shard without one is opened.

        Raises:
            PlanError: Remote shards have no index.
        """
        self._check_indexed()
        wanted = key.encode("utf-8", "surrogatepass")
        numbers = range(len(self._shards))
        with ThreadPoolExecutor(_CONNECTIONS, "penstock view key") as pool:
            for number, row in enumerate(pool.map(lambda number: self._find_in(number, key, wanted), numbers)):
                if row is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return self.begin_of(number) + row
        return None

    def _find_in(self, number: int, key: str, wanted: bytes) -> int | None:
        leaf, shard = self._shards[number]
        reader = self.readers[leaf]
        if not isinstance(reader, TarReader):
            return self._find_in_column(reader, shard, key)
        if number not in self._keys:
            stored = reader.stored_index(shard)
            if stored is not None and wanted not in stored:
                self._remember_keys(number, stored)
                return None
        elif wanted not in self._keys[number]:
            return None
        index = reader.index(shard)
        try:
            row = index.keys().index(key)
        except ValueError:
            return None
        return row

    def _remember_keys(self, number: int, stored: bytes) -> None:
        with self._lock:
            self._key_bytes += len(stored)
            if self._key_bytes <= _MAX_KEY_BYTES:
                self._keys[number] = stored

    def _find_in_column(self, reader: Reader, shard: int, key: str) -> int | None:
        if "__key__" not in reader.fields(shard) and reader.key(shard, 0) is None:
            return None
        count = reader.count(shard)
        return next((row for row in range(count) if reader.key(shard, row) == key), None)

    def search(self, text: str, after: int, count: int, seconds: float = SEARCH_S) -> Found:
        """Return up to ``count`` samples that meet a condition, from position ``after`` on, within ``seconds``.

        Raises:
            PlanError: The text is not a condition.
        """
        condition = TextExpression(text)
        deadline: float | None = None  # from the first result on, so that a slow server is not left without any
        positions: list[int] = []
        searched, from_index = 0, True
        for run in self._searched_runs(condition, after):
            deadline = deadline or time.monotonic() + seconds
            from_index &= run.indexed
            for row in run.matches:
                positions.append(run.begin + row)
                if len(positions) == count:
                    return Found(positions, positions[-1] + 1, searched + row + 1 - run.start, from_index)
            searched += run.stop - run.start
            if time.monotonic() > deadline:
                return Found(positions, run.begin + run.stop, searched, from_index)
        return Found(positions, None, searched, from_index)

    def _searched_runs(self, condition: TextExpression, after: int) -> Iterator[_SearchedRun]:
        try:
            first = self._shards.index(self.place(after)[:2])
        except IndexError:
            return
        for number in range(first, len(self._shards)):
            if (number - first) % _CONNECTIONS == 0:
                self._prefetch_indexes(number)
            leaf, shard = self._shards[number]
            begin, total, reader = self.begin_of(number), self.count(number), self.readers[leaf]
            low = max(0, after - begin)
            matches = _indexed_matches(reader, shard, condition)
            if matches is not None:
                yield _SearchedRun(begin, low, total, [row for row in matches if row >= low], True)
                continue
            for start in range(low, total, _SEARCH_ROWS):
                rows = range(start, min(start + _SEARCH_ROWS, total))
                samples = _read_fields(reader, shard, rows, condition.fields())
                found = [row for row, sample in zip(rows, samples, strict=True) if _holds(condition, sample)]
                yield _SearchedRun(begin, start, rows.stop, found, False)

    def _prefetch_indexes(self, first: int) -> None:
        """Fetch the indexes of the next shards, several at a time: each takes a round trip to remote storage."""
        numbers = range(first, min(first + _CONNECTIONS, len(self._shards)))
        found = [(self.readers[leaf], shard) for leaf, shard in map(self._shards.__getitem__, numbers)]
        tars = [(reader, shard) for reader, shard in found if isinstance(reader, TarReader)]
        if len(tars) > 1:
            with ThreadPoolExecutor(_CONNECTIONS, "penstock view index") as pool:
                list(pool.map(lambda at: at[0].index(at[1]), tars))

    def close(self) -> None:
        """Stop background reads and close remote shards."""
        self.program.suspend()

    def class_names(self, field: str) -> Sequence[str] | None:
        """Return the names of the classes that a field numbers, if they are known."""
        feature = self.features().get(field)
        if isinstance(feature, ClassLabel):
            return feature.names
        if field == "label" and isinstance(reader := self.readers[0], FilesReader):
            return sorted({os.path.basename(os.path.dirname(name)) for name in reader.names})
        if field.rpartition(".")[2] in ("cls", "label"):
            return next((r.classes for r in self.readers if isinstance(r, TarReader) and r.classes), None)
        return None

    def features(self) -> dict[str, Any]:
        """Return the typed features of the sources' fields."""
        try:
            return self.program.features()
        except PenstockError:
            return {}


@dataclass(frozen=True, slots=True)
class _SearchedSample:
    """The fields of a sample, as a condition sees them."""

    key: str
    shard: str
    fields: dict[str, Any]

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(self.fields)

    def value(self, field: str) -> Any:
        return self.fields.get(field)


def _holds(condition: TextExpression, sample: _SearchedSample | None) -> bool:
    """Return whether a condition holds; one that cannot be evaluated for a sample does not."""
    if sample is None:
        return False
    try:
        return bool(condition.of(sample))
    except DataError:
        return False


def _indexed_matches(reader: Reader, shard: int, condition: TextExpression) -> list[int] | None:
    """Return which samples of a shard meet a condition by its index alone; None if the index lacks the fields."""
    if not isinstance(reader, TarReader):
        return None
    index, fields = reader.index(shard), sorted(condition.fields())
    if not index.values.keys() >= {*fields} or "size(" in condition.text or "has(" in condition.text:
        return None
    columns = [index.values[name].all() for name in fields]
    by_key = "key" in condition.text or "shard" in condition.text
    url, known = reader.url(shard), dict[tuple[Any, ...], bool]()
    matches = []
    for row, key in enumerate(index.keys()):
        values = tuple(column[row] for column in columns)
        label = (key, *values) if by_key else values  # a condition is evaluated once for equal values
        if label not in known:
            sample = {name: value for name, value in zip(fields, values, strict=True) if value is not None}
            known[label] = _holds(condition, _SearchedSample(key, url, sample))
        if known[label]:
            matches.append(row)
    return matches


def _read_fields(reader: Reader, shard: int, rows: range, fields: frozenset[str]) -> list[_SearchedSample | None]:
    numbers = np.arange(rows.start, rows.stop, dtype=np.int64)
    located = reader.locate(np.full(len(rows), shard, np.int64), numbers, Fields(only=fields))
    items, errors = located.read()
    out: list[_SearchedSample | None] = []
    url = reader.url(shard)
    for number, item in enumerate(items):
        if number in errors or not isinstance(item, dict):
            out.append(None)
        else:
            key = item.get("__key__")
            values = {str(name): value for name, value in item.items()}
            out.append(_SearchedSample(key if isinstance(key, str) else "", url, values))
    return out


def _sample_sizes(reader: Reader, shards: I64, rows: I64) -> I64:
    """Return the bytes of samples without fetching them."""
    if not isinstance(reader, TarReader):
        return reader.locate(shards, rows, Fields()).nbytes
    reader.locate(shards, rows, Fields(only=frozenset()))  # opens remote shards together, and announces no bytes
    spans = (field_spans(reader.index(shard), row) for shard, row in zip(shards.tolist(), rows.tolist(), strict=True))
    return np.array([sum(size for _, size in found.values()) for found in spans], np.int64)


def field_spans(index: Index, row: int) -> dict[str, tuple[int, int]]:
    """Return the offset and size of each field of a sample in its archive."""
    first = int(index.first[row])
    names = index.kinds[int(index.kind[row])]
    return {name: (int(index.start[first + n]), int(index.size[first + n])) for n, name in enumerate(names)}


def _key_of(reader: Reader, place: SamplePlace) -> str | None:
    try:
        return reader.key(place.shard, place.row)
    except (PenstockError, IndexError):
        return None


def _nbytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, str | bytes):
        return len(value)
    return int(getattr(value, "nbytes", 64))


def parse_position(text: str, most: int | None) -> int:
    """Return a position that a browser sent.

    Raises:
        PlanError: It is not a position.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 15 or (most is not None and int(text) >= max(1, most)):
        raise PlanError(f"{text[:40]!r} is not a position of this dataset")
    return int(text)
