"""Made-up shards whose samples are numbers: a source that costs nothing and fails on request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import DataError
from penstock.order import I64
from penstock.plan import Fields, Plan, Resources


@dataclass(frozen=True, slots=True)
class Numbers:
    """A source of made-up shards: sample i of shard s is ``{"shard": s, "index": i, "x": its number over all}``.

    ``hidden`` keeps the counts from being known before a shard is opened; ``bad`` are numbers that cannot be read.
    """

    counts: tuple[int, ...]
    hidden: bool = False
    bad: frozenset[int] = frozenset()
    name: str = "shard"

    random_access = False

    @property
    def resources(self) -> Resources | None:
        """Reading costs nothing."""
        return None

    def open(self) -> NumbersReader:
        """Nothing to open."""
        return NumbersReader(self)

    def describe(self) -> str:
        """The call that made it."""
        return f"numbers({list(self.counts)})"


class NumbersReader:
    """Makes the samples."""

    def __init__(self, source: Numbers) -> None:
        self._source = source
        self._starts = np.concatenate([[0], np.cumsum(source.counts)]).astype(np.int64)
        self.names = [f"{source.name}-{i:04d}" for i in range(len(source.counts))]

    def counts(self, scan: bool) -> I64 | None:
        """The counts, unless they are hidden."""
        return None if self._source.hidden else np.array(self._source.counts, np.int64)

    def count(self, shard: int) -> int:
        """The count of one shard."""
        return self._source.counts[shard]

    def sizes(self) -> list[int]:
        """A size that tells shards apart."""
        return [1000 + count for count in self._source.counts]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedNumbers:
        """Remember which."""
        return LocatedNumbers(self._source, shard, index, self._starts, np.full(len(index), 100, np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """The sample's number."""
        return str(int(self._starts[shard]) + index)

    def url(self, shard: int) -> str:
        """The shard's name."""
        return self.names[shard]


@dataclass(slots=True)
class LocatedNumbers:
    """Numbers that will be made."""

    source: Numbers
    shard: I64
    index: I64
    starts: I64
    nbytes: I64

    def take(self, sel: slice) -> LocatedNumbers:
        """Some of them."""
        return LocatedNumbers(self.source, self.shard[sel], self.index[sel], self.starts, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Make them."""
        numbers = (self.starts[self.shard] + self.index).tolist()
        made = zip(self.shard.tolist(), self.index.tolist(), numbers, strict=True)
        items = [{"shard": s, "index": i, "x": x} for s, i, x in made]
        bad = {
            at: DataError("made to fail", f"{self.source.name}-{int(self.shard[at]):04d}", str(x))
            for at, x in enumerate(numbers)
            if x in self.source.bad
        }
        return items, bad


def numbers(counts: Iterable[int], *, hidden: bool = False, bad: Iterable[int] = (), name: str = "shard") -> Dataset:
    """A dataset of made-up shards with these counts."""
    return Dataset(Plan(Numbers(tuple(counts), hidden, frozenset(bad), name)))
