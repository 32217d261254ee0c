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
LARGEST_CHUNK = 8192
_PASSES = 4  # passes of a repeat kept: neighbours, also when a zip asks for two places at once
UNFOUND, LEFT_OUT = -1, -2  # instead of the position of a sample: there is none such; a stage left it out


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


def doubling() -> Iterator[int]:
    """Sizes of chunks: the first sample touches its own shard only, the rest cost little."""
    size = 1
    while True:
        yield size
        size = min(2 * size, LARGEST_CHUNK)


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

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        """Say at which position each of these samples stands, by branch, hash of the shard's name, and index.

        ``UNFOUND`` stands for one that is in no shard, ``LEFT_OUT`` for one that a limit or split left out.

        Raises:
            PlanError: the order changes with the epoch, or holds a sample more than once.
        """
        raise PlanError(
            "exclude() cannot find its samples behind a limit, skip, split or zip of an order that is shuffled, mixed "
            "or repeated: put exclude() before that"
        )

    def spans(self, stop: int | None = None) -> Spans:
        """Say which stretches are read front to back, of the positions below ``stop``.

        Raises:
            PlanError: the order has no end, and ``stop`` gives none.
        """
        end = self.size if stop is None else min(stop, self.size)
        if end >= ENDLESS:
            raise PlanError("an endless order cannot be shuffled as a whole: put shuffle() before repeat()")
        return self._spans(end).clip(0, end)

    def walk(self, piece: Piece, sizes: Iterator[int] | None = None) -> Iterator[tuple[I64, Refs, int]]:
        """Go through a piece in chunks of (positions, samples, the position that comes after).

        ``[after, stop, step, 0]`` is what is left when a chunk is used up. ``sizes`` says how many positions a
        chunk has: the first one 1, later ones more, where nobody says. ``sub`` is left to the caller.
        """
        start, stop, step, _ = piece
        sizes = sizes or doubling()
        while start < stop:
            count = min(next(sizes), runs_of.size([start, stop, step, 0]))
            p = start + step * np.arange(count, dtype=np.int64)
            start += count * step
            yield p, self.at(p), start

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


class ShardOrder(Order):
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

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        if not len(self._names):
            return np.full(len(index), UNFOUND, np.int64)
        by_name = np.argsort(self._names)
        place = np.searchsorted(self._names, name, sorter=by_name)
        shard = by_name[np.minimum(place, len(by_name) - 1)]
        there = (leaf == self.leaf) & (self._names[shard] == name) & (index < np.diff(self._bounds)[shard])
        return np.where(there, self._bounds[shard] + index, UNFOUND)

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


class ShuffledOrder(Order):
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


class SlicedOrder(Order):
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

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        at = self._inner.find(leaf, name, index)
        inside = (at >= self._start) & (at < self._start + self.size)
        return np.where(inside, at - self._start, np.where(at < 0, at, LEFT_OUT))

    def _spans(self, stop: int) -> Spans:
        end = self._start + stop
        return self._inner.spans(end).clip(self._start, end)


class ChainedOrder(Order):
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

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        out = np.full(len(index), UNFOUND, np.int64)
        for start, order in zip(self._bounds[:-1], self._orders, strict=True):
            at = order.find(leaf, name, index)
            out = np.where(at == UNFOUND, out, np.where(at >= 0, at + start, at))
        return out

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


class ZippedOrder(Order):
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

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        left = self._left.find(leaf, name, index)
        at = np.where(left == UNFOUND, self._right.find(leaf, name, index), left)
        return np.where(at < self.size, at, LEFT_OUT)

    def _spans(self, stop: int) -> Spans:
        return self._left.spans(stop)


def _samples(size: int) -> str:
    return "endless samples" if size >= ENDLESS else f"{size} samples"


class RepeatedOrder(Order):
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
