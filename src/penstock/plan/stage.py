"""The base classes of stages, and the only loops over items: Map, Filter, FlatMap.

Cursor, randomness, retries and the error policy are handled in these loops. To write a new stage, subclass one of them
and return the function to call from ``function``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from penstock.errors import DataError, EngineError, MissingExtra, PenstockError, PlanError, StageError, message_of
from penstock.order import ENDLESS, fold_into
from penstock.plan.block import Block, Context, Place, Skipped, estimate_nbytes
from penstock.plan.values import Fields, Recut, Resources, Scope, no_field

# The size that one block may reach in a flat_map before the remaining outputs go into another block.
MAX_PART_ITEMS, MAX_PART_BYTES = 4096, 16_000_000

# Errors that no sample caused: skipping the sample would only hide them.
_FATAL = (MissingExtra, PlanError, EngineError)


@dataclass(frozen=True)
class Stage(ABC):
    """One step of a plan: a value that defines the work on a block, how much of the stream it sees, and its resources.

    ``resources`` is ``None`` for stages that are too small for a pool of their own; they run in a neighbour's pool.
    """

    resources: Resources | None = field(default=None, kw_only=True)

    scope: ClassVar[Scope] = Scope.EACH
    recut: ClassVar[Recut] = Recut.FREE
    keeps_count: ClassVar[bool] = True  # one item out for every item in
    ends_stream: ClassVar[bool] = False  # the stage itself ends the stream, even one that has no end
    reads_source: ClassVar[bool] = False  # the stage reads the located samples of its block
    optional_fields: ClassVar[bool] = False  # some samples may lack a field that the stage names
    uses_features: ClassVar[bool] = False  # ``Context.features`` is filled in for this stage
    numbered: ClassVar[bool] = True  # the stage counts among the stages whose numbers are part of random keys

    @abstractmethod
    def run(self, block: Block, ctx: Context) -> Block:
        """Process ``block`` and return the result.

        A failing item ends the block (``lineage.error``) or, with ``ctx.skip``, is skipped and recorded.
        """

    def parts(self, block: Block, ctx: Context) -> Iterator[Block]:
        """Process ``block`` and yield the result in blocks of bounded size, for stages that multiply items."""
        yield self.run(block, ctx)

    @property
    def group_size(self) -> int | None:
        """How many items the stage processes at a time; ``None`` if that differs between groups."""
        return 1

    @property
    def wants_rng(self) -> bool:
        """Whether the stage uses the sample's own generator, which is the second argument of its function."""
        return False

    def for_leaf(self, leaf: int) -> Stage | None:
        """Return the stage that processes the samples of a source; ``None`` if they pass through unchanged."""
        return self

    def prepare(self, ctx: Context) -> None:
        """Construct in a worker what the stage needs, before the first block: a failure is not a sample's."""
        return None

    def needs(self, after: Fields) -> Fields:
        """Return the input fields that the stage needs to produce ``after``; all fields by default."""
        return Fields()

    @property
    def named_fields(self) -> tuple[tuple[str, ...], ...]:
        """The fields that the stage names, each with its alternatives; a field that no sample has is a mistake."""
        return ()

    def names_after(self, names: frozenset[str]) -> frozenset[str] | None:
        """Return the fields after the stage, given those before it; ``None`` if only running it can tell."""
        return None

    def features_after(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return the typed features after the stage, given those before it."""
        return features

    def length(self, items: int) -> int | None:
        """Return the number of outputs for ``items`` inputs, or ``None`` if only a run can tell."""
        return items if self.keeps_count else None

    @property
    def name(self) -> str:
        """The name of the dataset method that creates the stage."""
        return type(self).__name__.lower()

    def describe(self) -> str:
        """Return the call that created the stage, for ``repr`` and ``explain``."""
        values = ((f, getattr(self, f.name)) for f in fields(self) if f.name != "resources")
        shown = [f"{f.name}={value!r}" for f, value in values if value != f.default]
        return f"{self.name}({', '.join(shown)})"

    def finish(self, ctx: Context) -> None:
        """Release what a worker stored for this stage; called once, when the worker ends."""
        ctx.local.clear()

    def failure(self, exc: Exception, place: Place) -> Exception:
        """Return the error to report when ``exc`` was raised for the sample at ``place``."""
        error = StageError(message_of(exc), self.describe(), place.key, place.shard)
        error.__cause__ = exc
        return error

    def fail(self, block: Block, item: int, exc: Exception, ctx: Context) -> bool:
        """Record that ``item`` failed; return whether the block continues without it."""
        place = block.place(item)
        sample = block.items[item]
        if isinstance(sample, dict) and isinstance(sample.get("__key__"), str):
            place = place._replace(key=sample["__key__"])
        if isinstance(exc, MissingField):
            exc = exc.at(place)
        fatal = isinstance(exc, _FATAL)
        error = exc if fatal or (isinstance(exc, PenstockError) and _names_location(exc)) else self.failure(exc, place)
        if fatal or not ctx.skip:
            block.lineage = block.lineage.stopped(item, error)
            return False
        block.lineage = block.lineage.with_skips(Skipped(block.lineage.input_of(item), place, self.name, str(error)))
        return True


class EachStage(Stage):
    """A stage that calls a function on every item."""

    takes_columns: ClassVar[bool] = False  # the stage can process ``Columns``

    @abstractmethod
    def function(self, ctx: Context) -> Callable[..., Any]:
        """Return the function to call on each item (and its generator, if ``wants_rng``); called once per block."""

    def prepare(self, ctx: Context) -> None:
        self.function(ctx)

    def _calls(self, block: Block, ctx: Context) -> tuple[Callable[..., Any], list[Any]]:
        """Return the function, with retries, and its arguments by column."""
        call = self.function(ctx)
        if not (self.takes_columns or isinstance(block.items, list)):
            block.items = list(block.items)  # a function of one sample needs rows
        columns: list[Any] = [block.items]
        if self.wants_rng:
            columns.append(block.generators(ctx.stage_number))
        retries = self.resources.retries if self.resources else 0
        if retries:
            call = _retried(call, self._attempt(call), retries, ctx)
        return (call if ctx.watch is None else self._watched(call, block, ctx.watch)), columns

    def _watched(self, call: Callable[..., Any], block: Block, watch: Callable[[int], Any]) -> Callable[..., Any]:
        """Return the function, reporting each input to ``watch`` before the call."""
        inputs = iter(block.lineage.owners(len(block.items)).tolist())

        def step(*args: Any) -> Any:
            watch(next(inputs))
            return call(*args)

        return step

    def _attempt(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that is called again when it fails; the last call is one of ``call`` itself."""
        return call


def sample_error(problem: str, place: Place, exc: BaseException) -> DataError:
    """Return a DataError for the sample at ``place``, caused by ``exc``."""
    error = DataError(problem, place.shard, place.key)
    error.__cause__ = exc
    return error


class MissingField(DataError):
    """A sample lacks a field that a stage names.

    Attributes:
        wanted: The field, and its alternatives.
        present: The fields of the sample, as far as they were read.
    """

    wanted: tuple[str, ...] = ()
    present: tuple[str, ...] = ()

    @classmethod
    def of(cls, stage: str, wanted: tuple[str, ...], sample: Mapping[str, Any]) -> MissingField:
        """Return the error for a sample."""
        present = tuple(name for name in sample if not name.startswith("__"))
        error = cls(f"{stage}: the sample has {no_field(wanted, present)}")
        error.wanted, error.present = wanted, present
        return error

    def at(self, place: Place) -> DataError:
        """Return the error with its location; fields that were not read are named too, unless a stage changed them."""
        stage = self.problem.partition(":")[0]
        unchanged = {*self.present} <= {*place.fields}
        problem = f"{stage}: the sample has {no_field(self.wanted, place.fields if unchanged else self.present)}"
        return DataError(problem, place.shard, place.key)


def _names_location(exc: PenstockError) -> bool:
    return bool(getattr(exc, "key", None) or getattr(exc, "shard", None))


def _retried(call: Callable[..., Any], attempted: Callable[..., Any], retries: int, ctx: Context) -> Callable[..., Any]:
    def attempt(item: Any, *rngs: np.random.Generator) -> Any:
        states = [rng.bit_generator.state for rng in rngs]
        for _ in range(retries):
            try:
                return attempted(item, *rngs)
            except _FATAL:
                raise
            except Exception:  # only the last attempt, below, is reported
                ctx.retried += 1
                for rng, state in zip(rngs, states, strict=True):
                    rng.bit_generator.state = state
        return call(item, *rngs)

    return attempt


class Map(EachStage):
    """One item in, one item out."""

    def run(self, block: Block, ctx: Context) -> Block:
        """Call the function on every item; the only cost per item is the call."""
        out, failed = self._results(block, ctx)
        if not failed and block.lineage.error is None:
            return block.with_items(out)
        failures = set(failed)
        return block.keep([i for i in range(len(out) + len(failed)) if i not in failures], out)

    def _converted(self, results: Iterator[Any]) -> Iterator[Any]:
        """Return the items for the function's results, lazily."""
        return results

    def _results(self, block: Block, ctx: Context) -> tuple[list[Any], list[int]]:
        call, columns = self._calls(block, ctx)
        out: list[Any] = []
        failed: list[int] = []
        results = self._converted(map(call, *columns))
        while len(out) + len(failed) < len(block.items):
            try:
                out.extend(results)  # keeps the results before a failure; the map can be resumed after it
                if len(out) + len(failed) < len(block.items):
                    raise RuntimeError("the function raised StopIteration")
            except Exception as exc:
                item = len(out) + len(failed)
                if not self.fail(block, item, exc, ctx):
                    break
                failed.append(item)
        return out, failed


class Filter(Map):
    """Keeps the items for which the function returns true."""

    keeps_count = False

    def names_after(self, names: frozenset[str]) -> frozenset[str] | None:
        return names

    def _converted(self, results: Iterator[Any]) -> Iterator[Any]:
        """Evaluate the truth of each result, which can fail as well."""
        return map(bool, results)

    def run(self, block: Block, ctx: Context) -> Block:
        """Call the function on every item and keep those for which it returns true."""
        chosen, failed = self._results(block, ctx)
        failures = set(failed)
        evaluated = [i for i in range(len(chosen) + len(failed)) if i not in failures]
        kept = [i for i, keep in zip(evaluated, chosen, strict=True) if keep]
        return block.keep(kept, [block.items[i] for i in kept])


class FlatMap(EachStage):
    """One item in, any number of items out, each with its own identity."""

    keeps_count = False

    def _attempt(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Collect all outputs within the attempt: a generator can fail long after the call."""
        return lambda *args: list(call(*args))

    def run(self, block: Block, ctx: Context) -> Block:
        """Call the function on every item and return all outputs in one block, however large."""
        return next(self._buffered(block, ctx, _OutputBuffer(ENDLESS, ENDLESS)))

    def parts(self, block: Block, ctx: Context) -> Iterator[Block]:
        """Call the function on every item and yield the outputs in blocks of bounded size, computed on demand."""
        return self._buffered(block, ctx, _OutputBuffer(MAX_PART_ITEMS, MAX_PART_BYTES))

    def _buffered(self, block: Block, ctx: Context, buffer: _OutputBuffer) -> Iterator[Block]:
        call, columns = self._calls(block, ctx)
        for item, args in enumerate(zip(*columns, strict=True)):
            outputs: Iterator[Any] | None = None
            unfinished, output_count = True, 0
            while unfinished:
                before = len(buffer.out)
                try:
                    outputs = iter(call(*args)) if outputs is None else outputs
                    unfinished = buffer.take(outputs)
                except Exception as exc:  # the outputs before it are kept
                    unfinished = False
                    if not self.fail(block, item, exc, ctx):
                        buffer.record(item, output_count)
                        yield buffer.block(block)
                        return
                buffer.record(item, output_count)
                output_count += len(buffer.out) - before
                if buffer.full() and (following := item if unfinished else item + 1) < len(block.items):
                    yield buffer.part(block, following)
        yield buffer.block(block)


class _OutputBuffer:
    """Collects the outputs of a flat_map until there are enough for a block."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.max_items, self.max_bytes = max_items, max_bytes
        self.begin: int | None = None
        self._clear()

    def _clear(self) -> None:
        self.out: list[Any] = []
        self.runs: list[tuple[int, int, int]] = []  # (item, number of its first output here, end in ``out``)
        self.next_check = 1  # the number of outputs at which to measure their size again

    def take(self, results: Iterator[Any]) -> bool:
        """Take outputs until their size must be measured; return whether there may be more."""
        self.out.extend(islice(results, self.next_check - len(self.out)))
        return len(self.out) == self.next_check

    def record(self, item: int, first_output: int) -> None:
        """Record that the latest outputs came from ``item``, beginning with its output ``first_output``."""
        self.runs.append((item, first_output, len(self.out)))

    def full(self) -> bool:
        """Return whether the buffer is full, and schedule the next measurement."""
        count = len(self.out)
        if count < self.next_check:
            return False
        room = min(self.max_items, self.max_bytes * count // (estimate_nbytes(self.out) + 1)) - count
        self.next_check = count + max(1, min(count, room))
        return room <= 0

    def block(self, block: Block) -> Block:
        """Return the buffered outputs as a block that replaces ``block``."""
        runs = np.array(self.runs, np.int64).reshape(-1, 3)
        counts = np.diff(runs[:, 2], prepend=0)
        grown = block.keep(np.repeat(runs[:, 0], counts), self.out)
        first = np.repeat(runs[:, 2] - counts - runs[:, 1], counts)
        grown.keys = fold_into(grown.keys, np.arange(len(self.out)) - first)
        if self.begin is not None:
            grown.lineage = replace(grown.lineage, begin=self.begin)
        return grown

    def part(self, block: Block, following: int) -> Block:
        """Return the buffered outputs as a block and clear the buffer; the next block begins at item ``following``."""
        part = self.block(block)
        self.begin = block.lineage.input_of(following)
        part.lineage = replace(part.lineage, inputs=self.begin, error=None, more=True)
        block.lineage = replace(block.lineage, skips=())
        self._clear()
        return part


class GroupStage(Stage):
    """A stage on groups of consecutive items; the engine collects each group and calls ``run`` on it."""

    scope = Scope.GROUP
    recut = Recut.NEVER
    keeps_count = False

    @property
    @abstractmethod
    def capacity(self) -> float:
        """The capacity of a group, in the unit of ``weigh``."""

    @property
    def group_size(self) -> int | None:
        return None if self.weighs else int(self.capacity)

    weighs: ClassVar[bool] = False  # items differ in weight

    def weigh(self, item: Any) -> float:
        """Return how much of the capacity ``item`` takes."""
        return 1


class StreamStage(Stage):
    """A stage on the whole stream; the number of items seen is its only state."""

    scope = Scope.ALL
    recut = Recut.NEVER
    keeps_count = False

    def run(self, block: Block, ctx: Context) -> Block:
        """Process ``block`` as the first of the stream; engines call ``pass_on`` instead."""
        return self.pass_on(block, 0)

    @abstractmethod
    def pass_on(self, block: Block, seen: int) -> Block:
        """Return the part of ``block`` that the stage passes on, after ``seen`` items in earlier blocks."""

    def finished(self, seen: int) -> bool:
        """Return whether the stage passes nothing more on after ``seen`` items."""
        return False
