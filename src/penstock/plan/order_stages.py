"""The stages that only select and order samples: they work on positions and never touch a payload.

Each wraps the factory of an epoch's order in another one. The sources that combine plans are defined here too.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from penstock.errors import PlanError
from penstock.order import (
    I64,
    NOT_FOUND,
    ChainedOrder,
    ExcludingOrder,
    MixedOrder,
    Order,
    PermutedOrder,
    RepeatedOrder,
    ShuffledOrder,
    SlicedOrder,
    SubsetOrder,
    UncountedOrder,
    ZippedOrder,
    name_hashes,
)
from penstock.plan.identity import Identity, digest
from penstock.plan.values import check_flag

if TYPE_CHECKING:
    from penstock.plan.plan import Plan

log = logging.getLogger("penstock")

OrderFactory = Callable[[int], Order]  # epoch -> order


@dataclass(frozen=True, slots=True)
class OrderStage(ABC):
    """A stage that processes positions of the order."""

    @property
    def applies_per_rank(self) -> bool:
        """Whether the stage slices the positions of each rank, not the order."""
        return False

    @property
    def bounds(self) -> tuple[int, int | None] | None:
        """The first position that the stage keeps, and the one after the last; ``None`` if it does more than that."""
        return None

    def without_counts(self, order: UncountedOrder) -> UncountedOrder | None:
        """Return the order with this stage, given the plain order of uncounted shards; ``None``: it needs counts."""
        return None

    def occurrences(self, times: list[int]) -> list[int] | None:
        """Return how often a sample of each source occurs in an epoch, given how often it does without the stage.

        ``None`` if that differs between samples of a source.
        """
        return None

    @abstractmethod
    def wrap(self, make: OrderFactory, seed: int, leaf: int) -> OrderFactory:
        """Return the order factory with this stage, given the one without; ``leaf`` numbers its first source."""

    @abstractmethod
    def describe(self) -> str:
        """Return the call that created the stage."""


@dataclass(frozen=True, slots=True)
class Shuffle(OrderStage):
    """``shuffle()`` of the epoch order, with the run's seed."""

    window: int | None = None
    shards: int = 16
    all: bool = False

    def wrap(self, make: OrderFactory, seed: int, leaf: int) -> OrderFactory:
        return lambda epoch: ShuffledOrder(
            make(epoch), seed, epoch, window=self.window, shards=self.shards, all=self.all
        )

    def without_counts(self, order: UncountedOrder) -> UncountedOrder | None:
        return None if self.all else order.shuffled(self.window, self.shards)

    def occurrences(self, times: list[int]) -> list[int] | None:
        return times

    def describe(self) -> str:
        shown = [f"window={self.window}"] if self.window else []
        shown += [f"shards={self.shards}"] if self.shards != 16 else []
        return f"shuffle({', '.join(shown + ['all=True'] * self.all)})"


@dataclass(frozen=True, slots=True)
class Slice(OrderStage):
    """``limit(n)`` and ``skip(n)`` on positions; ``per_rank`` if they come after ``shard``."""

    start: int = 0
    stop: int | None = None
    per_rank: bool = False

    @property
    def applies_per_rank(self) -> bool:
        return self.per_rank

    @property
    def bounds(self) -> tuple[int, int | None] | None:
        return self.start, self.stop

    def wrap(self, make: OrderFactory, seed: int, leaf: int) -> OrderFactory:
        return lambda epoch: SlicedOrder(make(epoch), self.start, self.stop)

    def describe(self) -> str:
        return f"skip({self.start})" if self.stop is None else f"limit({self.stop})"


@dataclass(frozen=True, slots=True)
class Repeat(OrderStage):
    """``repeat(n)``: pass i of epoch e has the order and randomness of epoch e*n+i."""

    times: int | None = None

    def wrap(self, make: OrderFactory, seed: int, leaf: int) -> OrderFactory:
        return lambda epoch: RepeatedOrder(make, epoch, self.times)

    def occurrences(self, times: list[int]) -> list[int] | None:
        return None if self.times is None else [count * self.times for count in times]

    def describe(self) -> str:
        return f"repeat({'' if self.times is None else self.times})"


class PositionSorter(Protocol):
    """Finds the permutation of a sort; a value that can be compared and pickled."""

    def __call__(self, order: Order, seed: int, epoch: int, leaf: int) -> I64:
        """Return the positions of ``order`` in sorted order; ``leaf`` numbers its first source."""

    def unshuffled(self) -> PositionSorter:
        """Return the sorter of the same samples without their shuffles."""

    def describe(self) -> str:
        """Return the call that created it."""


@dataclass(frozen=True, slots=True)
class Sort(OrderStage):
    """``sort(...)`` of stages that keep the count: a permutation of the positions."""

    find: PositionSorter

    def wrap(self, make: OrderFactory, seed: int, leaf: int) -> OrderFactory:
        def sorted_order(epoch: int) -> Order:
            order = make(epoch)
            return PermutedOrder(order, lambda: self.find(order, seed, epoch, leaf))

        return sorted_order

    def occurrences(self, times: list[int]) -> list[int] | None:
        return times

    def describe(self) -> str:
        return self.find.describe()


@dataclass(frozen=True, slots=True)
class SplitSide(OrderStage):
    """One side of ``train_test_split``."""

    share: float
    seed: int
    test: bool
    tail: bool = False  # with shuffle=False, the test side is the end of the order

    def wrap(self, make: OrderFactory, seed: int, leaf: int) -> OrderFactory:
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
    """``exclude(...)``: leaves samples out. Engines ``resolve`` the files that list them, before a run."""

    entries: tuple[str | Identity, ...]
    first: int = 0  # identities number the sources of the whole plan; those of this branch are ``first`` to ``until``
    until: int | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are not read yet."""
        return tuple(entry for entry in self.entries if isinstance(entry, str))

    def resolve(self, read: Callable[[str], Iterable[Identity]]) -> Exclude:
        """Return the stage with its files replaced by the samples that they list, as ``read`` returns them."""
        lists = (read(entry) if isinstance(entry, str) else [entry] for entry in self.entries)
        return replace(self, entries=tuple(dict.fromkeys(chain.from_iterable(lists))))

    def for_branch(self, first: int, until: int | None) -> Exclude:
        """Return the stage for a branch, whose sources are ``first`` to ``until`` of this plan's sources."""
        return replace(self, first=self.first + first, until=self.until if until is None else self.first + until)

    def wrap(self, make: OrderFactory, seed: int, leaf: int) -> OrderFactory:
        own = self._own_identities()
        query = (
            np.array([identity.source - self.first + leaf for identity in own], np.int64),
            name_hashes(identity.shard for identity in own),
            np.array([identity.index for identity in own], np.int64),
        )

        def without(epoch: int) -> Order:
            order = make(epoch)
            positions = order.find(*query)
            if (missing := np.flatnonzero(positions == NOT_FOUND)).size:
                _warn_about_missing(len(missing), own[int(missing[0])])
            return ExcludingOrder(order, positions[positions >= 0])

        return without

    def _own_identities(self) -> list[Identity]:
        end = float("inf") if self.until is None else self.until
        return [entry for entry in self.entries if isinstance(entry, Identity) and self.first <= entry.source < end]

    def describe(self) -> str:
        files = [repr(file) for file in self.files]
        own = self._own_identities()
        samples = [f"{len(own)} samples: {digest(own)}"] if own or not files else []
        return f"exclude({', '.join(files + samples)})"


@cache  # warn once per process, not in every epoch and run
def _warn_about_missing(count: int, example: Identity) -> None:
    identity = (example.source, example.shard, example.index)
    log.warning("exclude: %d samples are not in this dataset and are ignored, such as %s", count, identity)


@dataclass(frozen=True, slots=True)
class Combination(ABC):
    """A source that combines other plans."""

    branches: tuple[Plan, ...]

    @property
    def random_access(self) -> bool:
        """Whether random access is as cheap as sequential reading."""
        return all(branch.source.random_access for branch in self.branches)

    @property
    def streams(self) -> bool:
        """False: what can be read only once cannot be combined."""
        return False

    @property
    def computed(self) -> bool:
        """False: each branch answers for itself."""
        return False

    @abstractmethod
    def occurrences(self) -> list[int] | None:
        """Return how often a sample of each source occurs in an epoch; ``None`` if that differs between samples."""

    @abstractmethod
    def join(self, factories: Sequence[OrderFactory], seed: int) -> OrderFactory:
        """Return the factory of the combined order, given those of the branches."""

    @abstractmethod
    def describe(self) -> str:
        """Return the call that created the source, without the branches."""


@dataclass(frozen=True, slots=True)
class Union(Combination):
    """``a.union(b)``: one dataset after another."""

    def occurrences(self) -> list[int] | None:
        return _all_occurrences(self.branches)

    def join(self, factories: Sequence[OrderFactory], seed: int) -> OrderFactory:
        return lambda epoch: ChainedOrder([make(epoch) for make in factories])

    def describe(self) -> str:
        return "union"


@dataclass(frozen=True, slots=True)
class Mix(Combination):
    """``ps.mix([a, b])``: interleaves source samples by weight; ``changes`` are later weights with their positions."""

    weights: tuple[float, ...]
    stop: Literal["first", "all"] = "first"
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def occurrences(self) -> list[int] | None:
        return _all_occurrences(self.branches) if self.stop == "all" else None

    def join(self, factories: Sequence[OrderFactory], seed: int) -> OrderFactory:
        return lambda epoch: MixedOrder(
            [make(epoch) for make in factories], self.weights, self.stop, seed, epoch, self.changes
        )

    def describe(self) -> str:
        shown: list[Any] = list(self.weights)
        if self.changes:
            shown = [(0, shown), *((position, list(weights)) for position, weights in self.changes)]
        return f"mix(weights={shown}, stop={self.stop!r})"


@dataclass(frozen=True, slots=True)
class Zip(Combination):
    """``a.zip(b)``: pairs samples by position."""

    strict: bool = True
    suffix: str | None = None

    def __post_init__(self) -> None:
        check_flag("strict", self.strict)
        if self.suffix is not None and not (isinstance(self.suffix, str) and self.suffix):
            raise PlanError(f"suffix={self.suffix!r}: expected text that is appended to the names of fields")

    def occurrences(self) -> list[int] | None:
        """Return 0 for the sources of the right side: a pair is recorded as its left sample."""
        left, right = self.branches
        found = left.occurrences() if self.strict else None
        return None if found is None else [*found, *(0 for _ in right.leaves())]

    def join(self, factories: Sequence[OrderFactory], seed: int) -> OrderFactory:
        left, right = factories
        return lambda epoch: ZippedOrder(left(epoch), right(epoch), self.strict)

    def describe(self) -> str:
        return f"zip(strict={self.strict}{'' if self.suffix is None else f', suffix={self.suffix!r}'})"


def _all_occurrences(branches: Sequence[Plan]) -> list[int] | None:
    found: list[int] = []
    for branch in branches:
        if (times := branch.occurrences()) is None:
            return None
        found += times
    return found


def check_branch(plan: Any, combination: str) -> None:
    """Check that a plan can be a branch of a combination.

    Raises:
        PlanError: The plan is cut, or has a stage that a branch must not have.
    """
    if plan.cut is not None:
        raise PlanError(f"{combination}: a branch is already cut by shard(); cut the combination instead")
    if combination == "zip":
        for branch in plan.branches():
            check_branch(branch, combination)
    for stage in plan.body:
        if stage.scope.value != "each" or (combination == "zip" and not stage.keeps_count):
            why = "changes the count" if stage.scope.value == "each" else "needs more than one sample at a time"
            raise PlanError(
                f"{combination}: a branch must not have {stage.describe()}, which {why}; "
                f"call it on the result of {combination}"
            )
    if combination != "zip" and any(isinstance(source, Zip) for source in plan.sources()):
        raise PlanError(f"{combination}: a branch must not be a zip; combine first and zip the result")
