"""Order by value: in memory, or in sorted runs on the disk that are merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset.relations.key_values import apart, gathered, order_of
from penstock.dataset.relations.spill import SpillFile, size_of
from penstock.order import I64
from penstock.plan import pick_rows

_WAYS = 16  # runs that are merged at a time: a piece of each is in memory
_HOLDS = 3  # the samples, their order, and the samples in order
Order = Callable[[Sequence[Any]], I64]


@dataclass(frozen=True, slots=True)
class Sorted:
    """All samples by the values of fields; equal ones stay in order."""

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


def sort(runs: Iterable[Sequence[Any]], order: Order, memory: int) -> Sequence[Sequence[Any]]:
    """Put samples in order: pieces of them, in memory or in a spool."""
    held: list[Sequence[Any]] = []
    size, lot = 0, max(1, memory // _HOLDS)
    spool: SpillFile | None = None
    ordered: list[list[int]] = []  # pieces of the spool that are in order
    for run in runs:
        held.append(run)
        size += size_of(run)
        if size > lot:
            spool = spool or SpillFile()
            ordered.append(spill(spool, _in_order(held, order), piece_bytes(memory)))
            held, size = [], 0
    if spool is None:
        return [_in_order(held, order)] if held else []
    if held:
        ordered.append(spill(spool, _in_order(held, order), piece_bytes(memory)))
    while len(ordered) > 1:
        spool, ordered = _merged_runs(spool, ordered, order, piece_bytes(memory))
    return spool


def _merged_runs(
    spool: SpillFile, ordered: list[list[int]], order: Order, most: int
) -> tuple[SpillFile, list[list[int]]]:
    """Fewer and longer runs, in a spool of their own."""
    out, longer = SpillFile(), []
    for low in range(0, len(ordered), _WAYS):
        made: list[int] = []
        for piece in merged(spool, ordered[low : low + _WAYS], order):
            made += spill(out, piece, most)
        longer.append(made)
    return out, longer


def piece_bytes(memory: int) -> int:
    """How large pieces of a spool are."""
    return min(4 << 20, max(64 << 10, memory // (3 * _WAYS)))


def _in_order(held: Sequence[Sequence[Any]], order: Order) -> Sequence[Any]:
    items = gathered(held)
    return apart(pick_rows(items, order(items)))


def spill(spool: SpillFile, items: Sequence[Any], most: int) -> list[int]:
    """Write samples in pieces; their numbers."""
    many = max(1, -(-size_of(items) // most))
    step = max(1, -(-len(items) // many))
    return [spool.add(items[low : low + step]) for low in range(0, len(items), step)]


class Kept:
    """Samples in memory, and in a spool if they are many."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._held: list[Sequence[Any]] = []
        self._size = 0
        self._spool: SpillFile | None = None

    def add(self, items: Sequence[Any]) -> None:
        if not len(items):
            return
        self._held.append(items)
        self._size += size_of(items)
        if self._size > self._memory // 3:
            self._flush()

    def _flush(self) -> None:
        self._spool = self._spool or SpillFile()
        for items in self._held:
            spill(self._spool, items, piece_bytes(self._memory))
        self._held, self._size = [], 0

    def pieces(self) -> Sequence[Sequence[Any]]:
        if self._spool is None:
            return self._held
        self._flush()
        return self._spool


def merged(spool: SpillFile, runs: Sequence[Sequence[int]], order: Order) -> Iterator[Sequence[Any]]:
    """One stream in order, of runs of pieces that are; of equal samples those of earlier runs come first.

    What is at hand of all runs is put in order together; it is right up to where the first run ends of which there is
    more to come.
    """
    left = [list(reversed(numbers)) for numbers in runs]
    held: list[Sequence[Any]] = [[] for _ in runs]
    while True:
        held = [spool[more.pop()] if more and not len(own) else own for own, more in zip(held, left, strict=True)]
        live = [number for number, own in enumerate(held) if len(own)]
        if not live:
            return
        edges = np.cumsum([0, *(len(held[number]) for number in live)])
        items = gathered([held[number] for number in live])
        found = order(items)
        place = np.empty_like(found)
        place[found] = np.arange(len(found))
        ends = [int(place[edges[i + 1] - 1]) for i, number in enumerate(live) if left[number]]
        until = min(ends) + 1 if ends else len(found)
        yield pick_rows(items, found[:until])
        rest = np.sort(found[until:])
        kept = apart(pick_rows(items, rest))
        cuts = np.searchsorted(rest, edges)
        for i, number in enumerate(live):
            held[number] = kept[int(cuts[i]) : int(cuts[i + 1])]
