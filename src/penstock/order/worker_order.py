"""The share of one worker in an order that several workers divide in alternating runs of samples."""

from __future__ import annotations

import numpy as np

from penstock.errors import PlanError
from penstock.order.hashing import I64
from penstock.order.orders import Order, Refs, Spans
from penstock.order.pieces import ENDLESS, Piece
from penstock.order.pieces import size as size_of


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
