"""The stages that only choose and order samples: integer functions of the epoch, never touching a payload.

Each wraps the function that makes an epoch's order in another one. Sources that combine plans stand here too.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.errors import PlanError
from penstock.order import (
    NOT_FOUND,
    ChainedOrder,
    ExcludingOrder,
    MixedOrder,
    Order,
    RepeatedOrder,
    ShuffledOrder,
    SlicedOrder,
    SubsetOrder,
    ZippedOrder,
    name_hashes,
)
from penstock.plan.quarantine import Identity, digest, listed

if TYPE_CHECKING:
    from penstock.plan.plan import Plan

log = logging.getLogger("penstock")

Make = Callable[[int], Order]  # epoch -> order


@dataclass(frozen=True, slots=True)
class OrderStage(ABC):
    """A stage on positions."""

    @abstractmethod
    def wrap(self, make: Make, seed: int, leaf: int) -> Make:
        """The order of an epoch with this stage, given the one without; ``leaf`` is the first source in it."""

    @abstractmethod
    def describe(self) -> str:
        """The call that made the stage."""


@dataclass(frozen=True, slots=True)
class Shuffle(OrderStage):
    """``shuffle()``: the epoch order; its seed is the run's."""

    window: int | None = None
    shards: int = 16
    all: bool = False

    def wrap(self, make: Make, seed: int, leaf: int) -> Make:
        return lambda epoch: ShuffledOrder(
            make(epoch), seed, epoch, window=self.window, shards=self.shards, all=self.all
        )

    def describe(self) -> str:
        shown = [f"window={self.window}"] if self.window else []
        shown += [f"shards={self.shards}"] if self.shards != 16 else []
        return f"shuffle({', '.join(shown + ['all=True'] * self.all)})"


@dataclass(frozen=True, slots=True)
class Slice(OrderStage):
    """``limit(n)`` and ``skip(n)`` on positions; ``per_rank`` where they stand after ``shard``."""

    start: int = 0
    stop: int | None = None
    per_rank: bool = False

    def wrap(self, make: Make, seed: int, leaf: int) -> Make:
        return lambda epoch: SlicedOrder(make(epoch), self.start, self.stop)

    def describe(self) -> str:
        return f"skip({self.start})" if self.stop is None else f"limit({self.stop})"


@dataclass(frozen=True, slots=True)
class Repeat(OrderStage):
    """``repeat(n)``: pass i of epoch e has the order and randomness of epoch e*n+i."""

    times: int | None = None

    def wrap(self, make: Make, seed: int, leaf: int) -> Make:
        return lambda epoch: RepeatedOrder(make, epoch, self.times)

    def describe(self) -> str:
        return f"repeat({'' if self.times is None else self.times})"


@dataclass(frozen=True, slots=True)
class Choose(OrderStage):
    """One side of ``train_test_split``."""

    share: float
    seed: int
    test: bool
    tail: bool = False  # shuffle=False: the end of the order is the test side

    def wrap(self, make: Make, seed: int, leaf: int) -> Make:
        return lambda epoch: self._choose(make(epoch))

    def _choose(self, order: Order) -> Order:
        if not self.tail:
            return SubsetOrder(order, self.share, self.seed, self.test)
        start = order.size - round(order.size * self.share)
        return SlicedOrder(order, start, None) if self.test else SlicedOrder(order, 0, start)

    def describe(self) -> str:
        return f"train_test_split(test_size={self.share})[{int(self.test)}]"


@dataclass(frozen=True, slots=True)
class Exclude(OrderStage):
    """``exclude(...)``: all but these samples. Files are named here and read when the plan is made ready."""

    given: tuple[str | Identity, ...]
    first: int = 0  # the listed sources that are this plan's own: from here on
    until: int | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are still to be read."""
        return tuple(one for one in self.given if isinstance(one, str))

    def settle(self) -> Exclude:
        """The same with its files read.

        Raises:
            StorageError: a file is not there.
            DataError: a line of it is damaged.
        """
        read = [which for one in self.given for which in (listed(one) if isinstance(one, str) else [one])]
        return replace(self, given=tuple(dict.fromkeys(read)))

    def part(self, first: int, until: int | None) -> Exclude:
        """What concerns a branch: its sources are ``first`` to ``until`` of this plan's."""
        return replace(self, first=self.first + first, until=self.until if until is None else self.first + until)

    def wrap(self, make: Make, seed: int, leaf: int) -> Make:
        own = self._own()
        asked = (
            np.array([which.source - self.first + leaf for which in own], np.int64),
            name_hashes(which.shard for which in own),
            np.array([which.index for which in own], np.int64),
        )

        def without(epoch: int) -> Order:
            order = make(epoch)
            at = order.find(*asked)
            if (unknown := np.flatnonzero(at == NOT_FOUND)).size:
                _warn_of_unknown(len(unknown), own[int(unknown[0])])
            return ExcludingOrder(order, at[at >= 0])

        return without

    def _own(self) -> list[Identity]:
        end = float("inf") if self.until is None else self.until
        return [one for one in self.given if isinstance(one, Identity) and self.first <= one.source < end]

    def describe(self) -> str:
        files = [repr(file) for file in self.files]
        own = self._own()
        named = [f"{len(own)} samples: {digest(own)}"] if own or not files else []
        return f"exclude({', '.join(files + named)})"


@cache  # once a process, however many epochs and runs there are
def _warn_of_unknown(many: int, which: Identity) -> None:
    named = (which.source, which.shard, which.index)
    log.warning("exclude: %d samples are not in this dataset and are ignored, such as %s", many, named)


@dataclass(frozen=True, slots=True)
class Combination(ABC):
    """A source made of other plans."""

    branches: tuple[Plan, ...]

    @property
    def random_access(self) -> bool:
        """Whether any position is as cheap as the next one."""
        return all(branch.source.random_access for branch in self.branches)

    @abstractmethod
    def join(self, makes: Sequence[Make], seed: int) -> Make:
        """The order of an epoch, given the branches' own."""

    @abstractmethod
    def describe(self) -> str:
        """The call that made it, without the branches."""


@dataclass(frozen=True, slots=True)
class Union(Combination):
    """``a.union(b)``: one after the other."""

    def join(self, makes: Sequence[Make], seed: int) -> Make:
        return lambda epoch: ChainedOrder([make(epoch) for make in makes])

    def describe(self) -> str:
        return "union"


@dataclass(frozen=True, slots=True)
class Mix(Combination):
    """``ps.mix([a, b])``: by weight, counted in source samples; ``changes`` are later weights by position."""

    weights: tuple[float, ...]
    stop: Literal["first", "all"] = "first"
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def join(self, makes: Sequence[Make], seed: int) -> Make:
        return lambda epoch: MixedOrder(
            [make(epoch) for make in makes], self.weights, self.stop, seed, epoch, self.changes
        )

    def describe(self) -> str:
        shown: list[Any] = list(self.weights)
        if self.changes:
            shown = [(0, shown), *((position, list(weights)) for position, weights in self.changes)]
        return f"mix(weights={shown}, stop={self.stop!r})"


@dataclass(frozen=True, slots=True)
class Zip(Combination):
    """``a.zip(b)``: pairs by position."""

    strict: bool = True
    suffix: str | None = None

    def join(self, makes: Sequence[Make], seed: int) -> Make:
        left, right = makes
        return lambda epoch: ZippedOrder(left(epoch), right(epoch), self.strict)

    def describe(self) -> str:
        return f"zip(strict={self.strict}{'' if self.suffix is None else f', suffix={self.suffix!r}'})"


def check_branch(plan: Any, combination: str) -> None:
    """Require that a plan can be a branch of a combination.

    Raises:
        PlanError: it holds a stage that a branch may not hold.
    """
    if plan.cut is not None:
        raise PlanError(f"{combination}: a branch is already cut by shard(); cut the combination instead")
    if combination == "zip":
        for branch in plan.branches():
            check_branch(branch, combination)
    for stage in plan.body:
        if stage.scope.value != "each" or (combination == "zip" and not stage.keeps_count):
            why = "changes the count" if stage.scope.value == "each" else "needs more than one sample at a time"
            raise PlanError(f"{combination}: a branch may not hold {stage.describe()}, which {why}; put it after")
    if combination != "zip" and any(isinstance(source, Zip) for source in plan.sources()):
        raise PlanError(f"{combination}: a branch may not be a zip; combine first and zip the result")
