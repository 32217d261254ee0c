"""``join``: looks up each block in the samples of another plan, so that order and states are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from penstock.engines import Program, start_run
from penstock.errors import DataError, PlanError, import_extra
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.values import is_number
from penstock.lazy import cached_property
from penstock.order import I64, fold_into
from penstock.plan import Block, Columns, Context, FlatMap, Place, Plan, pick_rows, sample_error
from penstock.relations.database import memory_of
from penstock.relations.keys import chunks, column_at, gathered, hashable, value_of, values_at
from penstock.relations.lookup import HashedRows, comparable
from penstock.relations.source import no_samples, select_fields
from penstock.relations.store import SampleStore

_NONE = -1  # in place of a number: no match
_MAX_ROWS = 1 << 16  # of a block that is joined at once; a larger result is built sample by sample


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """How to join.

    Attributes:
        on: The fields to compare.
        how: Which samples are kept. ``"rest"`` keeps those without a match, like ``"anti"``, and adds the fields of the
            other side: what a right or full join has beyond an inner or left one, seen from the right side.
        suffix: Appended to the names of fields that both sides have.
    """

    on: tuple[str, ...]
    how: Literal["inner", "left", "semi", "anti", "rest"] = "inner"
    suffix: str | None = None

    @property
    def adds_fields(self) -> bool:
        """Whether samples get the values of their matches."""
        return self.how in ("inner", "left")


class OtherSide:
    """The samples of the other side, collected when the first sample is joined, once in every process that joins.

    Keys and the numbers of their samples stay in memory; samples beyond the memory limit are in a temporary file.
    """

    def __init__(self, plan: Plan, how: JoinOptions) -> None:
        self._plan, self._how = plan, how
        self._lock = threading.Lock()
        self._index: _KeyedSamples | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return OtherSide, (self._plan, self._how)

    def index(self) -> _KeyedSamples:
        """Return the collected samples; the first call runs the plan."""
        with self._lock:
            if self._index is None:
                self._index = _collect(self._plan, self._how)
            return self._index


class _KeyedSamples:
    """The samples of the other side by their keys."""

    def __init__(self, how: JoinOptions) -> None:
        self.how = how
        self.items: Sequence[Any] = ()
        self.fields: dict[str, None] = {}  # the names of all fields, without those that begin with __
        self._keys: list[Sequence[Any]] = []  # of each chunk: Arrow arrays of one type, or values
        self._types: dict[str, dict[str, str]] = {name: {} for name in how.on}  # by family

    @property
    def names(self) -> list[str]:
        """The names of the fields that a join adds."""
        return [name for name in self.fields if name not in self.how.on]

    def add_keys(self, items: Sequence[Any]) -> None:
        """Add the keys of samples.

        Raises:
            PlanError: The values of a field have no one type.
        """
        columns = [column_at(items, name, "join") for name in self.how.on]
        for name, column in zip(self.how.on, columns, strict=True):
            if family := _family(column.type):
                self._types[name].setdefault(family, str(column.type))
        arrays = list(map(comparable, columns))
        self._keys.append(_keys(items, self.how.on) if any(array is None for array in arrays) else arrays)

    @cached_property
    def _rows(self) -> HashedRows | None:
        """The keys as columns; ``None`` if they are not all integers or text of one type."""
        import pyarrow as pa

        types = {tuple(getattr(array, "type", None) for array in arrays) for arrays in self._arrays()}
        if len(types) != 1 or len(self._arrays()) < len(self._keys):
            return None
        return HashedRows([pa.concat_arrays(column) for column in zip(*self._arrays(), strict=True)])

    def _arrays(self) -> list[list[Any]]:
        import pyarrow as pa

        return [keys for keys in self._keys if isinstance(keys, list) and keys and isinstance(keys[0], pa.Array)]

    @cached_property
    def _numbers(self) -> dict[Hashable, list[int]]:
        """The numbers of the samples of each key."""
        import pyarrow as pa

        found: dict[Hashable, list[int]] = {}
        number = 0
        for keys in self._keys:
            if keys and isinstance(keys[0], pa.Array):
                columns = [array.to_pylist() for array in keys]
                keys = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
            for key in keys:
                found.setdefault(key, []).append(number)
                number += 1
        return found

    def matches(self, items: Sequence[Any]) -> tuple[I64, I64]:
        """Return pairs of a sample here and one of the other side, which is ``_NONE`` if there is no match."""
        left, right = self._pairs(items)
        if self.how.how == "inner":
            return left, right
        matched = np.zeros(len(items), bool)
        matched[left] = True
        if not self.how.adds_fields:
            kept = np.flatnonzero(matched == (self.how.how == "semi"))
            return kept, np.full(len(kept), _NONE, np.int64)
        alone = np.flatnonzero(~matched)
        if not len(alone):
            return left, right
        left, right = np.concatenate([left, alone]), np.concatenate([right, np.full(len(alone), _NONE, np.int64)])
        order = np.argsort(left, kind="stable")
        return left[order], right[order]

    def _check_types(self, items: Sequence[Any]) -> None:
        """Check that the keys of samples may equal those of the other side."""
        for name, known in self._types.items():
            kind = _type_of(items, name)
            family = None if kind is None else _family(kind)
            if family and known and family not in known:
                raise PlanError(
                    f"join: field {name!r} has {kind} here and {' and '.join(known.values())} in the other dataset, "
                    "which are never equal; convert one of them first"
                )

    def _pairs(self, items: Sequence[Any]) -> tuple[I64, I64]:
        self._check_types(items)
        if isinstance(items, ArrowColumns) and self._rows is not None:
            arrays = [comparable(column_at(items, name, "join")) for name in self.how.on]
            if [getattr(array, "type", None) for array in arrays] == self._rows.types:
                return self._rows.pairs(arrays)
        found = [self._numbers.get(key, ()) for key in _keys(items, self.how.on)]
        left = np.repeat(np.arange(len(found)), np.fromiter(map(len, found), np.int64, len(found)))
        return left, np.fromiter(chain.from_iterable(found), np.int64, len(left))


def _collect(plan: Plan, how: JoinOptions) -> _KeyedSamples:
    """Run the plan of the other side to its end."""
    index, memory = _KeyedSamples(how), memory_of(plan)
    plan = select_fields(plan, "join", *how.on) if how.how in ("semi", "anti") else plan
    program, store = Program(plan), SampleStore(memory)
    program.check_finite()

    def runs() -> Iterator[Sequence[Any]]:
        for run in start_run(plan, plan.epoch or 0, program).runs():
            index.fields.update(dict.fromkeys(_names(run)))
            if len(run):
                yield run

    for items in chunks(runs(), memory):
        index.add_keys(items)
        if how.adds_fields:
            store.add(items)
    if not index.fields:
        index.fields.update(dict.fromkeys(_names(no_samples(program))))
    items = store.items()
    index.items = items if store.has_spilled or not len(items) else gathered([items])
    return index


def _names(items: Sequence[Any]) -> list[str]:
    names: dict[str, None] = {}
    for fields in [items.names] if isinstance(items, Columns) else items:
        if isinstance(fields, dict | tuple):
            names.update(dict.fromkeys(fields))
    return [name for name in names if not name.startswith("__")]


def _type_of(items: Sequence[Any], name: str) -> Any:
    """Return the Arrow type of the first value of a key; None if there is none, or Arrow has none for it."""
    import pyarrow as pa

    if isinstance(items, ArrowColumns):
        return column_at(items, name, "join").type
    first = next((value for item in items if (value := value_of(item, name, "join")) is not None), None)
    try:
        return pa.scalar(first).type
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def _family(kind: Any) -> str:
    """Return a name for the Arrow types whose values may equal values of this type; empty if that is not known."""
    import pyarrow as pa

    types = pa.types
    if is_number(kind) or types.is_decimal(kind):
        return "number"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes"
    for family in (types.is_date, types.is_time, types.is_timestamp, types.is_duration):
        if family(kind):
            return str(family.__name__)
    return ""


def _keys(items: Sequence[Any], on: Sequence[str]) -> Sequence[Hashable]:
    columns = [_key_column(items, name) for name in on]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _key_column(items: Sequence[Any], name: str) -> Sequence[Hashable]:
    if isinstance(items, ArrowColumns):
        import pyarrow as pa

        array = column_at(items, name, "join")
        if is_number(array.type) and not pa.types.is_floating(array.type) and not array.null_count:
            return array.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            return array.to_pylist()  # type: ignore[no-any-return]
    return [hashable(value) for value in values_at(items, name, "join")]


@dataclass(frozen=True)
class Join(FlatMap):
    """``join(other, on)``: adds the fields of the other side to each sample, or keeps those with or without a match."""

    side: OtherSide
    how: JoinOptions

    @property
    def name(self) -> str:
        return "join"

    def describe(self) -> str:
        return f"join(on={', '.join(map(repr, self.how.on))}, how={self.how.how!r})"

    def failure(self, exc: Exception, place: Place) -> Exception:
        """Return a DataError that names shard and key."""
        return sample_error(exc.problem, place, exc) if isinstance(exc, DataError) else super().failure(exc, place)

    def prepare(self, ctx: Context) -> None:
        """Check that pyarrow is installed, which compares keys.

        Raises:
            MissingExtra: It is not.
        """
        import_extra("pyarrow", "join", "tables")

    def function(self, ctx: Context) -> Callable[..., Any]:
        return self._joined

    def _joined(self, sample: Any) -> list[Any]:
        for name in self.how.on:
            value_of(sample, name, "join")
        index = self.side.index()
        left, right = index.matches([sample])
        return self._join_rows([sample], left, index, right)

    def _renamed(self, names: Sequence[str], clashing: Any) -> dict[str, str]:
        """Return the new name of each field.

        Raises:
            DataError: Both sides have a field, and there is no suffix.
        """
        clash = [name for name in names if name in clashing]
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
        adds, rest = self.how.adds_fields, self.how.how == "rest"
        clash = self.how.suffix is None and any(name in fields for name in index.names for fields in field_sets)
        if len(left) > _MAX_ROWS or (clash and (adds or rest)):
            return None
        joined: Sequence[Any]
        if isinstance(items, ArrowColumns) and adds and (isinstance(index.items, ArrowColumns) or not index.names):
            joined = self._join_columns(items, left, index, right)
        elif adds or rest:
            joined = self._join_rows(items, left, index, right)
        else:
            joined = pick_rows(items, left)
        grown = block.keep(left, joined)
        grown.keys = fold_into(grown.keys, np.arange(len(left)) - np.searchsorted(left, left))
        return grown

    def _join_rows(self, items: Sequence[Any], left: I64, index: _KeyedSamples, right: I64) -> list[Any]:
        samples = list(items)
        chosen = [samples[position] for position in left.tolist()]
        if self.how.how == "rest":
            return [self._with_missing(sample, index) for sample in chosen]
        if not self.how.adds_fields:
            return chosen
        others = iter(list(pick_rows(index.items, right[right >= 0])))
        out = []
        for sample, match in zip(chosen, right.tolist(), strict=True):
            other = {} if match == _NONE else next(others)
            renamed = self._renamed(index.names, sample)
            out.append({**sample, **{new: other.get(old) for old, new in renamed.items()}})
        return out

    def _with_missing(self, sample: dict[str, Any], index: _KeyedSamples) -> dict[str, Any]:
        """Return a sample of the right side with the fields of the left side, which has no match for it."""
        renamed = self._renamed([name for name in sample if name not in self.how.on], index.names)
        return {
            **dict.fromkeys(index.fields),
            **{name: sample[name] for name in self.how.on},
            **{new: sample[old] for old, new in renamed.items()},
        }

    def _join_columns(self, items: ArrowColumns, left: I64, index: _KeyedSamples, right: I64) -> ArrowColumns:
        import pyarrow as pa

        whole = len(left) == len(items) and bool((left == np.arange(len(items))).all())
        here = (items if whole else items.pick(left)).batch()
        arrays, fields = list(here.columns), list(here.schema)
        if index.names:
            matched = right >= 0
            assert isinstance(index.items, ArrowColumns)
            added = index.items.renamed({name: name for name in index.names})
            there = added.pick(right if matched.all() else right[matched]).batch()
            spread = None
            if not matched.all():
                spread = pa.array(np.where(matched, np.cumsum(matched) - 1, 0), mask=~matched)
            for old, new in self._renamed(index.names, items.names).items():
                column = there.column(old)
                arrays.append(column if spread is None else column.take(spread))
                fields.append(there.schema.field(old).with_name(new).with_nullable(True))
        batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=here.schema.metadata))
        return ArrowColumns([batch], np.arange(len(left)), row_bytes=batch.nbytes / max(1, len(left)))
