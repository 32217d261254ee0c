"""Orders that leave samples out: one side of a split, an order without excluded samples, one worker's share."""

from __future__ import annotations

import numpy as np

from penstock.errors import PlanError
from penstock.order.hashing import I64, U64, fold, fold_into, permute
from penstock.order.orders import EXCLUDED, Order, Refs, Spans, require_counts
from penstock.order.pieces import ENDLESS, Piece
from penstock.order.pieces import size as size_of
from penstock.order.windows import cumulative_bounds, indices_by_label, span_at

_CACHED_SPANS, _CACHED_INDICES = 64, 1 << 20  # of a split: the spans that a shuffle reads at a time, up to 8 MB


class SubsetOrder(Order):
    """One side of a train-test split: the test samples of each span are the first ones of a keyed permutation.

    A side keeps the order of the whole. The share is exact if it is a whole number of a span's samples; otherwise the
    span's hash decides how to round, so that many tiny shards also add up to the share. The hash is that of the shard's
    base name and count alone: adding shards or folders does not move any sample to the other side.

    Raises:
        PlanError: The inner order differs between epochs, is endless or is not counted.
    """

    stable = fixed = True

    def __init__(self, inner: Order, share: float, seed: int, test: bool) -> None:
        if not require_counts(inner, "train_test_split").fixed:
            raise PlanError(
                "train_test_split needs an order that is the same in every epoch: split first, then shuffle or mix"
            )
        spans = inner.spans()
        self._inner, self._test, self._ends, self._starts = inner, test, spans.bounds, spans.bounds[:-1]
        self._counts, self._keys, self._bases = np.diff(spans.bounds), spans.keys, spans.base_keys
        self._split_keys = fold_into(fold_into(self._bases, self._counts), fold(seed, 7))
        chance = (fold_into(self._split_keys, 1) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        test_counts = np.floor(np.round(self._counts * share, 9) + chance).astype(np.int64)
        self._test_counts = np.clip(test_counts, 0, self._counts)
        self._bounds = cumulative_bounds(self._test_counts if test else self._counts - self._test_counts)
        self.size = int(self._bounds[-1])
        self._cache: tuple[tuple[int, I64], ...] = ()

    def at(self, p: I64) -> Refs:
        inner = np.empty_like(p)
        for s, indices in indices_by_label(span_at(self._bounds, p)):
            inner[indices] = self._selection(s)[p[indices] - self._bounds[s]] + self._starts[s]
        return self._inner.at(inner)

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        positions = self._inner.find(leaf, name, index)
        found = np.flatnonzero(positions >= 0)
        for s, indices in indices_by_label(span_at(self._ends, positions[found])):
            selected = self._selection(s)
            offset = positions[found[indices]] - self._starts[s]
            insertion = np.searchsorted(selected, offset)
            is_selected = np.append(selected, -1)[insertion] == offset
            positions[found[indices]] = np.where(is_selected, insertion + self._bounds[s], EXCLUDED)
        return positions

    def _selection(self, s: int) -> I64:
        cached = self._cache  # read once: another thread may replace it in the meantime
        for span, selected in cached:
            if span == s:
                return selected
        selected = self._select(s)
        room = _CACHED_INDICES - len(selected)
        recent: list[tuple[int, I64]] = []
        for span, other in cached[: _CACHED_SPANS - 1]:
            room -= len(other)
            if room < 0:
                break
            recent.append((span, other))
        self._cache = ((s, selected), *recent)
        return selected

    def _select(self, s: int) -> I64:
        count, test_count = int(self._counts[s]), int(self._test_counts[s])
        is_test = np.zeros(count, np.bool_)
        is_test[permute(int(self._split_keys[s]), count, np.arange(test_count, dtype=np.int64))] = True
        return np.flatnonzero(is_test if self._test else ~is_test)

    def _spans(self, stop: int) -> Spans:
        return Spans(self._bounds, self._keys, self._bases)


class ExcludingOrder(Order):
    """An order without a few of its samples; the others keep their order.

    Args:
        inner: The complete order; it must be the same in every epoch.
        excluded: The positions to leave out, in any order.

    Raises:
        PlanError: The inner order is not counted.
    """

    stable = fixed = True

    def __init__(self, inner: Order, excluded: I64) -> None:
        self._inner = require_counts(inner, "exclude")
        self._excluded = np.unique(excluded)
        self._kept_before = self._excluded - np.arange(len(self._excluded))
        self.size = inner.size - len(self._excluded)

    def at(self, p: I64) -> Refs:
        return self._inner.at(p + np.searchsorted(self._kept_before, p, "right"))

    def find(self, leaf: I64, name: U64, index: I64) -> I64:
        positions = self._inner.find(leaf, name, index)
        before = np.searchsorted(self._excluded, positions)
        is_excluded = np.append(self._excluded, -1)[before] == positions
        return np.where(positions < 0, positions, np.where(is_excluded, EXCLUDED, positions - before))

    def _spans(self, stop: int) -> Spans:
        spans = self._inner.spans()
        return Spans(spans.bounds - np.searchsorted(self._excluded, spans.bounds), spans.keys, spans.bases)


class WorkerOrder(Order):
    """One worker's share of some pieces of an order: a run of positions, then those after the runs of the others."""

    stable = fixed = False

    def __init__(self, inner: Order, pieces: list[Piece], worker: int, workers: int, run_length: int) -> None:
        self._inner, self._worker, self._workers, self._run_length = inner, worker, workers, run_length
        self._pieces = np.array([piece[:3] for piece in pieces], np.int64).reshape(-1, 3)
        self._ends = np.cumsum([0, *map(size_of, pieces)])
        self.size = ENDLESS if self._ends[-1] >= ENDLESS else self.count_before(int(self._ends[-1]))

    def count_before(self, offset: int) -> int:
        """Return how many positions of this share are before an offset into the pieces."""
        rounds, over = divmod(offset, self._run_length * self._workers)
        return rounds * self._run_length + min(self._run_length, max(0, over - self._worker * self._run_length))

    def at(self, p: I64) -> Refs:
        return self._inner.at(self.inner_positions(p))

    def inner_positions(self, p: I64) -> I64:
        """Return the positions in the order that is shared."""
        round_, within = np.divmod(p, self._run_length)
        offset = (round_ * self._workers + self._worker) * self._run_length + within
        if len(self._pieces) == 1:
            start, _, step = self._pieces[0].tolist()
            inner: I64 = start + step * offset
            return inner
        piece = np.searchsorted(self._ends, offset, "right") - 1
        inner = self._pieces[piece, 0] + self._pieces[piece, 2] * (offset - self._ends[piece])
        return inner

    def _spans(self, stop: int) -> Spans:
        raise PlanError("a worker's share cannot be shuffled: it is the last change to an order")
