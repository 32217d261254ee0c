"""Synthetic shards whose samples are numbers: a cheap source, with samples that fail on request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import DataError
from penstock.order import I64
from penstock.plan import Fields, Plan, Reader, Source


@dataclass(frozen=True, slots=True)
class Numbers(Source):
    """A source of synthetic shards: sample i of shard s is ``{"shard": s, "index": i, "x": n}``, n counted over all.

    Attributes:
        counts: The number of samples of each shard.
        hidden: Whether counts are unknown until a shard is opened, as without an index.
        bad: The numbers of samples that cannot be read.
        name: The prefix of shard names.
    """

    counts: tuple[int, ...]
    hidden: bool = False
    bad: frozenset[int] = frozenset()
    name: str = "shard"

    def open(self) -> NumbersReader:
        return NumbersReader(self)

    def describe(self) -> str:
        return f"numbers({list(self.counts)})"


class NumbersReader(Reader):
    """The reader of :class:`Numbers`."""

    def __init__(self, source: Numbers) -> None:
        self._source = source
        self._starts = np.concatenate([[0], np.cumsum(source.counts)]).astype(np.int64)
        self.names = [f"{source.name}-{i:04d}" for i in range(len(source.counts))]

    def counts(self, scan: bool) -> I64 | None:
        return None if self._source.hidden else np.array(self._source.counts, np.int64)

    def count(self, shard: int) -> int:
        return self._source.counts[shard]

    def sizes(self) -> list[int]:
        return [1000 + count for count in self._source.counts]  # shards of different counts differ in size too

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedNumbers:
        return LocatedNumbers(self._source, shard, index, self._starts, np.full(len(index), 100, np.int64))

    def key(self, shard: int, index: int) -> str | None:
        return str(int(self._starts[shard]) + index)

    def url(self, shard: int) -> str:
        return self.names[shard]


@dataclass(slots=True)
class LocatedNumbers:
    """Samples of :class:`Numbers` that have been located but not read."""

    source: Numbers
    shard: I64
    index: I64
    starts: I64
    nbytes: I64

    def take(self, sel: slice) -> LocatedNumbers:
        return LocatedNumbers(self.source, self.shard[sel], self.index[sel], self.starts, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        numbers = (self.starts[self.shard] + self.index).tolist()
        rows = zip(self.shard.tolist(), self.index.tolist(), numbers, strict=True)
        items = [{"shard": s, "index": i, "x": x} for s, i, x in rows]
        errors = {
            i: DataError("made to fail", f"{self.source.name}-{int(self.shard[i]):04d}", str(x))
            for i, x in enumerate(numbers)
            if x in self.source.bad
        }
        return items, errors


def numbers(counts: Iterable[int], *, hidden: bool = False, bad: Iterable[int] = (), name: str = "shard") -> Dataset:
    """Return a dataset of synthetic shards; see :class:`Numbers`."""
    return Dataset(Plan(Numbers(tuple(counts), hidden, frozenset(bad), name)))
