"""Samples beside those of another plan that have the same values: block by block, so that order and states hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.dataset.relations.groups import lots
from penstock.dataset.relations.key_values import column, columns_of, gathered, value_of
from penstock.dataset.relations.keys import UNKNOWN, ColumnKeys, Numbering
from penstock.dataset.relations.sort import piece_bytes, spill
from penstock.dataset.relations.source import memory_of, runs_of
from penstock.dataset.relations.spill import PiecesReader, SpillFile, size_of
from penstock.errors import DataError
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64, fold_into
from penstock.plan import EVERYTHING, Block, Context, FlatMap, Place, Plan, fault

_MOST = 1 << 16  # rows that are made of a block at once; more are made one sample after the other


@dataclass(frozen=True, slots=True)
class How:
    """What joins samples: the fields that must be equal, whether those without a partner stay, and clashing names."""

    on: tuple[str, ...]
    left: bool = False
    suffix: str | None = None


class Side:
    """The other plan's samples: gathered when the first sample asks, once in every process that joins.

    Those beyond the bound of memory are in a temporary file; where each value's samples lie stays in memory.
    """

    def __init__(self, plan: Plan, how: How) -> None:
        self._plan, self._how = plan, how
        self._lock = threading.Lock()
        self._ready: _Ready | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Side, (self._plan, self._how)

    def ready(self) -> _Ready:
        """What was gathered."""
        with self._lock:
            if self._ready is None:
                self._ready = _Ready.of(self._plan, self._how)
            return self._ready


@dataclass(slots=True)
class _Ready:
    """Samples by the numbers of their values."""

    how: How
    known: Numbering
    reader: PiecesReader
    order: I64  # numbers of samples, by the number of their values, then as they came
    edges: I64  # where each value's begin in it
    names: tuple[str, ...]  # their fields, but for those they are joined on and those of their own kind
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, plan: Plan, how: How) -> _Ready:
        known = Numbering(how.on, "join")
        memory = memory_of(plan)
        held: list[Sequence[Any]] = []
        size, spool, numbers = 0, None, []
        names: dict[str, None] = {}
        for lot in lots(runs_of(plan), known, memory):
            numbers.append(known.of(lot))
            names.update(dict.fromkeys(_names(lot, how.on)))
            held.append(lot)
            size += size_of(lot)
            if size > memory // 2:
                spool = spool or SpillFile()
                for one in held:
                    spill(spool, one, piece_bytes(memory))
                held, size = [], 0
        if isinstance(known.keys, ColumnKeys):
            known.keys.settle()
        if spool is not None:
            for one in held:
                spill(spool, one, piece_bytes(memory))
        pieces: Sequence[Sequence[Any]] = spool if spool is not None else [gathered(held)] if held else []
        found = np.concatenate([np.zeros(0, np.int64), *numbers])
        edges = np.concatenate([[0], np.cumsum(np.bincount(found, minlength=len(known)))]).astype(np.int64)
        return cls(how, known, PiecesReader(pieces), np.argsort(found, kind="stable"), edges, tuple(names))

    def matches(self, items: Sequence[Any]) -> tuple[I64, I64]:
        """The numbers of samples here and there that go together; there ``UNKNOWN`` where a sample stays alone."""
        number = self._numbers(items)
        many = np.where(number < 0, 0, self.edges[number + 1] - self.edges[number]) if len(self.known) else 0 * number
        rows = np.maximum(many, 1) if self.how.left else many
        here = np.repeat(np.arange(len(items)), rows)
        begin = np.cumsum(rows) - rows
        within = np.arange(len(here)) - begin[here]
        there = np.full(len(here), UNKNOWN, np.int64)
        has = many[here] > 0
        there[has] = self.order[self.edges[number[here[has]]] + within[has]]
        return here, there

    def _numbers(self, items: Sequence[Any]) -> I64:
        keys = self.known.keys
        if isinstance(keys, ColumnKeys):
            columns = [column(items, name, "join") for name in self.how.on]
            if all(array is not None for array in columns):
                fitting = _as_types(columns, keys.kinds)
                if fitting is not None:
                    return keys.numbers(fitting, False)
        with self.lock:
            return self.known.of(items, False)

    def rows(self, there: I64) -> Sequence[Any]:
        """Samples of this side."""
        return self.reader.read(there, EVERYTHING)


def _as_types(columns: Sequence[Any], kinds: Sequence[Any]) -> list[Any] | None:
    """The columns in these types, where every value is kept: whole numbers of other widths, text of other offsets."""
    import pyarrow as pa

    types, out = pa.types, []
    for array, kind in zip(columns, kinds, strict=True):
        same = [
            all(map(types.is_integer, (array.type, kind))),
            all(types.is_string(one) or types.is_large_string(one) for one in (array.type, kind)),
            all(types.is_binary(one) or types.is_large_binary(one) for one in (array.type, kind)),
        ]
        if array.type != kind and not any(same):
            return None
        try:
            out.append(array.cast(kind))
        except pa.ArrowInvalid:  # a number that has no place there, and so no partner: Python knows
            return None
    return out


def _names(items: Sequence[Any], on: Sequence[str]) -> list[str]:
    names: dict[str, None] = {}
    for own in [items.names] if isinstance(items, ArrowColumns) else items:
        if isinstance(own, dict | tuple):
            names.update(dict.fromkeys(own))
    return [name for name in names if name not in on and not name.startswith("__")]


@dataclass(frozen=True)
class Join(FlatMap):
    """``join(other, on)``."""

    side: Side
    how: How

    @property
    def name(self) -> str:
        return "join"

    def describe(self) -> str:
        on = ", ".join(map(repr, self.how.on))
        return f"join(on={on}, how={'left' if self.how.left else 'inner'!r})"

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        return fault(exc.problem, place, exc) if isinstance(exc, DataError) else super().failure(exc, place)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Join one sample."""
        return self._joined

    def _joined(self, sample: Any) -> list[Any]:
        for name in self.how.on:
            value_of(sample, name, "join")
        ready = self.side.ready()
        _, there = ready.matches([sample])
        if len(there) and there[0] == UNKNOWN:
            return [{**sample, **dict.fromkeys(self._renamed(ready.names, sample).values())}]
        found = ready.rows(there) if len(there) else []
        return [{**sample, **self._merged(ready.names, row, sample)} for row in found]

    def _merged(self, names: Sequence[str], row: dict[str, Any], sample: Any) -> dict[str, Any]:
        return {new: row.get(old) for old, new in self._renamed(names, sample).items()}

    def _renamed(self, names: Sequence[str], here: Any) -> dict[str, str]:
        """The other side's fields and what they are called here."""
        clash = [name for name in names if name in here]
        if clash and self.how.suffix is None:
            raise DataError(f"join: both sides have {', '.join(map(repr, sorted(clash)))}; give suffix=")
        return {name: f"{name}{self.how.suffix}" if name in clash else name for name in names}

    def run(self, block: Block, ctx: Context) -> Block:
        """Join the whole block at once; sample by sample where one of them fails, or where that makes very much."""
        made = self._at_once(block)
        return super().run(block, ctx) if made is None else made

    def parts(self, block: Block, ctx: Context) -> Iterator[Block]:
        """The same in blocks of bounded size."""
        made = self._at_once(block)
        if made is not None:
            yield made
        else:
            yield from super().parts(block, ctx)

    def _at_once(self, block: Block) -> Block | None:
        items = block.items
        columns = [items.names] if isinstance(items, ArrowColumns) else items
        if not len(items) or any(not isinstance(one, dict | tuple) or not {*self.how.on} <= {*one} for one in columns):
            return None
        ready = self.side.ready()
        here, there = ready.matches(items)
        if len(here) > _MOST or (
            self.how.suffix is None and any(name in one for name in ready.names for one in columns)
        ):
            return None
        found = there[there >= 0]
        rows = ready.rows(found if len(found) else np.arange(min(1, ready.reader.count(0))))
        place = np.full(len(there), UNKNOWN, np.int64)
        place[there >= 0] = np.arange(len(found))
        made: Sequence[Any]
        if isinstance(items, ArrowColumns) and isinstance(rows, ArrowColumns):
            made = self._beside(items.pick(here), rows, place, ready.names)
        else:
            made = self._merged_rows(items, here, rows, place, ready.names)
        grown = block.keep(here, made)
        grown.keys = fold_into(grown.keys, np.arange(len(here)) - np.searchsorted(here, here))
        return grown

    def _merged_rows(
        self, items: Sequence[Any], here: I64, rows: Sequence[Any], place: I64, names: Sequence[str]
    ) -> list[Any]:
        samples, others = list(items), list(rows)
        out = []
        for number, at in zip(here.tolist(), place.tolist(), strict=True):
            other = {} if at == UNKNOWN else others[at]
            out.append({**samples[number], **self._merged(names, other, samples[number])})
        return out

    def _beside(self, items: ArrowColumns, rows: ArrowColumns, place: I64, names: Sequence[str]) -> ArrowColumns:
        import pyarrow as pa

        left, right = items.batch(), rows.batch()
        renamed = self._renamed(names, items.names)
        take = pa.array(place, mask=place < 0)
        own = [right.schema.field(old).with_name(new).with_nullable(True) for old, new in renamed.items()]
        arrays = [*left.columns, *(right.column(old).take(take) for old in renamed)]
        schema = pa.schema([*left.schema, *own], metadata=left.schema.metadata)
        return columns_of(pa.Table.from_arrays(arrays, schema=schema))
