"""The stages that need nothing but Python and numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.errors import DataError, PlanError, StageError
from penstock.order import name_hash
from penstock.plan.block import Block, Context, Place
from penstock.plan.collation import collate, rows
from penstock.plan.columns import Columns
from penstock.plan.stage import Filter, FlatMap, Map, fault
from penstock.plan.values import ByObject, Fields, check_callable, check_count, name_of, takes_parameter


def bound(fn: Callable[..., Any], ctx: Context) -> Callable[..., Any]:
    """``fn`` with its device, taking the generator by position."""
    if takes_parameter(fn, "device"):
        fn = partial(fn, device=ctx.device)
    return _with_rng(fn) if takes_parameter(fn, "rng") else fn


def _with_rng(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda item, rng: fn(item, rng=rng)


@dataclass(frozen=True)
class _UserStage:
    """What map, filter and flat_map share: a function of the user's."""

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        check_callable(self.name, self.fn)

    @property
    def name(self) -> str:
        return type(self).__name__.removesuffix("Fn").lower().replace("flatmap", "flat_map")

    @property
    def wants_rng(self) -> bool:
        return takes_parameter(self.fn, "rng")

    def function(self, ctx: Context) -> Callable[..., Any]:
        """The user's function, prepared once per worker."""
        if "call" not in ctx.local:
            ctx.local["call"] = bound(self.fn, ctx)
        return ctx.local["call"]  # type: ignore[no-any-return]

    def describe(self) -> str:
        return f"{self.name}({name_of(self.fn)})"


@dataclass(frozen=True)
class MapFn(_UserStage, Map):
    """``map(fn)``."""


@dataclass(frozen=True)
class FilterFn(_UserStage, Filter):
    """``filter(fn)``."""


@dataclass(frozen=True)
class FlatMapFn(_UserStage, FlatMap):
    """``flat_map(fn)``."""


@dataclass(frozen=True)
class MapBatches(Map):
    """``map_batches(fn)``: neighbours are stacked for speed, row i of the answer belongs to row i of the question."""

    takes_columns = True

    fn: Callable[..., Any]
    batch_size: int | None = None
    args: ByObject | None = None
    kwargs: ByObject | None = None

    def __post_init__(self) -> None:
        check_callable("map_batches", self.fn)
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", check_count("batch_size", self.batch_size, least=1))
        if (self.args or self.kwargs) and not isinstance(self.fn, type):
            raise PlanError("fn_args and fn_kwargs are for a class, which is constructed once per worker")

    @property
    def name(self) -> str:
        return "map_batches"

    def describe(self) -> str:
        size = "" if self.batch_size is None else f", batch_size={self.batch_size}"
        return f"map_batches({name_of(self.fn)}{size})"

    @property
    def prefers(self) -> int:
        return self.batch_size or 1

    @property
    def wants_rng(self) -> bool:
        return takes_parameter(self.fn.__call__ if isinstance(self.fn, type) else self.fn, "rng")

    def function(self, ctx: Context) -> Callable[..., Any]:
        """The function on the columns of a chunk; a class is constructed here, once per worker."""
        if "call" not in ctx.local:
            call = self._constructed(ctx)
            ctx.local["call"] = _with_rngs(call) if self.wants_rng else call
        return ctx.local["call"]  # type: ignore[no-any-return]

    def _constructed(self, ctx: Context) -> Callable[..., Any]:
        device = {"device": ctx.device} if takes_parameter(self.fn, "device") else {}
        if isinstance(self.fn, type):
            args = self.args.value if self.args else ()
            kwargs = self.kwargs.value if self.kwargs else {}
            try:
                made = ctx.local["made"] = self.fn(*args, **{**device, **kwargs})
                return made  # type: ignore[no-any-return]
            except Exception as exc:  # no sample's fault
                raise StageError(f"{type(exc).__name__}: {exc}", self.describe()) from exc
        return partial(self.fn, **device) if device else self.fn

    def _watched(self, call: Callable[..., Any], block: Block, watch: Callable[[int], Any]) -> Callable[..., Any]:
        """As it is: ``_results`` says which chunk it is at."""
        return call

    def finish(self, ctx: Context) -> None:
        """Close what was constructed for this worker, where it can be closed."""
        made = ctx.local.pop("made", None)
        if (close := getattr(made, "close", None)) is not None:
            close()

    def _results(self, block: Block, ctx: Context) -> tuple[list[Any], list[int]]:
        call, columns = self._calls(block, ctx)
        rngs = columns[1] if self.wants_rng else None
        out: list[Any] = []
        failed: list[int] = []
        size = self.batch_size or len(block.items) or 1
        for start in range(0, len(block.items), size):
            chunk = slice(start, min(start + size, len(block.items)))
            if ctx.watch is not None:
                ctx.watch(block.input_of(start))
            try:
                out += _rows_of(call, block.items[chunk], rngs and rngs[chunk])
            except Exception as problem:  # one row is to blame: ask row by row, whatever its neighbours
                blamed = len(failed)
                rngs = block.generators(ctx.place) if self.wants_rng else None  # not those the failed call drew from
                for item in range(chunk.start, chunk.stop):
                    alone = slice(item, item + 1)
                    try:
                        out += _rows_of(call, block.items[alone], rngs and rngs[alone])
                    except Exception as exc:
                        if not self.fail(block, item, exc, ctx):
                            return out, failed
                        failed.append(item)
                if isinstance(problem, RowCountError) and len(failed) == blamed:  # it is the function's fault
                    del out[start - len(failed) :]
                    block.stop(start, self.failure(problem, block.place(start)))
                    return out, failed
        return out, failed


def _with_rngs(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda batch, *rngs: fn(batch, rng=list(rngs))


class RowCountError(ValueError):
    """The answer has another number of rows than the question."""


def _rows_of(call: Callable[..., Any], items: Sequence[Any], rngs: list[Any] | None) -> list[Any]:
    """What the function makes of the rows, one for one; ``rng`` is the list of their generators."""
    if not isinstance(items, Columns) and not isinstance(items[0], dict):
        raise TypeError(f"map_batches needs samples with fields, not {type(items[0]).__name__}")
    answer = call(collate(items), *(rngs or ()))
    out = rows(answer) if isinstance(answer, dict) else list(answer)
    if len(out) != len(items):
        raise RowCountError(f"{len(items)} rows in, {len(out)} rows out: map_batches answers row by row")
    return out


@dataclass(frozen=True)
class _FieldStage(Map):
    """A stage on the fields of a sample: what it cannot find is a fault of the data."""

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        return fault(exc.problem if isinstance(exc, DataError) else f"{self.name}: {exc}", place, exc)


class _NameStage(_FieldStage):
    """A field stage that looks at names only: what it does to a sample of names it does to columns."""

    def run(self, block: Block, ctx: Context) -> Block:
        """Rename and leave out columns at once; where that fails every sample is asked, as each fails by itself."""
        if isinstance(block.items, Columns) and self.by_names(block.items.names):
            try:
                names = self.function(ctx)({name: name for name in block.items.names})
            except DataError:
                return super().run(block, ctx)
            return block.become(block.items.renamed(names))
        return super().run(block, ctx)

    def by_names(self, names: Sequence[str]) -> bool:
        """Whether samples with these fields need not be looked into."""
        return True


def _alternatives(spec: str) -> tuple[str, ...]:
    names = tuple(name for name in spec.split(";") if name)
    if not names:
        raise PlanError(f"{spec!r} names no field")
    return names


def _check_names(stage: str, names: tuple[Any, ...]) -> None:
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"{stage} needs names of fields, not {names!r}")


def _first(sample: Any, names: tuple[str, ...], stage: str) -> str:
    """The first of ``names`` that the sample has, rather one that holds something: a table has all its columns."""
    if not isinstance(sample, dict):
        raise DataError(f"{stage} needs a sample with fields, not {type(sample).__name__}")
    there = [name for name in names if name in sample]
    if there:
        return there[0] if len(there) == 1 else next((one for one in there if sample[one] is not None), there[0])
    raise DataError(f"{stage}: the sample has no field {' or '.join(map(repr, names))}")


@dataclass(frozen=True)
class Select(_NameStage):
    """``select("jpg", "cls")``: keeps these fields, and those named ``__like_this__``."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names("select", self.names)

    def describe(self) -> str:
        return f"select({', '.join(map(repr, self.names))})"

    def needs(self, after: Fields) -> Fields:
        """Only what is selected."""
        return Fields(frozenset(self.names), meta=after.meta)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Pick the fields."""
        names = self.names

        def select(sample: Any) -> dict[str, Any]:
            chosen = {name: sample[_first(sample, (name,), "select")] for name in names}
            return {name: value for name, value in sample.items() if name.startswith("__")} | chosen

        return select


@dataclass(frozen=True)
class Drop(_NameStage):
    """``drop("json")``: leaves these fields out."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names("drop", self.names)

    def describe(self) -> str:
        return f"drop({', '.join(map(repr, self.names))})"

    def needs(self, after: Fields) -> Fields:
        """All but the dropped."""
        return after.without(self.names)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Leave the fields out."""
        gone = frozenset(self.names)

        def drop(sample: Any) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise DataError(f"drop needs a sample with fields, not {type(sample).__name__}")
            return {name: value for name, value in sample.items() if name not in gone}

        return drop


@dataclass(frozen=True)
class Rename(_NameStage):
    """``rename(image="jpg;png")``: gives the first of these fields that is there a new name."""

    names: tuple[tuple[str, str], ...]  # (new, "old;older")

    def __post_init__(self) -> None:
        _check_names("rename", tuple(new for new, _ in self.names))
        _check_names("rename", tuple(old for _, old in self.names))
        olds = [name for _, old in self.names for name in _alternatives(old)]
        if twice := sorted({name for name in olds if olds.count(name) > 1}):
            raise PlanError(f"rename gives {', '.join(map(repr, twice))} two new names")

    def describe(self) -> str:
        return f"rename({', '.join(f'{new}={old!r}' for new, old in self.names)})"

    def needs(self, after: Fields) -> Fields:
        """The old names in place of the new ones."""
        wanted = [old for _, spec in self.names for old in _alternatives(spec)]
        return after.without(new for new, _ in self.names).with_(wanted)

    def by_names(self, names: Sequence[str]) -> bool:
        """Unless a field may be found under several of them, of which one may hold nothing."""
        return all(sum(old in names for old in _alternatives(spec)) <= 1 for _, spec in self.names)

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        """The same under the new names."""
        known = ((new, [old for old in _alternatives(spec) if old in features]) for new, spec in self.names)
        names = {olds[0]: new for new, olds in known if olds}
        gone = {new for new, _ in self.names} - names.keys()
        return {names.get(name, name): what for name, what in features.items() if name not in gone}

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Rename the fields, in place."""
        pairs = [(new, _alternatives(old)) for new, old in self.names]
        several = [pair for pair in pairs if len(pair[1]) > 1]

        def rename(sample: Any) -> dict[str, Any]:
            names = {_first(sample, old, "rename"): new for new, old in pairs}
            gone = names.values() - names.keys()  # a field that had a new name before makes way
            gone |= {one for _, old in several for one in old if one not in names and sample.get(one, ...) is None}
            return {names.get(name, name): value for name, value in sample.items() if name not in gone}

        return rename


@dataclass(frozen=True)
class ToTuple(_FieldStage):
    """``to_tuple("jpg;png", "cls")``: the sample as a tuple of these fields."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names("to_tuple", self.names)
        for spec in self.names:
            _alternatives(spec)

    @property
    def name(self) -> str:
        return "to_tuple"

    def describe(self) -> str:
        return f"to_tuple({', '.join(map(repr, self.names))})"

    def needs(self, after: Fields) -> Fields:
        """Only what goes into the tuple."""
        return Fields(frozenset(name for spec in self.names for name in _alternatives(spec)), meta=False)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Pick the values."""
        slots = [_alternatives(spec) for spec in self.names]
        return lambda sample: tuple(sample[_first(sample, names, "to_tuple")] for names in slots)


@dataclass(frozen=True)
class MapTuple(Map):
    """``map_tuple(f, None)``: a function for each place of the tuple; ``None`` leaves it as it is."""

    fns: tuple[Callable[..., Any] | None, ...]

    def __post_init__(self) -> None:
        for fn in self.fns:
            if fn is not None:
                check_callable("map_tuple", fn)

    @property
    def name(self) -> str:
        return "map_tuple"

    def describe(self) -> str:
        return f"map_tuple({', '.join('None' if fn is None else name_of(fn) for fn in self.fns)})"

    @property
    def wants_rng(self) -> bool:
        return any(fn is not None and takes_parameter(fn, "rng") for fn in self.fns)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Apply each function to its place."""
        if "call" not in ctx.local:
            ctx.local["call"] = self._bound(ctx)
        return ctx.local["call"]  # type: ignore[no-any-return]

    def _bound(self, ctx: Context) -> Callable[..., Any]:
        calls = [(i, bound(fn, ctx), takes_parameter(fn, "rng")) for i, fn in enumerate(self.fns) if fn is not None]
        many = len(self.fns)

        def apply(item: Any, rng: Any = None) -> tuple[Any, ...]:
            if not isinstance(item, tuple | list) or len(item) < many:
                raise TypeError(f"map_tuple has {many} functions for {_shape(item)}")
            values = list(item)
            for i, call, random in calls:
                values[i] = call(values[i], rng) if random else call(values[i])
            return tuple(values)

        return apply


def _shape(item: Any) -> str:
    if isinstance(item, tuple | list):
        return f"{len(item)} values"
    return f"a {type(item).__name__}; use to_tuple first"


@dataclass(frozen=True)
class SplitBy(_FieldStage, Filter):
    """One side of ``train_test_split(by="field")``: equal values are always on the same side."""

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
        """The field that decides, too."""
        return after.with_((self.field,))

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Hash the field's value."""
        return self._chosen

    def _chosen(self, sample: Any) -> bool:
        value = sample[_first(sample, (self.field,), self.name)]
        text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
        return (name_hash(f"{self.seed}:{text}") < self.share * 2**64) == self.test
