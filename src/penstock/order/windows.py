"""Windows: how a shuffle permutes a few spans that are read together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.order.hashing import I64, U64, fold, fold_into, permute

DEFAULT_WINDOW = 16384


def cumulative_bounds(counts: I64) -> I64:
    """Return the position at which each span begins, followed by the end of the last one."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def span_at(bounds: I64, p: I64) -> I64:
    """Return the number of the span that contains each position; empty spans contain none."""
    return np.searchsorted(bounds, p, "right") - 1


def indices_by_label(labels: I64) -> Iterator[tuple[int, I64]]:
    """Yield every distinct label with the indices at which it occurs."""
    if not labels.size:
        return
    indices = np.argsort(labels, kind="stable")
    ordered = labels[indices]
    edges = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(ordered)]
    for begin, end in pairwise(edges):
        yield int(ordered[begin]), indices[begin:end]


def shuffled_span_order(keys: U64, seed: int, epoch: int) -> I64:
    """Return the order in which a shuffle visits spans; a keyed hash decides, so no counts are needed."""
    return np.argsort(fold_into(keys, fold(seed, epoch, 1)), kind="stable")


@dataclass(frozen=True, slots=True)
class Group:
    """Spans that are read together; window ``j`` is a permutation of the ``j``-th slice of each of them."""

    counts: I64
    window: int
    key: tuple[int, int, int]  # seed, epoch, number of the group

    def locate(self, offsets: I64) -> tuple[I64, I64]:
        """Return the span, and the index within that span, at each offset of the group's order."""
        total = int(self.counts.sum())
        slices = max(1, -(-total // self.window))
        span, index = np.empty_like(offsets), np.empty_like(offsets)
        for j, indices in indices_by_label(self._windows(offsets, total, slices)):
            begin, end = self._edges(j, slices), self._edges(j + 1, slices)
            bounds = cumulative_bounds(end - begin)
            seed, epoch, group = self.key
            q = permute(fold(seed, epoch, 2, group, j), int(bounds[-1]), offsets[indices] - int(begin.sum()))
            hit = span_at(bounds, q)
            span[indices], index[indices] = hit, q - bounds[hit] + begin[hit]
        return span, index

    def _edges(self, j: int, slices: int) -> I64:
        """Return where slice ``j`` of each span begins: counts * j // slices, computed without overflowing 63 bits."""
        edges: I64 = self.counts // slices * j + self.counts % slices * j // slices
        return edges

    def _windows(self, offsets: I64, total: int, slices: int) -> I64:
        """Return the window of each offset, by binary search: slices are rounded span by span."""
        if slices == 1:
            return np.zeros(len(offsets), np.int64)
        rate, slack = slices / total, 1e-5  # slack: larger than any rounding error of a quotient below 2**31
        low: I64 = np.maximum(offsets * rate - slack, 0).astype(np.int64)
        high = np.minimum((offsets + len(self.counts)) * rate + slack, slices - 1).astype(np.int64)
        while (undecided := np.flatnonzero(low < high)).size:
            middle = (low[undecided] + high[undecided] + 1) // 2
            distinct = sorted(set(middle.tolist()))  # np.unique would load much of numpy for a few numbers
            begins = np.array([int(self._edges(j, slices).sum()) for j in distinct], np.int64)
            inside = begins[np.searchsorted(distinct, middle)] <= offsets[undecided]
            low[undecided] = np.where(inside, middle, low[undecided])
            high[undecided] = np.where(inside, high[undecided], middle - 1)
        return low
