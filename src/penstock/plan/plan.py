"""The plan: a source, a tuple of stages, and who runs it. A value: it opens nothing and can be compared and pickled."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from penstock.errors import DataError, PlanError
from penstock.order import I64
from penstock.plan.order_stages import Combination, Exclude, OrderStage
from penstock.plan.stage import Stage
from penstock.plan.values import Cut, EngineOptions, Fields, OnError, Resources


class Located(Protocol):
    """Samples that were found but not read yet: cheap to make, to cut and to pass to a worker."""

    nbytes: I64  # payload bytes of each

    def take(self, sel: Any) -> Located:
        """Some of them."""

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        """The samples, and by number those that cannot be read (``None`` stands in their place)."""


class Reader(Protocol):
    """An open source. Its methods may be called from several threads."""

    names: list[str]  # of the shards, relative to their common root

    def counts(self, scan: bool) -> I64 | None:
        """Samples in each shard; ``None`` where that is not known (with ``scan``: where it cannot be found out)."""

    def count(self, shard: int) -> int:
        """Samples in one shard, looking into it if need be."""

    def sizes(self) -> list[int]:
        """Bytes of each shard."""

    def locate(self, shard: I64, index: I64, fields: Fields) -> Located:
        """Find samples."""

    def key(self, shard: int, index: int) -> str | None:
        """The key of one sample, for messages."""

    def url(self, shard: int) -> str:
        """The shard, for messages."""


@runtime_checkable
class StreamReader(Protocol):
    """An open source that can only be read once, front to back."""

    def stream(self, fields: Fields) -> Iterator[tuple[Any, DataError | None]]:
        """The samples as they come; one that cannot be read is ``None`` with its error."""


class Source(Protocol):
    """Where samples come from: a value that opens into a reader."""

    @property
    def random_access(self) -> bool:
        """Whether any sample is as cheap as the next one (so a plain ``shuffle()`` may mix everything)."""

    @property
    def resources(self) -> Resources | None:
        """What reading may use."""

    def open(self) -> Reader | StreamReader:
        """Look at what is there.

        Raises:
            StorageError: nothing is there.
        """

    def describe(self) -> str:
        """The call that made it."""


_RAISE, _LOCAL = OnError(), EngineOptions()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done: the whole description of a dataset."""

    source: Source | Combination
    stages: tuple[Stage | OrderStage, ...] = ()
    seed: int | None = None
    epoch: int | None = None
    cut: Cut | None = None
    errors: OnError = _RAISE
    engine: EngineOptions = _LOCAL

    def __post_init__(self) -> None:
        uneven = "keep" if self.cut is None or self.cut.world == 1 else self.cut.uneven
        if uneven != "keep" and self.unsure is not None:
            raise PlanError(
                f"uneven={uneven!r} promises ranks of equal length, but {self.unsure} changes the count: "
                "pass uneven='keep', or give it to loader() in a process group, where ranks can agree"
            )

        if (path := self.errors.quarantine) is not None and _same(path, self._excluded_files()):
            raise PlanError(
                f"quarantine={path!r} would grow while it is read by exclude(): ranks would not agree on the order; "
                "list what fails in another file"
            )

    def _excluded_files(self) -> Iterator[str]:
        for stage in self.stages:
            if isinstance(stage, Exclude):
                yield from stage.files
        for branch in self.branches():
            yield from branch._excluded_files()

    def then(self, stage: Stage | OrderStage) -> Plan:
        """The plan with one more stage."""
        return replace(self, stages=(*self.stages, stage))

    @property
    def body(self) -> tuple[Stage, ...]:
        """The stages that work on items."""
        return tuple(stage for stage in self.stages if isinstance(stage, Stage))

    @property
    def ordering(self) -> tuple[OrderStage, ...]:
        """The stages that work on positions."""
        return tuple(stage for stage in self.stages if isinstance(stage, OrderStage))

    @property
    def counted(self) -> bool:
        """Whether every stage so far gives one item for each sample of the order."""
        return all(stage.keeps_count and stage.scope.value == "each" for stage in self.body) and not any(
            branch.changes_count for branch in self.branches()
        )

    @property
    def changes_count(self) -> bool:
        """Whether a stage that works on items may give more or fewer."""
        return any(not stage.keeps_count and stage.scope.value == "each" for stage in self.body) or any(
            branch.changes_count for branch in self.branches()
        )

    @property
    def unsure(self) -> str | None:
        """What keeps the number of items from being known before they come, in words; ``None``: it is known."""
        for branch in self.branches():
            if branch.unsure is not None:
                return branch.unsure
        unknown = next((stage.describe() for stage in self.body if stage.length(1) is None), None)
        return unknown or ('on_error("skip")' if self.errors.action == "skip" else None)

    @property
    def commutes(self) -> bool:
        """Whether a choice of samples made now is the same as one made at the source."""
        return all(stage.scope.value == "each" for stage in self.body)

    def branches(self) -> tuple[Plan, ...]:
        """The plans this one combines."""
        return self.source.branches if isinstance(self.source, Combination) else ()

    def sources(self) -> Iterator[Source | Combination]:
        """The source and every source below it."""
        yield self.source
        for branch in self.branches():
            yield from branch.sources()

    def shard(self, cut: Cut) -> Plan:
        """The plan cut for one rank.

        Raises:
            PlanError: it is cut already, or holds a stage that needs the whole stream.
        """
        if self.cut is not None:
            raise PlanError(f"the dataset is already cut for rank {self.cut.rank} of {self.cut.world}")
        if cut.world > 1:
            for stage in self.body:
                if stage.scope.value == "all":
                    raise PlanError(f"{stage.describe()} needs the whole stream and cannot be cut in {cut.world}")
        return replace(self, cut=cut)

    def describe(self, indent: str = "") -> str:
        """The chain of calls that made it, one per line."""
        if isinstance(self.source, Combination):
            inner = ",\n".join(branch.describe(indent + "    ") for branch in self.source.branches)
            lines = [f"{indent}{self.source.describe()}[\n{inner}\n{indent}]"]
        else:
            lines = [indent + self.source.describe()]
        lines += [f"{indent}  .{stage.describe()}" for stage in self.stages]
        if self.seed is not None:
            lines.append(f"{indent}  .seed({self.seed})")
        if self.epoch is not None:
            lines.append(f"{indent}  .epoch({self.epoch})")
        if self.cut is not None:
            cut = self.cut
            lines.append(f"{indent}  .shard({cut.rank}, {cut.world}, cut={cut.how!r}, uneven={cut.uneven!r})")
        if self.errors.action != "raise":
            more = "" if self.errors.quarantine is None else f", quarantine={self.errors.quarantine!r}"
            lines.append(f"{indent}  .on_error({self.errors.action!r}{more})")
        return "\n".join(lines)


def _same(path: str, others: Iterable[str]) -> bool:
    return os.path.abspath(path) in map(os.path.abspath, others)
