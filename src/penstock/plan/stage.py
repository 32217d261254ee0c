"""What a stage is, and the only loops over items: Map, Filter, FlatMap, Group.

Cursor, randomness, retries and the error policy live in these loops, so a new stage is one function: subclass one of
them and return what to call from ``function``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from penstock.errors import DataError, EngineError, MissingExtra, PenstockError, PlanError, StageError
from penstock.order import ENDLESS, fold_into
from penstock.plan.block import Block, Context, Place, Skipped, weight
from penstock.plan.values import Fields, Resources, Scope

# What one block may grow to in a flat_map before the rest becomes a block of its own.
PART_ITEMS, PART_BYTES = 4096, 16_000_000

# Not the sample's fault: skipping the sample would only hide it.
_FATAL = (MissingExtra, PlanError, EngineError)


@dataclass(frozen=True)
class Stage(ABC):
    """One step of a plan: a value that says what to do with a block, how much it must see, and what it needs.

    ``resources`` is ``None`` for stages too small to have a pool of their own: they join their neighbour's.
    """

    resources: Resources | None = field(default=None, kw_only=True)

    scope: ClassVar[Scope] = Scope.EACH
    keeps_count: ClassVar[bool] = True  # one item out for every item in
    follows_features: ClassVar[bool] = False  # its contexts say what the sources know of the fields

    @abstractmethod
    def run(self, block: Block, ctx: Context) -> Block:
        """Do the stage's work on ``block``.

        A failing item ends the block (``block.error``) or, where ``ctx.skip``, is left out and noted.
        """

    def parts(self, block: Block, ctx: Context) -> Iterator[Block]:
        """The same in blocks of bounded size: for stages that can make much of little."""
        yield self.run(block, ctx)

    @property
    def prefers(self) -> int:
        """How many items the stage would like to see together, for speed."""
        return 1

    def needs(self, after: Fields) -> Fields:
        """Which fields must come in so that ``after`` can go out; every field unless the stage knows better."""
        return Fields()

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        """What is known of the fields behind the stage, where ``features`` is known of them before it."""
        return features

    def length(self, items: int) -> int | None:
        """How many items come out when ``items`` come in; ``None``: only running it tells."""
        return items if self.keeps_count else None

    @property
    def name(self) -> str:
        """The stage as the user wrote it: the method's name."""
        return type(self).__name__.lower()

    def describe(self) -> str:
        """The call that made the stage, for ``repr`` and ``explain``."""
        values = ((f, getattr(self, f.name)) for f in fields(self) if f.name != "resources")
        shown = [f"{f.name}={value!r}" for f, value in values if value != f.default]
        return f"{self.name}({', '.join(shown)})"

    def finish(self, ctx: Context) -> None:
        """Let go of what a worker kept for this stage; called once, when the worker ends."""
        ctx.local.clear()

    def failure(self, exc: Exception, place: Place) -> Exception:
        """What the user sees when ``exc`` came up at ``place``."""
        error = StageError(f"{type(exc).__name__}: {exc}", self.describe(), place.key, place.shard)
        error.__cause__ = exc
        return error

    def fail(self, block: Block, item: int, exc: Exception, ctx: Context) -> bool:
        """Note that ``item`` failed; say whether the block goes on without it."""
        place = block.place(item)
        own = block.items[item]
        if isinstance(own, dict) and isinstance(own.get("__key__"), str):
            place = place._replace(key=own["__key__"])
        fatal = isinstance(exc, _FATAL)
        error = exc if fatal or (isinstance(exc, PenstockError) and _located(exc)) else self.failure(exc, place)
        if fatal or not ctx.skip:
            block.stop(item, error)
            return False
        block.skips.append(Skipped(block.input_of(item), place, self.name, str(error)))
        return True


class EachStage(Stage):
    """A stage that calls a function on every item."""

    takes_columns: ClassVar[bool] = False  # it can work on items that are columns

    @abstractmethod
    def function(self, ctx: Context) -> Callable[..., Any]:
        """What to call on each item (and its generator, where ``wants_rng``); asked for once a block."""

    @property
    def wants_rng(self) -> bool:
        """Whether ``function`` takes the sample's own generator as second argument."""
        return False

    def _calls(self, block: Block, ctx: Context) -> tuple[Callable[..., Any], list[Any]]:
        """The function with its retries, and its argument columns."""
        call = self.function(ctx)
        if not (self.takes_columns or isinstance(block.items, list)):
            block.items = list(block.items)  # a function of one sample wants rows
        columns: list[Any] = [block.items]
        if self.wants_rng:
            columns.append(block.generators(ctx.place))
        retries = self.resources.retries if self.resources else 0
        if retries:
            call = _retried(self._attempt(call), retries, ctx)
        return (call if ctx.watch is None else self._watched(call, block, ctx.watch)), columns

    def _watched(self, call: Callable[..., Any], block: Block, watch: Callable[[int], Any]) -> Callable[..., Any]:
        """The function, saying which input it is called for."""
        inputs = iter(range(len(block.items)) if block.owner is None else block.owner.tolist())

        def step(*args: Any) -> Any:
            watch(next(inputs))
            return call(*args)

        return step

    def _attempt(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What is tried again when it fails."""
        return call


def fault(problem: str, place: Place, exc: Exception) -> DataError:
    """The error of a sample: what is wrong, its shard and key, and what was raised."""
    error = DataError(problem, place.shard, place.key)
    error.__cause__ = exc
    return error


def _located(exc: PenstockError) -> bool:
    return bool(getattr(exc, "key", None) or getattr(exc, "shard", None))


def _retried(call: Callable[..., Any], retries: int, ctx: Context) -> Callable[..., Any]:
    def attempt(item: Any, *rngs: np.random.Generator) -> Any:
        states = [rng.bit_generator.state for rng in rngs]
        for _ in range(retries):
            try:
                return call(item, *rngs)
            except _FATAL:
                raise
            except Exception:  # the last attempt below speaks for all of them
                ctx.retried += 1
                for rng, state in zip(rngs, states, strict=True):
                    rng.bit_generator.state = state
        return call(item, *rngs)

    return attempt


class Map(EachStage):
    """One item in, one item out."""

    def run(self, block: Block, ctx: Context) -> Block:
        """Call the function on every item; nothing is paid per item but the call."""
        out, failed = self._results(block, ctx)
        if not failed and block.error is None:
            return block.become(out)
        gone = set(failed)
        return block.keep([i for i in range(len(out) + len(failed)) if i not in gone], out)

    def _answers(self, answers: Iterator[Any]) -> Iterator[Any]:
        """What is made of the function's answers, item by item."""
        return answers

    def _results(self, block: Block, ctx: Context) -> tuple[list[Any], list[int]]:
        call, columns = self._calls(block, ctx)
        out: list[Any] = []
        failed: list[int] = []
        results = self._answers(map(call, *columns))
        while len(out) + len(failed) < len(block.items):
            try:
                out.extend(results)  # what came before a failure stays, and the map goes on after it
                if len(out) + len(failed) < len(block.items):
                    raise RuntimeError("the function raised StopIteration")
            except Exception as exc:
                item = len(out) + len(failed)
                if not self.fail(block, item, exc, ctx):
                    break
                failed.append(item)
        return out, failed


class Filter(Map):
    """Keeps the items for which the function is true."""

    keeps_count = False

    def _answers(self, answers: Iterator[Any]) -> Iterator[Any]:
        """Ask each answer for its truth, which can fail too."""
        return map(bool, answers)

    def run(self, block: Block, ctx: Context) -> Block:
        """Call the function on every item and keep the chosen ones."""
        chosen, failed = self._results(block, ctx)
        gone = set(failed)
        asked = [i for i in range(len(chosen) + len(failed)) if i not in gone]
        kept = [i for i, keep in zip(asked, chosen, strict=True) if keep]
        return block.keep(kept, [block.items[i] for i in kept])


class FlatMap(EachStage):
    """One item in, any number of items out, each with an identity of its own."""

    keeps_count = False

    def _attempt(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """All that it gives: a generator fails long after the call."""
        return lambda *args: list(call(*args))

    def run(self, block: Block, ctx: Context) -> Block:
        """Call the function on every item and join what comes out, however much that is."""
        return next(self._grown(block, ctx, _Lot(ENDLESS, ENDLESS)))

    def parts(self, block: Block, ctx: Context) -> Iterator[Block]:
        """The same in blocks of bounded size; what an item gives beyond is asked of it with the next one."""
        return self._grown(block, ctx, _Lot(PART_ITEMS, PART_BYTES))

    def _grown(self, block: Block, ctx: Context, lot: _Lot) -> Iterator[Block]:
        call, columns = self._calls(block, ctx)
        for item, args in enumerate(zip(*columns, strict=True)):
            results: Iterator[Any] | None = None
            going, made = True, 0
            while going:
                before = len(lot.out)
                try:
                    results = iter(call(*args)) if results is None else results
                    going = lot.take(results)
                except Exception as exc:  # what came before it stays
                    going = False
                    if not self.fail(block, item, exc, ctx):
                        lot.note(item, made)
                        yield lot.block(block)
                        return
                lot.note(item, made)
                made += len(lot.out) - before
                if lot.full() and (following := item if going else item + 1) < len(block.items):
                    yield lot.part(block, following)
        yield lot.block(block)


class _Lot:
    """What a flat_map has made so far of a block, until it is enough for a block of its own."""

    def __init__(self, most: int, nbytes: int) -> None:
        self.most, self.nbytes = most, nbytes
        self.begin: int | None = None
        self._clear()

    def _clear(self) -> None:
        self.out: list[Any] = []
        self.runs: list[tuple[int, int, int]] = []  # (item, number of its first output here, where it ends)
        self.check = 1  # outputs after which they are weighed again: soon while they are few, or large

    def take(self, results: Iterator[Any]) -> bool:
        """Take outputs until it is time to weigh them; say whether there may be more."""
        self.out.extend(islice(results, self.check - len(self.out)))
        return len(self.out) == self.check

    def note(self, item: int, made: int) -> None:
        """Note that what was taken last came from ``item``, which had given ``made`` before."""
        self.runs.append((item, made, len(self.out)))

    def full(self) -> bool:
        """Whether this is enough."""
        many = len(self.out)
        if many < self.check:
            return False
        room = min(self.most, self.nbytes * many // (weight(self.out) + 1)) - many
        self.check = many + max(1, min(many, room))
        return room <= 0

    def block(self, block: Block) -> Block:
        """Everything that is here, as what became of ``block``."""
        runs = np.array(self.runs, np.int64).reshape(-1, 3)
        many = np.diff(runs[:, 2], prepend=0)
        grown = block.keep(np.repeat(runs[:, 0], many), self.out)
        first = np.repeat(runs[:, 2] - many - runs[:, 1], many)
        grown.keys = fold_into(grown.keys, np.arange(len(self.out)) - first)
        grown.begin = block.begin if self.begin is None else self.begin
        return grown

    def part(self, block: Block, following: int) -> Block:
        """Everything that is here, as a block of its own; ``following`` is the item the next one goes on with."""
        part = self.block(block)
        part.inputs = self.begin = block.input_of(following)
        part.error, part.more, block.skips = None, True, []
        self._clear()
        return part


class GroupStage(Stage):
    """A stage on so many consecutive items at once; the engine collects them and calls ``run`` on each group."""

    scope = Scope.GROUP
    keeps_count = False

    @property
    def capacity(self) -> float:
        """How much a group holds, in the unit of ``weigh``."""
        raise TypeError(f"{self.name} has no capacity")

    weighs: ClassVar[bool] = False  # whether items differ in weight

    def weigh(self, item: Any) -> float:
        """What ``item`` takes of the capacity."""
        return 1


class StreamStage(Stage):
    """A stage on the whole stream, with a counter that is its entire memory."""

    scope = Scope.ALL
    keeps_count = False

    def run(self, block: Block, ctx: Context) -> Block:
        """Not used: a stream stage is given the counter too."""
        return self.pass_on(block, 0)

    @abstractmethod
    def pass_on(self, block: Block, seen: int) -> Block:
        """What goes through of ``block`` when ``seen`` items came before it."""

    def finished(self, seen: int) -> bool:
        """Whether nothing more can come out after ``seen`` items."""
        return False
