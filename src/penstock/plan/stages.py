"""The stages that need nothing but Python and numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import DataError, PlanError
from penstock.order import fold, permute
from penstock.plan.block import Block, Context, Place
from penstock.plan.collate import collate, rows
from penstock.plan.stage import Filter, FlatMap, GroupStage, Map, StreamStage
from penstock.plan.values import ByObject, Fields, check_callable, check_count, name_of, takes

NOTHING = ByObject(())


def bound(fn: Callable[..., Any], ctx: Context) -> Callable[..., Any]:
    """``fn`` with its device, taking the generator by position."""
    if takes(fn, "device"):
        fn = partial(fn, device=ctx.device)
    return _with_rng(fn) if takes(fn, "rng") else fn


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
        return takes(self.fn, "rng")

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

    fn: Callable[..., Any]
    batch_size: int | None = None
    args: ByObject = NOTHING
    kwargs: ByObject = NOTHING

    def __post_init__(self) -> None:
        check_callable("map_batches", self.fn)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, least=1)
        if (self.args.value or self.kwargs.value) and not isinstance(self.fn, type):
            raise PlanError("fn_args and fn_kwargs are for a class, which is constructed once per worker")

    @property
    def name(self) -> str:
        return "map_batches"

    def describe(self) -> str:
        size = "" if self.batch_size is None else f", batch_size={self.batch_size}"
        return f"map_batches({name_of(self.fn)}{size})"

    def function(self, ctx: Context) -> Callable[..., Any]:
        """The function on one chunk of samples."""
        if "call" not in ctx.local:
            fn = self.fn
            if isinstance(fn, type):
                kwargs = dict(self.kwargs.value)
                if takes(fn, "device"):
                    kwargs.setdefault("device", ctx.device)
                fn = fn(*self.args.value, **kwargs)
            elif takes(fn, "device"):
                fn = partial(fn, device=ctx.device)
            ctx.local["call"], ctx.local["rng"] = fn, takes(getattr(fn, "__call__", fn), "rng")  # noqa: B004
        return ctx.local["call"]  # type: ignore[no-any-return]

    def _results(self, block: Block, ctx: Context) -> tuple[list[Any], list[int]]:
        out: list[Any] = []
        failed: list[int] = []
        size = self.batch_size or len(block.items) or 1
        for start in range(0, len(block.items), size):
            numbers = range(start, min(start + size, len(block.items)))
            try:
                out += self._chunk(block, numbers, ctx)
            except Exception:  # one row is to blame: ask row by row, whatever its neighbours
                for item in numbers:
                    try:
                        out += self._chunk(block, range(item, item + 1), ctx)
                    except Exception as exc:
                        if not self._fail(block, item, exc, ctx):
                            return out, failed
                        failed.append(item)
        return out, failed

    def _chunk(self, block: Block, numbers: range, ctx: Context) -> list[Any]:
        items = block.items[numbers.start : numbers.stop]
        if not isinstance(items[0], dict):
            raise TypeError(f"map_batches needs samples with fields, not {type(items[0]).__name__}")
        call = self.function(ctx)
        rng = {"rng": block.generators(ctx.place)[numbers.start : numbers.stop]} if ctx.local["rng"] else {}
        answer = call(collate(items), **rng)
        out = rows(answer) if isinstance(answer, dict) else list(answer)
        if len(out) != len(items):
            raise ValueError(f"{len(items)} rows in, {len(out)} rows out: map_batches answers row by row")
        return out


@dataclass(frozen=True)
class _FieldStage(Map):
    """A stage on the fields of a sample: what it cannot find is a fault of the data."""

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        problem = exc.problem if isinstance(exc, DataError) else f"{self.name}: {exc}"
        error = DataError(problem, place.shard, place.key)
        error.__cause__ = exc
        return error


def _alternatives(spec: str) -> tuple[str, ...]:
    names = tuple(name for name in spec.split(";") if name)
    if not names:
        raise PlanError(f"{spec!r} names no field")
    return names


def _check_names(stage: str, names: tuple[Any, ...]) -> None:
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"{stage} needs names of fields, not {names!r}")


def _first(sample: Any, names: tuple[str, ...], stage: str) -> str:
    """The first of ``names`` that the sample has."""
    if not isinstance(sample, dict):
        raise DataError(f"{stage} needs a sample with fields, not {type(sample).__name__}")
    for name in names:
        if name in sample:
            return name
    raise DataError(f"{stage}: the sample has no field {' or '.join(map(repr, names))}")


@dataclass(frozen=True)
class Select(_FieldStage):
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
class Drop(_FieldStage):
    """``drop("json")``: leaves these fields out."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names("drop", self.names)

    def describe(self) -> str:
        return f"drop({', '.join(map(repr, self.names))})"

    def needs(self, after: Fields) -> Fields:
        """All but the dropped."""
        return after.but(self.names)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Leave the fields out."""
        gone = frozenset(self.names)
        return lambda sample: {name: value for name, value in sample.items() if name not in gone}


@dataclass(frozen=True)
class Rename(_FieldStage):
    """``rename(image="jpg;png")``: gives the first of these fields that is there a new name."""

    names: tuple[tuple[str, str], ...]  # (new, "old;older")

    def __post_init__(self) -> None:
        _check_names("rename", tuple(new for new, _ in self.names))
        for _, old in self.names:
            _alternatives(old)

    def describe(self) -> str:
        return f"rename({', '.join(f'{new}={old!r}' for new, old in self.names)})"

    def needs(self, after: Fields) -> Fields:
        """The old names in place of the new ones."""
        wanted = [old for new, spec in self.names if after.wants(new) for old in _alternatives(spec)]
        return after.but(new for new, _ in self.names).also(wanted)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Rename the fields, in place."""
        pairs = [(new, _alternatives(old)) for new, old in self.names]

        def rename(sample: Any) -> dict[str, Any]:
            names = {_first(sample, old, "rename"): new for new, old in pairs}
            return {names.get(name, name): value for name, value in sample.items()}

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
        return any(fn is not None and takes(fn, "rng") for fn in self.fns)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Apply each function to its place."""
        if "call" not in ctx.local:
            ctx.local["call"] = self._bound(ctx)
        return ctx.local["call"]  # type: ignore[no-any-return]

    def _bound(self, ctx: Context) -> Callable[..., Any]:
        calls = [(i, bound(fn, ctx), takes(fn, "rng")) for i, fn in enumerate(self.fns) if fn is not None]
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
class Unbatched(FlatMap):
    """``unbatched()``: the samples of a batch again."""

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Take the columns apart."""
        return rows

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after


@dataclass(frozen=True)
class Batched(GroupStage):
    """``batched(64)``: so many neighbours as one batch."""

    batch_size: int
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        check_count("batched", self.batch_size, least=1)
        if self.collate is not None:
            check_callable("collate", self.collate)

    @property
    def capacity(self) -> float:
        return self.batch_size

    def describe(self) -> str:
        more = ", drop_last=True" if self.drop_last else ""
        more += f", collate={name_of(self.collate)}" if self.collate else ""
        return f"batched({self.batch_size}{more})"

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after

    def length(self, items: int) -> int | None:
        """Whole batches, and the last one if it is kept."""
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def run(self, block: Block, ctx: Context) -> Block:
        """Collate the group."""
        if self.drop_last and len(block.items) < self.batch_size:
            return block.keep([], [])
        return _batch(block, self.collate or collate)


def _batch(block: Block, join: Callable[[list[Any]], Any]) -> Block:
    """One item made of all; its identity is that of its first sample, in another role."""
    batch = block.keep([0], [join(block.items)])
    batch.keys = np.array([fold(int(block.keys[0]), 7)], np.uint64)
    return batch


@dataclass(frozen=True)
class BatchedBy(GroupStage):
    """``batched_by(size_fn, max_size)``: as many neighbours as fit; one that alone is larger stands alone."""

    size_fn: Callable[[Any], float]
    max_size: float
    collate: Callable[[list[Any]], Any] | None = None

    weighs = True

    def __post_init__(self) -> None:
        check_callable("batched_by", self.size_fn)
        if isinstance(self.max_size, bool) or not self.max_size > 0:
            raise PlanError(f"max_size={self.max_size!r}: give a number above 0")

    @property
    def name(self) -> str:
        return "batched_by"

    @property
    def capacity(self) -> float:
        return self.max_size

    def weigh(self, item: Any) -> float:
        """The size of one item."""
        return self.size_fn(item)

    def describe(self) -> str:
        return f"batched_by({name_of(self.size_fn)}, {self.max_size})"

    def run(self, block: Block, ctx: Context) -> Block:
        """Collate the group."""
        return _batch(block, self.collate or collate)


@dataclass(frozen=True)
class LateShuffle(GroupStage):
    """``shuffle(window)`` after a stage that makes or joins items: permutes windows of the stream."""

    window: int

    keeps_count = True

    @property
    def name(self) -> str:
        return "shuffle"

    @property
    def capacity(self) -> float:
        return self.window

    def describe(self) -> str:
        return f"shuffle(window={self.window})"

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after

    def run(self, block: Block, ctx: Context) -> Block:
        """Permute the group by where it began, so that whoever replays it gets the same permutation."""
        start = block.origin.cursor(0, 0).marks()
        order = permute(fold(ctx.seed, ctx.epoch, 5, ctx.place, *start), len(block), np.arange(len(block)))
        return block.keep(order, [block.items[i] for i in order.tolist()])


@dataclass(frozen=True)
class StreamLimit(StreamStage):
    """``limit(n)`` where the count is not known before: the first n that come."""

    n: int

    @property
    def name(self) -> str:
        return "limit"

    def describe(self) -> str:
        return f"limit({self.n})"

    def length(self, items: int) -> int | None:
        """At most n."""
        return min(items, self.n)

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after

    def pass_on(self, block: Block, seen: int) -> Block:
        """The items below n."""
        left = max(0, self.n - seen)
        return block if len(block) <= left else block.first(left)

    def finished(self, seen: int) -> bool:
        """After n items nothing more comes."""
        return seen >= self.n


@dataclass(frozen=True)
class StreamSkip(StreamStage):
    """``skip(n)`` where the count is not known before: without the first n that come."""

    n: int

    @property
    def name(self) -> str:
        return "skip"

    def describe(self) -> str:
        return f"skip({self.n})"

    def length(self, items: int) -> int | None:
        """All but n."""
        return max(0, items - self.n)

    def needs(self, after: Fields) -> Fields:
        """The same fields."""
        return after

    def pass_on(self, block: Block, seen: int) -> Block:
        """The items from n on."""
        gone = min(len(block), max(0, self.n - seen))
        return block.keep(np.arange(gone, len(block)), block.items[gone:]) if gone else block
