"""Orders: pure functions from a position in the epoch to the sample at that position.

Any position of an order can be looked up without visiting the ones before it. Orders store nothing per sample (a sort
stores one integer) and may be used from several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import PlanError
from penstock.lazy import cached_property
from penstock.order import pieces as piece_ops
from penstock.order.hashing import I64, U64, fold, fold_into, permute
from penstock.order.pieces import ENDLESS, Piece
from penstock.order.windows import (
    DEFAULT_WINDOW,
    Group,
    cumulative_bounds,
    indices_by_label,
    shuffled_span_order,
    span_at,
)

UNKNOWN = -1  # the size of an order whose shards are not counted
MAX_CHUNK = 8192
_CACHED_PASSES = 4  # passes of a repeat to keep: a zip may read at two positions, each near the boundary of two passes
NOT_FOUND, EXCLUDED = -1, -2  # returned in place of a position: no such sample; removed by a stage


@dataclass(slots=True)
class Refs:
    """References to samples, as parallel arrays: source, shard of that source, index in the shard, and key.

    ``leaf`` is the number of the source in the plan. ``key`` is the hash of (seed, epoch, leaf, shard name, index);
    all randomness of the sample is derived from it. ``pair`` holds the samples that these are zipped with, chained if
    there are several; a ``leaf`` of -1 in ``pair`` marks a sample without a partner (in a union of zipped and plain
    samples). ``epoch`` is the epoch that each key is hashed from; ``None``: 0.
    """

    leaf: I64
    shard: I64
    index: I64
    key: U64
    pair: Refs | None = None
    epoch: I64 | None = None

    def __len__(self) -> int:
        return len(self.index)

    def take(self, sel: slice | I64) -> Refs:
        """Return the selected references, in the order of ``sel``."""
        pair = None if self.pair is None else self.pair.take(sel)
        epoch = None if self.epoch is None else self.epoch[sel]
        return Refs(self.leaf[sel], self.shard[sel], self.index[sel], self.key[sel], pair, epoch)

    def paired(self, partner: Refs) -> Refs:
        """Return these references with ``partner`` appended to the chain of pairs."""
        pair = partner if self.pair is None else self.pair.paired(partner)
        return Refs(self.leaf, self.shard, self.index, self.key, pair, self.epoch)


@dataclass(slots=True)
class Spans:
    """The units that a shuffle groups: ranges of positions that are read front to back, each with a hash.

    ``bounds`` has one more entry than ``keys`` and runs from 0 to the size of the order. A span may be empty.
    ``bases`` are hashes of the shards' base names, which do not depend on other shards or folders; ``None``: the keys.
    """

    bounds: I64
    keys: U64
    bases: U64 | None = None

    def rekeyed(self, number: int) -> Spans:
        """Return the spans of branch or pass ``number``, with hashes of its own."""
        return replace(self, keys=fold_into(self.keys, number), bases=self.base_keys)

    @property
    def base_keys(self) -> U64:
        """A hash of each span that does not depend on other spans."""
        return self.keys if self.bases is None else self.bases

    def clip(self, start: int, stop: int) -> Spans:
        """Return the spans within ``[start, stop)``, with positions relative to ``start``."""
        if start == 0 and stop >= int(self.bounds[-1]):
            return self
        first = max(0, int(np.searchsorted(self.bounds, start, "right")) - 1)
        last = max(first, int(np.searchsorted(self.bounds, stop, "left")))
        bounds = np.clip(self.bounds[first : last + 1], start, stop) - start
        return Spans(bounds, self.keys[first:last], self.base_keys[first:last])


def doubling_sizes(most: int = MAX_CHUNK) -> Iterator[int]:
    """Yield chunk sizes 1, 1, 2, 4, ...: the first sample touches one shard only, and later chunks amortise the cost.

    The chunks of one size begin at multiples of that size, as groups of rows do that are read together.
    """
    yield 1
    size = 1
    while True:
        yield size
        size = min(2 * size, most)


class Order(ABC):
    """The order of one epoch.

    Attributes:
        size: The number of positions; ``ENDLESS`` if there is no end, ``UNKNOWN`` if the shards are not counted.
        stable: Every epoch contains the same samples (False for, say, the first hundred samples of a shuffle).
        fixed: Every epoch has the same sample at the same position; implies ``stable``.
    """

    size: int
    stable: bool
    fixed: bool

    @abstractmethod
    def at(self, p: I64) -> Refs:
        """Return the samples at the positions ``p``, which are in ``[0, size)`` and may be in any order."""

    @abstractmethod
    def _spans(self, stop: int) -> Spans:
        """Return spans that cover at least ``[0, stop)``."""

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        """Return the position of each sample, given its source, the hash of its shard's name, and its index.

        The result is ``NOT_FOUND`` for a sample that no shard contains, and ``EXCLUDED`` for one that a limit or a
        split removed.

        Raises:
            PlanError: The order changes with the epoch, or contains a sample more than once.
        """
        raise PlanError(
            "exclude() cannot locate samples after a limit, skip, split or zip of a shuffled, mixed or repeated order: "
            "put exclude() before it"
        )

    def spans(self, stop: int | None = None) -> Spans:
        """Return the spans of the positions below ``stop`` (all positions by default).

        Raises:
            PlanError: The order is endless, and ``stop`` does not bound it.
        """
        end = self.size if stop is None else min(stop, self.size)
        if end >= ENDLESS:
            raise PlanError("an endless order cannot be shuffled as a whole: put shuffle() before repeat()")
        return self._spans(end).clip(0, end)

    def walk(self, piece: Piece, sizes: Iterator[int] | None = None) -> Iterator[tuple[I64, Refs, int]]:
        """Yield a piece in chunks of (positions, samples, next position).

        After a chunk, ``[next position, stop, step, 0]`` remains of the piece. ``sizes`` yields the number of
        positions in each chunk; by default chunks start at 1 and double. The caller handles ``sub``.
        """
        start, stop, step, _ = piece
        sizes = sizes or doubling_sizes()
        while start < stop:
            count = min(next(sizes), piece_ops.size([start, stop, step, 0]))
            p = start + step * np.arange(count, dtype=np.int64)
            start += count * step
            yield p, self.at(p), start

    def whole(self) -> list[Piece]:
        """Return the pieces that cover the order: one, or none if the order is empty."""
        return [[0, self.size, 1, 0]] if self.size else []

    def cut(self, pieces: Sequence[Piece], rank: int, world: int, kind: str) -> list[Piece]:
        """Return a rank's share of the pieces.

        Raises:
            PlanError: This order cannot be cut that way.
        """
        return piece_ops.cut(pieces, rank, world, kind)

    def merge(self, pieces: Iterable[Piece], world: int) -> list[Piece]:
        """Merge the remaining pieces of all ranks of a world into one list."""
        return piece_ops.merge(pieces, world)

    def holds(self, piece: Piece) -> bool:
        """Return whether every position of a piece exists in this order."""
        start, _, step, _ = piece
        return start + (piece_ops.size(piece) - 1) * step < self.size


def scatter(length: int, parts: Iterable[tuple[I64, Refs]]) -> Refs:
    """Combine samples that were looked up separately, each part with its indices in the result."""
    parts = list(parts)
    leaf = np.full(length, -1, np.int64)
    shard, index, key = np.zeros(length, np.int64), np.zeros(length, np.int64), np.zeros(length, np.uint64)
    epoch = np.zeros(length, np.int64)
    for indices, refs in parts:
        leaf[indices], shard[indices], index[indices], key[indices] = refs.leaf, refs.shard, refs.index, refs.key
        epoch[indices] = 0 if refs.epoch is None else refs.epoch
    pairs = [(indices, refs.pair) for indices, refs in parts if refs.pair is not None]
    return Refs(leaf, shard, index, key, scatter(length, pairs) if pairs else None, epoch)


def require_counts(order: Order, operation: str) -> Order:
    """Return ``order``, after checking that its shards are counted.

    Raises:
        PlanError: The order's size is unknown; the message names ``operation``.
    """
    if order.size == UNKNOWN:
        raise PlanError(
            f"{operation} needs the number of samples in every shard: run `penstock index` on the shards first"
        )
    return order


class ShardOrder(Order):
    """The shards one after another, each read front to back."""

    stable = fixed = True

    def __init__(
        self, names_hash: U64, counts: I64, leaf: int, seed: int, epoch: int, bases_hash: U64 | None = None
    ) -> None:
        self.leaf, self._bases = leaf, bases_hash
        self._names = np.asarray(names_hash, np.uint64)
        self._bounds = cumulative_bounds(np.asarray(counts, np.int64))
        self._keys = shard_keys(self._names, leaf, seed, epoch)
        self._epoch = epoch
        self.size = int(self._bounds[-1])

    def at(self, p: I64) -> Refs:
        shard = span_at(self._bounds, p)
        return shard_refs(self.leaf, self._keys, shard, p - self._bounds[shard], self._epoch)

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        if not len(self._names):
            return np.full(len(index), NOT_FOUND, np.int64)
        by_name = np.argsort(self._names)
        insertion = np.searchsorted(self._names, name, sorter=by_name)
        shard = by_name[np.minimum(insertion, len(by_name) - 1)]
        found = (leaf == self.leaf) & (self._names[shard] == name) & (index < np.diff(self._bounds)[shard])
        return np.where(found, self._bounds[shard] + index, NOT_FOUND)

    def groups(self) -> I64:
        """Return the position at which each shard begins, followed by the end of the order."""
        return self._bounds

    def _spans(self, stop: int) -> Spans:
        return Spans(self._bounds, self._names, self._bases)


def shard_keys(names: U64, leaf: int, seed: int, epoch: int) -> U64:
    """Return one key per shard; the keys of its samples are derived from it."""
    return fold_into(np.full(len(names), fold(seed, epoch, leaf), np.uint64), names)


def shard_refs(leaf: int, keys: U64, shard: I64, index: I64, epoch: int) -> Refs:
    """Return references to the samples at (shard, index) of one source, whose shards have these keys in an epoch."""
    leaves, epochs = np.full(len(shard), leaf, np.int64), np.full(len(shard), epoch, np.int64)
    return Refs(leaves, shard, index, fold_into(keys[shard], index), None, epochs)


class ShuffledOrder(Order):
    """A shuffle that reads a few shards at a time, front to back, and permutes windows of them.

    Args:
        inner: The order to shuffle.
        seed: The run's seed.
        epoch: The epoch.
        window: The approximate maximum number of samples to permute together; 16384 if None.
        shards: The number of the inner order's spans to read at a time.
        all: Permute the whole order at once instead of by window.

    Raises:
        PlanError: The inner order is endless or not counted, or ``window`` or ``shards`` is below 1.
    """

    fixed = False

    def __init__(
        self, inner: Order, seed: int, epoch: int, *, window: int | None, shards: int = 16, all: bool = False
    ) -> None:
        self.size, self.stable = require_counts(inner, "shuffle over this plan").size, inner.stable
        self._inner, self._seed, self._epoch = inner, seed, epoch
        self._window, self._shards, self._all = DEFAULT_WINDOW if window is None else window, shards, all
        if self._window < 1 or shards < 1:
            raise PlanError(f"shuffle(window={window}, shards={shards}): both must be 1 or more")
        if self.size >= ENDLESS:
            inner.spans()  # raises the PlanError
        if all:
            self._groups = np.array([0, self.size], np.int64)
            return
        spans = inner.spans()
        visited = shuffled_span_order(spans.keys, seed, epoch)
        self._starts = spans.bounds[:-1][visited]
        self._counts = np.diff(spans.bounds)[visited]
        self._groups = np.append(cumulative_bounds(self._counts)[:-1:shards], np.int64(self.size))

    def at(self, p: I64) -> Refs:
        if self._all:
            return self._inner.at(permute(fold(self._seed, self._epoch, 2), self.size, p))
        inner = np.empty_like(p)
        for g, indices in indices_by_label(span_at(self._groups, p)):
            first = g * self._shards
            group = Group(self._counts[first : first + self._shards], self._window, (self._seed, self._epoch, g))
            span, index = group.locate(p[indices] - self._groups[g])
            inner[indices] = self._starts[first + span] + index
        return self._inner.at(inner)

    def groups(self) -> I64:
        """Return the position at which each group of shards begins, followed by the end of the order."""
        return self._groups

    def _spans(self, stop: int) -> Spans:
        numbers = np.arange(len(self._groups) - 1, dtype=np.uint64)
        return Spans(self._groups, fold_into(numbers, fold(self._seed, self._epoch, 4)))


class SlicedOrder(Order):
    """A contiguous range of an order's positions: limit and skip.

    Raises:
        PlanError: The inner order is not counted.
    """

    def __init__(self, inner: Order, start: int, stop: int | None) -> None:
        inner_size = require_counts(inner, "limit or skip").size
        end = inner_size if stop is None else max(0, min(stop, inner_size))
        self._inner, self._start = inner, min(max(0, start), end)
        self.size = ENDLESS if end == ENDLESS else end - self._start
        self.fixed = inner.fixed
        self.stable = inner.fixed or (inner.stable and self.size == inner_size)

    def at(self, p: I64) -> Refs:
        return self._inner.at(p + self._start)

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        positions = self._inner.find(leaf, name, index)
        inside = (positions >= self._start) & (positions < self._start + self.size)
        return np.where(inside, positions - self._start, np.where(positions < 0, positions, EXCLUDED))

    def _spans(self, stop: int) -> Spans:
        end = self._start + stop
        return self._inner.spans(end).clip(self._start, end)


class PermutedOrder(Order):
    """An order whose positions are permuted as a table says: a sort.

    Args:
        inner: The order to permute.
        find: Returns, for every position, the position in ``inner``; called once, when the first sample is looked up.

    Raises:
        PlanError: The inner order is endless or not counted.
    """

    def __init__(self, inner: Order, find: Callable[[], I64]) -> None:
        self.size, self.stable, self.fixed = require_counts(inner, "sort").size, inner.stable, inner.fixed
        if self.size >= ENDLESS:
            raise PlanError("an endless order cannot be sorted: put sort() before repeat(), or give repeat() a number")
        self._inner, self._find = inner, find

    @cached_property
    def _table(self) -> I64:
        return self._find()

    @cached_property
    def _inverse(self) -> I64:
        inverse = np.empty_like(self._table)
        inverse[self._table] = np.arange(self.size)
        return inverse

    def at(self, p: I64) -> Refs:
        return self._inner.at(self._table[p])

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        positions = self._inner.find(leaf, name, index)
        found = positions >= 0
        positions[found] = self._inverse[positions[found]]
        return positions

    def _spans(self, stop: int) -> Spans:
        return self._inner.spans()


class ChainedOrder(Order):
    """Several orders one after another: union.

    Raises:
        PlanError: One of the orders is not counted.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = [require_counts(order, "union") for order in orders]
        ends = [0]
        for order in orders:
            ends.append(min(ends[-1] + order.size, ENDLESS))
        self._bounds, self.size = np.array(ends, np.int64), ends[-1]
        self.stable, self.fixed = all(o.stable for o in orders), all(o.fixed for o in orders)

    def at(self, p: I64) -> Refs:
        part = span_at(self._bounds, p)
        lookups = ((b, indices, p[indices] - self._bounds[b]) for b, indices in indices_by_label(part))
        return scatter(len(p), [(indices, self._orders[b].at(inner)) for b, indices, inner in lookups])

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        out = np.full(len(index), NOT_FOUND, np.int64)
        for start, order in zip(self._bounds[:-1], self._orders, strict=True):
            positions = order.find(leaf, name, index)
            out = np.where(positions == NOT_FOUND, out, np.where(positions >= 0, positions + start, positions))
        return out

    def _spans(self, stop: int) -> Spans:
        starts = self._bounds[:-1].tolist()
        parts = [
            (start, b, order.spans(stop - start))
            for b, (start, order) in enumerate(zip(starts, self._orders, strict=True))
            if start < stop
        ]
        return chain_spans([(start, spans.rekeyed(b)) for start, b, spans in parts])


def chain_spans(parts: Sequence[tuple[int, Spans]]) -> Spans:
    """Concatenate spans, each given with the position at which it begins."""
    bounds = [spans.bounds[1:] + start for start, spans in parts]
    none = np.zeros(0, np.uint64)
    keys = np.concatenate([none, *(spans.keys for _, spans in parts)])
    bases = np.concatenate([none, *(spans.base_keys for _, spans in parts)])
    return Spans(np.concatenate([np.zeros(1, np.int64), *bounds]), keys, bases)


class ZippedOrder(Order):
    """Two orders paired by position; a pair has the identity of its left sample.

    Raises:
        PlanError: ``strict`` is set and the sizes differ, or one of the orders is not counted.
    """

    def __init__(self, left: Order, right: Order, strict: bool) -> None:
        self._left, self._right = require_counts(left, "zip"), require_counts(right, "zip")
        if strict and left.size != right.size:
            raise PlanError(
                f"zip of {_count_text(left.size)} with {_count_text(right.size)}: "
                "make the lengths equal, or use strict=False to stop at the shorter one"
            )
        self.size = min(left.size, right.size)
        self.stable = self.fixed = left.fixed and right.fixed

    def at(self, p: I64) -> Refs:
        return self._left.at(p).paired(self._right.at(p))

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        left = self._left.find(leaf, name, index)
        positions = np.where(left == NOT_FOUND, self._right.find(leaf, name, index), left)
        return np.where(positions < self.size, positions, EXCLUDED)

    def _spans(self, stop: int) -> Spans:
        return self._left.spans(stop)


def _count_text(size: int) -> str:
    return "endless samples" if size >= ENDLESS else f"{size} samples"


class RepeatedOrder(Order):
    """Several passes over an order, one after another.

    Args:
        make: Returns the order of an epoch; it has the same size in every epoch.
        epoch: The epoch of the repetition: its pass ``i`` is ``make(epoch * times + i)``.
        times: The number of passes; None for endless, where pass ``i`` is ``make(epoch + i)``.

    Raises:
        PlanError: The order is not counted.
    """

    def __init__(self, make: Callable[[int], Order], epoch: int, times: int | None) -> None:
        self._make, self._first = make, epoch * (1 if times is None else times)
        self._passes: tuple[tuple[int, Order], ...] = ()
        first_pass = require_counts(self._pass(0), "repeat")
        self._pass_size = first_pass.size
        total = ENDLESS if times is None else self._pass_size * times
        self.size = min(total, ENDLESS) if self._pass_size else 0
        self.stable, self.fixed = first_pass.stable, first_pass.fixed

    def at(self, p: I64) -> Refs:
        number, inner = np.divmod(p, self._pass_size)
        return scatter(len(p), [(indices, self._pass(i).at(inner[indices])) for i, indices in indices_by_label(number)])

    def _pass(self, i: int) -> Order:
        cached = self._passes  # read once: another thread may replace it in the meantime
        for number, order in cached:
            if number == i:
                return order
        order = self._make(self._first + i)
        self._passes = ((i, order), *cached[: _CACHED_PASSES - 1])
        return order

    def _spans(self, stop: int) -> Spans:
        parts = []
        for start in range(0, stop, max(1, self._pass_size)):
            i = start // self._pass_size
            parts.append((start, self._pass(i).spans(stop - start).rekeyed(i)))
        return chain_spans(parts)
