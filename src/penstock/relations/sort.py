"""``sort``: DuckDB sorts the keys and gives positions; the samples are read, or picked, in that order."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.engines import COLUMNS, DELIVERED, KIND, POSITION, Program, Run
from penstock.order import I64, Order, Refs, Spans
from penstock.plan import Plan, unshuffled
from penstock.relations.database import StagedTable, database, memory_of
from penstock.relations.groups import numbers_of
from penstock.relations.key_codes import key_codes, sorted_rows
from penstock.relations.keys import chunks, ordering, staged
from penstock.relations.source import Rows, select_fields
from penstock.relations.store import SampleStore

_CACHED = 2  # permutations to keep: the current epoch, and the next one


@dataclass(frozen=True, slots=True)
class Sorted:
    """All samples of a stream, sorted by the values of some fields; equal samples keep their order."""

    fields: tuple[str, ...]
    descending: tuple[bool, ...]

    def __call__(self, runs: Iterator[Sequence[Any]], plan: Plan) -> Rows:
        memory, store = memory_of(plan), SampleStore(memory_of(plan))

        def stored() -> Iterator[Sequence[Any]]:
            for items in chunks(runs, memory):
                store.add(items)
                yield items

        order = self.permutation(stored(), plan)
        return store.items(), order

    def permutation(self, runs: Iterable[Sequence[Any]], plan: Plan) -> I64:
        """Return the positions of the samples in sorted order."""
        with database(plan, "sort") as con:
            table = staged(con, runs, self.fields, "sort", memory_of(plan))
            if table.schema is None:
                return np.zeros(0, np.int64)
            return self.sorted_positions(con, table)

    def sorted_positions(self, con: Any, table: StagedTable) -> I64:
        """Return the positions in a table with columns ``c0``, ``c1``, ... in sorted order."""
        columns = [f"c{number}" for number in range(len(self.fields))]
        if (codes := key_codes(table, columns, self.descending)) is not None:
            return sorted_rows(codes)
        terms = ordering(table, columns, self.descending)
        return numbers_of(con, f"select position from {table.name} order by {terms}, position")

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return features

    def describe(self) -> str:
        names = ", ".join(map(repr, self.fields))
        down = f", descending={list(self.descending)}" if any(self.descending) else ""
        return f"sort({names}{', descending=True' if all(self.descending) else down})"


@dataclass(frozen=True, slots=True)
class SortedPositions:
    """Finds the permutation of an order-level sort, by reading the keys of all samples of an order.

    A value that can be pickled; what it found is kept, but is not compared.
    """

    plan: Plan  # the stages before the sort
    by: Sorted
    _found: dict[Any, I64] = field(default_factory=dict, compare=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return SortedPositions, (self.plan, self.by)

    def __call__(self, order: Order, seed: int, epoch: int, leaf: int) -> I64:
        """Return the positions of ``order`` in sorted order.

        Args:
            order: The order of the epoch, without the sort.
            seed: The seed of the run.
            epoch: The epoch.
            leaf: The number that the first source of this plan has in ``order``.
        """
        same = order.fixed and not _draws(self.plan)
        key = None if same else (seed, epoch, leaf)
        with self._lock:
            if key not in self._found:
                found = self._find(order, seed, epoch, leaf)
                while len(self._found) >= _CACHED:
                    self._found.pop(next(iter(self._found)))
                self._found[key] = found
            return self._found[key]

    def unshuffled(self) -> SortedPositions:
        """Return what finds the permutation of the unshuffled order."""
        return SortedPositions(unshuffled(self.plan), self.by)

    def describe(self) -> str:
        """Return the call that created the sort."""
        return self.by.describe()

    def _find(self, order: Order, seed: int, epoch: int, leaf: int) -> I64:
        errors = replace(self.plan.errors, quarantine=None)  # the run itself reports what fails
        program = Program(
            replace(select_fields(self.plan, "sort", *self.by.fields), seed=seed, cut=None, errors=errors)
        )
        order = _Renumbered(order, leaf) if leaf else order
        start = program.start(order, None)
        if errors.action == "raise":
            with closing(Run(program, order, epoch, start).runs()) as runs:
                return self.by.permutation((run for run in runs if len(run)), self.plan)
        return self._find_delivered(program, order, epoch)

    def _find_delivered(self, program: Program, order: Order, epoch: int) -> I64:
        """Return the sorted positions of the samples that do not fail, followed by those of the samples that do."""
        tables: list[I64] = []
        start = program.start(order, None)
        run = Run(program, order, epoch, start, on_delivered=lambda table, items: tables.append(table))
        with closing(iter(run)) as items:
            samples = list(items)
        traced = np.concatenate([np.zeros((COLUMNS, 0), np.int64), *tables], axis=1)
        delivered = traced[POSITION][traced[KIND] == DELIVERED]
        found = delivered[self.by.permutation([samples] if samples else [], self.plan)]
        return np.concatenate([found, np.setdiff1d(np.arange(order.size), found)])


def _draws(plan: Plan) -> bool:
    """Return whether a stage draws random numbers, so that values differ between epochs."""
    return any(getattr(stage, "wants_rng", False) for stage in plan.body) or any(map(_draws, plan.branches()))


class _Renumbered(Order):
    """The order of a branch, whose sources are numbered from 0, for a program of its own."""

    def __init__(self, inner: Order, first: int) -> None:
        self._inner, self._first = inner, first
        self.size, self.stable, self.fixed = inner.size, inner.stable, inner.fixed

    def at(self, p: I64) -> Refs:
        return self._shifted(self._inner.at(p))

    def _shifted(self, refs: Refs) -> Refs:
        pair = None if refs.pair is None else self._shifted(refs.pair)
        leaf = np.where(refs.leaf < 0, refs.leaf, refs.leaf - self._first)
        return Refs(leaf, refs.shard, refs.index, refs.key, pair, refs.epoch)

    def _spans(self, stop: int) -> Spans:
        return self._inner.spans(stop)


def can_sort_positions(plan: Plan) -> bool:
    """Return whether a sort of the plan's samples is a permutation of its positions.

    It is not if a stage changes the count, and for a source that can be read only once, or is computed when it is read.
    """
    return plan.keeps_count and not any(leaf.streams or leaf.computed for leaf in plan.leaves())
