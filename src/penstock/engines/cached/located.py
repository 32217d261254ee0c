"""Samples whose results may be cached: located in the cache where they are, and in their source where they are not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from penstock.engines.cached.record_store import Entries, record_store
from penstock.errors import DataError, PlanError
from penstock.order import I64, U64, Refs, fold_into
from penstock.order.orders import shard_keys
from penstock.plan import Fields, Located, Reader

_INDEX_BITS = 40  # of a record's number; the others are the number of the shard


class Miss(NamedTuple):
    """A sample on its way through the stages whose results are cached, or one of the outputs that they made of it.

    Attributes:
        value: The sample, or the output.
        leaf: The number of its source.
        store: The folder of the record to write.
        number: The number of that record.
        key: What its random numbers are derived from.
        path: Its number among the outputs of each flat_map so far.
        share: Its share of the sample: the shares of all outputs add up to 1, unless one of them failed.
    """

    value: Any
    leaf: int
    store: str
    number: int
    key: int
    path: tuple[int, ...] = ()
    share: Fraction | int = 1


class Gone(NamedTuple):
    """A sample or output that a stage dropped; the attributes are those of ``Miss``."""

    leaf: int
    store: str
    number: int
    share: Fraction | int = 1


class Hit(NamedTuple):
    """The record of a sample, which is decoded after the stages that it passes by."""

    leaf: int
    record: Any


@dataclass(frozen=True, slots=True)
class LeafCache:
    """Where the cached results of one source are; it can be pickled.

    Attributes:
        folder: The folder of its records.
        leaf: The number of the source.
        seed: The seed of its random numbers.
        variants: How many variants of random stages are kept: epoch e has variant e modulo this. None: one for each
            epoch. 0: no stage draws random numbers.
        names: The hashes of the names of its shards.
        begun: When the run began, by this machine's monotonic clock: records that were added before are found.
    """

    folder: str
    leaf: int
    seed: int
    variants: int | None
    names: U64
    begun: float = 0

    def locate(self, refs: Refs, reader: Reader, fields: Fields) -> list[tuple[I64, Located]]:
        """Return the samples in the cache and those in the source, each with their indices in ``refs``.

        Raises:
            PlanError: The source has more shards or samples than records can be numbered.
        """
        if not len(refs):
            return []
        if max(int(refs.index.max()) >> _INDEX_BITS, int(refs.shard.max()) >> (64 - _INDEX_BITS)):
            raise PlanError("the source has too many shards or samples for cache()")
        variant = np.zeros(len(refs), np.int64)
        if self.variants != 0 and refs.epoch is not None:
            variant = refs.epoch if self.variants is None else refs.epoch % self.variants
        parts: list[tuple[I64, Located]] = []
        for number in np.unique(variant).tolist():
            rows = np.flatnonzero(variant == number)
            parts += self._locate_variant(int(number), rows, refs, reader, fields)
        return parts

    def _locate_variant(
        self, variant: int, rows: I64, refs: Refs, reader: Reader, fields: Fields
    ) -> list[tuple[I64, Located]]:
        store = os.path.join(self.folder, f"{variant:04d}")
        shard, index = refs.shard[rows], refs.index[rows]
        keys = refs.key[rows]
        if self.variants != 0:
            keys = fold_into(shard_keys(self.names, self.leaf, self.seed, variant)[shard], index)
        samples = _Samples(self.leaf, store, shard, index, keys, reader, fields)
        entries = record_store(store).find(samples.numbers(), self.begun)
        absent = entries.file < 0
        out: list[tuple[I64, Located]] = []
        if (hits := np.flatnonzero(~absent)).size:
            out.append((rows[hits], LocatedHits(samples.take(hits), entries.take(hits))))
        if (misses := np.flatnonzero(absent)).size:
            missing = samples.take(misses)
            out.append((rows[misses], LocatedMisses(missing, missing.locate())))
        return out


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples of one source and one variant."""

    leaf: int
    store: str
    shard: I64
    index: I64
    keys: U64
    reader: Reader
    fields: Fields

    def take(self, sel: Any) -> _Samples:
        taken = self.shard[sel], self.index[sel], self.keys[sel]
        return _Samples(self.leaf, self.store, *taken, self.reader, self.fields)

    def numbers(self) -> U64:
        return self.shard.astype(np.uint64) << np.uint64(_INDEX_BITS) | self.index.astype(np.uint64)

    def locate(self) -> Located:
        return self.reader.locate(self.shard, self.index, self.fields)


@dataclass(frozen=True, slots=True)
class LocatedMisses:
    """Samples that are read from their source."""

    samples: _Samples
    inner: Located

    @property
    def nbytes(self) -> I64:
        return self.inner.nbytes

    def take(self, sel: slice) -> LocatedMisses:
        return LocatedMisses(self.samples.take(sel), self.inner.take(sel))

    def read(self) -> tuple[list[Any], dict[int, DataError | None]]:
        items, errors = self.inner.read()
        return self.wrapped(items, errors)

    def wrapped(
        self, items: Any, errors: Mapping[int, DataError | None]
    ) -> tuple[list[Any], dict[int, DataError | None]]:
        """Return samples as they were read as misses; one that a condition rejects is gone, but has not failed."""
        samples = self.samples
        out: list[Any] = []
        rows = zip(items, samples.numbers().tolist(), samples.keys.tolist(), strict=True)
        for row, (item, number, key) in enumerate(rows):
            if row in errors and errors[row] is None:
                out.append(Gone(samples.leaf, samples.store, number))
            else:
                out.append(Miss(item, samples.leaf, samples.store, number, key))
        return out, {row: error for row, error in errors.items() if error is not None}


@dataclass(frozen=True, slots=True)
class LocatedHits:
    """Samples that are in the cache; one whose record is damaged is read from its source."""

    samples: _Samples
    entries: Entries

    @property
    def nbytes(self) -> I64:
        return self.entries.nbytes

    def take(self, sel: slice) -> LocatedHits:
        return LocatedHits(self.samples.take(sel), self.entries.take(sel))

    def read(self) -> tuple[list[Any], dict[int, DataError | None]]:
        store = record_store(self.samples.store)
        columns = (column.tolist() for column in self.entries)
        items: list[Any] = []
        errors: dict[int, DataError | None] = {}
        for row, entry in enumerate(zip(*columns, strict=True)):
            record = store.read(*entry)
            if record is not None:
                items.append(Hit(self.samples.leaf, record))
                continue
            one = self.samples.take(slice(row, row + 1))
            found, failed = LocatedMisses(one, one.locate()).read()
            items += found
            if 0 in failed:
                errors[row] = failed[0]
        return items, errors
