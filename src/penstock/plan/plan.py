"""The plan: a source, its stages, and the engine, as a value that opens nothing and can be compared and pickled."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from penstock.errors import PlanError
from penstock.plan.order_stages import Combination, Exclude, OrderStage
from penstock.plan.source import Source
from penstock.plan.stage import Stage
from penstock.plan.values import Cut, EngineOptions, OnError, Recut

_DEFAULT_ERRORS, _DEFAULT_ENGINE = OnError(), EngineOptions()


@dataclass(frozen=True, slots=True)
class Plan:
    """The complete description of a dataset: source, stages, seed, epoch, cut, error policy and engine.

    Raises:
        PlanError: ``uneven`` needs a known count, or the quarantine is a file that ``exclude`` reads.
    """

    source: Source | Combination
    stages: tuple[Stage | OrderStage, ...] = ()
    seed: int | None = None
    epoch: int | None = None
    cut: Cut | None = None
    errors: OnError = _DEFAULT_ERRORS
    engine: EngineOptions = _DEFAULT_ENGINE

    def __post_init__(self) -> None:
        uneven = "keep" if self.cut is None or self.cut.world == 1 else self.cut.uneven
        if uneven != "keep" and self.unknown_count_cause is not None:
            raise PlanError(
                f"uneven={uneven!r} promises ranks of equal length, but {self.unknown_count_cause} changes the count: "
                "use uneven='keep', or pass uneven= to loader() in a process group, where the ranks can agree"
            )
        if (path := self.errors.quarantine) is not None and _contains_path(self._excluded_files(), path):
            raise PlanError(
                f"quarantine={path!r} would grow while it is read by exclude(), and ranks would disagree on the order: "
                "use another file for the quarantine"
            )

    def _excluded_files(self) -> Iterator[str]:
        for stage in self.stages:
            if isinstance(stage, Exclude):
                yield from stage.files
        for branch in self.branches():
            yield from branch._excluded_files()

    def then(self, stage: Stage | OrderStage) -> Plan:
        """Return the plan with one more stage."""
        return replace(self, stages=(*self.stages, stage))

    @property
    def body(self) -> tuple[Stage, ...]:
        """The stages that process items."""
        return tuple(stage for stage in self.stages if isinstance(stage, Stage))

    @property
    def ordering(self) -> tuple[OrderStage, ...]:
        """The stages that process positions of the order."""
        return tuple(stage for stage in self.stages if isinstance(stage, OrderStage))

    @property
    def keeps_count(self) -> bool:
        """Whether the stages produce exactly one item for each sample of the order."""
        return all(stage.keeps_count and stage.scope.value == "each" for stage in self.body) and not any(
            branch.changes_count for branch in self.branches()
        )

    @property
    def changes_count(self) -> bool:
        """Whether a stage that processes single items may produce more or fewer of them."""
        return any(not stage.keeps_count and stage.scope.value == "each" for stage in self.body) or any(
            branch.changes_count for branch in self.branches()
        )

    @property
    def unknown_count_cause(self) -> str | None:
        """The stage or policy that makes the number of items unknown before a run, as text; ``None``: it is known."""
        for branch in self.branches():
            if branch.unknown_count_cause is not None:
                return branch.unknown_count_cause
        unknown = next((stage.describe() for stage in self.body if stage.length(1) is None), None)
        return unknown or ('on_error("skip")' if self.errors.action == "skip" else None)

    @property
    def samples_per_item(self) -> int | None:
        """How many samples make one item; ``None`` if that differs from item to item."""
        samples = 1
        if self.changes_count or self.errors.action == "skip":
            return None
        for stage in self.body:
            if stage.recut is Recut.REGROUP and stage.group_size is not None:
                samples *= stage.group_size
            elif stage.recut is Recut.NEVER:
                return None
        return samples

    @property
    def commutes(self) -> bool:
        """Whether selecting samples after the stages is the same as selecting them at the source."""
        return all(stage.scope.value == "each" for stage in self.body)

    def branches(self) -> tuple[Plan, ...]:
        """Return the plans that this one combines."""
        return self.source.branches if isinstance(self.source, Combination) else ()

    def sources(self) -> Iterator[Source | Combination]:
        """Yield the source and every source below it."""
        yield self.source
        for branch in self.branches():
            yield from branch.sources()

    def leaves(self) -> Iterator[Source]:
        """Yield the sources that are not combinations, in the order of their numbers."""
        if not isinstance(self.source, Combination):
            yield self.source
        for branch in self.branches():
            yield from branch.leaves()

    def occurrences(self) -> list[int] | None:
        """Return how often a sample of each source occurs in an epoch; ``None`` if that differs between samples."""
        found = self.source.occurrences() if isinstance(self.source, Combination) else [1]
        for stage in self.ordering:
            found = None if found is None else stage.occurrences(found)
        return found

    def shard(self, cut: Cut) -> Plan:
        """Return the plan cut for one rank.

        Raises:
            PlanError: The plan is already cut, or has a stage that needs the whole stream.
        """
        if self.cut is not None:
            raise PlanError(
                f"the dataset is already cut for rank {self.cut.rank} of {self.cut.world}: call shard() only once"
            )
        if cut.world > 1:
            for stage in self.body:
                if stage.scope.value == "all":
                    raise PlanError(
                        f"{stage.describe()} needs the whole stream and cannot be cut for {cut.world} ranks"
                    )
        return replace(self, cut=cut)

    def as_branch(self) -> Plan:
        """Return the plan as a branch of a combination, which has the engine, the error policy and the epoch."""
        return replace(self, engine=_DEFAULT_ENGINE, errors=_DEFAULT_ERRORS, epoch=None)

    def describe(self, indent: str = "") -> str:
        """Return the chain of calls that created the plan, one per line."""
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
            lines.append(f"{indent}  .shard({cut.rank}, {cut.world}, cut={cut.kind!r}, uneven={cut.uneven!r})")
        if self.errors.action != "raise":
            more = "" if self.errors.quarantine is None else f", quarantine={self.errors.quarantine!r}"
            lines.append(f"{indent}  .on_error({self.errors.action!r}{more})")
        return "\n".join(lines)


def _contains_path(paths: Iterable[str], path: str) -> bool:
    return os.path.abspath(path) in map(os.path.abspath, paths)
