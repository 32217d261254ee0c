"""What a stage is, and the only loops over items: Map, Filter, FlatMap, Group.

Cursor, randomness, retries and the error policy live in these loops, so a new stage is one function: subclass one of
them and return what to call from ``function``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from penstock.errors import DataError, EngineError, MissingExtra, PenstockError, PlanError, StageError
from penstock.order import fold_into
from penstock.plan.block import Block, Context, Place, Skipped
from penstock.plan.values import Fields, Resources, Scope

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

    @abstractmethod
    def run(self, block: Block, ctx: Context) -> Block:
        """Do the stage's work on ``block``.

        A failing item ends the block (``block.error``) or, where ``ctx.skip``, is left out and noted.
        """

    def needs(self, after: Fields) -> Fields:
        """Which fields must come in so that ``after`` can go out; every field unless the stage knows better."""
        return Fields()

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


class EachStage(Stage):
    """A stage on one item at a time: gives the loops their function and words their failures."""

    @abstractmethod
    def function(self, ctx: Context) -> Callable[..., Any]:
        """What to call on each item (and its generator, where ``wants_rng``); asked for once a block."""

    @property
    def wants_rng(self) -> bool:
        """Whether ``function`` takes the sample's own generator as second argument."""
        return False

    def failure(self, exc: Exception, place: Place) -> Exception:
        """What the user sees when ``exc`` came up at ``place``."""
        error = StageError(f"{type(exc).__name__}: {exc}", self.describe(), place.key, place.shard)
        error.__cause__ = exc
        return error

    def _calls(self, block: Block, ctx: Context) -> tuple[Callable[..., Any], list[Iterable[Any]]]:
        """The function with its retries, and its argument columns."""
        call = self.function(ctx)
        columns: list[Iterable[Any]] = [block.items]
        if self.wants_rng:
            columns.append(block.generators(ctx.place))
        retries = self.resources.retries if self.resources else 0
        return (_retried(call, retries) if retries else call), columns

    def _fail(self, block: Block, item: int, exc: Exception, ctx: Context) -> bool:
        """Note that ``item`` failed; say whether the block goes on without it."""
        place = block.place(item)
        own = block.items[item]
        if isinstance(own, dict) and isinstance(own.get("__key__"), str):
            place = place._replace(key=own["__key__"])
        fatal = isinstance(exc, _FATAL)
        error = (
            exc if fatal or (isinstance(exc, PenstockError) and _located(exc)) else self.failure(exc, place)
        )
        if fatal or not ctx.skip:
            block.stop(item, error)
            return False
        block.skips.append(Skipped(block.input_of(item), place, self.name, str(error)))
        return True


def _located(exc: PenstockError) -> bool:
    return bool(getattr(exc, "key", None) or getattr(exc, "shard", None))


def _retried(call: Callable[..., Any], retries: int) -> Callable[..., Any]:
    def attempt(*args: Any) -> Any:
        for _ in range(retries):
            try:
                return call(*args)
            except _FATAL:
                raise
            except Exception:  # the last attempt below speaks for all of them
                continue
        return call(*args)

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

    def _results(self, block: Block, ctx: Context) -> tuple[list[Any], list[int]]:
        call, columns = self._calls(block, ctx)
        out: list[Any] = []
        failed: list[int] = []
        results = map(call, *columns)
        while len(out) + len(failed) < len(block.items):
            try:
                out.extend(results)  # what came before a failure stays, and the map goes on after it
                if len(out) + len(failed) < len(block.items):
                    raise RuntimeError("the function raised StopIteration")
            except Exception as exc:
                item = len(out) + len(failed)
                if not self._fail(block, item, exc, ctx):
                    break
                failed.append(item)
        return out, failed


class Filter(Map):
    """Keeps the items for which the function is true."""

    keeps_count = False

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

    def run(self, block: Block, ctx: Context) -> Block:
        """Call the function on every item and join what comes out."""
        call, columns = self._calls(block, ctx)
        out: list[Any] = []
        owner: list[int] = []
        number: list[int] = []
        for item, args in enumerate(zip(*columns, strict=True)):
            before = len(out)
            try:
                out.extend(call(*args))
            except Exception as exc:
                if not self._fail(block, item, exc, ctx):
                    _own(out, before, item, owner, number)
                    break
            _own(out, before, item, owner, number)
        grown = block.keep(owner, out)
        grown.keys = fold_into(grown.keys, np.asarray(number, np.int64))
        return grown


def _own(out: list[Any], before: int, item: int, owner: list[int], number: list[int]) -> None:
    """Note that everything in ``out`` from ``before`` on came from ``item``."""
    many = len(out) - before
    owner += [item] * many
    number += range(many)


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


def missing_field(name: str, sample: Any) -> DataError:
    """The error for a field that is not there."""
    has = ", ".join(map(str, sample)) if isinstance(sample, dict) else type(sample).__name__
    return DataError(f"no field {name!r}; the sample has {has}")
