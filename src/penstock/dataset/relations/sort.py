"""``sort``: in memory, or by merging sorted runs on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset.relations.key_values import compacted, gathered, order_of
from penstock.dataset.relations.spill import SpillFile, size_of
from penstock.order import I64
from penstock.plan import pick_rows

_MERGE_WIDTH = 16  # runs merged at a time: one piece of each is in memory
_COPIES = 3  # in memory while sorting: the samples, their order, and the sorted samples
RowOrder = Callable[[Sequence[Any]], I64]


@dataclass(frozen=True, slots=True)
class Sorted:
    """All samples sorted by the values of some fields; equal samples keep their order."""

    fields: tuple[str, ...]
    descending: tuple[bool, ...]

    def __call__(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        return sort(runs, self._order, memory)

    def _order(self, items: Sequence[Any]) -> I64:
        return order_of(items, self.fields, self.descending, "sort")

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return features

    def describe(self) -> str:
        names = ", ".join(map(repr, self.fields))
        down = f", descending={list(self.descending)}" if any(self.descending) else ""
        return f"sort({names}{', descending=True' if all(self.descending) else down})"


def sort(runs: Iterable[Sequence[Any]], order: RowOrder, memory: int) -> Sequence[Sequence[Any]]:
    """Return samples sorted, in pieces, in memory or in a spill file."""
    held: list[Sequence[Any]] = []
    size, limit = 0, max(1, memory // _COPIES)
    file: SpillFile | None = None
    sorted_runs: list[list[int]] = []  # the pieces of the file that form each run
    for run in runs:
        held.append(run)
        size += size_of(run)
        if size > limit:
            file = file or SpillFile()
            sorted_runs.append(write_pieces(file, _sorted_items(held, order), piece_bytes(memory)))
            held, size = [], 0
    if file is None:
        return [_sorted_items(held, order)] if held else []
    if held:
        sorted_runs.append(write_pieces(file, _sorted_items(held, order), piece_bytes(memory)))
    while len(sorted_runs) > 1:
        file, sorted_runs = _merge_pass(file, sorted_runs, order, piece_bytes(memory))
    return file


def _merge_pass(
    file: SpillFile, sorted_runs: list[list[int]], order: RowOrder, max_bytes: int
) -> tuple[SpillFile, list[list[int]]]:
    """Merge runs into fewer, longer ones in a new file."""
    out, longer = SpillFile(), []
    for low in range(0, len(sorted_runs), _MERGE_WIDTH):
        pieces: list[int] = []
        for piece in merge_runs(file, sorted_runs[low : low + _MERGE_WIDTH], order):
            pieces += write_pieces(out, piece, max_bytes)
        longer.append(pieces)
    return out, longer


def piece_bytes(memory: int) -> int:
    """Return the size of the pieces of a spill file."""
    return min(4 << 20, max(64 << 10, memory // (3 * _MERGE_WIDTH)))


def _sorted_items(held: Sequence[Sequence[Any]], order: RowOrder) -> Sequence[Any]:
    items = gathered(held)
    return compacted(pick_rows(items, order(items)))


def write_pieces(file: SpillFile, items: Sequence[Any], max_bytes: int) -> list[int]:
    """Write samples in pieces, and return the numbers of the pieces."""
    count = max(1, -(-size_of(items) // max_bytes))
    step = max(1, -(-len(items) // count))
    return [file.add(items[low : low + step]) for low in range(0, len(items), step)]


class SampleBuffer:
    """Collects samples in memory, and in a spill file once they exceed a third of ``memory``."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._held: list[Sequence[Any]] = []
        self._size = 0
        self._file: SpillFile | None = None

    def add(self, items: Sequence[Any]) -> None:
        if not len(items):
            return
        self._held.append(items)
        self._size += size_of(items)
        if self._size > self._memory // 3:
            self._flush()

    def _flush(self) -> None:
        self._file = self._file or SpillFile()
        for items in self._held:
            write_pieces(self._file, items, piece_bytes(self._memory))
        self._held, self._size = [], 0

    def pieces(self) -> Sequence[Sequence[Any]]:
        if self._file is None:
            return self._held
        self._flush()
        return self._file


def merge_runs(file: SpillFile, runs: Sequence[Sequence[int]], order: RowOrder) -> Iterator[Sequence[Any]]:
    """Merge sorted runs, each given as the numbers of its pieces; equal samples keep the order of the runs.

    The current pieces of all runs are sorted together. The result is final up to the end of the piece that ends first
    among the runs that have more pieces.
    """
    left = [list(reversed(numbers)) for numbers in runs]
    held: list[Sequence[Any]] = [[] for _ in runs]
    while True:
        held = [file[more.pop()] if more and not len(piece) else piece for piece, more in zip(held, left, strict=True)]
        live = [number for number, piece in enumerate(held) if len(piece)]
        if not live:
            return
        edges = np.cumsum([0, *(len(held[number]) for number in live)])
        items = gathered([held[number] for number in live])
        found = order(items)
        sorted_at = np.empty_like(found)
        sorted_at[found] = np.arange(len(found))
        ends = [int(sorted_at[edges[i + 1] - 1]) for i, number in enumerate(live) if left[number]]
        until = min(ends) + 1 if ends else len(found)
        yield pick_rows(items, found[:until])
        rest = np.sort(found[until:])
        remaining = compacted(pick_rows(items, rest))
        cuts = np.searchsorted(rest, edges)
        for i, number in enumerate(live):
            held[number] = remaining[int(cuts[i]) : int(cuts[i + 1])]
