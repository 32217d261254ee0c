"""``join``: joins each block with the samples of another plan, so that order and states are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.dataset.relations.groups import chunks
from penstock.dataset.relations.key_values import arrow_column, columns_of, gathered, value_of
from penstock.dataset.relations.keys import UNKNOWN_KEY, ColumnKeys, Numbering
from penstock.dataset.relations.sort import piece_bytes, write_pieces
from penstock.dataset.relations.source import memory_of, runs_of
from penstock.dataset.relations.spill import PiecesReader, SpillFile, size_of
from penstock.errors import DataError
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64, fold_into
from penstock.plan import EVERYTHING, Block, Context, FlatMap, Place, Plan, sample_error

_MAX_ROWS = 1 << 16  # of a block that is joined at once; a larger result is built sample by sample


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The fields to compare, whether it is a left join, and the suffix for names that both sides have."""

    on: tuple[str, ...]
    left: bool = False
    suffix: str | None = None


class RightSide:
    """The samples of the right side, collected when the first sample is joined, once in every process that joins.

    Samples beyond the memory limit are spilled to a temporary file; the keys and the positions of their samples stay in
    memory.
    """

    def __init__(self, plan: Plan, how: JoinOptions) -> None:
        self._plan, self._how = plan, how
        self._lock = threading.Lock()
        self._index: _RightIndex | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RightSide, (self._plan, self._how)

    def index(self) -> _RightIndex:
        """Return the collected samples; the first call runs the plan."""
        with self._lock:
            if self._index is None:
                self._index = _RightIndex.of(self._plan, self._how)
            return self._index


@dataclass(slots=True)
class _RightIndex:
    """The samples of the right side, indexed by the number of their key."""

    how: JoinOptions
    known: Numbering
    reader: PiecesReader
    order: I64  # the samples, sorted by the number of their key, then by position
    edges: I64  # where each key begins in ``order``
    names: tuple[str, ...]  # of the fields, without those of the key and those that begin with __
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, plan: Plan, how: JoinOptions) -> _RightIndex:
        known = Numbering(how.on, "join")
        memory = memory_of(plan)
        held: list[Sequence[Any]] = []
        size, spilled, numbers = 0, None, []
        names: dict[str, None] = {}
        for chunk in chunks(runs_of(plan), known, memory):
            numbers.append(known.of(chunk))
            names.update(dict.fromkeys(_names(chunk, how.on)))
            held.append(chunk)
            size += size_of(chunk)
            if size > memory // 2:
                spilled = spilled or SpillFile()
                for items in held:
                    write_pieces(spilled, items, piece_bytes(memory))
                held, size = [], 0
        if isinstance(known.keys, ColumnKeys):
            known.keys.freeze()
        if spilled is not None:
            for items in held:
                write_pieces(spilled, items, piece_bytes(memory))
        pieces: Sequence[Sequence[Any]] = spilled if spilled is not None else [gathered(held)] if held else []
        found = np.concatenate([np.zeros(0, np.int64), *numbers])
        edges = np.concatenate([[0], np.cumsum(np.bincount(found, minlength=len(known)))]).astype(np.int64)
        return cls(how, known, PiecesReader(pieces), np.argsort(found, kind="stable"), edges, tuple(names))

    def matches(self, items: Sequence[Any]) -> tuple[I64, I64]:
        """Return pairs of left and right samples; on the right, ``UNKNOWN_KEY`` for a left sample without a match."""
        number = self._numbers(items)
        counts = np.where(number < 0, 0, self.edges[number + 1] - self.edges[number]) if len(self.known) else 0 * number
        rows = np.maximum(counts, 1) if self.how.left else counts
        left = np.repeat(np.arange(len(items)), rows)
        begin = np.cumsum(rows) - rows
        within = np.arange(len(left)) - begin[left]
        right = np.full(len(left), UNKNOWN_KEY, np.int64)
        matched = counts[left] > 0
        right[matched] = self.order[self.edges[number[left[matched]]] + within[matched]]
        return left, right

    def _numbers(self, items: Sequence[Any]) -> I64:
        keys = self.known.keys
        if isinstance(keys, ColumnKeys):
            columns = [arrow_column(items, name, "join") for name in self.how.on]
            if all(array is not None for array in columns):
                converted = _as_types(columns, keys.kinds)
                if converted is not None:
                    return keys.numbers(converted, False)
        with self.lock:
            return self.known.of(items, False)

    def rows(self, right: I64) -> Sequence[Any]:
        """Return samples of the right side by position."""
        return self.reader.read(right, EVERYTHING)


def _as_types(columns: Sequence[Any], kinds: Sequence[Any]) -> list[Any] | None:
    """Return the columns cast to these types, or ``None`` if a value would change.

    Integers may differ in width, text and bytes in the width of their offsets.
    """
    import pyarrow as pa

    types, out = pa.types, []
    for array, kind in zip(columns, kinds, strict=True):
        same = [
            all(map(types.is_integer, (array.type, kind))),
            all(types.is_string(either) or types.is_large_string(either) for either in (array.type, kind)),
            all(types.is_binary(either) or types.is_large_binary(either) for either in (array.type, kind)),
        ]
        if array.type != kind and not any(same):
            return None
        try:
            out.append(array.cast(kind))
        except pa.ArrowInvalid:  # a number is out of range: values are compared in Python
            return None
    return out


def _names(items: Sequence[Any], on: Sequence[str]) -> list[str]:
    names: dict[str, None] = {}
    for fields in [items.names] if isinstance(items, ArrowColumns) else items:
        if isinstance(fields, dict | tuple):
            names.update(dict.fromkeys(fields))
    return [name for name in names if name not in on and not name.startswith("__")]


@dataclass(frozen=True)
class Join(FlatMap):
    """``join(other, on)``: adds the fields of the right side to each sample."""

    side: RightSide
    how: JoinOptions

    @property
    def name(self) -> str:
        return "join"

    def describe(self) -> str:
        on = ", ".join(map(repr, self.how.on))
        return f"join(on={on}, how={'left' if self.how.left else 'inner'!r})"

    def failure(self, exc: Exception, place: Place) -> Exception:
        """Return a DataError that names shard and key."""
        return sample_error(exc.problem, place, exc) if isinstance(exc, DataError) else super().failure(exc, place)

    def function(self, ctx: Context) -> Callable[..., Any]:
        return self._joined

    def _joined(self, sample: Any) -> list[Any]:
        for name in self.how.on:
            value_of(sample, name, "join")
        index = self.side.index()
        _, right = index.matches([sample])
        if len(right) and right[0] == UNKNOWN_KEY:
            return [{**sample, **dict.fromkeys(self._renamed(index.names, sample).values())}]
        found = index.rows(right) if len(right) else []
        return [{**sample, **self._merged(index.names, row, sample)} for row in found]

    def _merged(self, names: Sequence[str], row: dict[str, Any], sample: Any) -> dict[str, Any]:
        return {new: row.get(old) for old, new in self._renamed(names, sample).items()}

    def _renamed(self, names: Sequence[str], left: Any) -> dict[str, str]:
        """Return the name in the result of each field of the right side.

        Raises:
            DataError: Both sides have a field, and there is no suffix.
        """
        clash = [name for name in names if name in left]
        if clash and self.how.suffix is None:
            raise DataError(f"join: both sides have {', '.join(map(repr, sorted(clash)))}; pass suffix=")
        return {name: f"{name}{self.how.suffix}" if name in clash else name for name in names}

    def run(self, block: Block, ctx: Context) -> Block:
        """Join the block at once, or sample by sample if a sample is wrong or the result is very large."""
        joined = self._join_at_once(block)
        return super().run(block, ctx) if joined is None else joined

    def parts(self, block: Block, ctx: Context) -> Iterator[Block]:
        """Yield the joined block; a very large one in blocks of bounded size."""
        joined = self._join_at_once(block)
        if joined is not None:
            yield joined
        else:
            yield from super().parts(block, ctx)

    def _join_at_once(self, block: Block) -> Block | None:
        """Return the joined block; ``None`` if a sample is wrong, or if the result is very large."""
        items = block.items
        field_sets = [items.names] if isinstance(items, ArrowColumns) else items
        on = {*self.how.on}
        if not len(items) or any(not isinstance(fields, dict | tuple) or not on <= {*fields} for fields in field_sets):
            return None
        index = self.side.index()
        left, right = index.matches(items)
        if len(left) > _MAX_ROWS or (
            self.how.suffix is None and any(name in fields for name in index.names for fields in field_sets)
        ):
            return None
        found = right[right >= 0]
        rows = index.rows(found if len(found) else np.arange(min(1, index.reader.count(0))))
        number = np.full(len(right), UNKNOWN_KEY, np.int64)  # the position of each match in ``rows``
        number[right >= 0] = np.arange(len(found))
        joined: Sequence[Any]
        if isinstance(items, ArrowColumns) and isinstance(rows, ArrowColumns):
            joined = self._join_columns(items.pick(left), rows, number, index.names)
        else:
            joined = self._join_rows(items, left, rows, number, index.names)
        grown = block.keep(left, joined)
        grown.keys = fold_into(grown.keys, np.arange(len(left)) - np.searchsorted(left, left))
        return grown

    def _join_rows(
        self, items: Sequence[Any], left: I64, rows: Sequence[Any], number: I64, names: Sequence[str]
    ) -> list[Any]:
        samples, others = list(items), list(rows)
        out = []
        for position, match in zip(left.tolist(), number.tolist(), strict=True):
            sample, other = samples[position], {} if match == UNKNOWN_KEY else others[match]
            out.append({**sample, **self._merged(names, other, sample)})
        return out

    def _join_columns(self, items: ArrowColumns, rows: ArrowColumns, number: I64, names: Sequence[str]) -> ArrowColumns:
        import pyarrow as pa

        left, right = items.batch(), rows.batch()
        renamed = self._renamed(names, items.names)
        take = pa.array(number, mask=number < 0)
        fields = [right.schema.field(old).with_name(new).with_nullable(True) for old, new in renamed.items()]
        arrays = [*left.columns, *(right.column(old).take(take) for old in renamed)]
        schema = pa.schema([*left.schema, *fields], metadata=left.schema.metadata)
        return columns_of(pa.Table.from_arrays(arrays, schema=schema))
