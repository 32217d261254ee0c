"""Windows: how a shuffle arranges a few stretches that are read together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.order.hashing import I64, U64, fold, fold_into, permute

DEFAULT_WINDOW = 16384


def bounds_of(counts: I64) -> I64:
    """Turn counts into the positions where each begins, and the end."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def containing(bounds: I64, p: I64) -> I64:
    """Say which stretch each position is in; empty stretches hold none."""
    return np.searchsorted(bounds, p, "right") - 1


def by_label(labels: I64) -> Iterator[tuple[int, I64]]:
    """Go through the distinct labels, each with the places where it stands."""
    if not labels.size:
        return
    places = np.argsort(labels, kind="stable")
    ranked = labels[places]
    edges = [0, *(np.flatnonzero(ranked[1:] != ranked[:-1]) + 1).tolist(), len(ranked)]
    for begin, end in pairwise(edges):
        yield int(ranked[begin]), places[begin:end]


def shuffled_spans(keys: U64, seed: int, epoch: int) -> I64:
    """The order in which a shuffle takes spans: by a keyed hash, so that it needs no counts."""
    return np.argsort(fold_into(keys, fold(seed, epoch, 1)), kind="stable")


@dataclass(frozen=True, slots=True)
class Group:
    """Some spans that are read together; window ``j`` is the ``j``-th slice of each of them, permuted."""

    counts: I64
    window: int
    key: tuple[int, int, int]  # seed, epoch, number of the group

    def locate(self, offsets: I64) -> tuple[I64, I64]:
        """Say which span of the group, and what index in it, stands at each offset of the group's order."""
        total = int(self.counts.sum())
        slices = max(1, -(-total // self.window))
        span, index = np.empty_like(offsets), np.empty_like(offsets)
        for j, places in by_label(self._windows(offsets, total, slices)):
            begin, end = self._edges(j, slices), self._edges(j + 1, slices)
            bounds = bounds_of(end - begin)
            seed, epoch, group = self.key
            q = permute(fold(seed, epoch, 2, group, j), int(bounds[-1]), offsets[places] - int(begin.sum()))
            which = containing(bounds, q)
            span[places], index[places] = which, q - bounds[which] + begin[which]
        return span, index

    def _edges(self, j: int, slices: int) -> I64:
        """Where slice ``j`` of each span begins: counts * j // slices, without leaving 63 bits."""
        edges: I64 = self.counts // slices * j + self.counts % slices * j // slices
        return edges

    def _windows(self, offsets: I64, total: int, slices: int) -> I64:
        """Which window each offset is in; searched between bounds, since slices are rounded span by span."""
        if slices == 1:
            return np.zeros(len(offsets), np.int64)
        rate, slack = slices / total, 1e-5  # slack: more than what rounding can do to a quotient below 2**31
        low: I64 = np.maximum(offsets * rate - slack, 0).astype(np.int64)
        high = np.minimum((offsets + len(self.counts)) * rate + slack, slices - 1).astype(np.int64)
        while (unsure := np.flatnonzero(low < high)).size:
            middle = (low[unsure] + high[unsure] + 1) // 2
            distinct = sorted(set(middle.tolist()))  # np.unique would import half of numpy for a few numbers
            begins = np.array([int(self._edges(j, slices).sum()) for j in distinct], np.int64)
            inside = begins[np.searchsorted(distinct, middle)] <= offsets[unsure]
            low[unsure] = np.where(inside, middle, low[unsure])
            high[unsure] = np.where(inside, high[unsure], middle - 1)
        return low
