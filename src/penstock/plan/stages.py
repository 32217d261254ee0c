"""The stages on single samples: map, filter, flat_map, map_batches, select, drop, rename, to_tuple."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import CoroutineType
from typing import Any

import numpy as np

from penstock.errors import DataError, PlanError, StageError
from penstock.order import name_hash
from penstock.plan.block import Block, Context, Place
from penstock.plan.collation import collate, is_tensor, uncollate
from penstock.plan.columns import Columns
from penstock.plan.stage import EachStage, Filter, FlatMap, Map, MissingField, sample_error
from penstock.plan.values import (
    ByObject,
    Fields,
    check_callable,
    check_count,
    check_names,
    is_callable_class,
    kind_of,
    name_of,
    takes_parameter,
)

_PLAIN = ("i8", "u8", "f8", "b1")  # the types of arrays of Python's numbers
_NUMBERS = (int, float, bool)


def bind_parameters(fn: Callable[..., Any], ctx: Context) -> Callable[..., Any]:
    """Return ``fn`` with its ``device`` bound, taking the generator, if any, as its second argument."""
    fn = _with_device(fn, ctx)
    return _rng_by_keyword(fn) if takes_parameter(fn, "rng") else fn


def _with_device(fn: Callable[..., Any], ctx: Context) -> Callable[..., Any]:
    return partial(fn, device=ctx.device) if takes_parameter(fn, "device") else fn


def _rng_by_keyword(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda item, rng: fn(item, rng=rng)


@dataclass(frozen=True)
class _UserStage(EachStage):
    """The base of map, filter, flat_map and map_batches: a stage with a user's function.

    A class whose instances can be called is constructed once per worker, with ``args`` and ``kwargs``.
    """

    fn: Callable[..., Any]
    args: ByObject | None = field(default=None, kw_only=True)
    kwargs: ByObject | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_callable(self.name, self.fn)
        if (self.args or self.kwargs) and not is_callable_class(self.fn):
            problem = f"fn_args and fn_kwargs are for a class, and {name_of(self.fn)} is called as it is"
            raise PlanError(f"{self.name}: {problem}; use functools.partial to pass arguments to a function")

    @property
    def name(self) -> str:
        return type(self).__name__.removesuffix("Fn").lower().replace("flatmap", "flat_map")

    @property
    def wants_rng(self) -> bool:
        fn: Any = self.fn
        return takes_parameter(fn.__call__ if is_callable_class(fn) else fn, "rng")

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Return the user's function, or the instance of the user's class, which is constructed by the first call."""
        if "call" not in ctx.local:
            call = _with_device(self._instance(ctx) if is_callable_class(self.fn) else self.fn, ctx)
            ctx.local["call"] = self._taking_rng(call) if self.wants_rng else call
        return ctx.local["call"]  # type: ignore[no-any-return]

    def _taking_rng(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return _rng_by_keyword(call)

    def _instance(self, ctx: Context) -> Callable[..., Any]:
        args = self.args.value if self.args else ()
        kwargs = self.kwargs.value if self.kwargs else {}
        try:
            instance = ctx.local["instance"] = _with_device(self.fn, ctx)(*args, **kwargs)
        except Exception as exc:  # no sample caused it
            raise StageError(f"{type(exc).__name__}: {exc}", self.describe()) from exc
        return instance  # type: ignore[no-any-return]

    def finish(self, ctx: Context) -> None:
        """Close the instance that was constructed for this worker, if it has ``close``."""
        instance = ctx.local.get("instance")
        super().finish(ctx)
        if (close := getattr(instance, "close", None)) is not None:
            close()

    def describe(self) -> str:
        return f"{self.name}({name_of(self.fn)})"


@dataclass(frozen=True)
class MapFn(_UserStage, Map):
    """``map(fn)``."""

    def _converted(self, results: Iterator[Any]) -> Iterator[Any]:
        """Refuse ``None``: it is what a function without ``return`` returns."""
        return map(_returned, results)


def _returned(value: Any) -> Any:
    if value is None:
        raise TypeError("the function returned None: return the new sample, or use filter to leave samples out")
    return _not_awaitable(value)


def _not_awaitable(value: Any) -> Any:
    if type(value) is CoroutineType:
        value.close()
        raise TypeError("the function is async, and nothing awaits what it returns: call asyncio.run in it")
    return value


@dataclass(frozen=True)
class FilterFn(_UserStage, Filter):
    """``filter(fn)``."""


@dataclass(frozen=True)
class FlatMapFn(_UserStage, FlatMap):
    """``flat_map(fn)``."""

    def function(self, ctx: Context) -> Callable[..., Any]:
        call = super().function(ctx)
        return lambda *args: _outputs(call(*args))


def _outputs(result: Any) -> Any:
    """Return the result of a function of ``flat_map``; iterating over one sample would yield its parts."""
    if result is None or isinstance(_not_awaitable(result), dict | str | bytes):
        raise TypeError(f"the function returned {kind_of(result)}: return a list of samples, or yield them")
    return result


@dataclass(frozen=True)
class MapBatches(_UserStage, Map):
    """``map_batches(fn)``: calls the function on stacked samples, for speed; row i of the result belongs to row i."""

    takes_columns = True

    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", check_count("batch_size", self.batch_size, least=1))

    @property
    def name(self) -> str:
        return "map_batches"

    def describe(self) -> str:
        size = "" if self.batch_size is None else f", batch_size={self.batch_size}"
        return f"map_batches({name_of(self.fn)}{size})"

    @property
    def group_size(self) -> int | None:
        return self.batch_size or 1

    def _taking_rng(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda batch, *rngs: call(batch, rng=list(rngs))

    def _watched(self, call: Callable[..., Any], block: Block, watch: Callable[[int], Any]) -> Callable[..., Any]:
        """Return the function unchanged: ``_results`` reports the progress batch by batch."""
        return call

    def _results(self, block: Block, ctx: Context) -> tuple[list[Any], list[int]]:
        call, columns = self._calls(block, ctx)
        rngs = columns[1] if self.wants_rng else None
        out: list[Any] = []
        failed: list[int] = []
        size = self.batch_size or len(block.items) or 1
        for start in range(0, len(block.items), size):
            chunk = slice(start, min(start + size, len(block.items)))
            if ctx.watch is not None:
                ctx.watch(block.lineage.input_of(start))
            try:
                out += _call_rows(call, block.items[chunk], rngs and rngs[chunk])
            except Exception as batch_error:  # call the function row by row to find the row that failed
                failed_before = len(failed)
                # The failed call may have drawn from its generators.
                rngs = block.generators(ctx.stage_number) if self.wants_rng else None
                for item in range(chunk.start, chunk.stop):
                    single = slice(item, item + 1)
                    try:
                        out += _call_rows(call, block.items[single], rngs and rngs[single])
                    except Exception as exc:
                        if not self.fail(block, item, exc, ctx):
                            return out, failed
                        failed.append(item)
                if isinstance(batch_error, _UnequalRowsError) or len(failed) > failed_before:
                    continue
                # Every row succeeds on its own: the function is to blame, not a row. What it raised may concern only
                # so many rows at once, so the rows are kept where failures are skipped.
                if isinstance(batch_error, ResultError) or not ctx.skip:
                    del out[start - len(failed) :]
                    block.lineage = block.lineage.stopped(start, self.failure(batch_error, block.place(start)))
                    return out, failed
        return out, failed


class ResultError(ValueError):
    """The function of ``map_batches`` did not return one row for each row that it received."""


class _UnequalRowsError(Exception):
    """Rows have different fields, or are not dicts, so they cannot be stacked."""


def _call_rows(call: Callable[..., Any], items: Sequence[Any], rngs: list[Any] | None) -> list[Any]:
    """Call the function on the rows and return its result, one item per row.

    Raises:
        TypeError: The items have no fields.
        ResultError: The result does not have one row for each item.
        _UnequalRowsError: The items cannot be stacked.
    """
    if not isinstance(items, Columns) and not isinstance(items[0], dict):
        raise TypeError(f"map_batches needs samples with fields, not {type(items[0]).__name__}")
    try:
        batch = collate(items)
    except DataError as exc:
        raise _UnequalRowsError from exc
    out = _rows_of(_returned(call(batch, *(rngs or ()))), items)
    if len(out) != len(items):
        problem = f"{len(items)} rows in, {len(out)} rows out"
        raise ResultError(f"{problem}: the function of map_batches must return one row for each row")
    return out


def _rows_of(result: Any, items: Sequence[Any]) -> list[Any]:
    """Return the rows of a result: columns by name, or rows.

    Raises:
        ResultError: It is something else, or its columns differ in length.
    """
    if isinstance(result, Mapping):
        try:
            return uncollate(_plain_numbers(result, items))
        except DataError as exc:
            raise ResultError(f"map_batches: {exc.problem}; return an array or a list for each field") from exc
    if not isinstance(result, list | np.ndarray | Iterator) and not is_tensor(result):
        raise ResultError(f"the function returned {kind_of(result)}: return a dict of columns, or a list of rows")
    return [_returned(row) for row in result]


def _plain_numbers(result: Mapping[str, Any], items: Sequence[Any]) -> dict[str, Any]:
    """Return a result with Python's numbers where the items had them, row by row: stacking converts them."""
    out = dict(result)
    if isinstance(items, Columns):
        return out
    for name, column in result.items():
        is_plain = isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.str[1:] in _PLAIN
        if is_plain and len(column) == len(items) and any(type(item.get(name)) in _NUMBERS for item in items):
            out[name] = [
                plain if type(item.get(name)) in _NUMBERS else own
                for item, plain, own in zip(items, column.tolist(), column, strict=True)
            ]
    return out


@dataclass(frozen=True)
class _FieldStage(Map):
    """A stage on the fields of a sample; a failure is a DataError with shard and key."""

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(exc.problem if isinstance(exc, DataError) else f"{self.name}: {exc}", place, exc)


class _NameStage(_FieldStage):
    """A field stage that depends on field names only, so that it can rename and drop whole columns."""

    def run(self, block: Block, ctx: Context) -> Block:
        """Rename and drop columns at once; if that fails, process sample by sample, as each sample fails on its own."""
        if isinstance(block.items, Columns) and self.decided_by_names(block.items.names):
            try:
                names = self.function(ctx)({name: name for name in block.items.names})
            except DataError:
                return super().run(block, ctx)
            return block.with_items(block.items.renamed(names))
        return super().run(block, ctx)

    def decided_by_names(self, names: Sequence[str]) -> bool:
        """Return whether the names alone decide the result for samples with these fields."""
        return True


def _alternatives(spec: str) -> tuple[str, ...]:
    names = tuple(name for name in spec.split(";") if name)
    if not names:
        raise PlanError(f"{spec!r} does not name a field: expected field names separated by ';'")
    return names


def _find_field(sample: Any, names: tuple[str, ...], stage: str) -> str:
    """Return the first of ``names`` that the sample has.

    Fields that are not ``None`` come first: the rows of a table have all its columns.

    Raises:
        MissingField: The sample has none of the fields.
        DataError: The sample is not a dict.
    """
    if not isinstance(sample, dict):
        raise DataError(f"{stage} needs a sample with fields, not {type(sample).__name__}")
    present = [name for name in names if name in sample]
    if present:
        if len(present) == 1:
            return present[0]
        return next((name for name in present if sample[name] is not None), present[0])
    raise MissingField.of(stage, names, sample)


@dataclass(frozen=True)
class Select(_NameStage):
    """``select("jpg", "cls")``: keeps these fields, and those named ``__like_this__``; ``verb`` is for messages."""

    names: tuple[str, ...]
    verb: str = "select"

    def __post_init__(self) -> None:
        check_names("select", self.names)

    def describe(self) -> str:
        verb = self.verb if self.verb.isidentifier() else "select"
        return f"{verb}({', '.join(map(repr, self.names))})"

    def needs(self, after: Fields) -> Fields:
        return Fields(frozenset(self.names), meta=after.meta)

    @property
    def named_fields(self) -> tuple[tuple[str, ...], ...]:
        return tuple((name,) for name in self.names)

    def names_after(self, names: frozenset[str]) -> frozenset[str]:
        return names.intersection(self.names)

    def function(self, ctx: Context) -> Callable[..., Any]:
        names, verb = self.names, self.verb

        def select(sample: Any) -> dict[str, Any]:
            chosen = {name: sample[_find_field(sample, (name,), verb)] for name in names}
            return {name: value for name, value in sample.items() if name.startswith("__")} | chosen

        return select


@dataclass(frozen=True)
class Drop(_NameStage):
    """``drop("json")``: removes these fields."""

    optional_fields = True

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check_names("drop", self.names)

    def describe(self) -> str:
        return f"drop({', '.join(map(repr, self.names))})"

    def needs(self, after: Fields) -> Fields:
        return after.without(self.names)

    @property
    def named_fields(self) -> tuple[tuple[str, ...], ...]:
        return tuple((name,) for name in self.names)

    def names_after(self, names: frozenset[str]) -> frozenset[str]:
        return names.difference(self.names)

    def function(self, ctx: Context) -> Callable[..., Any]:
        dropped = frozenset(self.names)

        def drop(sample: Any) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise DataError(f"drop needs a sample with fields, not {type(sample).__name__}")
            return {name: value for name, value in sample.items() if name not in dropped}

        return drop


@dataclass(frozen=True)
class Rename(_NameStage):
    """``rename(image="jpg;png")``: renames the first of these fields that the sample has."""

    names: tuple[tuple[str, str], ...]  # (new name, "old;alternative")

    def __post_init__(self) -> None:
        check_names("rename", tuple(new for new, _ in self.names))
        check_names("rename", tuple(old for _, old in self.names))
        olds = [name for _, old in self.names for name in _alternatives(old)]
        if repeated := sorted({name for name in olds if olds.count(name) > 1}):
            raise PlanError(f"rename gives {', '.join(map(repr, repeated))} more than one new name")

    def describe(self) -> str:
        return f"rename({', '.join(f'{new}={old!r}' for new, old in self.names)})"

    def needs(self, after: Fields) -> Fields:
        wanted = [old for _, spec in self.names for old in _alternatives(spec)]
        return after.without(new for new, _ in self.names).with_(wanted)

    @property
    def named_fields(self) -> tuple[tuple[str, ...], ...]:
        return tuple(_alternatives(spec) for _, spec in self.names)

    def names_after(self, names: frozenset[str]) -> frozenset[str]:
        renamed = {old for _, spec in self.names for old in _alternatives(spec)}
        return names.difference(renamed) | {new for new, _ in self.names}

    def decided_by_names(self, names: Sequence[str]) -> bool:
        """Return False if a field has several alternatives among ``names``: some of them may be ``None``."""
        return all(sum(old in names for old in _alternatives(spec)) <= 1 for _, spec in self.names)

    def features_after(self, features: dict[str, Any]) -> dict[str, Any]:
        known = ((new, [old for old in _alternatives(spec) if old in features]) for new, spec in self.names)
        names = {olds[0]: new for new, olds in known if olds}
        replaced = {new for new, _ in self.names} - names.keys()
        return {names.get(name, name): feature for name, feature in features.items() if name not in replaced}

    def function(self, ctx: Context) -> Callable[..., Any]:
        pairs = [(new, _alternatives(old)) for new, old in self.names]
        optional = [olds for _, olds in pairs if len(olds) > 1]

        def rename(sample: Any) -> dict[str, Any]:
            names = {_find_field(sample, old, "rename"): new for new, old in pairs}
            removed = names.values() - names.keys()  # an existing field of a new name is replaced
            removed |= {old for olds in optional for old in olds if old not in names and sample.get(old, ...) is None}
            return {names.get(name, name): value for name, value in sample.items() if name not in removed}

        return rename


@dataclass(frozen=True)
class ToTuple(_FieldStage):
    """``to_tuple("jpg;png", "cls")``: turns the sample into a tuple of these fields."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        check_names("to_tuple", self.names)
        for spec in self.names:
            _alternatives(spec)

    @property
    def name(self) -> str:
        return "to_tuple"

    def describe(self) -> str:
        return f"to_tuple({', '.join(map(repr, self.names))})"

    def needs(self, after: Fields) -> Fields:
        return Fields(frozenset(name for spec in self.names for name in _alternatives(spec)), meta=False)

    @property
    def named_fields(self) -> tuple[tuple[str, ...], ...]:
        return tuple(map(_alternatives, self.names))

    def function(self, ctx: Context) -> Callable[..., Any]:
        slots = [_alternatives(spec) for spec in self.names]
        return lambda sample: tuple(sample[_find_field(sample, names, "to_tuple")] for names in slots)


@dataclass(frozen=True)
class MapTuple(Map):
    """``map_tuple(f, None)``: applies one function to each element of the tuple; ``None`` leaves it unchanged."""

    fns: tuple[Callable[..., Any] | None, ...]

    def __post_init__(self) -> None:
        for fn in self.fns:
            if fn is not None:
                check_callable("map_tuple", fn, constructs=False)

    @property
    def name(self) -> str:
        return "map_tuple"

    def describe(self) -> str:
        return f"map_tuple({', '.join('None' if fn is None else name_of(fn) for fn in self.fns)})"

    @property
    def wants_rng(self) -> bool:
        return any(fn is not None and takes_parameter(fn, "rng") for fn in self.fns)

    def function(self, ctx: Context) -> Callable[..., Any]:
        if "call" not in ctx.local:
            ctx.local["call"] = self._bind_all(ctx)
        return ctx.local["call"]  # type: ignore[no-any-return]

    def _bind_all(self, ctx: Context) -> Callable[..., Any]:
        fns = [(i, fn) for i, fn in enumerate(self.fns) if fn is not None]
        calls = [(i, bind_parameters(fn, ctx), takes_parameter(fn, "rng")) for i, fn in fns]
        count = len(self.fns)

        def apply(item: Any, rng: Any = None) -> tuple[Any, ...]:
            if not isinstance(item, tuple | list) or len(item) < count:
                raise TypeError(f"map_tuple has {count} functions for {_shape(item)}")
            values = list(item)
            for i, call, takes_rng in calls:
                values[i] = call(values[i], rng) if takes_rng else call(values[i])
            return tuple(values)

        return apply


def _shape(item: Any) -> str:
    if isinstance(item, tuple | list):
        return f"{len(item)} values"
    return f"{kind_of(item)}; use to_tuple first"


@dataclass(frozen=True)
class SplitBy(_FieldStage, Filter):
    """One side of ``train_test_split(by="field")``: samples with equal values are on the same side."""

    field: str
    share: float
    seed: int
    test: bool

    @property
    def name(self) -> str:
        return "train_test_split"

    def describe(self) -> str:
        return f"train_test_split(test_size={self.share}, by={self.field!r})[{int(self.test)}]"

    def needs(self, after: Fields) -> Fields:
        return after.with_((self.field,))

    def function(self, ctx: Context) -> Callable[..., Any]:
        return self._is_selected

    def _is_selected(self, sample: Any) -> bool:
        value = sample[_find_field(sample, (self.field,), self.name)]
        text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(_canonical(value))
        return (name_hash(f"{self.seed}:{text}") < self.share * 2**64) == self.test


def _canonical(value: Any) -> Any:
    """Return a value whose text is the same for equal values and in every process.

    Raises:
        DataError: The value has no such text.
    """
    if hasattr(value, "tolist") and getattr(getattr(value, "dtype", None), "kind", None) not in ("m", "M"):
        value = value.tolist()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return list(map(_canonical, value))
    kind: Any = type(value)
    if isinstance(value, Set) or (kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__):
        raise DataError(f"train_test_split: {kind_of(value)} has no text that is the same in every process")
    return value
