"""Orders that leave samples out: one side of a split, and everything but a few."""

from __future__ import annotations

import numpy as np

from penstock.errors import PlanError
from penstock.order.hashing import I64, U64, fold, fold_into, permute
from penstock.order.orders import LEFT_OUT, Order, Refs, Spans, counted
from penstock.order.windows import bounds_of, by_label, containing

_SPANS, _SELECTED = 64, 1 << 20  # selections a split keeps: of the shards a shuffle reads at once, 8 MB


class SubsetOrder(Order):
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
        self._inner, self._test, self._ends, self._starts = inner, test, spans.bounds, spans.bounds[:-1]
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

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        at = self._inner.find(leaf, name, index)
        there = np.flatnonzero(at >= 0)
        for s, places in by_label(containing(self._ends, at[there])):
            selected = self._selection(s)
            offset = at[there[places]] - self._starts[s]
            rank = np.searchsorted(selected, offset)
            mine = np.append(selected, -1)[rank] == offset
            at[there[places]] = np.where(mine, rank + self._bounds[s], LEFT_OUT)
        return at

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


class ExcludingOrder(Order):
    """An order without a few of its samples; the others keep their order.

    Args:
        inner: What to leave them out of; the same in every epoch.
        gone: Their positions, in any order.

    Raises:
        PlanError: inner is not counted.
    """

    stable = fixed = True

    def __init__(self, inner: Order, gone: I64) -> None:
        self._inner = counted(inner, "exclude")
        self._gone = np.unique(gone)
        self._kept_before = self._gone - np.arange(len(self._gone))
        self.size = inner.size - len(self._gone)

    def at(self, p: I64) -> Refs:
        return self._inner.at(p + np.searchsorted(self._kept_before, p, "right"))

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        at = self._inner.find(leaf, name, index)
        before = np.searchsorted(self._gone, at)
        absent = np.append(self._gone, -1)[before] == at
        return np.where(at < 0, at, np.where(absent, LEFT_OUT, at - before))

    def _spans(self, stop: int) -> Spans:
        spans = self._inner.spans()
        return Spans(spans.bounds - np.searchsorted(self._gone, spans.bounds), spans.keys)
