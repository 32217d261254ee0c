"""Orders: pure functions from a position in the epoch to the sample that stands there.

Every order can be asked for any position without having seen the ones before it, keeps nothing per sample,
and may be asked from several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import PlanError
from penstock.order import pieces as runs_of
from penstock.order.hashing import I64, U64, fold, fold_into, permute
from penstock.order.pieces import ENDLESS, Piece
from penstock.order.windows import DEFAULT_WINDOW, Group, bounds_of, by_label, containing, shuffled_spans

UNKNOWN = -1  # the size of an order whose shards have not been counted
FIRST_CHUNK, LARGEST_CHUNK = 1, 8192  # the first sample touches its own shard only, the rest cost little
_PASSES = 4  # passes of a repeat kept: neighbours, also when a zip asks for two places at once
_SPANS, _SELECTED = 64, 1 << 20  # selections a split keeps: of the shards a shuffle reads at once, 8 MB


@dataclass(slots=True)
class Refs:
    """Where samples lie, as parallel arrays: branch, shard of that branch, index in the shard, and identity.

    ``key`` is what all randomness of the sample comes from: (seed, epoch, branch, shard name, index), hashed.
    ``pair`` holds the samples these are zipped with, in a chain if there are several; a ``leaf`` of -1 there
    says that this sample has no partner (a union of zipped and plain samples).
    """

    leaf: I64
    shard: I64
    index: I64
    key: U64
    pair: Refs | None = None

    def __len__(self) -> int:
        return len(self.index)

    def take(self, sel: slice | I64) -> Refs:
        """Select some of them, in the order of ``sel``."""
        pair = None if self.pair is None else self.pair.take(sel)
        return Refs(self.leaf[sel], self.shard[sel], self.index[sel], self.key[sel], pair)

    def paired(self, partner: Refs) -> Refs:
        """Append a partner to the end of the chain."""
        pair = partner if self.pair is None else self.pair.paired(partner)
        return Refs(self.leaf, self.shard, self.index, self.key, pair)


@dataclass(slots=True)
class Spans:
    """What a shuffle groups: stretches that are read front to back, with a hash each.

    ``bounds`` has one entry more than ``keys`` and runs from 0 to the size; a stretch may be empty.
    """

    bounds: I64
    keys: U64

    def clip(self, start: int, stop: int) -> Spans:
        """Keep what lies in ``[start, stop)``, counted from ``start``."""
        if start == 0 and stop >= int(self.bounds[-1]):
            return self
        first = max(0, int(np.searchsorted(self.bounds, start, "right")) - 1)
        last = max(first, int(np.searchsorted(self.bounds, stop, "left")))
        return Spans(np.clip(self.bounds[first : last + 1], start, stop) - start, self.keys[first:last])


class Order(ABC):
    """The order of one epoch.

    Attributes:
        size: How many positions there are; ``ENDLESS`` without end, ``UNKNOWN`` if shards are not counted.
        stable: Every epoch holds the same samples (False for the first hundred of a shuffle).
        fixed: Every epoch has the same sample at the same position; implies ``stable``.
    """

    size: int
    stable: bool
    fixed: bool

    @abstractmethod
    def at(self, p: I64) -> Refs:
        """Say which samples stand at the positions ``p``, each in ``[0, size)``, in any order."""

    @abstractmethod
    def _spans(self, stop: int) -> Spans:
        """The spans that cover ``[0, stop)`` at least."""

    def spans(self, stop: int | None = None) -> Spans:
        """Say which stretches are read front to back, of the positions below ``stop``.

        Raises:
            PlanError: the order has no end, and ``stop`` gives none.
        """
        end = self.size if stop is None else min(stop, self.size)
        if end >= ENDLESS:
            raise PlanError("an endless order cannot be shuffled as a whole: put shuffle() before repeat()")
        return self._spans(end).clip(0, end)

    def walk(self, piece: Piece) -> Iterator[tuple[I64, Refs, int]]:
        """Go through a piece in chunks of (positions, samples, the position that comes after).

        ``[after, stop, step, 0]`` is what is left when a chunk is used up. The first chunk is one position and the
        next ones double, up to 8192. ``sub`` is left to the caller.
        """
        start, stop, step, _ = piece
        chunk = FIRST_CHUNK
        while start < stop:
            count = min(chunk, runs_of.size([start, stop, step, 0]))
            p = start + step * np.arange(count, dtype=np.int64)
            start += count * step
            yield p, self.at(p), start
            chunk = min(2 * chunk, LARGEST_CHUNK)

    def whole(self) -> list[Piece]:
        """Give the pieces of everything: one, or none when the order is empty."""
        return [[0, self.size, 1, 0]] if self.size else []

    def cut(self, pieces: Sequence[Piece], rank: int, world: int, how: str) -> list[Piece]:
        """Give a rank its share of the pieces.

        Raises:
            PlanError: the cut cannot be made of this order.
        """
        return runs_of.cut(pieces, rank, world, how)

    def merge(self, pieces: Iterable[Piece], world: int) -> list[Piece]:
        """Put together what the ranks of a world have left."""
        return runs_of.merge(pieces, world)

    def holds(self, piece: Piece) -> bool:
        """Say whether every position of a piece is one of this order's."""
        start, _, step, _ = piece
        return start + (runs_of.size(piece) - 1) * step < self.size


def scatter(length: int, parts: Iterable[tuple[I64, Refs]]) -> Refs:
    """Put samples that were looked up apart back to their places."""
    parts = list(parts)
    leaf = np.full(length, -1, np.int64)
    shard, index, key = np.zeros(length, np.int64), np.zeros(length, np.int64), np.zeros(length, np.uint64)
    for places, refs in parts:
        leaf[places], shard[places], index[places], key[places] = refs.leaf, refs.shard, refs.index, refs.key
    pairs = [(places, refs.pair) for places, refs in parts if refs.pair is not None]
    return Refs(leaf, shard, index, key, scatter(length, pairs) if pairs else None)


def counted(order: Order, what: str) -> Order:
    """Refuse an order of uncounted shards where counts are needed.

    Raises:
        PlanError: the order's size is unknown.
    """
    if order.size == UNKNOWN:
        raise PlanError(f"{what} needs the number of samples in every shard: run `penstock index` on the shards first")
    return order


class Shards(Order):
    """The shards one after the other, each front to back."""

    stable = fixed = True

    def __init__(self, names_hash: U64, counts: I64, leaf: int, seed: int, epoch: int) -> None:
        self.leaf = leaf
        self._names = np.asarray(names_hash, np.uint64)
        self._bounds = bounds_of(np.asarray(counts, np.int64))
        self._keys = shard_keys(self._names, leaf, seed, epoch)
        self.size = int(self._bounds[-1])

    def at(self, p: I64) -> Refs:
        shard = containing(self._bounds, p)
        return shard_refs(self.leaf, self._keys, shard, p - self._bounds[shard])

    def groups(self) -> I64:
        """Where each shard begins, and the end."""
        return self._bounds

    def _spans(self, stop: int) -> Spans:
        return Spans(self._bounds, self._names)


def shard_keys(names: U64, leaf: int, seed: int, epoch: int) -> U64:
    """Derive every shard's part of its samples' identity."""
    return fold_into(np.full(len(names), fold(seed, epoch, leaf), np.uint64), names)


def shard_refs(leaf: int, keys: U64, shard: I64, index: I64) -> Refs:
    """Name the samples at (shard, index) of a branch."""
    return Refs(np.full(len(shard), leaf, np.int64), shard, index, fold_into(keys[shard], index))


class Shuffled(Order):
    """A shuffle that reads a few shards at once, front to back, and permutes windows of them; or all at once.

    Args:
        inner: What to shuffle.
        seed: The run's seed.
        epoch: The epoch.
        window: How many samples to permute at once, at most about; 16384 if None.
        shards: How many of inner's spans to read at once.
        all: One permutation of everything.

    Raises:
        PlanError: inner has no end or is not counted, or window or shards is below 1.
    """

    fixed = False

    def __init__(
        self, inner: Order, seed: int, epoch: int, *, window: int | None, shards: int = 16, all: bool = False
    ) -> None:
        self.size, self.stable = counted(inner, "shuffle over this plan").size, inner.stable
        self._inner, self._seed, self._epoch = inner, seed, epoch
        self._window, self._shards, self._all = DEFAULT_WINDOW if window is None else window, shards, all
        if self._window < 1 or shards < 1:
            raise PlanError(f"shuffle(window={window}, shards={shards}): both must be 1 or more")
        if self.size >= ENDLESS:
            inner.spans()  # refuses
        if all:
            self._groups = np.array([0, self.size], np.int64)
            return
        spans = inner.spans()
        taken = shuffled_spans(spans.keys, seed, epoch)
        self._starts = spans.bounds[:-1][taken]
        self._counts = np.diff(spans.bounds)[taken]
        self._groups = np.append(bounds_of(self._counts)[:-1:shards], np.int64(self.size))

    def at(self, p: I64) -> Refs:
        if self._all:
            return self._inner.at(permute(fold(self._seed, self._epoch, 2), self.size, p))
        inner = np.empty_like(p)
        for g, places in by_label(containing(self._groups, p)):
            first = g * self._shards
            group = Group(self._counts[first : first + self._shards], self._window, (self._seed, self._epoch, g))
            span, index = group.locate(p[places] - self._groups[g])
            inner[places] = self._starts[first + span] + index
        return self._inner.at(inner)

    def groups(self) -> I64:
        """Where each group of shards begins, and the end."""
        return self._groups

    def _spans(self, stop: int) -> Spans:
        numbers = np.arange(len(self._groups) - 1, dtype=np.uint64)
        return Spans(self._groups, fold_into(numbers, fold(self._seed, self._epoch, 4)))


class Sliced(Order):
    """Some positions of an order: limit and skip.

    Raises:
        PlanError: inner is not counted.
    """

    def __init__(self, inner: Order, start: int, stop: int | None) -> None:
        whole = counted(inner, "limit or skip").size
        end = whole if stop is None else max(0, min(stop, whole))
        self._inner, self._start = inner, min(max(0, start), end)
        self.size = ENDLESS if end == ENDLESS else end - self._start
        self.fixed = inner.fixed
        self.stable = inner.fixed or (inner.stable and self.size == whole)

    def at(self, p: I64) -> Refs:
        return self._inner.at(p + self._start)

    def _spans(self, stop: int) -> Spans:
        end = self._start + stop
        return self._inner.spans(end).clip(self._start, end)


class Chained(Order):
    """Orders one after the other: union.

    Raises:
        PlanError: one of them is not counted.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = [counted(order, "union") for order in orders]
        ends = [0]
        for order in orders:
            ends.append(min(ends[-1] + order.size, ENDLESS))
        self._bounds, self.size = np.array(ends, np.int64), ends[-1]
        self.stable, self.fixed = all(o.stable for o in orders), all(o.fixed for o in orders)

    def at(self, p: I64) -> Refs:
        which = containing(self._bounds, p)
        found = ((b, places, p[places] - self._bounds[b]) for b, places in by_label(which))
        return scatter(len(p), [(places, self._orders[b].at(inner)) for b, places, inner in found])

    def _spans(self, stop: int) -> Spans:
        starts = self._bounds[:-1].tolist()
        parts = [
            (start, b, order.spans(stop - start))
            for b, (start, order) in enumerate(zip(starts, self._orders, strict=True))
            if start < stop
        ]
        return chain_spans([(start, Spans(s.bounds, fold_into(s.keys, b))) for start, b, s in parts])


def chain_spans(parts: Sequence[tuple[int, Spans]]) -> Spans:
    """Put spans that begin at the given positions one after the other."""
    bounds = [spans.bounds[1:] + start for start, spans in parts]
    keys = [spans.keys for _, spans in parts]
    return Spans(np.concatenate([np.zeros(1, np.int64), *bounds]), np.concatenate([np.zeros(0, np.uint64), *keys]))


class Zipped(Order):
    """Pairs by position; the identity is the left one's.

    Raises:
        PlanError: strict, and the sizes differ; or one of them is not counted.
    """

    def __init__(self, left: Order, right: Order, strict: bool) -> None:
        self._left, self._right = counted(left, "zip"), counted(right, "zip")
        if strict and left.size != right.size:
            raise PlanError(
                f"zip of {_samples(left.size)} with {_samples(right.size)}: "
                "give both the same length, or use strict=False to stop at the shorter"
            )
        self.size = min(left.size, right.size)
        self.stable = self.fixed = left.fixed and right.fixed

    def at(self, p: I64) -> Refs:
        return self._left.at(p).paired(self._right.at(p))

    def _spans(self, stop: int) -> Spans:
        return self._left.spans(stop)


def _samples(size: int) -> str:
    return "endless samples" if size >= ENDLESS else f"{size} samples"


class Repeated(Order):
    """The passes of an order, one after the other.

    Args:
        make: Gives the order of an epoch; all its orders have the same size.
        epoch: The epoch of the repeated whole: pass ``i`` of it is ``make(epoch * times + i)``.
        times: How many passes; None for no end, where pass ``i`` is ``make(epoch + i)``.

    Raises:
        PlanError: the order is not counted.
    """

    def __init__(self, make: Callable[[int], Order], epoch: int, times: int | None) -> None:
        self._make, self._first = make, epoch * (1 if times is None else times)
        self._passes: tuple[tuple[int, Order], ...] = ()
        one = counted(self._pass(0), "repeat")
        self._each = one.size
        wanted = ENDLESS if times is None else self._each * times
        self.size = min(wanted, ENDLESS) if self._each else 0
        self.stable, self.fixed = one.stable, one.fixed

    def at(self, p: I64) -> Refs:
        number, inner = np.divmod(p, self._each)
        return scatter(len(p), [(places, self._pass(i).at(inner[places])) for i, places in by_label(number)])

    def _pass(self, i: int) -> Order:
        kept = self._passes  # read once: another thread may replace it meanwhile
        for number, order in kept:
            if number == i:
                return order
        order = self._make(self._first + i)
        self._passes = ((i, order), *kept[: _PASSES - 1])
        return order

    def _spans(self, stop: int) -> Spans:
        parts = []
        for start in range(0, stop, max(1, self._each)):
            i = start // self._each
            spans = self._pass(i).spans(stop - start)
            parts.append((start, Spans(spans.bounds, fold_into(spans.keys, i))))
        return chain_spans(parts)


class Chosen(Order):
    """One part of a train-test split: of each span, the first of a keyed permutation are test.

    A part keeps the order of the whole. The share is exact where it is a whole number of a span's samples and
    rounded by the span's hash elsewhere, so that many tiny shards give the share too. New shards move no
    sample.

    Raises:
        PlanError: inner differs from epoch to epoch, is endless or is not counted.
    """

    stable = fixed = True

    def __init__(self, inner: Order, share: float, seed: int, test: bool) -> None:
        if not counted(inner, "train_test_split").fixed:
            raise PlanError(
                "train_test_split of an order that changes with the epoch: split first, then shuffle or mix"
            )
        spans = inner.spans()
        self._inner, self._test, self._starts = inner, test, spans.bounds[:-1]
        self._counts, self._keys = np.diff(spans.bounds), spans.keys
        self._secrets = fold_into(spans.keys, fold(seed, 7))
        chance = (fold_into(self._secrets, 1) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        tests = np.floor(np.round(self._counts * share, 9) + chance).astype(np.int64)
        self._tests = np.clip(tests, 0, self._counts)
        self._bounds = bounds_of(self._tests if test else self._counts - self._tests)
        self.size = int(self._bounds[-1])
        self._kept: tuple[tuple[int, I64], ...] = ()

    def at(self, p: I64) -> Refs:
        inner = np.empty_like(p)
        for s, places in by_label(containing(self._bounds, p)):
            inner[places] = self._selection(s)[p[places] - self._bounds[s]] + self._starts[s]
        return self._inner.at(inner)

    def _selection(self, s: int) -> I64:
        kept = self._kept  # read once: another thread may replace it meanwhile
        for span, selected in kept:
            if span == s:
                return selected
        selected = self._select(s)
        room = _SELECTED - len(selected)
        recent: list[tuple[int, I64]] = []
        for span, other in kept[: _SPANS - 1]:
            room -= len(other)
            if room < 0:
                break
            recent.append((span, other))
        self._kept = ((s, selected), *recent)
        return selected

    def _select(self, s: int) -> I64:
        count, tests = int(self._counts[s]), int(self._tests[s])
        taken = np.zeros(count, np.bool_)
        taken[permute(int(self._secrets[s]), count, np.arange(tests, dtype=np.int64))] = True
        return np.flatnonzero(taken if self._test else ~taken)

    def _spans(self, stop: int) -> Spans:
        return Spans(self._bounds, self._keys)
